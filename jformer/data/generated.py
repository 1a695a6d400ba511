"""Generated corpora as a source: the quickstart, and the copy, reverse and sort tasks for experiments. No files.

Beside train, valid and test, the tasks of letters have a split for any range of lengths beyond those of training, named
after it: "21-30" is HELD_OUT pairs of 21 to 30 letters.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jformer.data import quickstart
from jformer.data.config import SourceConfig
from jformer.data.sources import Pair, Split, fingerprint
from jformer.errors import UserError

MAX_LETTERS = 20
HELD_OUT = 500  # pairs of "valid", and of "test"

TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda letters: letters,
    "reverse": lambda letters: letters[::-1],
    "sort": lambda letters: "".join(sorted(letters)),
}


def open_split(config: SourceConfig, split: str) -> Split:
    """Generate a corpus and open one split of it. The fingerprint is that of the pairs themselves."""
    if config.name not in ("quickstart", *TASKS):
        raise UserError(f"data.name={config.name!r}; choose one of: {', '.join(('quickstart', *TASKS))}")
    pairs = _longer(config.name, split) or _generate(config.name, config.num_pairs).get(split)
    if not pairs:
        longer = f", or lengths such as {MAX_LETTERS + 1}-{2 * MAX_LETTERS}" if config.name in TASKS else ""
        raise UserError(f"data.name={config.name!r} has no split {split!r}; choose one of: train, valid, test{longer}")

    def read(_counts: Counter[str]) -> Iterator[Pair]:
        return iter(pairs)

    return Split(split, fingerprint("generated", pairs), read)


@functools.lru_cache(maxsize=1)  # a run opens train, valid and test one after the other
def _generate(name: str, num_pairs: int) -> dict[str, list[Pair]]:
    if name == "quickstart":
        corpus = quickstart.build()
        return {split: [Pair(e.source, e.target, e.family) for e in examples] for split, examples in corpus.items()}
    pairs = _solved(name, _draw_letters(2 * HELD_OUT + num_pairs, 1, MAX_LETTERS))
    return {"train": pairs[2 * HELD_OUT :], "valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT]}


def _longer(name: str, split: str) -> list[Pair]:
    """Return the pairs of a split named after its lengths, or none where the name is not that of one."""
    lengths = re.fullmatch(r"(\d{1,3})-(\d{1,3})", split)
    if name not in TASKS or not lengths or not MAX_LETTERS < int(lengths[1]) <= int(lengths[2]):
        return []
    return _solved(name, _draw_letters(HELD_OUT, int(lengths[1]), int(lengths[2])))


def _solved(name: str, sources: Iterable[str]) -> list[Pair]:
    return [Pair(" ".join(letters), " ".join(TASKS[name](letters))) for letters in sources]


def _draw_letters(number: int, shortest: int, longest: int) -> list[str]:
    """Draw distinct strings of so many letters; the first ones do not depend on how many are drawn."""
    rng = np.random.default_rng(0)
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        lengths = rng.integers(shortest, longest + 1, size=4096)
        letters = rng.integers(ord("a"), ord("z") + 1, size=(4096, longest), dtype=np.uint8)
        drawn |= {row[:length].tobytes().decode(): None for row, length in zip(letters, lengths, strict=True)}
    return list(drawn)[:number]
