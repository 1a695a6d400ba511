"""Products whose gradients are written by hand, for the speed of CPUs. Arrays in, arrays out: no parameters here."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _multiply(x: Array, w: Array) -> Array:
    return x @ w.astype(x.dtype)


@jax.custom_vjp
def matmul(x: Float[Array, "... d"], w: Float[Array, "d f"]) -> Float[Array, "... f"]:
    """Multiply in x's dtype by a float32 matrix.

    The gradients are spelled out because autodiff's form of the weight gradient, a transposed product, falls off
    XLA:CPU's fast path (25 times slower in bfloat16).
    """
    return _multiply(x, w)


def _matmul_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    x = _settled(x)
    return _multiply(x, w), (x, w)  # not `matmul`, which a policy of rematerialisation could not look into


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


@jax.custom_vjp
def add_bias(y: Float[Array, "... f"], bias: Float[Array, " f"]) -> Float[Array, "... f"]:
    """Add a float32 bias in y's dtype; its gradient is summed in float32, exactly and, on CPUs, much faster."""
    return y + bias.astype(y.dtype)


add_bias.defvjp(
    lambda y, bias: (y + bias.astype(y.dtype), None),
    lambda _, g: (g, g.astype(jnp.float32).sum(tuple(range(g.ndim - 1)))),
)
