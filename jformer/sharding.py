"""The mesh of devices, and how arrays lie on it: parameters by one table of their names, batches by their rows."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jformer.errors import UserError
from jformer.placement import FSDP, NARROW, TENSOR, WIDE, kernel_axes

DATA = "data"
AXES = (DATA, FSDP, TENSOR)
ROWS = PartitionSpec(None, DATA)  # of batch leaves [a b …], as far as steps split them by hand
EVERY_ROW = PartitionSpec((DATA, FSDP))

PLACES = (  # a regular expression over a parameter's path → the mesh axes of its last axes; layers are never split
    (r"/(q|k|v|gate|up)/kernel$", kernel_axes(WIDE)),
    (r"/(q|k|v|gate|up)/bias$", (TENSOR,)),
    (r"/(o|down)/kernel$", kernel_axes(NARROW)),
    (r"^(source_|target_)?embedding/embedding$", (TENSOR, FSDP)),
    (r"^head/output/kernel$", kernel_axes(WIDE)),
    (r"^head/bias$", (TENSOR,)),
    # What is small lies whole on every device.
    (r"/(o|down)/bias$|norm/(scale|bias)$|(positions|segments|position_bias)/embedding$", ()),
    (r"^head/transform/|^(pooler/dense|classifier|patches)/(kernel|bias)$|^class_token$", ()),
)


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay the devices (all there are, if none are given) on three axes; -1 on one of them takes all that are left.

    Raises UserError for sizes that the devices do not fill, as far as some stay over; one process may use fewer.
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


def row_shards(mesh: Mesh) -> int:
    """Return among how many parts of the mesh the rows of a batch are split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def fill_rows(rows: int, mesh: Mesh) -> int:
    """Return the least number of rows, so many or more, that the mesh splits evenly."""
    return -(-rows // row_shards(mesh)) * row_shards(mesh)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_specs(params: Any) -> Any:
    """Return where each parameter (or its shape) lies, as PartitionSpecs; its gradient and moments lie there too.

    Raises UserError for a parameter that the table does not know.
    """

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = _name(path)
        axes = next((axes for pattern, axes in PLACES if re.search(pattern, name)), None)
        if axes is None:
            raise UserError(f"parameter {name}: jformer.sharding.PLACES does not say where it lies; add a row")
        return PartitionSpec(*(None,) * (len(leaf.shape) - len(axes)), *axes) if axes else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def parameter_shardings(mesh: Mesh, params: Any, whole: Sequence[str] = ()) -> Any:
    """Return the sharding of each parameter; over the axes in `whole` none is split.

    Raises UserError for a parameter that does not divide.
    """

    def place(path: Any, leaf: Any, spec: PartitionSpec) -> NamedSharding:
        axes = [None if axis in whole or (axis and mesh.shape[axis] == 1) else axis for axis in spec]
        for size, axis in zip(leaf.shape, axes, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise UserError(
                    f"mesh.{axis}={mesh.shape[axis]} does not divide {size} of parameter {_name(path)} "
                    f"[{' '.join(map(str, leaf.shape))}]: choose a divisor of it, or another size of the model"
                )
        while axes and axes[-1] is None:  # compiled programs say it so, and would be compiled again for another name
            axes.pop()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(place, params, parameter_specs(params))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Return the shardings of a state with `params`: what has a parameter's name and shape lies as that does.

    So do moments and moving averages; the rest, counters and statistics of rows and columns, is everywhere.
    """
    shapes = jax.tree_util.tree_leaves_with_path(state.params)
    places = jax.tree.leaves(parameter_shardings(mesh, state.params))
    known = {(_name(path), leaf.shape): place for (path, leaf), place in zip(shapes, places, strict=True)}

    def place(path: Any, leaf: Any) -> NamedSharding:
        parts = _name(path).split("/")
        names = ("/".join(parts[start:]) for start in range(len(parts)))
        return next((known[name, leaf.shape] for name in names if (name, leaf.shape) in known), replicated(mesh))

    return jax.tree_util.tree_map_with_path(place, state)


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Return which of a batch's rows this process's devices hold, in order."""
    parts: Any = NamedSharding(mesh, EVERY_ROW).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in parts]))


def put_batch(mesh: Mesh, batch: dict[str, np.ndarray], rows: int | None = None) -> dict[str, jax.Array]:
    """Move a batch of leaves [a b …] to the devices, rows split over data and fsdp.

    With several processes, each gives its `local_rows` alone, of `rows` in each microbatch.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, *EVERY_ROW))
    if rows is None:
        return jax.device_put(batch, sharding)
    everyone, mine = np.arange(rows), local_rows(mesh, rows)

    def put(x: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            return x[:, np.searchsorted(mine, everyone[index[1]])]

        return jax.make_array_from_callback((x.shape[0], rows, *x.shape[2:]), sharding, part)

    return jax.tree.map(put, batch)


def over_rows(function: Callable, mesh: Mesh | None) -> Callable:
    """Return function(parameters, batch), each part of a mesh working on its own rows; the results are everywhere.

    Arrays of the batch have the rows first, scalars are for all. Nothing is exchanged on the way over data and fsdp,
    where parameters are whole: rows of one part may need more steps of a loop than those of another. The axis `tensor`
    is left to the compiler.
    """
    if mesh is None or mesh.size == 1:
        return function

    def run(params: Any, batch: dict[str, Any]) -> Any:
        rows = jax.tree.map(lambda x: EVERY_ROW if np.ndim(x) else PartitionSpec(), batch)
        split = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec(), rows),
            out_specs=EVERY_ROW,
            axis_names={DATA, FSDP},
            check_vma=False,
        )
        return jax.lax.with_sharding_constraint(split(params, batch), replicated(mesh))

    return run


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
