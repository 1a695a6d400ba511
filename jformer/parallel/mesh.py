"""The mesh: which devices do what, on the axes data, fsdp and tensor. How arrays lie on it is said in `sharding`."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jformer.errors import UserError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay the devices (all there are, if none are given) on three axes; -1 on one of them takes all that are left.

    Raises UserError for sizes whose product is more than the devices, and for one that is less if a size is -1 or
    there are several processes: a single process may use fewer devices than it has.
    """
    given = jax.devices() if devices is None else list(devices)
    sizes = fill_axes({DATA: data, FSDP: fsdp, TENSOR: tensor}, len(given))
    count = math.prod(sizes.values())
    if count > len(given) or (count < len(given) and (-1 in (data, fsdp, tensor) or jax.process_count() > 1)):
        wanted = " x ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, (data, fsdp, tensor), strict=True))
        raise UserError(f"{wanted} does not fit {len(given)} devices: their product must be that, and -1 fills it up")
    # Explicit axes, the default of jax.make_mesh, refuse Linen's embeddings: the compiler shards what we leave open.
    auto = (AxisType.Auto,) * len(AXES)
    if count == len(given) and count > 1 and given[0].platform == "tpu":  # neighbours on the chips' network
        laid = mesh_utils.create_device_mesh(tuple(sizes.values()), given, allow_split_physical_axes=True)
        return Mesh(laid, AXES, axis_types=auto)
    return Mesh(np.array(given[:count]).reshape(*sizes.values()), AXES, axis_types=auto)


def fill_axes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the size of each axis of the mesh: -1 is what the others leave of so many devices."""
    rest = devices // math.prod(size for size in sizes.values() if size != -1)
    return {axis: max(rest, 1) if size == -1 else size for axis, size in sizes.items()}
