"""Division modulo 97: half of the table to learn, the other half to answer (Power et al. 2022, section 2).

Each equation is one example, as `a / b =` and its answer c, where c b is a modulo 97. The halves share no equation.
"""

import numpy as np

from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split

PRIME = 97


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split, "train" or "valid"."""
    return open_built(config, split, build)


def build(_num_pairs: int = 0) -> dict[str, list[Pair]]:
    """Return the 9,312 equations, drawn into two halves by us: train and valid."""
    # By Fermat's little theorem b^(p-2) is what b has to be multiplied by to give 1.
    table = [(a, b, a * pow(b, PRIME - 2, PRIME) % PRIME) for a in range(PRIME) for b in range(1, PRIME)]
    order = np.random.default_rng(0).permutation(len(table)).tolist()
    pairs = [Pair(f"{a} / {b} =", str(c)) for a, b, c in (table[i] for i in order)]
    return {"train": pairs[: len(pairs) // 2], "valid": pairs[len(pairs) // 2 :]}
