"""Products with hand-written gradients: for speed on CPUs, and for kernels that many devices share.

Arrays in, arrays out: no parameters here. Axes: d inputs, f outputs; in attention
b rows, t query positions, s key positions, g heads of keys, r query heads of each, k size of a query and key, u of
a value.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jformer.models.layers.precision import keeping
from jformer.parallel.activations import COLUMN, ROW, constrain_rows, constrain_sharding, kernel_axes
from jformer.parallel.backend import target
from jformer.parallel.mesh import TENSOR

F = TypeVar("F", bound=Callable[..., Any])
jax_gradients = jax.make_user_context(False)  # under `with jax_gradients(True)` JAX derives every gradient


def gradient_by_hand(
    forward: Callable[..., PyTree], backward: Callable[..., PyTree], static: tuple[int, ...] = (), zeros: bool = False
) -> Callable[[F], F]:
    """Decorate a function with a hand-written gradient; under `jax_gradients(True)` JAX derives it instead.

    JAX differentiates a function with a hand-written gradient only once, in reverse mode; others, in every mode and
    order.

    Args:
        forward, backward: those of `jax.custom_vjp`.
        static: the arguments that are hashable and not differentiated, its `nondiff_argnums`.
        zeros: its `symbolic_zeros`.
    """

    def decorate(function: F) -> F:
        @functools.cache
        def by_hand(precision: str | None) -> Callable[..., Any]:
            rule = jax.custom_vjp(keeping(precision, function), nondiff_argnums=static)
            rule.defvjp(keeping(precision, forward), keeping(precision, backward), symbolic_zeros=zeros)
            return rule

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return (function if jax_gradients.value else by_hand(jax.config.jax_default_matmul_precision))(*args)

        return call  # type: ignore[return-value]

    return decorate


def _gathered(w: Array, split: str | None) -> Array:
    """Return a kernel gathered whole on every device, except along `tensor`."""
    return constrain_sharding(w, *(axis if axis == TENSOR else None for axis in kernel_axes(split)))


def _input(x: Array, split: str | None) -> Array:
    return constrain_rows(x, TENSOR if split == ROW else None)


def _output(y: Array, split: str | None) -> Array:
    return constrain_rows(y, TENSOR if split == COLUMN else None)


def materialized(x: Array) -> Array:
    """Have x, transposed or not, computed before it is multiplied.

    XLA:CPU would fuse its computation into the transposing copy that the weight gradient needs, which then reads and
    writes a few bytes at a time. On other platforms, products read either layout.
    """
    return jax.lax.optimization_barrier(x) if target().platform == "cpu" else x


def apart(tree: PyTree) -> PyTree:
    """Keep XLA:GPU from recomputing arrays in every kernel that reads them."""
    return jax.lax.optimization_barrier(tree) if target().platform == "gpu" else tree


def _multiply(x: Array, w: Array, split: str | None, dtype: str | None) -> Array:
    kernel = _gathered(w.astype(x.dtype), split)
    return _output(jnp.matmul(_input(x, split), kernel, preferred_element_type=dtype), split)


def _multiply_forward(x: Array, w: Array, split: str | None, dtype: str | None) -> tuple[Array, tuple[Array, Array]]:
    x = materialized(x)
    # Not `matmul`: a rematerialisation policy does not see the product inside it.
    return _multiply(x, w, split, dtype), (x, w)


def _multiply_backward(
    split: str | None, dtype: str | None, saved: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, w = saved
    g = materialized(_output(g.astype(x.dtype), split))
    rows = tuple(range(x.ndim - 1))
    dx = jnp.einsum("...f,df->...d", g, _gathered(w.astype(g.dtype), split))
    # XLA:CPU has no product of two bfloat16 arrays into float32.
    product = None if target().platform == "cpu" else w.dtype
    dw = jnp.tensordot(_input(x, split), g, axes=(rows, rows), preferred_element_type=product)
    return _input(dx, split), constrain_sharding(dw.astype(w.dtype), *kernel_axes(split))


@gradient_by_hand(_multiply_forward, _multiply_backward, static=(2, 3))
def matmul(
    x: Float[Array, "... d"], w: Float[Array, "d f"], split: str | None = None, dtype: str | None = None
) -> Float[Array, "... f"]:
    """Multiply in x's dtype by a float32 matrix, into x's dtype or the given one.

    The gradients are spelled out because autodiff's form of the weight gradient, a transposed product, falls off
    XLA:CPU's fast path (25 times slower in bfloat16). On a mesh, `split` says how devices share the matrix: COLUMN or
    ROW over `tensor` (Shoeybi et al. 2019), and over `fsdp` stored in parts that are gathered for each product,
    forward and backward, so that no device keeps what it does not own (Rajbhandari et al. 2020).
    """
    return _multiply(x, w, split, dtype)


@gradient_by_hand(
    lambda y, bias: (y + bias.astype(y.dtype), None),
    lambda _, g: (g, g.astype(jnp.float32).sum(tuple(range(g.ndim - 1)))),
)
def add_bias(y: Float[Array, "... f"], bias: Float[Array, " f"]) -> Float[Array, "... f"]:
    """Add a float32 bias in y's dtype; its gradient is summed in float32, exactly and, on CPUs, much faster."""
    return y + bias.astype(y.dtype)


