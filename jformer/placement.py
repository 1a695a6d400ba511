"""Where the arrays inside a model lie on the mesh that a program is made for. Without a mesh, this does nothing.

The mesh and the parameters' places are made elsewhere; here is only what a model must say, because a compiler that is
left to guess would rather move activations than parameters.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

FSDP, TENSOR = "fsdp", "tensor"
WIDE, NARROW = "wide", "narrow"  # a kernel whose outputs are split over `tensor`, and one whose inputs are


def place(x: Array, *axes: str | None) -> Array:
    """Lay the axes of x on axes of the mesh, as far as the compiler is free to: None and missing ones are not split."""
    free = _free(jax.sharding.get_abstract_mesh()) & {FSDP, TENSOR}
    if not free:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axis if axis in free else None for axis in axes)))


def place_rows(x: Array, features: str | None = None) -> Array:
    """Split the rows of activations [b · f] over `fsdp`, and their features over an axis of the mesh or none."""
    return place(x, FSDP, *(None,) * (x.ndim - 2), features)


def look_up(table: Array, ids: Array) -> Array:
    """Return table[ids], rows of ids [b ·] split over `fsdp` and those of the table [v d] over `tensor`.

    Each device looks up what it has and the sum over `tensor` is whole. Said by hand, for XLA's partitioner may abort
    at a gather whose table and indices are both split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = _free(mesh) & {FSDP, TENSOR}
    if not free:
        return table[ids]
    rows, share = (axis if axis in free else None for axis in (FSDP, TENSOR))

    def own(table: Array, first: Array, ids: Array) -> Array:
        at = ids - first
        here = (at >= 0) & (at < len(table))
        return jnp.where(here[..., None], table[at.clip(0, len(table) - 1)], 0)[None]

    split = jax.shard_map(
        own,
        in_specs=(PartitionSpec(share), PartitionSpec(share), PartitionSpec(rows)),
        out_specs=PartitionSpec(share, rows),
        axis_names=free,
        check_vma=False,
    )
    size = len(table) // parts(TENSOR)
    return place_rows(split(table, jnp.arange(0, len(table), size, dtype=ids.dtype), ids).sum(axis=0))


def kernel_axes(split: str | None) -> tuple[str | None, str | None]:
    """Return the axes that a kernel [d f] is stored on: split as said over `tensor`, and the other way over `fsdp`."""
    return {WIDE: (FSDP, TENSOR), NARROW: (TENSOR, FSDP)}.get(split or "", (None, None))


def parts(*axes: str) -> int:
    """Return among how many devices the compiler is free to split something over some axes of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(size for name, size in mesh.shape.items() if name in axes and name in _free(mesh))


def _free(mesh: Any) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1}
