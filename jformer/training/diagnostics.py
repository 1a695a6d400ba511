"""Norms of gradients and activations, layer by layer, of one batch; nothing is trained.

Letters in shapes: b rows of a batch, t positions, d d_model, l layers, · any further axes.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jformer.errors import UserError
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.tasks.sums import LossFn

# Stack → what it reads; 0 is padding.
SEGMENTS: dict[str, Literal["source_segments", "target_segments"]] = {
    "encoder": "source_segments",
    "decoder": "target_segments",
}


class Norms(NamedTuple):
    """One number for each layer, float32 [l]. A stack is 'encoder' or 'decoder'."""

    gradients: dict[str, Array]  # 'encoder/feed_forward' → norm of the gradient of all its parameters together
    parameter_gradients: dict[str, Array]  # 'encoder/feed_forward/down/kernel' → Frobenius norm of that gradient
    activations: dict[str, Array]  # 'encoder' → root mean square of the block's output, over positions with text


def make_norms(model: Model, loss: LossFn) -> Callable[..., Norms]:
    """Return the compiled (parameters, batch [b …], dropout key or None) → norms, for one device.

    Gradients are those of the mean loss over the batch, before any clipping. At initialisation they explain the
    need for warmup (Xiong et al. 2020, Theorem 1 and Figure 3): near the output those of Post-LN are large, while those
    of Pre-LN shrink as layers are added.
    """

    if model.config.recurrent.cell:
        raise UserError("norms by layer are those of Transformer blocks: a recurrent model has none")

    def mean_loss(params: PyTree, batch: Batch, key: Array | None) -> Array:
        total, count = loss(params, batch, key)["loss"]
        return total / jnp.maximum(count, 1.0)

    def norms(params: PyTree, batch: Batch, key: Array | None = None) -> Norms:
        squares = squared_norms(jax.grad(mean_loss)(params, batch, key))
        totals: dict[str, Array] = {}
        for path, square in squares.items():
            sublayer = "/".join(path.split("/")[:2])
            totals[sublayer] = totals.get(sublayer, jnp.zeros(())) + square
        rngs = {} if key is None else {"dropout": key}
        arguments = {"train": key is not None, "rngs": rngs, "method": "hidden", "mutable": ["intermediates"]}
        _, found = model.apply({"params": params}, batch, **arguments)
        return Norms(
            gradients=jax.tree.map(jnp.sqrt, totals),
            parameter_gradients=jax.tree.map(jnp.sqrt, squares),
            activations={
                stack: root_mean_square(inner["block"]["output"][0], batch.get(SEGMENTS[stack]))
                for stack, inner in found["intermediates"].items()
            },
        )

    return jax.jit(norms)


def squared_norms(gradients: Mapping[str, PyTree]) -> dict[str, Array]:
    """Return stack/sublayer/…/parameter → squared norm of its gradient in every layer, float32 [l]."""
    blocks = {stack: gradients[stack]["block"] for stack in SEGMENTS if stack in gradients}
    leaves = jax.tree_util.tree_flatten_with_path(blocks)[0]
    return {
        "/".join(key.key for key in path): jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=range(1, leaf.ndim))
        for path, leaf in leaves
    }


def root_mean_square(x: Float[Array, "l b t d"], segments: Int[Array, "b t"] | None) -> Float[Array, " l"]:
    """Return the root mean square over features and non-padding positions; without segments [b t], over all."""
    weights = jnp.ones(x.shape[1:3]) if segments is None else segments > 0
    squares = jnp.square(x.astype(jnp.float32)).mean(axis=-1) * weights
    return jnp.sqrt(squares.sum(axis=(1, 2)) / weights.sum())
