"""Parameters that multiply: the projection used by every layer, and the embedding table."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jformer.models.initializers import Init


@jax.custom_vjp
def matmul(x: Float[Array, "... d"], w: Float[Array, "d f"]) -> Float[Array, "... f"]:
    """Multiply in x's dtype by a float32 matrix.

    The gradients are spelled out because autodiff's form of the weight gradient, a transposed product, falls off
    XLA:CPU's fast path (25 times slower in bfloat16).
    """
    return x @ w.astype(x.dtype)


def _matmul_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    x = _settled(x)
    return matmul(x, w), (x, w)


def _matmul_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    g = _settled(g)
    rows = tuple(range(x.ndim - 1))
    dx = jnp.einsum("...f,df->...d", g, w.astype(g.dtype))
    # Not with preferred_element_type=float32: XLA:CPU runs no product of two bfloat16 arrays into float32.
    dw = jnp.tensordot(x, g, axes=(rows, rows))
    return dx, dw.astype(w.dtype)


def _settled(x: Array) -> Array:
    """Have x made before it is multiplied.

    XLA:CPU would fuse what makes it into the transposing copy that the weight gradient takes, which then reads and
    writes a few bytes at a time. Elsewhere products read either order, and there is nothing to mend.
    """
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


matmul.defvjp(_matmul_forward, _matmul_backward)


class Dense(nn.Module):
    """x · kernel + bias, with kernel float32 [d f]."""

    features: int
    kernel_init: Init
    use_bias: bool = True
    bias_init: Init = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
        """Project the last axis, in x's dtype."""
        y = matmul(x, self.param("kernel", self.kernel_init, (x.shape[-1], self.features)))
        if self.use_bias:
            y = y + self.param("bias", self.bias_init, (self.features,)).astype(y.dtype)
        return y


class Embedding(nn.Module):
    """A table float32 [v d]."""

    num_rows: int
    d_model: int
    init_table: Init

    def setup(self) -> None:
        """Make the table."""
        self.embedding = self.param("embedding", self.init_table, (self.num_rows, self.d_model))

    def __call__(self, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Look rows up."""
        return self.embedding[ids]

    def attend(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Return the products with every row: the tied projection to logits (Press and Wolf 2017)."""
        return matmul(hidden, self.embedding.T)
