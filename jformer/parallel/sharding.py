"""Shardings of parameters and their moments, by one table of names, and of batches, by their rows.

`mesh` makes the mesh; `activations` shards the arrays inside a model. This module has the only hand-written sum over
devices.

Letters in shapes: a microbatches, b rows, t positions, · any further axes.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jformer.errors import UserError
from jformer.parallel.activations import manual_parts
from jformer.parallel.mesh import DATA, FSDP, SEQUENCE, TENSOR

EVERY_ROW = PartitionSpec((DATA, FSDP))

# A regular expression over a parameter's path → the mesh axes that its last axes are split over; the axis of layers, in
# front of them, is never split. The first row that matches counts. Parameters that match none are replicated: they are
# small, as in norms and recurrent models, or user-defined. A kernel [inputs outputs] is split over `tensor` as
# matmul.py multiplies by it, so that a block needs one sum over devices for attention and one for the feed-forward
# (Shoeybi et al. 2019, section 3): q, k, v and up by their outputs, o and down by their inputs.
PARAMETER_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"^adapter/", ()),  # small: replicated, whatever its paths end with
    (r"/(q|k|v|distance|gate|up)/kernel$", (FSDP, TENSOR)),
    (r"/(q|k|v|gate|up)/bias$", (TENSOR,)),
    (r"/distance/(content|distance)_bias$", (TENSOR,)),
    (r"/(o|down)/kernel$", (TENSOR, FSDP)),
    (r"^(source_|target_)?embedding/embedding$", (TENSOR, FSDP)),
    (r"^head/output/kernel$", (FSDP, TENSOR)),
    (r"^head/bias$", (TENSOR,)),
)


def row_shards(mesh: Mesh) -> int:
    """Return the number of parts of the mesh that split the rows of a batch."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def round_up_rows(rows: int, mesh: Mesh) -> int:
    """Round `rows` up to the next number that the mesh splits evenly."""
    return -(-rows // row_shards(mesh)) * row_shards(mesh)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a replicated value."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_names(params: PyTree) -> PyTree:
    """Return the tree with every leaf replaced by its path, such as 'encoder/block/self_attn/q/kernel'."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path), params)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the path of every leaf of a tree → the leaf, in the order of `jax.tree.leaves`."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def parameter_specs(params: PyTree) -> PyTree:
    """Return the PartitionSpec of each parameter (or its shape), which its gradient and moments share.

    A parameter whose name matches no row of the table, as in a user-defined layer, is replicated.
    Raises ValueError for one that has fewer axes than its row in the table.
    """

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = _name(path)
        axes = next((axes for pattern, axes in PARAMETER_AXES if re.search(pattern, name)), ())
        in_front = len(leaf.shape) - len(axes)
        if in_front < 0:
            raise ValueError(f"parameter {name} {leaf.shape} has fewer axes than PARAMETER_AXES splits: {axes}")
        return PartitionSpec(*(None,) * in_front, *axes) if axes else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def parameter_shardings(mesh: Mesh, params: PyTree, whole: Sequence[str] = ()) -> PyTree:
    """Return the sharding of each parameter, not split over the axes in `whole`.

    Raises UserError for a parameter that does not divide evenly.
    """

    def sharding_of(path: Any, leaf: Any, spec: PartitionSpec) -> NamedSharding:
        axes = [None if axis in whole or (axis and mesh.shape[axis] == 1) else axis for axis in spec]
        for size, axis in zip(leaf.shape, axes, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise UserError(
                    f"mesh.{axis}={mesh.shape[axis]} does not divide {size} of parameter {_name(path)} "
                    f"[{' '.join(map(str, leaf.shape))}]: choose a divisor of it, or another size of the model"
                )
        # jit gives its results shardings without trailing None. Those of the first state must be written the same way,
        # or the step is compiled twice.
        while axes and axes[-1] is None:
            axes.pop()
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding_of, params, parameter_specs(params))


def state_shardings(mesh: Mesh, state: PyTree) -> PyTree:
    """Return the shardings of a state with `params`; moments and moving averages are split like their parameters.

    They are matched by shape, and by path, which contains the whole path of a parameter: at the end, or before the
    names of a state of its own (`training.optim.per_layer`). The rest is replicated: counters, and Adafactor's
    statistics of rows and columns, which have a parameter's path, not its shape.
    """
    shapes = named_leaves(state.params).items()
    shardings = jax.tree.leaves(parameter_shardings(mesh, state.params))
    known = {(name, leaf.shape): sharding for (name, leaf), sharding in zip(shapes, shardings, strict=True)}

    def like_its_parameter(path: Any, leaf: Any) -> NamedSharding:
        parts = _name(path).split("/")
        # The one that begins first counts, because one may contain another.
        places = itertools.product(range(len(parts)), range(len(parts), 0, -1))
        names = ("/".join(parts[start:end]) for start, end in places)
        return next((known[name, leaf.shape] for name in names if (name, leaf.shape) in known), replicated(mesh))

    return jax.tree_util.tree_map_with_path(like_its_parameter, state)


def abstract_like(tree: PyTree, shardings: PyTree) -> PyTree:
    """Return shapes and dtypes of a tree of arrays, each with its own sharding."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Return the sorted rows of a batch that this process's devices hold."""
    parts: Any = NamedSharding(mesh, EVERY_ROW).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in parts]))


