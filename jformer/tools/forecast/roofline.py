"""A lower bound on the time of a compiled program on a chip, from its arithmetic, memory traffic and network traffic.

See ASSUMPTIONS: it is not a prediction.
"""

from typing import NamedTuple

from jformer.tools.forecast.collectives import Collective
from jformer.tools.forecast.compiled_ahead import Figures
from jformer.tools.forecast.topology import Chip, Gpu, Topology

KERNELS = "products at the data sheet's peak, each kernel's arrays between HBM and cores once at full bandwidth, "
SUMS = "overlapped = the longest of these, apart = their sum"
ASSUMPTIONS = f"{KERNELS}the bytes of a ring over all links of a chip at once; {SUMS}"
GPU_ASSUMPTIONS = (
    f"{KERNELS}the bytes of a ring over NVLink; between machines what is left once each machine has combined its own, "
    f"over a network card a GPU of 200 (A100) or 400 Gbit/s; {SUMS}. Kernels that XLA would time were chosen by rules"
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


def bound(figures: Figures, chips: Topology, dtype: str = "bfloat16", precision: str = "default") -> Bound:
    """Return the bound of a program on the devices that it was compiled for, with products in a dtype."""
    network = sum(_sending(each, chips.chip) for each in figures.collectives)
    return Bound(figures.flops / chips.peak_in(dtype, precision), figures.traffic / chips.chip.bandwidth, network)


def beside_kernels(figures: Figures, chips: Topology, dtype: str = "bfloat16", precision: str = "default") -> float:
    """Return how many of the collectives' seconds in `bound` overlap with kernels in the schedule; 0 on TPUs."""
    peak, bandwidth = chips.peak_in(dtype, precision), chips.chip.bandwidth
    return sum(
        min(
            _sending(each, chips.chip) * overlap.bytes / each.bytes,
            max(overlap.flops / peak, overlap.traffic / bandwidth),
        )
        for each in figures.collectives
        for overlap in each.overlaps
    )


def _sending(each: Collective, chip: Chip | Gpu) -> float:
    """Return the seconds on the busier network; both run at the same time."""
    return max(each.sent / chip.network, each.crossing / chip.between if isinstance(chip, Gpu) else 0.0)
