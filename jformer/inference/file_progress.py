"""How far a job over a file is, told on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jformer.data.progress import counted, show, telling
from jformer.parallel import processes

WARNINGS = 10


class Progress:
    """Counts lines read, answered and written, and tells of them."""

    def __init__(self, path: Path, compiling: Callable[[], float]) -> None:
        """Begin; how much there is to do is known of plain files only.

        `compiling` tells in how many seconds so far programs were compiled: they say nothing of the time that is left.
        """
        self._size = path.stat().st_size if path.is_file() and path.suffix != ".gz" else 0
        self._compiling = compiling
        self._written = self._answered = self._reading = 0  # lines; the last two since some were written
        self._read = self._skipped = self._finished = 0  # bytes; those of lines that are written
        self._warned = 0
        self._began = time.monotonic()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell how far it is, every so often, as long as this lasts; of several processes one speaks."""
        with telling(self.line, self.share) if processes.is_main_process() else contextlib.nullcontext():
            yield

    def read(self, size: int, skipped: bool) -> None:
        """Note that a line of so many bytes was read."""
        self._read += size
        if skipped:
            self._skipped = self._finished = self._read
        else:
            self._reading += 1

    def answered(self, count: int) -> None:
        """Note that so many inputs were answered, and are not yet written."""
        self._answered += count

    def written(self, lines: int) -> None:
        """Note that so many lines were written: all that were read."""
        self._written, self._answered, self._reading = self._written + lines, 0, 0
        self._finished = self._read

    def warn(self, text: str) -> None:
        """Tell of a line that was altered; of many, only the first ones, for all of them are counted."""
        self._warned += 1
        if self._warned <= WARNINGS:
            _say(text)

    def end(self, counts: Mapping[str, int]) -> None:
        """Tell what was done, and all that was counted."""
        _say(", ".join([self._done(), *(counted(count, what) for what, count in counts.items() if count)]))

    def line(self) -> str:
        """Return how far it is, and how long the rest takes at the pace of what is done."""
        seconds = time.monotonic() - self._began
        if not self._written + self._answered:
            return f"no line is answered yet, {seconds:.0f} s"
        at = self._at()
        if not self._size or at <= self._skipped:
            return self._done()
        left = max(0, self._size - at) / (at - self._skipped) * max(0.0, seconds - self._compiling())
        return f"{self._done()}, {int(left) // 60}:{int(left) % 60:02} left"

    def share(self) -> float | None:
        """Return how much of the input is answered; None where nobody knows how long it is."""
        return self._at() / self._size if self._size else None

    def _at(self) -> float:
        """Return the byte of the input that is answered, of a window in which some inputs are: about."""
        share = min(1.0, self._answered / max(1, self._reading))
        return self._finished + share * (self._read - self._finished)

    def _done(self) -> str:
        lines, compiling = self._written + self._answered, self._compiling()
        rate = lines / max(time.monotonic() - self._began - compiling, 1e-3)
        aside = f" after {compiling:.0f} s of compiling" if compiling >= 1 else ""
        return f"{counted(lines, 'lines')}, {rate:,.1f} a second{aside}"


def _say(text: str) -> None:
    if processes.is_main_process():
        show(text, "\n")
