"""Shared by texts that templates generate: random draws, and the split that a text belongs to. No templates here."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from jformer.data.sources.split import Pair

T = TypeVar("T")

HELD_OUT = {"valid": 500, "test": 1_000}
SHARES = {"valid": (0,), "test": (1, 2), "train": range(3, 10)}
"""Split → the remainders modulo ten of the CRC-32 of its sources, so that no two splits share one."""

Draws = Iterator[float]
"""Random numbers from 0 to 1: drawn many at a time, as a call of the generator takes longer than its numbers."""


def dealt(num_pairs: int, draw: Callable[[Draws], Pair]) -> dict[str, list[Pair]]:
    """Draw pairs, each source once, until there are enough for training and all of those held out.

    The first ones do not depend on how many there are.
    """
    sizes = {**HELD_OUT, "train": num_pairs}
    splits: dict[str, dict[str, Pair]] = {split: {} for split in sizes}
    of_remainder = {remainder: split for split, remainders in SHARES.items() for remainder in remainders}
    draws = _draws()
    while any(len(splits[split]) < size for split, size in sizes.items()):
        pair = draw(draws)
        split = of_remainder[zlib.crc32(pair.source.encode()) % 10]
        if len(splits[split]) < sizes[split]:
            splits[split].setdefault(pair.source, pair)
    return {split: [*pairs.values()] for split, pairs in splits.items()}


def one(draws: Draws, choices: Sequence[T]) -> T:
    """Draw one of several."""
    return choices[int(next(draws) * len(choices))]


def _draws() -> Draws:
    rng = np.random.default_rng(0)
    while True:
        yield from rng.random(4_096).tolist()
