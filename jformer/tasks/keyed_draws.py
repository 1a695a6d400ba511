"""Vectorized random draws for many texts at once, each depending only on its own key.

The generator is SplitMix64 (Steele et al. 2014): word i of a key is a hash of key + i, so all words of all keys take a
few array operations and do not depend on their order or on the host.

Letters in shapes: n keys; the values of all keys are concatenated in the order of the keys.
"""

import math

import numpy as np

from jformer.data.draws import ranges

STRIDE = np.uint64(0x9E3779B97F4A7C15)


def make_keys(seed: tuple[int, ...], *numbers: np.ndarray) -> np.ndarray:
    """Return a key [n] for each column of numbers [n], derived from them and the seed only."""
    keys = np.zeros(numbers[0].shape, np.uint64)
    for part in (*seed, *numbers):
        keys = _hash(keys ^ _hash(np.full(keys.shape, part).astype(np.uint64) + STRIDE))
    return keys


def other_keys(keys: np.ndarray, purpose: int) -> np.ndarray:
    """Return independent keys for draws with another purpose."""
    return _hash(keys ^ np.uint64(purpose))


def words(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `counts` [n] random 64-bit words for each key."""
    return _hash(np.repeat(keys, counts) + (ranges(counts) + 1).astype(np.uint64) * STRIDE)


def uniform(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `counts` [n] numbers in [0, 1) for each key."""
    return (words(keys, counts) >> np.uint64(11)) * 2.0**-53


def integers(keys: np.ndarray, counts: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return `counts` [n] integers in [low, high) for each key."""
    return low + (uniform(keys, counts) * (high - low)).astype(np.int64)


def poisson(keys: np.ndarray, counts: np.ndarray, mean: float) -> np.ndarray:
    """Return `counts` [n] Poisson draws for each key, by inverting the distribution function."""
    most = math.ceil(mean + 12 * math.sqrt(mean) + 24)
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(most)]
    return np.searchsorted(np.cumsum(np.exp(logs)), uniform(keys, counts), side="right")


def choose(keys: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Choose `counts` of the `sizes` items of each key, without replacement, in random order; return their indices.

    >>> keys = make_keys((0,), np.arange(2))
    >>> sorted(choose(keys, np.array([3, 2]), np.array([3, 1]))[:3].tolist())  # all three of the first key
    [0, 1, 2]
    """
    owner = np.repeat(np.arange(len(keys)), sizes).astype(np.uint64)
    order = np.argsort(owner << np.uint64(40) | words(keys, sizes) >> np.uint64(24), kind="stable")
    return order[ranges(sizes) < np.repeat(counts, sizes)]


def divide(keys: np.ndarray, totals: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Divide each total into `parts` non-empty parts, uniformly at random; return the sizes of all parts."""
    cuts = choose(keys, totals - 1, parts - 1)
    firsts = np.cumsum(totals) - totals
    cuts = cuts + 1 + np.repeat(np.arange(len(keys)), parts - 1)  # a total is never cut before its first unit
    return np.diff(np.sort(np.concatenate([firsts, cuts])), append=totals.sum())


def _hash(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
