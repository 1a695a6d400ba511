"""Sampling rates of corpora, and concatenated ranges."""

from collections.abc import Sequence

import numpy as np


def ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0..n-1 for each n of lengths, concatenated."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def shares_of(sizes: Sequence[int], temperature: float) -> list[float]:
    """Return how often an example of each corpus is drawn, 1 on average.

    Corpora then have shares in proportion to size ** (1 / temperature): Arivazhagan et al. 2019, section 4.2.

    >>> shares_of([900, 100], 1.0), shares_of([900, 100], 2.0)
    ([1.0, 1.0], [0.8333333333333334, 2.5])
    """
    total = sum(sizes)
    powers = [(size / total) ** (1 / temperature) if size else 0.0 for size in sizes]
    drawn = total / sum(powers) if total else 0.0
    return [drawn * power / size if size else 1.0 for power, size in zip(powers, sizes, strict=True)]
