"""Attention as functions of queries, keys and values: all queries at once, in chunks, and with a cache.

Axes: b rows, t query positions, s key positions, h query heads, g heads of keys and values, r = h / g query heads of a
group, k size of a query and key, u size of a value. In a cache: m sentences, e entries, q queries that attend to the
keys of one sentence and group.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer.models.cache import KeyValue
from jformer.models.layers.matmul import add_shared_bias, apart, gradient_by_hand, query_key_scores, weighted_values
from jformer.models.layers.visibility import Visibility
from jformer.parallel.backend import target
from jformer.parallel.chunks import map_chunks

# Up to this many queries, sums of products are 2 to 4 times as fast on CPU as a matrix product: docs/decisions/0018.
MAX_QUERIES_FOR_SUMS = 16

DropWeights = Callable[[Array, int | Int[Array, ""]], Array]
"""(weights [b h t s], the index of their first query) → weights after dropout; a pytree of its arrays."""
KEEP_ALL = Partial(lambda weights, first: weights)


def attend(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    mask: Bool[Array, " b #1 #t s"] | None,
    bias: Float[Array, "#b h t s"] | None = None,
    scale: float = 1.0,
    drop_weights: DropWeights = KEEP_ALL,
    first: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "b t h u"], Float[Array, "b h t s"]]:
    """Attention: softmax(scale · q·k + bias)·v, and its weights before dropout (Vaswani et al. 2017, equation 1).

    Each of the g heads of keys and values serves r neighbouring heads of queries (Ainslie et al. 2023). Softmax is
    float32, and on CPUs the scores. A query that sees no key gets finite, undefined weights.

    Args:
        q: of h heads.
        kv: of g heads, a divisor of h.
        mask: True where a query may attend to a key; None: everywhere.
        bias: added to the scaled scores.
        scale: multiplies the queries, usually 1 / √k.
        drop_weights: dropout of the weights, given the index of their first query.
        first: that index, if q is a chunk of all queries.
    """
    b, t, h, _ = q.shape
    s, g = kv["k"].shape[1:3]
    # Scale the queries rather than the scores, of which there are more.
    q = (q * scale).reshape(b, t, g, h // g, -1)  # [b t h k] → [b t g r k]
    scores = query_key_scores(q, kv["k"])  # [b g r t s], float32
    scores = scores.reshape(b, h, t, s)
    if bias is not None:
        scores = add_shared_bias(scores, bias, q.dtype.name) if bias.shape[0] == 1 else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return softmax_values(scores, kv["v"], drop_weights, first), _weights(scores, q.dtype)


def _weights(scores: Array, dtype: jax.typing.DTypeLike) -> Array:
    return jax.nn.softmax(scores).astype(dtype)


def _kept(weights: Array, drop_weights: DropWeights, first: int | Int[Array, ""]) -> Array:
    return drop_weights(weights.astype(jnp.float32), first).astype(weights.dtype)


def _values(kept: Array, v: Array) -> Array:
    b, h, t, s = kept.shape
    return weighted_values(kept.reshape(b, v.shape[2], -1, t, s), v).reshape(b, t, h, -1)  # [b h t s] → [b g r t s]


def _softmax_values_forward(
    scores: Array, v: Array, drop_weights: DropWeights, first: int | Int[Array, ""]
) -> tuple[Array, tuple[PyTree, ...]]:
    weights, drop_weights = apart((_weights(scores, v.dtype), drop_weights))
    dropped = jax.vjp(lambda weights: _kept(weights, drop_weights, first), weights)
    values = _values(dropped[0], v)
    cpu, gpu = target().platform == "cpu", target().platform == "gpu"
    return values, (weights, v, drop_weights, first, dropped if cpu else None, values if gpu else None)


def _softmax_values_backward(saved: tuple[Any, ...], g: Array) -> tuple[Array, Array, None, None]:
    weights, v, drop_weights, first, dropped, values = saved
    if dropped is None:
        again, drop_weights = apart((weights, drop_weights))
        dropped = jax.vjp(lambda weights: _kept(weights, drop_weights, first), again)
    kept, pull_back = dropped
    d_kept, dv = jax.vjp(_values, kept, v)[1](g)
    (dw,) = pull_back(d_kept)
    w, dw = weights.astype(jnp.float32), dw.astype(jnp.float32)
    if values is None:
        mean = (w * dw).sum(-1, keepdims=True)
    else:  # the same: Dao et al. 2022, appendix B.2
        mean = jnp.einsum("bthu,bthu->bht", g, values, preferred_element_type=jnp.float32)[..., None]
    return w * (dw - mean), dv, None, None


@gradient_by_hand(_softmax_values_forward, _softmax_values_backward)
def softmax_values(
    scores: Float[Array, "b h t s"], v: Float[Array, "b s g u"], drop_weights: DropWeights, first: int | Int[Array, ""]
) -> Float[Array, "b t h u"]:
    """Sum values by the softmax of float32 scores, rounded to the dtype of values, after dropout.

    For the gradient, only weights before dropout are kept, except on CPUs, where drawing masks again is slow. On GPUs
    softmax, dropout, and the gradients of both become one kernel each: left to itself, XLA computes softmax twice,
    writes the masks of all layers at the start, and takes the sums of gradients in a kernel of their own.
    """
    return _values(_kept(_weights(scores, v.dtype), drop_weights, first), v)


def attend_in_chunks(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    visible: Visibility,
    bias: Float[Array, "#b h t s"] | None,
    scale: float,
    drop_weights: DropWeights,
    chunk: int,
) -> Float[Array, "b t h u"]:
    """Attend from a chunk of queries at a time, and recompute their weights in the backward pass.

    Memory is linear in t, for a third more computation (Rabe and Staats 2021, without their chunks of keys).

    Args:
        q, kv, bias, scale, drop_weights: those of `attend`.
        visible: which keys each query may attend to; a mask is made for one chunk at a time.
        chunk: queries of a chunk; need not divide t.
    """
    tokens, structure = jax.tree.flatten(visible.query)

    def values(part: dict[str, Array], first: Int[Array, ""]) -> Array:
        query = jax.tree.unflatten(structure, [part[f"tokens {i}"] for i in range(len(tokens))])
        mask = dataclasses.replace(visible, query=query).mask()
        return attend(part["q"], kv, mask, part.get("bias"), scale, drop_weights, first)[0]

    arrays = {"q": (q, 1)} | {f"tokens {i}": (x, 1) for i, x in enumerate(tokens)}
    arrays |= {} if bias is None else {"bias": (bias, 2)}
    return map_chunks(values, arrays, chunk)


def attend_few_queries(
    q: Float[Array, "m g q k"],
    cached_kv: KeyValue,
    mask: Bool[Array, " m #g #q e"] | None,
    bias: Float[Array, "m g q e"] | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, "m g q u"], Float[Array, "m g q e"]]:
    """Attend from a few queries to the entries of a cache; also return the weights.

    On CPU, few rows are slow as a matrix product and fast as sums of products, which XLA fuses.

    Args:
        q: the queries of a sentence and group: of its beams, their new tokens, and the heads that share its keys.
        cached_kv: keys [m g k e] and values [m g e u].
        mask, bias, scale: those of `attend`.
    """
    k, v = cached_kv["k"], cached_kv["v"]
    as_sums = q.shape[2] <= MAX_QUERIES_FOR_SUMS and target().platform == "cpu"
    if as_sums:
        products = q[..., None].astype(jnp.float32) * k[:, :, None].astype(jnp.float32)  # [m g q k e]
        scores = products.sum(3)
    else:
        scores = jnp.einsum("mgqk,mgke->mgqe", q, k, preferred_element_type=jnp.float32)
    scores = scores * scale + (0.0 if bias is None else bias)  # float32, as here queries may be bfloat16
    scores = scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores)
    kept = weights.astype(q.dtype)
    values = (kept[..., None] * v[:, :, None]).sum(3) if as_sums else jnp.einsum("mgqe,mgeu->mgqu", kept, v)
    return values, weights
