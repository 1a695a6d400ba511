"""Report long-running work on standard error, from a thread, so that it also works while C++ computes."""

import contextlib
import dataclasses
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tqdm import tqdm

BARS = "▁▂▃▄▅▆▇█"
SILENCE = (2.0, 30.0)  # seconds between two lines: on a terminal, elsewhere
# Plural nouns of what is counted.
NOUNS = re.compile(
    r"\b(answer|checkpoint|example|input|output|text|token|word|line|return|feed|mark|file|parameter|kernel|reference|"
    r"update)s( that are)?\b"
)


@dataclasses.dataclass
class Done:
    """Progress counter."""

    examples: int = 0

    def count(self, examples: int) -> None:
        """Add to the examples that are done."""
        self.examples += examples


@contextlib.contextmanager
def show_progress(what: str, total: int = 0, quiet: bool = False) -> Iterator[Done]:
    """Report the work, its duration and its examples (of a total, if known) for the duration of the context."""
    done, began = Done(), time.monotonic()

    def line() -> str:
        seconds = int(time.monotonic() - began)
        many = f"{done.examples:,} of {total:,} examples" if total else counted(done.examples, "examples")
        count = f"{many}, " if done.examples else ""
        return f"{what}: {count}{seconds // 60}:{seconds % 60:02}"

    with contextlib.nullcontext() if quiet else showing_line(line, lambda: done.examples / total if total else None):
        yield done


@contextlib.contextmanager
def showing_line(line: Callable[[], str], share: Callable[[], float | None] = lambda: None) -> Iterator[None]:
    """Print the current line periodically from a thread for the duration of the context.

    On a terminal, each line overwrites the last, with a progress bar if the share that is done is known.
    """
    over, terminal = threading.Event(), sys.stderr.isatty()

    def tell() -> None:
        while not over.wait(SILENCE[0 if terminal else 1]):
            show(with_bar(line(), share()) if terminal else line(), "" if terminal else "\n")

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        if terminal:
            show("", "")


def with_bar(text: str, share: float | None) -> str:
    """Return a line of the terminal's width with a progress bar in front, or the line alone without a share.

    >>> with_bar("answering test", 0.5)[:5]
    ' 50%|'
    """
    if share is None:
        return text
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:  # no terminal
        columns = 80
    form = "{percentage:3.0f}%|{bar}| {desc}"
    return str(tqdm.format_meter(min(share, 1.0), 1.0, 0, ncols=max(columns - 1, 20), prefix=text, bar_format=form))


def show(text: str, end: str) -> None:
    """Print on standard error; on a terminal, overwrite the current line."""
    print(("\r\033[K" if sys.stderr.isatty() else "") + text, end=end, file=sys.stderr, flush=True)


def counted(count: int, what: str) -> str:
    """Return a count and its noun, which is given in the plural.

    >>> counted(1, "inputs cut to the limit"), counted(2_000, "inputs cut to the limit")
    ('1 input cut to the limit', '2,000 inputs cut to the limit')
    """
    one = NOUNS.sub(lambda noun: noun[1] + (" that is" if noun[2] else ""), what, count=1)
    return f"{count:,} {one if count == 1 else what}"


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Return a curve as at most `width` bars, each the mean of its share of the finite values.

    >>> sparkline([4.0, 2.0, 1.0, 0.5])
    '█▄▂▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    bars = min(width, len(finite))
    shares = [finite[i * len(finite) // bars : (i + 1) * len(finite) // bars] for i in range(bars)]
    means = [sum(share) / len(share) for share in shares]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)
