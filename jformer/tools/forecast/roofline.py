"""How fast a compiled program can be at best on a chip: what its arithmetic, its memory and its network take alone.

It is a bound and no forecast: see the assumptions.
"""

from typing import NamedTuple

from jformer.tools.forecast.compiled_ahead import Figures
from jformer.tools.forecast.topology import Slice

ASSUMPTIONS = (
    "products at the data sheet's peak, each kernel's arrays between HBM and cores once at full bandwidth, the bytes "
    "of a ring over all links of a chip at once; overlapped = the longest of these, apart = their sum"
)


class Bound(NamedTuple):
    """Seconds that one run takes at least, if it did nothing else."""

    products: float
    memory: float
    network: float

    @property
    def overlapped(self) -> float:
        """Where the three hide behind each other altogether."""
        return max(self)

    @property
    def apart(self) -> float:
        """Where they wait for each other."""
        return sum(self)


def bound(figures: Figures, chips: Slice) -> Bound:
    """Return the least time of a program on the chips that it was compiled for."""
    return Bound(figures.flops / chips.peak, figures.traffic / chips.chip.bandwidth, figures.sent / chips.chip.network)