def _scores_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    q, k = saved
    g = g.astype(q.dtype)
    if target().platform == "gpu":
        rows, t = _merged(g), q.shape[1]
        dq = _multiply_heads(rows, k.swapaxes(1, 2), (3, 2))
        return _positions_first(dq, t), _multiply_heads(rows, _heads_first(q), (2, 2)).swapaxes(1, 2)
    return jax.vjp(lambda q, k: jnp.einsum("btgrk,bsgk->bgrts", q, k), q, k)[1](g)


@gradient_by_hand(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)
def query_key_scores(q: Float[Array, "b t g r k"], k: Float[Array, "b s g k"]) -> Float[Array, "b g r t s"]:
    """Multiply queries by keys, in their dtype, into float32; on accelerators rounded to their dtype, half the bytes.

    The gradient is rounded to their dtype before it is multiplied, as those of projections are: autodiff would multiply
    it in float32, which most accelerators do many times slower.
    """
    return _scores(q, k)


def _scores(q: Array, k: Array) -> Array:
    if target().platform == "gpu":
        scores = _multiply_heads(_heads_first(q), k.swapaxes(1, 2), (3, 3))  # [b g r·t s]
        return scores.reshape(*scores.shape[:2], -1, q.shape[1], k.shape[1]).astype(jnp.float32)
    stored = jnp.float32 if target().platform == "cpu" else q.dtype
    return jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=stored).astype(jnp.float32)


def _values_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    weights, v = saved
    if target().platform == "gpu":
        g = _heads_first(g)
        d_weights = _multiply_heads(g, v.swapaxes(1, 2), (3, 3)).reshape(weights.shape)
        return d_weights, _multiply_heads(_merged(weights), g, (2, 2)).swapaxes(1, 2)
    return jax.vjp(_values, weights, v)[1](g)


@gradient_by_hand(lambda weights, v: (_values(weights, v), (weights, v)), _values_backward)
def weighted_values(weights: Float[Array, "b g r t s"], v: Float[Array, "b s g u"]) -> Float[Array, "b t g r u"]:
    """Sum values by their weights, in their dtype."""
    return _values(weights, v)


def _values(weights: Array, v: Array) -> Array:
    if target().platform == "gpu":
        return _positions_first(_multiply_heads(_merged(weights), v.swapaxes(1, 2), (3, 2)), weights.shape[3])
    return jnp.einsum("bgrts,bsgu->btgru", weights, v)


def _multiply_heads(x: Array, y: Array, sums: tuple[int, int]) -> Array:
    """Multiply matrices of each row and group, x by y [b g · ·] in this order, summing over an axis of each.

    `jnp.einsum` may swap them, sum over other axes, or permute the larger array. XLA:GPU then emits scores as [.. s t],
    sums them along the slow axis, and transposes weights, gradients and heads with slow kernels
    (experiments/speed/programs.md). Here only queries, keys and values are transposed, and their last axis stays last.
    """
    return jax.lax.dot_general(x, y, (((sums[0],), (sums[1],)), ((0, 1), (0, 1))))


def _heads_first(x: Float[Array, "b t g r k"]) -> Float[Array, "b g _ k"]:
    """Put all positions of a head side by side, and the r heads of a group: [b g r·t k]."""
    return _merged(x.transpose(0, 2, 3, 1, 4))


def _positions_first(x: Float[Array, "b g _ k"], t: int) -> Float[Array, "b t g r k"]:
    """Undo `_heads_first` for heads of t positions."""
    return x.reshape(*x.shape[:2], -1, t, x.shape[3]).transpose(0, 3, 1, 2, 4)


def _merged(x: Float[Array, "b g r t s"]) -> Float[Array, "b g _ s"]:
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])
