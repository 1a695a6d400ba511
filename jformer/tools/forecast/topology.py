"""TPU slices by name: their devices, none of which need be present, and the specifications of their chips.

libtpu describes slices and compiles for them on a CPU machine; `compiled_ahead` compiles.
"""

import math
import os
import re
from importlib.util import find_spec
from typing import NamedTuple

import jax
from jax.experimental import topologies

from jformer.errors import UserError
from jformer.parallel.devices import known_peak
from jformer.parallel.libtpu import SETTINGS

EXAMPLES = "v4:4x4x4, v5e:16x16, v5p:4x4x8, v6e:16x16, or as gcloud writes types: v5litepod-256, v6e-256, v5p-256"
GIB = 2**30


class Chip(NamedTuple):
    """Specifications of a chip, from cloud.google.com/tpu/docs (v4, v5e, v5p, v6e: key specifications)."""

    dimensions: int  # of the network of chips
    hbm: float  # bytes
    bandwidth: float  # bytes a second between HBM and the cores
    network: float  # bytes a second sent over all links together: half of "bidirectional"
    largest: int  # chips of a slice
    config: str = "default"  # libtpu's name of the configuration with one device a chip
    type: str = ""  # prefix of gcloud's types, if not the family
    cores: int = 1  # per chip, as gcloud's types count


CHIPS = {
    "v4": Chip(dimensions=3, hbm=32 * GIB, bandwidth=1_228e9, network=300e9, largest=4_096, config="megacore", cores=2),
    "v5e": Chip(dimensions=2, hbm=16 * GIB, bandwidth=819e9, network=200e9, largest=256, type="v5litepod"),
    "v5p": Chip(dimensions=3, hbm=95 * GIB, bandwidth=2_765e9, network=600e9, largest=6_144, cores=2),
    "v6e": Chip(dimensions=2, hbm=32 * GIB, bandwidth=1_638e9, network=400e9, largest=256),
}


class Slice(NamedTuple):
    """Connected chips."""

    name: str  # family:AxB or family:AxBxC
    chip: Chip
    devices: list[jax.Device]  # one a chip, in JAX's order; programs can be compiled for them

    @property
    def platform(self) -> str:
        """What JAX calls the platform."""
        return self.devices[0].platform

    @property
    def peak(self) -> float:
        """FLOPs a second of a chip; by default, products of float32 use bfloat16, too."""
        found = known_peak(self.devices[0].device_kind, "bfloat16")
        assert found, self.devices[0].device_kind
        return found


def open_slice(name: str) -> Slice:
    """Return the slice of a name such as v5e:16x16 or v5litepod-256.

    Raises UserError for invalid names, and without libtpu.
    """
    family, sizes = read_name(name)
    chip, full = CHIPS[family], f"{family}:{'x'.join(map(str, sizes))}"
    if not find_spec("libtpu"):
        raise UserError(f'--topology={name} needs libtpu, which compiles for TPUs: pip install -e ".[tpu-aot]"')
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    jax.config.update("jax_platforms", "cpu")  # keeps JAX from looking for a TPU
    try:
        found = topologies.get_topology_desc(full, "tpu", chip_config_name=chip.config)
    except RuntimeError as error:
        raise UserError(f"--topology={name}: no such slice, says libtpu: {error}; try {EXAMPLES}") from error
    return Slice(full, chip, list(found.devices))


def read_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the family of a slice and its chips along each dimension; raise UserError for invalid names."""
    family, colon, shape = name.partition(":")
    if colon and family in CHIPS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape):
        sizes = tuple(map(int, shape.split("x")))
        if len(sizes) == CHIPS[family].dimensions and math.prod(sizes) <= CHIPS[family].largest:
            return family, sizes
    kind, _, count = name.rpartition("-")
    for family, chip in CHIPS.items():
        if kind in (family, chip.type) and count.isdigit():
            chips, rest = divmod(int(count), chip.cores)
            if not rest and 1 <= chips <= chip.largest and chips.bit_count() == 1:
                return family, most_even(chips, chip.dimensions)
    raise UserError(f"--topology={name}: no such slice; the families are {', '.join(CHIPS)}: {EXAMPLES}")


def most_even(chips: int, dimensions: int) -> tuple[int, ...]:
    """Return the shape that gcloud gives a power of two of chips: as even as possible, larger sides last."""
    sizes = [1] * dimensions
    while math.prod(sizes) < chips:
        sizes[-1 - sizes[::-1].index(min(sizes))] *= 2
    return tuple(sorted(sizes, key=lambda size: (size == 1, size)))
