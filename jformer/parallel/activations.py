"""How the arrays inside a model are sharded over the mesh that a program is made for. Without a mesh: not at all.

A model calls this because a compiler that is left to guess would rather move activations than parameters. The mesh is
made in `mesh`; where parameters and batches lie is said in `sharding`.

Letters in shapes: b rows, d inputs and f outputs of a kernel, v vocabulary, t positions, h heads, k size of a head, ·
whatever axes follow.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from jformer.parallel.mesh import DATA, FSDP, TENSOR

# How a kernel [d f] is split over `tensor`, in the words of Shoeybi et al. 2019: by its outputs f, or by its inputs d.
COLUMN, ROW = "column", "row"


def constrain_sharding(x: Array, *axes: str | None) -> Array:
    """Split each axis of x over the axis of the mesh named for it; None and those not named are not split.

    Axes of the mesh that the program handles by hand, or that have one device, are left out.
    """
    free = _free(jax.sharding.get_abstract_mesh()) & {FSDP, TENSOR}
    if not free:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axis if axis in free else None for axis in axes)))


def constrain_rows(x: Array, features: str | None = None) -> Array:
    """Split the rows of activations [b · f] over `fsdp`, and their features over an axis of the mesh or none."""
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

    The compiler cannot split what is written for a device itself, not even over an axis of one device: every axis that
    is left to it is handled here.

    Args:
        function: called with the arrays of one device.
        arrays: each with its axes, as in "b t h k": those called b are split as rows, those called h or g as heads,
            others not at all. The result has the axes of the first.
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
    """Return the axes that a kernel [d f] is stored on: split as said over `tensor`, and the other way over `fsdp`."""
    return {COLUMN: (FSDP, TENSOR), ROW: (TENSOR, FSDP)}.get(split or "", (None, None))


def parts(*axes: str) -> int:
    """Return among how many devices the compiler is free to split something over some axes of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(size for name, size in mesh.shape.items() if name in axes and name in _free(mesh))


def _free(mesh: AbstractMesh) -> set[str]:
    """Return the axes that the compiler, and nobody by hand, splits over several devices."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1}
