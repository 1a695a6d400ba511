"""A lower bound on the time of a compiled program on a chip, from its arithmetic, memory traffic and network traffic.

See ASSUMPTIONS: it is not a prediction.
"""

from typing import NamedTuple

from jformer.tools.forecast.compiled_ahead import Figures
from jformer.tools.forecast.topology import Slice

ASSUMPTIONS = (
    "products at the data sheet's peak, each kernel's arrays between HBM and cores once at full bandwidth, the bytes "
    "of a ring over all links of a chip at once; overlapped = the longest of these, apart = their sum"
)


class Bound(NamedTuple):
    """Seconds of one run, if it did only one of these."""

    products: float
    memory: float
    network: float

    @property
    def overlapped(self) -> float:
        """If all three overlap completely."""
        return max(self)

    @property
    def apart(self) -> float:
        """If none of them overlap."""
        return sum(self)


def bound(figures: Figures, chips: Slice) -> Bound:
    """Return the bound of a program on the chips that it was compiled for."""
    return Bound(figures.flops / chips.peak, figures.traffic / chips.chip.bandwidth, figures.sent / chips.chip.network)
