"""Find duplicate pairs within a text, and between training and evaluation texts.

Pairs are compared by 64-bit hashes; ten million take 80 MB and collide with a probability of 1 in 370,000. Duplicates
are reported, never refused.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jformer.data.sources.split import Pair

SORTED_AT_ONCE = 2**23  # hashes


def hashes(pairs: Iterable[Pair]) -> np.ndarray:
    """Return a u64 hash of source and target for each non-empty pair, in order."""
    texts = (f"{pair.source}\0{pair.target}" for pair in pairs if pair.source.strip() or pair.target.strip())
    digests = (hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.uint64)


def in_order(read: Callable[[], Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield the hashes of several arrays in sorted order, with a bounded number of them in memory.

    `read` is called several times and must return the same arrays each time.
    """
    parts = np.uint64(sum(map(len, read())) // SORTED_AT_ONCE + 1)
    width = np.uint64(2**64 - 1) // parts + np.uint64(1) if parts > 1 else None
    for part in range(int(parts)):
        chosen = [each if width is None else each[each // width == part] for each in read()]
        yield np.sort(np.concatenate([hashes([]), *chosen]))


def repeated_places(pairs: Iterable[Pair]) -> np.ndarray:
    """Return the sorted numbers of the non-empty pairs that repeat an earlier one.

    The hashes of all pairs go to a temporary file; a bounded number of them is in memory.
    """
    with tempfile.TemporaryFile() as file:
        for pair in pairs:
            file.write(hashes([pair]).tobytes() or bytes(8))
        total = file.tell() // 8
        if not total:
            return np.zeros(0, np.int64)
        file.flush()
        found, parts = [], total // SORTED_AT_ONCE + 1
        every = np.memmap(file, np.uint64, "r", shape=(total,))
        for part in range(parts):
            places = [
                start + np.flatnonzero((chunk % np.uint64(parts) == part) & (chunk > 0))
                for start in range(0, total, SORTED_AT_ONCE)
                for chunk in [every[start : start + SORTED_AT_ONCE]]
            ]
            place = np.concatenate(places)
            order = np.argsort(every[place], kind="stable")
            same = np.flatnonzero(np.diff(every[place][order]) == 0) + 1
            found.append(place[order[same]])
        return np.sort(np.concatenate(found))


def repeated(ordered: np.ndarray) -> int:
    """Return how many pairs of a text, given as sorted hashes, repeat an earlier pair.

    >>> repeated(np.array([1, 2, 2, 2, 3], np.uint64))
    2
    """
    return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


def known(found: np.ndarray, training: Sequence[np.ndarray]) -> int:
    """Return how many hashes occur in any training text, each given as sorted hashes.

    >>> known(np.array([1, 4, 4], np.uint64), [np.array([4, 5], np.uint64), np.array([], np.uint64)])
    2
    """
    there = np.zeros(len(found), bool)
    for ordered in training:
        if len(ordered):
            there |= ordered[np.minimum(np.searchsorted(ordered, found), len(ordered) - 1)] == found
    return int(np.count_nonzero(there))


def duplicate_warnings(training: dict[str, np.ndarray], scored: dict[str, np.ndarray]) -> list[str]:
    """Return a line for every text with duplicate pairs or with pairs that also occur in a training text.

    Args:
        training: name → sorted hashes of every training text.
        scored: name → hashes of every other text.
    """
    lines = []
    for name, ordered in training.items():
        if count := repeated(ordered):
            lines.append(f"{name}: {count:,} of {len(ordered):,} pairs repeat an earlier one")
    for name, found in scored.items():
        if count := known(found, list(training.values())):
            lines.append(f"{name}: {count:,} of {len(found):,} pairs are also training pairs")
    return lines
