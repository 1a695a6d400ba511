"""Norms of gradients and activations, layer by layer, of one batch; nothing is trained.

Letters in shapes: b rows of a batch, t positions, d d_model, l layers, · any further axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.tasks.sums import LossFn, Scalar

SEGMENTS = {"encoder": "source_segments", "decoder": "target_segments"}  # stack → what it reads; 0 is padding


class Norms(NamedTuple):
    """One number for each layer, float32 [l]. A stack is 'encoder' or 'decoder'."""

    gradients: dict[str, Array]  # 'encoder/feed_forward' → norm of the gradient of all its parameters together
    activations: dict[str, Array]  # 'encoder' → root mean square of the block's output, over positions with text


def make_norms(model: Model, loss: LossFn) -> Callable[[PyTree, Any], Norms]:
    """Return the compiled (parameters, batch [b …]) → norms of a Transformer of texts, without dropout, on one device.

    Gradients are those of the mean loss over the batch, before any clipping. At initialisation they explain the need
    for warmup (Xiong et al. 2020, Theorem 1 and Figure 3).
    """

    def mean_loss(params: PyTree, batch: Batch) -> Scalar:
        total, count = loss(params, batch, None)["loss"]
        return total / count

    def norms(params: PyTree, batch: Any) -> Norms:
        gradients = jax.grad(mean_loss)(params, batch)
        _, found = model.apply({"params": params}, batch, method="hidden", mutable=["intermediates"])
        stacks = found["intermediates"]
        return Norms(
            {
                f"{stack}/{sublayer}": norm_of_layers(tree)
                for stack in stacks
                for sublayer, tree in gradients[stack]["block"].items()
            },
            {
                stack: root_mean_square(inner["block"]["output"][0], batch[SEGMENTS[stack]] > 0)
                for stack, inner in stacks.items()
            },
        )

    return jax.jit(norms)


def norm_of_layers(gradients: PyTree) -> Float[Array, " l"]:
    """Return the norm, in every layer, of all gradients [l ·] together."""
    squares = (jnp.square(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(gradients))
    return jnp.sqrt(sum(square.sum(axis=range(1, square.ndim)) for square in squares))


def root_mean_square(x: Float[Array, "l b t d"], marked: Bool[Array, "b t"]) -> Float[Array, " l"]:
    """Return the root mean square over features and the positions that are marked."""
    squares = jnp.square(x.astype(jnp.float32)).mean(axis=-1) * marked
    return jnp.sqrt(squares.sum(axis=(1, 2)) / marked.sum())
