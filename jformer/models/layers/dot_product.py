"""Attention as functions of queries, keys and values: all queries at once, in chunks, in slices, and with a cache.

Axes: b rows, t query positions, s key positions, h query heads, g heads of keys and values, r = h / g query heads of a
group, k size of a query and key, u size of a value. In a cache: m sentences, e entries, q queries that attend to the
keys of one sentence and group.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer.models.cache import KeyValue
from jformer.models.layers.matmul import apart, gradient_by_hand, query_key_scores, weighted_values
from jformer.models.layers.visibility import TokenPlaces, Visibility
from jformer.parallel.backend import target
from jformer.parallel.chunks import cut, join

# Up to this many queries, sums of products are 2 to 4 times as fast on CPU as a matrix product: docs/decisions/0018.
MAX_QUERIES_FOR_SUMS = 16

DropWeights = Callable[..., Array]
"""(weights [b h t s], the index of their first query, optionally that of their first key) → weights after dropout.

A pytree of its arrays."""
KEEP_ALL = Partial(lambda weights, first, first_key=0: weights)


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
    float32; on CPUs, so are the scores. A query that sees no key gets finite, undefined weights.

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
    # Scale the queries, not the scores, of which there are more.
    q = (q * scale).reshape(b, t, g, h // g, -1)  # [b t h k] → [b t g r k]
    scores = query_key_scores(q, kv["k"])  # [b g r t s], float32
    scores = scores.reshape(b, h, t, s)
    allowed = _allowed(scores, bias, mask)
    if target().platform == "gpu":
        values = softmax_values_gpu(scores, bias, mask, kv["v"], drop_weights, first)
    else:
        values = softmax_values(allowed, kv["v"], drop_weights, first)
    return values, _weights(allowed, q.dtype)


def _allowed(scores: Array, bias: Array | None, mask: Array | None) -> Array:
    scores = scores if bias is None else scores + bias
    return scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def _weights(scores: Array, dtype: jax.typing.DTypeLike) -> Array:
    return jax.nn.softmax(scores).astype(dtype)


def _kept(weights: Array, dtype: jax.typing.DTypeLike, drop_weights: DropWeights, first: int | Int[Array, ""]) -> Array:
    return drop_weights(weights.astype(jnp.float32), first).astype(dtype)


def _values(kept: Array, v: Array) -> Array:
    b, h, t, s = kept.shape
    return weighted_values(kept.reshape(b, v.shape[2], -1, t, s), v).reshape(b, t, h, -1)  # [b h t s] → [b g r t s]


def _softmax_values_forward(
    scores: Array, v: Array, drop_weights: DropWeights, first: int | Int[Array, ""]
) -> tuple[Array, tuple[PyTree, ...]]:
    weights = _weights(scores, v.dtype)
    dropped = jax.vjp(lambda weights: _kept(weights, v.dtype, drop_weights, first), weights)
    cpu = target().platform == "cpu"
    return _values(dropped[0], v), (weights, v, drop_weights, first, dropped if cpu else None)


def _softmax_values_backward(saved: tuple[Any, ...], g: Array) -> tuple[Array, Array, None, None]:
    weights, v, drop_weights, first, dropped = saved
    if dropped is None:
        dropped = jax.vjp(lambda weights: _kept(weights, v.dtype, drop_weights, first), weights)
    kept, pull_back = dropped
    d_kept, dv = jax.vjp(_values, kept, v)[1](g)
    (dw,) = pull_back(d_kept)
    w, dw = weights.astype(jnp.float32), dw.astype(jnp.float32)
    return w * (dw - (w * dw).sum(-1, keepdims=True)), dv, None, None


@gradient_by_hand(_softmax_values_forward, _softmax_values_backward)
def softmax_values(
    scores: Float[Array, "b h t s"], v: Float[Array, "b s g u"], drop_weights: DropWeights, first: int | Int[Array, ""]
) -> Float[Array, "b t h u"]:
    """Sum values by the softmax of float32 scores, rounded to the dtype of values, after dropout.

    For the gradient, only the weights before dropout are kept, except on CPUs, where redrawing masks is slow.
    """
    return _values(_kept(_weights(scores, v.dtype), v.dtype, drop_weights, first), v)


def _gpu_forward(
    scores: Array,
    bias: Array | None,
    mask: Array | None,
    v: Array,
    drop_weights: DropWeights,
    first: int | Int[Array, ""],
) -> tuple[Array, tuple[PyTree, ...]]:
    scores, bias, drop_weights = apart((scores.astype(v.dtype), bias, drop_weights))
    sums = apart(_highest_and_sum(_allowed(scores.astype(jnp.float32), bias, mask)))
    values = _values(_kept(_weights_again(scores, bias, mask, sums), v.dtype, drop_weights, first), v)
    return values, (scores, bias, mask, v, drop_weights, first, sums, values)


def _gpu_backward(saved: tuple[Any, ...], g: Array) -> tuple[Array, Array | None, None, Array, None, None]:
    scores, bias, mask, v, drop_weights, first, sums, values = saved
    scores, drop_weights = apart((scores, drop_weights))
    weights = _weights_again(scores, bias, mask, sums)
    kept, pull_back = jax.vjp(lambda weights: _kept(weights, v.dtype, drop_weights, first), weights)
    d_kept, dv = jax.vjp(_values, kept, v)[1](g)
    (d_weights,) = pull_back(d_kept)
    # The sum over keys of weights and their gradients: Dao et al. 2022, appendix B.2.
    mean = jnp.einsum("bthu,bthu->bht", g, values, preferred_element_type=jnp.float32)[..., None]
    d_scores = weights * (d_weights - mean)
    d_scores = d_scores if mask is None else jnp.where(mask, d_scores, 0.0)
    d_scores = apart(d_scores.astype(v.dtype))
    d_bias = None
    if bias is not None:
        d_bias = d_scores.astype(bias.dtype)
        if bias.shape[0] == 1:  # summed now: else XLA keeps the gradients of all layers and sums them at the end
            d_scores, d_bias = apart((d_scores, d_bias.sum(0, keepdims=True)))
    return d_scores.astype(jnp.float32), d_bias, None, dv, None, None


@gradient_by_hand(_gpu_forward, _gpu_backward)
def softmax_values_gpu(
    scores: Float[Array, "b h t s"],
    bias: Float[Array, "#b h t s"] | None,
    mask: Bool[Array, " b #1 #t s"] | None,
    v: Float[Array, "b s g u"],
    drop_weights: DropWeights,
    first: int | Int[Array, ""],
) -> Float[Array, "b t h u"]:
    """Sum values by the softmax of scores + bias where the mask allows it, after dropout, for GPUs.

    For the gradient, the products q·k are kept in the dtype of values, with the highest score and the sum for each
    query. One kernel finds these two, one makes weights and drops some, and one repeats that together with the
    gradient. Left to itself, XLA computes softmax twice, writes the dropout of all layers at the start, and sums
    gradients in a separate kernel.

    Args:
        scores: float32, products of the dtype of v.
        bias, mask, drop_weights, first: those of `attend`.
        v: the values, of g heads.
    """
    return _values(_kept(jax.nn.softmax(_allowed(scores, bias, mask)), v.dtype, drop_weights, first), v)


def _weights_again(scores: Array, bias: Array | None, mask: Array | None, sums: tuple[Array, Array]) -> Array:
    highest, total = sums
    return jnp.exp(_allowed(scores.astype(jnp.float32), bias, mask) - highest) / total


def _highest_and_sum(scores: Float[Array, "b h t s"]) -> tuple[Float[Array, "b h t 1"], Float[Array, "b h t 1"]]:
    """Return the highest score of each query, and the sum of exp(score - highest), in one pass.

    Joining two parts takes many more instructions than a sum, so eight distant keys are joined at once.
    """
    count = next(count for count in (8, 4, 2, 1) if scores.shape[-1] % count == 0)
    parts = jnp.split(scores, count, axis=-1)
    highest = functools.reduce(jnp.maximum, parts)
    total = sum(jnp.exp(part - highest) for part in parts)
    start = jnp.finfo(scores.dtype).min, jnp.zeros((), scores.dtype)
    highest, total = lax.reduce((highest, total), start, lambda a, b: join_exponentials(*a, *b), (3,))
    return highest[..., None], total[..., None]


def join_exponentials(highest: Array, total: Array, other_highest: Array, other_total: Array) -> tuple[Array, Array]:
    """Return the highest value of two parts, and their joint sum of exp(x - highest).

    The sum of the part with the lower maximum is scaled down (Milakov and Gimelshein 2018, section 3).
    """
    scale = jnp.exp(-jnp.abs(highest - other_highest))
    joint = jnp.where(highest < other_highest, total * scale + other_total, total + other_total * scale)
    return jnp.maximum(highest, other_highest), joint


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

    def values(part: tuple[Array, TokenPlaces, Array | None, Int[Array, ""]]) -> Array:
        q, query, bias, first = part
        mask = dataclasses.replace(visible, query=query).mask()
        return attend(q, kv, mask, bias, scale, drop_weights, first)[0]

    t = q.shape[1]
    query = jax.tree.map(lambda x: cut(x, 1, chunk), visible.query)
    bias = None if bias is None else cut(bias, 2, chunk)
    chunks = cut(q, 1, chunk), query, bias, jnp.arange(0, t, chunk)
    return join(lax.map(jax.checkpoint(values), chunks), t)


def attend_in_slices(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    visible: Visibility,
    bias: Float[Array, "#b h t t"] | None,
    scale: float,
    drop_weights: DropWeights,
    size: int,
) -> Float[Array, "b t h u"]:
    """Attend from a slice of queries at a time to the keys that causality, or a window, lets any of them see.

    Of t² scores, causality leaves (t + size) / 2t; a window about size + window of each query. Nothing is recomputed.

    Args:
        q, kv, bias, scale, drop_weights: those of `attend`, in self-attention.
        visible: which keys each query may attend to, by a causal rule without a prefix. A text's tokens are in order.
        size: queries of a slice; need not divide t.
    """
    values = []
    for first in range(0, q.shape[1], size):
        start = max(0, (first - visible.rule.window + 1) // size * size) if visible.rule.window else 0
        queries, keys = slice(first, first + size), slice(start, first + size)
        mask = dataclasses.replace(visible, query=_at(queries, visible.query), key=_at(keys, visible.key)).mask()
        part_bias = None if bias is None else bias[:, :, queries, keys]
        drop = Partial(functools.partial(_drop_from, start), drop_weights)
        values.append(attend(q[:, queries], _at(keys, kv), mask, part_bias, scale, drop, first)[0])
    return jnp.concatenate(values, axis=1)


def _at(positions: slice, tree: PyTree) -> PyTree:
    """Return some positions of arrays [b t ...]."""
    return jax.tree.map(lambda x: x[:, positions], tree)


def _drop_from(first_key: int, drop_weights: DropWeights, weights: Array, first: int | Int[Array, ""]) -> Array:
    return drop_weights(weights, first, first_key)


def attend_few_queries(
    q: Float[Array, "m g q k"],
    cached_kv: KeyValue,
    mask: Bool[Array, " m #g #q e"] | None,
    bias: Float[Array, "m g q e"] | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, "m g q u"], Float[Array, "m g q e"]]:
    """Attend from a few queries to the entries of a cache; also return the weights.

    On CPU, a matrix product of few rows is slow; sums of products, which XLA fuses, are fast.

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
    scores = scores * scale + (0.0 if bias is None else bias)  # float32, because queries may be bfloat16 here
    scores = scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores)
    kept = weights.astype(q.dtype)
    values = (kept[..., None] * v[:, :, None]).sum(3) if as_sums else jnp.einsum("mgqe,mgeu->mgqu", kept, v)
    return values, weights
