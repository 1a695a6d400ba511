"""Sequences of numbers and their reverses, as the tutorial of JoeyNMT defines the task ("Synthetic Data").

Test sequences may be longer than training sequences. As there, each sequence is drawn independently: all of one number,
and many of two, are in several splits.
"""

import numpy as np

from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split

NUMBERS = 50  # 0 to 49
LONGEST, LONGEST_HELD_OUT, HELD_OUT = 25, 30, 1_000  # numbers of a sequence; pairs for valid and for test


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of data.num_pairs training pairs, or of what is held out."""
    return open_built(config, split, build)


def build(num_pairs: int) -> dict[str, list[Pair]]:
    """Return the pairs of every split."""
    rng = np.random.default_rng(0)
    sizes = {"valid": HELD_OUT, "test": HELD_OUT, "train": num_pairs}

    def drawn(split: str) -> Pair:
        longest = LONGEST if split == "train" else LONGEST_HELD_OUT
        words = rng.integers(NUMBERS, size=rng.integers(1, longest + 1)).astype(str).tolist()
        return Pair(" ".join(words), " ".join(reversed(words)))

    return {split: [drawn(split) for _ in range(size)] for split, size in sizes.items()}
