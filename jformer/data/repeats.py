"""Pairs that come more than once: within a text, or in one that is trained on and in one that is scored.

Pairs are told apart by hashes of 64 bits, of which ten million take 80 MB; that two of so many pairs have one by chance
is to be expected once in 370,000 texts. What comes of it is told and never refused.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from jformer.data.sources.split import Pair


def hashes(pairs: Iterable[Pair]) -> np.ndarray:
    """Return the u64 of each pair that holds any text, in order; equal source and target have an equal one."""
    texts = (f"{pair.source}\0{pair.target}" for pair in pairs if pair.source.strip() or pair.target.strip())
    digests = (hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.uint64)


def repeated(ordered: np.ndarray) -> int:
    """Return how many pairs of a text, given as hashes in order, are one that came before.

    >>> repeated(np.array([1, 2, 2, 2, 3], np.uint64))
    2
    """
    return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


def known(found: np.ndarray, training: Sequence[np.ndarray]) -> int:
    """Return how many hashes are among those of any text that is trained on, each of which is in order.

    >>> known(np.array([1, 4, 4], np.uint64), [np.array([4, 5], np.uint64), np.array([], np.uint64)])
    2
    """
    there = np.zeros(len(found), bool)
    for ordered in training:
        if len(ordered):
            there |= ordered[np.minimum(np.searchsorted(ordered, found), len(ordered) - 1)] == found
    return int(np.count_nonzero(there))


def duplicate_warnings(training: dict[str, np.ndarray], scored: dict[str, np.ndarray]) -> list[str]:
    """Return a line for every text of which pairs come twice, or are trained on as well.

    Args:
        training: name → hashes, in order, of every text that is trained on.
        scored: name → hashes of the others.
    """
    lines = []
    for name, ordered in training.items():
        if count := repeated(ordered):
            lines.append(f"{name}: {count:,} of {len(ordered):,} pairs are the same as one before")
    for name, found in scored.items():
        if count := known(found, list(training.values())):
            lines.append(f"{name}: {count:,} of {len(found):,} pairs are training pairs as well")
    return lines