def put_batch(mesh: Mesh, batch: dict[str, np.ndarray], rows: int | None = None) -> dict[str, jax.Array]:
    """Move a batch of leaves [a b …] to the devices, rows split over data and fsdp.

    With several processes, each passes only its `local_rows`, of `rows` in each microbatch.
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


def over_rows(function: Callable[..., PyTree], mesh: Mesh | None) -> Callable[..., PyTree]:
    """Map function(parameters, batch) over the parts of a mesh, each with its own rows; results are replicated.

    Arrays of the batch have rows as their first axis; scalars are shared. Parameters must be whole over data and fsdp,
    so that the parts do not communicate there: one may need more steps of a loop than another. The axis `tensor` is
    left to the compiler.
    """
    if mesh is None or mesh.size == 1:
        return function

    def run(params: PyTree, batch: PyTree) -> PyTree:
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


def on_every_part(function: Callable[..., PyTree], mesh: Mesh | None) -> Callable[..., PyTree]:
    """Map function(*arrays) over the parts of a mesh, all of which compute the same; for parameters see `over_rows`."""
    if mesh is None or mesh.size == 1:
        return function
    every = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    return jax.shard_map(function, mesh=mesh, **every, axis_names={DATA, FSDP}, check_vma=False)


def sum_over_parts(function: Callable[..., PyTree], mesh: Mesh) -> Callable[..., PyTree]:
    """Map function(parameters, batch, …) over the parts of a batch [a b t ·] on a mesh, and sum its results.

    The axis `data` splits rows, and `sequence` positions, padded with zeros to a multiple of it. Everything else is
    replicated over both. Within a part, `fsdp` and `tensor` are left to the compiler. XLA cannot sum over an axis with
    one part if there are other axes.
    """
    axes, count = tuple(axis for axis in (DATA, SEQUENCE) if mesh.shape[axis] > 1), mesh.shape[SEQUENCE]

    def has_positions(x: jax.Array) -> bool:
        return x.ndim > 2 and count > 1

    def missing(x: jax.Array) -> int:
        return -x.shape[2] % count if has_positions(x) else 0

    def fill(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, missing(x) * (axis == 2)) for axis in range(x.ndim)]) if missing(x) else x

    def sum_of_part(*args: PyTree) -> PyTree:
        return jax.lax.psum(function(*args), axes) if axes else function(*args)

    def run(params: PyTree, batch: PyTree, *others: PyTree) -> PyTree:
        rows = {x.shape[1] for x in jax.tree.leaves(batch)}
        if any(number % mesh.shape[DATA] for number in rows):
            raise UserError(f"a batch of {max(rows)} rows cannot be split over mesh.data={mesh.shape[DATA]}: add rows")
        whole, batch = PartitionSpec(), jax.tree.map(fill, batch)
        split = jax.tree.map(lambda x: PartitionSpec(None, DATA, *[SEQUENCE] * has_positions(x)), batch)
        mapped = jax.shard_map(
            sum_of_part,
            mesh=mesh,
            in_specs=(whole, split, *[whole] * len(others)),
            out_specs=whole,
            axis_names={DATA, *axes},
            check_vma=False,  # otherwise gradients of replicated parameters would arrive summed already, and psum again
        )
        return mapped(params, batch, *others)

    return run


def gather_over_data(x: jax.Array) -> jax.Array:
    """Return the rows [b …] of all parts of the `data` axis, in the order of the update; with a single part, x itself.

    A part that differentiates its own sum receives the gradients of its rows from the sums of all parts.
    """
    return jax.lax.all_gather(x, DATA, tiled=True) if data_part() is not None else x


def data_part() -> jax.Array | None:
    """Return the number of this part of the `data` axis; None if the axis is not manual or has only one part."""
    return jax.lax.axis_index(DATA) if manual_parts(DATA) > 1 else None


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def device_bytes(tree: PyTree) -> int:
    """Return the bytes of sharded arrays, or abstract ones, on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
