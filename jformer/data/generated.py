"""Generated corpora as a source: the quickstart, and the copy, reverse and sort tasks for experiments. No files."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator

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
    splits = _generate(config.name, config.num_pairs)
    if split not in splits:
        raise UserError(f"data.name={config.name!r} has no split {split!r}; choose one of: {', '.join(splits)}")

    def read(_counts: Counter[str]) -> Iterator[Pair]:
        return iter(splits[split])

    return Split(split, fingerprint("generated", splits[split]), read)


@functools.lru_cache(maxsize=1)  # a run opens train, valid and test one after the other
def _generate(name: str, num_pairs: int) -> dict[str, list[Pair]]:
    if name == "quickstart":
        corpus = quickstart.build()
        return {split: [Pair(e.source, e.target, e.family) for e in examples] for split, examples in corpus.items()}
    sources = _draw_letters(2 * HELD_OUT + num_pairs)
    pairs = [Pair(" ".join(letters), " ".join(TASKS[name](letters))) for letters in sources]
    return {"train": pairs[2 * HELD_OUT :], "valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT]}


def _draw_letters(number: int) -> list[str]:
    """Draw distinct strings of 1 to MAX_LETTERS letters; the first ones do not depend on how many are drawn."""
    rng = np.random.default_rng(0)
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        lengths = rng.integers(1, MAX_LETTERS + 1, size=4096)
        letters = rng.integers(ord("a"), ord("z") + 1, size=(4096, MAX_LETTERS), dtype=np.uint8)
        drawn |= {row[:length].tobytes().decode(): None for row, length in zip(letters, lengths, strict=True)}
    return list(drawn)[:number]
