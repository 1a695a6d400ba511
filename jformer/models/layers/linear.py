"""Parameters that multiply: the projection used by every layer, and the embedding table.

Axes: b rows, t positions, d inputs, f outputs, v rows of a table.
"""

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from jformer.models.layers.initializers import Init
from jformer.models.layers.matmul import add_bias, matmul
from jformer.parallel.activations import COLUMN, constrain_rows, look_up

rounded_logits = jax.make_user_context(False)  # under `with rounded_logits(True)` logits are of the dtype of products


def logits_dtype() -> str | None:
    """Return the dtype of products that are logits; None = that of hidden states."""
    return None if rounded_logits.value else "float32"


class Dense(nn.Module):
    """x · kernel + bias, with kernel float32 [d f]; `split` tells how the devices of a mesh share it."""

    features: int
    kernel_init: Init
    use_bias: bool = True
    bias_init: Init = nn.initializers.zeros_init()
    split: str | None = None
    dtype: str | None = None  # of the result; None = x's

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"], product: Float[Array, "*b f"] | None = None) -> Float[Array, "*b f"]:
        """Project the last axis; products are of x's dtype. `product` is that of x, where it is known."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        y = matmul(x, kernel, self.split, self.dtype) if product is None else product
        if self.use_bias:
            y = add_bias(y, self.param("bias", self.bias_init, (self.features,)))
        return y


class Embedding(nn.Module):
    """A table float32 [v d]; that of a vocabulary may be split over the devices of a mesh."""

    num_rows: int
    d_model: int
    init_table: Init
    split: bool = False

    def setup(self) -> None:
        """Make the table."""
        self.embedding = self.param("embedding", self.init_table, (self.num_rows, self.d_model))

    def __call__(self, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Look rows up."""
        return look_up(self.embedding, ids) if self.split else constrain_rows(self.embedding[ids])

    def attend(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Return the products with every row: the tied projection to logits (Press and Wolf 2017)."""
        return matmul(hidden, self.embedding.T, COLUMN, logits_dtype())
