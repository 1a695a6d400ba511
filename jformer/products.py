"""Products whose gradients are written by hand: for the speed of CPUs, and for kernels that many devices share.

Arrays in, arrays out: no parameters here.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jformer.placement import NARROW, TENSOR, WIDE, kernel_axes, place, place_rows
from jformer.platform import target


def _gathered(w: Array, split: str | None) -> Array:
    """Return a kernel that every device holds whole, but for its part of `tensor`."""
    return place(w, *(axis if axis == TENSOR else None for axis in kernel_axes(split)))


def _input(x: Array, split: str | None) -> Array:
    return place_rows(x, TENSOR if split == NARROW else None)


def _output(y: Array, split: str | None) -> Array:
    return place_rows(y, TENSOR if split == WIDE else None)


def _multiply(x: Array, w: Array, split: str | None) -> Array:
    return _output(_input(x, split) @ _gathered(w.astype(x.dtype), split), split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "... d"], w: Float[Array, "d f"], split: str | None = None) -> Float[Array, "... f"]:
    """Multiply in x's dtype by a float32 matrix.

    The gradients are spelled out because autodiff's form of the weight gradient, a transposed product, falls off
    XLA:CPU's fast path (25 times slower in bfloat16). On a mesh, `split` says how devices share the matrix: WIDE or
    NARROW over `tensor` (Shoeybi et al. 2019), and over `fsdp` stored in parts that are gathered for each product,
    forward and backward, so that no device keeps what it does not own (Rajbhandari et al. 2020).
    """
    return _multiply(x, w, split)


def _matmul_forward(x: Array, w: Array, split: str | None) -> tuple[Array, tuple[Array, Array]]:
    x = _settled(x)
    return _multiply(x, w, split), (x, w)  # not `matmul`, which a policy of rematerialisation could not look into


def _matmul_backward(split: str | None, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    g = _settled(_output(g, split))
    rows = tuple(range(x.ndim - 1))
    dx = jnp.einsum("...f,df->...d", g, _gathered(w.astype(g.dtype), split))
    # Not with preferred_element_type=float32: XLA:CPU runs no product of two bfloat16 arrays into float32.
    dw = jnp.tensordot(_input(x, split), g, axes=(rows, rows))
    return _input(dx, split), place(dw.astype(w.dtype), *kernel_axes(split))


def _settled(x: Array) -> Array:
    """Have x made before it is multiplied.

    XLA:CPU would fuse what makes it into the transposing copy that the weight gradient takes, which then reads and
    writes a few bytes at a time. Elsewhere products read either order, and there is nothing to mend.
    """
    return jax.lax.optimization_barrier(x) if target() == "cpu" else x


matmul.defvjp(_matmul_forward, _matmul_backward)


@jax.custom_vjp
def add_bias(y: Float[Array, "... f"], bias: Float[Array, " f"]) -> Float[Array, "... f"]:
    """Add a float32 bias in y's dtype; its gradient is summed in float32, exactly and, on CPUs, much faster."""
    return y + bias.astype(y.dtype)


add_bias.defvjp(
    lambda y, bias: (y + bias.astype(y.dtype), None),
    lambda _, g: (g, g.astype(jnp.float32).sum(tuple(range(g.ndim - 1)))),
)
