"""Parameters as answers on a CPU read them at no cost: every layer's kernels as arrays of their own, rounded once.

A stack has one array for the kernels of all its layers. XLA on CPUs copies each layer's part out of it before a
product, in every call anew, and what computes in another dtype is rounded in every call, too: with d_model 512 that was
half of the time of a short sentence. A copy that is made once saves both. A call held as much while it ran; now it is
held between calls, too, also while what was answered is scored.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jformer.models.model import Model
from jformer.models.parts import STACKED
from jformer.parallel.backend import is_one_cpu


class LaidOut:
    """Lays out the parameters of models, and keeps what it made last. Programs take it through `joined`."""

    def __init__(self, models: Sequence[Model], mesh: Mesh | None, rounded: bool, copies: bool = True) -> None:
        """Hold what it takes, and copy nothing yet, or never: parameters stay as they are where no `copies` are wanted.

        Answers of `heads` are computed by kernels that are not `rounded`.
        """
        self._copies = copies
        self._make = [
            _make_lay_out(
                dtype=model.config.dtype if rounded else "float32",
                apart=is_one_cpu(mesh) and not model.config.execution.unroll,  # a loop over layers reads whole arrays
            )
            for model in models
        ]
        self._given: Sequence[PyTree] = ()
        self._made: Sequence[PyTree] = ()

    def __call__(self, params: Sequence[PyTree]) -> Sequence[PyTree]:
        """Return the parameters of every model laid out."""
        if not self._copies:
            return params
        if [*map(id, params)] != [*map(id, self._given)]:
            self._given = self._made = ()  # frees memory before more is taken
            self._made = [make(tree) for make, tree in zip(self._make, params, strict=True)]
            self._given = params  # which no others have the ids of while they are held
        return self._made


@functools.cache
def _make_lay_out(dtype: str, apart: bool) -> Callable[[PyTree], PyTree]:
    """Return the compiled parameters → laid out."""

    def lay_out(params: PyTree) -> PyTree:
        params = in_compute_dtype(params, dtype)
        return jax.tree_util.tree_map_with_path(_apart, params) if apart else params

    return jax.jit(lay_out)


def in_compute_dtype(params: PyTree, dtype: str) -> PyTree:
    """Round kernels and embeddings to the compute dtype, once instead of in every step."""

    def cast(path: Any, leaf: Array) -> Array:
        return leaf.astype(dtype) if path[-1].key in ("kernel", "embedding") else leaf

    return params if dtype == "float32" else jax.tree_util.tree_map_with_path(cast, params)


def _apart(path: Any, leaf: Array) -> Array | tuple[Array, ...]:
    return tuple(jnp.unstack(leaf)) if any(step.key == STACKED for step in path) else leaf


def joined(params: PyTree) -> PyTree:
    """Return parameters as models take them, laid out or not. For use inside jit, which finds nothing to do in it."""
    return jax.tree.map(
        lambda leaf: jnp.stack(leaf) if isinstance(leaf, tuple) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
