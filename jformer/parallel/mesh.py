"""The mesh of devices with the axes data, sequence, fsdp and tensor; `sharding` places arrays on it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jformer.errors import UserError

# Axes that programs make manual come first: XLA aborts where an automatic axis precedes a manual one.
DATA, SEQUENCE, FSDP, TENSOR = AXES = ("data", "sequence", "fsdp", "tensor")


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None, sequence: int = 1
) -> Mesh:
    """Arrange the devices on four axes, of which one may be -1 to take all remaining devices.

    Neighbours on the mesh are neighbours on the network: several slices (see `slices_of`) split `data`, or if that is
    too small `fsdp`, then `sequence`, and `tensor` last, as in the hybrid meshes of MaxText and Levanter.

    Args:
        data, fsdp, tensor, sequence: the sizes of the axes, see `MeshConfig`.
        devices: None = all.

    Raises:
        UserError: the product of the sizes exceeds the devices, or is smaller while a size is -1 or there are several
            processes; a single process may use fewer devices than it has.
    """
    given = jax.devices() if devices is None else list(devices)
    asked = {DATA: data, SEQUENCE: sequence, FSDP: fsdp, TENSOR: tensor}
    sizes = fill_axes(asked, len(given))
    count = math.prod(sizes.values())
    if count > len(given) or (count < len(given) and (-1 in asked.values() or jax.process_count() > 1)):
        wanted = " x ".join(f"mesh.{axis}={size}" for axis, size in asked.items())
        raise UserError(
            f"{wanted} does not fit {len(given)} devices: the product must be {len(given)}; -1 takes the rest"
        )
    # Explicit axes, the default of jax.make_mesh, do not work with Linen's embeddings; Auto leaves it to the compiler.
    auto = (AxisType.Auto,) * len(AXES)
    return Mesh(_arranged(given[:count], sizes, count == len(given)), AXES, axis_types=auto)


def _arranged(devices: Sequence[jax.Device], sizes: Mapping[str, int], whole: bool) -> np.ndarray:
    """Return the devices as a grid; `whole`: they are all devices of the run."""
    slices = Counter(slices_of(devices))
    if whole and len(slices) > 1 and len({*slices.values()}) == 1:
        outer, left = dict[str, int](), len(slices)
        for axis in (DATA, FSDP, SEQUENCE, TENSOR):
            outer[axis] = math.gcd(sizes[axis], left)
            left //= outer[axis]
        inner = [size // outer[axis] for axis, size in sizes.items()]
        by_process = _slice_attribute(devices[0]) == "process_index"
        return mesh_utils.create_hybrid_device_mesh(
            inner,
            [outer[axis] for axis in sizes],
            devices,
            process_is_granule=by_process,
            allow_split_physical_axes=True,
        )
    if whole and len(devices) > 1 and devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh([*sizes.values()], devices, allow_split_physical_axes=True)
    return np.array(devices).reshape([*sizes.values()])


def slices_of(devices: Iterable[jax.Device]) -> list[int]:
    """Return the number of each device's slice: TPU chips, or the GPUs of a machine, that share a fast network.

    Several slices are joined by a slower one.
    """
    return [getattr(device, _slice_attribute(device), 0) for device in devices]


def _slice_attribute(device: jax.Device) -> str:
    """Return the name of the attribute in which JAX numbers a device's slice.

    It is `slice_index`, but JAX gives the same one to all GPUs for which a program is only compiled. There, each
    machine has its own process index, while the compiling run has a single process.
    """
    return "process_index" if device.platform == "gpu" and jax.process_count() == 1 else "slice_index"


def axes_between_slices(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which devices are in different slices: their collectives cross the slower network."""
    slices = np.reshape(slices_of(mesh.devices.flat), mesh.devices.shape)
    return tuple(name for axis, name in enumerate(mesh.axis_names) if np.diff(slices, axis=axis).any())


def slices_line(mesh: Mesh) -> str:
    """Return a line on the axes that cross the network between slices, or '' for a mesh on a single one."""
    slices = len({*slices_of(mesh.devices.flat)})
    if slices == 1:
        return ""
    axes, what = axes_between_slices(mesh), "machines" if mesh.devices.flat[0].platform == "gpu" else "slices"
    line = f"mesh: {' and '.join(axes)} across {slices} {what}, joined by a slower network"
    for axis, most in ((TENSOR, mesh.size // slices), (SEQUENCE, mesh.size // slices // mesh.shape[TENSOR])):
        if axis in axes:
            return f"{line}, which {axis} uses in every layer: mesh.{axis} at most {most} stays within one"
    return line


def fill_axes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the size of each axis of the mesh, replacing -1 by the number of `devices` that the others leave."""
    rest = devices // math.prod(size for size in sizes.values() if size != -1)
    return {axis: max(rest, 1) if size == -1 else size for axis, size in sizes.items()}
