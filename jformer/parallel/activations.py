"""Shardings of the arrays inside a model over the mesh of a program; without a mesh, nothing is sharded.

A model needs these constraints because the compiler by itself would move activations rather than parameters. `mesh`
makes the mesh; `sharding` places parameters and batches.

Letters in shapes: b rows, d inputs and f outputs of a kernel, v vocabulary, t positions of a row and p those of a
device, h heads and e those of a device, k size of a head, · any further axes.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jformer.parallel.mesh import DATA, FSDP, SEQUENCE, TENSOR

# How a kernel [d f] is split over `tensor`, in the terms of Shoeybi et al. 2019: by its outputs f, or by its inputs d.
COLUMN, ROW = "column", "row"


def constrain_sharding(x: Array, *axes: str | None) -> Array:
    """Split each axis of x over the given mesh axis; None and missing axes are not split.

    Mesh axes that are manual in this program or have one device are ignored.
    """
    free = _free(jax.sharding.get_abstract_mesh()) & {FSDP, TENSOR}
    if not free:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axis if axis in free else None for axis in axes)))


def constrain_rows(x: Array, features: str | None = None) -> Array:
    """Split the rows of activations [b · f] over `fsdp`, and their features over a mesh axis, if given."""
    return constrain_sharding(x, FSDP, *(None,) * (x.ndim - 2), features)


def look_up(table: Array, ids: Array) -> Array:
    """Return table[ids], rows of ids [b ·] split over `fsdp` and those of the table [v d] over `tensor`.

    Each device looks up the rows that it has; the sum over `tensor` is complete. This is written by hand because XLA's
    partitioner may abort at a gather whose table and indices are both split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = _free(mesh) & {FSDP, TENSOR}
    if not free:
        return table[ids]
    rows, share = (axis if axis in free else None for axis in (FSDP, TENSOR))

    def look_up_own(table: Array, offset: Array, ids: Array) -> Array:
        """Return [1 b · d], zero for ids outside this device's rows, which begin at offset [1] of the whole table."""
        index = ids - offset
        is_here = (index >= 0) & (index < len(table))
        return jnp.where(is_here[..., None], table[index.clip(0, len(table) - 1)], 0)[None]

    look_up_parts = jax.shard_map(
        look_up_own,
        in_specs=(PartitionSpec(share), PartitionSpec(share), PartitionSpec(rows)),
        out_specs=PartitionSpec(share, rows),
        axis_names=free,
        check_vma=False,
    )
    offsets = jnp.arange(0, len(table), len(table) // parts(TENSOR), dtype=ids.dtype)
    partial = look_up_parts(table, offsets, ids)  # [devices of tensor, b · d]
    return constrain_rows(partial.sum(axis=0))


def over_rows_and_heads(function: Callable[..., Array], *arrays: tuple[str, Array]) -> Array:
    """Return function(*arrays), each device working on its own rows and heads.

    The compiler cannot split custom kernels, not even over an axis of one device: every automatic axis is made manual
    here.

    Args:
        function: called with the arrays of one device.
        arrays: each with its axes, as in "b t h k": b is split as rows, h and g as heads, others not at all. The result
            has the axes of the first array.
    """
    mesh = jax.sharding.get_abstract_mesh()
    own = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    if not own:
        return function(*(x for _, x in arrays))
    heads = TENSOR if TENSOR in own else None
    split = {"b": tuple(axis for axis in (DATA, FSDP) if axis in own), "h": heads, "g": heads}
    specs = tuple(PartitionSpec(*(split.get(axis) for axis in axes.split())) for axes, _ in arrays)
    mapped = jax.shard_map(function, in_specs=specs, out_specs=specs[0], axis_names=own, check_vma=False)
    return mapped(*(x for _, x in arrays))


def kernel_axes(split: str | None) -> tuple[str | None, str | None]:
    """Return the mesh axes of a stored kernel [d f]: the axis `split` over `tensor`, the other one over `fsdp`."""
    return {COLUMN: (FSDP, TENSOR), ROW: (TENSOR, FSDP)}.get(split or "", (None, None))


def parts(*axes: str) -> int:
    """Return the number of devices over which the compiler may split an array on the given mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(size for name, size in mesh.shape.items() if name in axes and name in _free(mesh))


def manual_parts(axis: str) -> int:
    """Return the number of parts of a mesh axis if it is manual in this program, otherwise 1."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[axis] if kinds.get(axis) == AxisType.Manual else 1


def own_positions(length: int) -> Int[Array, " p"]:
    """Return the indices in whole rows of the `length` positions of each row that this device has."""
    places = jnp.arange(length)
    return places + jax.lax.axis_index(SEQUENCE) * length if manual_parts(SEQUENCE) > 1 else places


def whole_rows(x: Shaped[Array, "b p *a"]) -> Shaped[Array, "b t *a"]:
    """Gather whole rows, whose positions are split over `sequence`."""
    return jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True) if manual_parts(SEQUENCE) > 1 else x


def own_heads(heads: int, groups: int) -> slice | Int[Array, " e"]:
    """Return an index of the heads that `positions_to_heads` gives this device; padding heads repeat the last group."""
    if manual_parts(SEQUENCE) == 1:
        return slice(None)
    places = np.arange(heads).reshape(parts(TENSOR), groups // parts(TENSOR), -1)
    places = np.pad(places, [(0, 0), (0, -places.shape[1] % manual_parts(SEQUENCE)), (0, 0)], mode="edge")
    shares = np.stack(np.split(places, manual_parts(SEQUENCE), axis=1)).reshape(manual_parts(SEQUENCE), -1)
    return jnp.asarray(shares)[jax.lax.axis_index(SEQUENCE)]


def positions_to_heads(x: Float[Array, "b p h k"], groups: int) -> Float[Array, "b t e k"]:
    """Give each device of `sequence` whole rows of some heads, instead of some positions of all heads.

    This is the all-to-all of Jacobs et al. 2023 (DeepSpeed-Ulysses, section 3.1). Heads stay in `groups` that attend to
    the same keys; groups of zeros pad them to a multiple of the devices. If `tensor` splits the heads, each device
    exchanges its own.
    """
    count, (b, length, _, k) = manual_parts(SEQUENCE), x.shape
    if count == 1:
        return x
    x = x.reshape(b, length, parts(TENSOR), groups // parts(TENSOR), -1)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % count), (0, 0)])
    x = constrain_sharding(x, FSDP, None, TENSOR)
    x = jax.lax.all_to_all(x, SEQUENCE, split_axis=3, concat_axis=1, tiled=True)
    return constrain_sharding(x, FSDP, None, TENSOR).reshape(b, count * length, -1, k)


def heads_to_positions(x: Float[Array, "b t e k"], heads: int, groups: int) -> Float[Array, "b p h k"]:
    """Undo `positions_to_heads`."""
    count, (b, length, _, k) = manual_parts(SEQUENCE), x.shape
    if count == 1:
        return x
    x = x.reshape(b, length, parts(TENSOR), -1, heads // groups * k)
    x = constrain_sharding(x, FSDP, None, TENSOR)
    x = jax.lax.all_to_all(x, SEQUENCE, split_axis=1, concat_axis=3, tiled=True)
    x = constrain_sharding(x, FSDP, None, TENSOR)[:, :, :, : groups // parts(TENSOR)]
    return x.reshape(b, length // count, heads, k)


def _free(mesh: AbstractMesh) -> set[str]:
    """Return the automatic axes with several devices, which the compiler splits."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1}
