"""The mesh of devices with the axes data, fsdp and tensor; `sharding` places arrays on it."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jformer.errors import UserError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange the devices (default: all) on three axes, of which one may be -1 to take all remaining devices.

    Raises UserError if the product of the sizes exceeds the devices, or is smaller while a size is -1 or there are
    several processes; a single process may use fewer devices than it has.
    """
    given = jax.devices() if devices is None else list(devices)
    sizes = fill_axes({DATA: data, FSDP: fsdp, TENSOR: tensor}, len(given))
    count = math.prod(sizes.values())
    if count > len(given) or (count < len(given) and (-1 in (data, fsdp, tensor) or jax.process_count() > 1)):
        wanted = " x ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, (data, fsdp, tensor), strict=True))
        raise UserError(f"{wanted} does not fit {len(given)} devices: the product must be {len(given)}; -1 fills it up")
    # Explicit axes, the default of jax.make_mesh, do not work with Linen's embeddings; Auto leaves it to the compiler.
    auto = (AxisType.Auto,) * len(AXES)
    if count == len(given) and count > 1 and given[0].platform == "tpu":  # neighbours on the chips' network
        grid = mesh_utils.create_device_mesh(tuple(sizes.values()), given, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=auto)
    return Mesh(np.array(given[:count]).reshape(*sizes.values()), AXES, axis_types=auto)


def fill_axes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the size of each axis of the mesh, replacing -1 by the number of `devices` that the others leave."""
    rest = devices // math.prod(size for size in sizes.values() if size != -1)
    return {axis: max(rest, 1) if size == -1 else size for axis, size in sizes.items()}
