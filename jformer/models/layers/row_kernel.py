"""An attention kernel for TPUs, with a bias and dropout of weights: the scores of a row stay in on-chip memory.

JAX's splash attention has neither. It visits keys block by block, and so must save the sums of softmax. Here a step of
the kernel has all keys of a row. Nothing is saved for the backward pass, which recomputes weights from queries and
keys, and dropout masks from hashes.

A step holds scores as [s t]: values of a query are a row of registers, and positions are the last axis of every array
in memory, since TPUs would pad the size of a head to 128.

Axes: b rows, t query positions, s key positions, h heads, k size of a head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from jformer.models.cache import KeyValue
from jformer.models.layers.dropout import HALF, dropped, hash_places, kept
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility, shown_at
from jformer.parallel.activations import over_rows_and_heads

LANES = 128  # positions come in multiples of this
STEP_PAIRS = 2**18  # query-key pairs of a step, if a row has so few: a bias for them takes 1 MiB of 16
PAIRS = 2**16  # query-key pairs at once: 64 registers hold one number for each
STAGES = 4  # of a causal row: a kernel's code grows with them
SAVED = "attended"  # what kernels of TPUs save for the backward pass, in a policy of jax.checkpoint
NAMES = ("q", "k", "v", "query", "key", "bias", "words")  # of the inputs; the last two are optional


class Setting(NamedTuple):
    """What a kernel is made for, beside the shapes of its arrays."""

    rule: Rule
    rate: float  # of dropout
    shared: bool  # one bias serves all rows, whose steps are consecutive
    interpret: bool


def attend_rows(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    visible: Visibility,
    bias: Float[Array, "#b h t s"] | None,
    words: UInt32[Array, "b h t"] | None,
    scale: float,
    rate: float,
    interpret: bool = False,
) -> Float[Array, "b t h k"]:
    """Attend with the kernel of this module.

    Args:
        q, kv, bias, scale: those of `dot_product.attend`, within the limits of `choose_kernel`.
        visible: which keys each query may attend to, without a prefix.
        words: what the dropout of weights hashes for each query, from `place_words`; None = nothing is dropped.
        rate: of that dropout.
        interpret: run the kernel step by step on any platform, for tests.
    """
    shared = bias is not None and len(bias) < len(q)
    setting = Setting(visible.rule, rate, shared, interpret)
    arrays: dict[str, tuple[str, Array]] = {
        "q": ("b t h k", q * scale),
        "k": ("b s h k", kv["k"]),
        "v": ("b s h k", kv["v"]),
        "query": ("b 2 t", _places(visible.query)),
        "key": ("b 2 s", _places(visible.key)),
    }
    if bias is not None:
        arrays["bias"] = "1 h t s" if shared else "b h t s", bias.astype(jnp.float32)
    if words is not None:
        arrays["words"] = "b h t", words
    axes = {"q": (0, 2, 3, 1), "k": (0, 2, 3, 1), "v": (0, 2, 3, 1), "bias": (0, 1, 3, 2)}  # positions, queries last

    def attend(*own: Array) -> Array:
        named = {name: x.transpose(axes.get(name)) if name in axes else x for name, x in zip(arrays, own, strict=True)}
        named |= {"words": named["words"][:, :, None]} if "words" in named else {}  # [b h t] → [b h 1 t]
        values = checkpoint_name(_attend(setting, *(named.get(name) for name in NAMES)), SAVED)
        return values.transpose(0, 3, 1, 2)  # [b h k t] → [b t h k]

    return over_rows_and_heads(attend, *arrays.values())


class Stage(NamedTuple):
    """Some queries of a row, which see only the first keys."""

    first: int
    end: int
    keys: int


def stages(queries: int, keys: int, causal: bool) -> list[Stage]:
    """Return the stages of a row: one, or up to four of causal self-attention, each with more keys."""
    if not causal or queries != keys:
        return [Stage(0, queries, keys)]
    size = -(-queries // (STAGES * LANES)) * LANES
    ends = [min(first + size, queries) for first in range(0, queries, size)]
    return [Stage(first, end, end) for first, end in zip([0, *ends], ends, strict=False)]


def queries_at_once(queries: int, keys: int) -> int:
    """Return how many queries of a stage are computed at once: a divisor of their number, and a multiple of 128."""
    most = max(LANES, PAIRS // keys)
    return next(size for size in range(most // LANES * LANES, 0, -LANES) if queries % size == 0)


def _places(tokens: TokenPlaces) -> Int[Array, "b 2 t"]:
    return jnp.stack([tokens.segments, jnp.broadcast_to(tokens.positions, tokens.segments.shape)], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(setting: Setting, *inputs: Array | None) -> Float[Array, "b h k t"]:
    return _run(_forward, "fwd", setting, inputs, (), ("q",))[0]


def _attend_forward(setting: Setting, *inputs: Array | None) -> tuple[Array, tuple[Array | None, ...]]:
    return _attend(setting, *inputs), inputs


def _attend_backward(setting: Setting, inputs: tuple[Array | None, ...], g: Array) -> tuple[Array | None, ...]:
    biased = inputs[NAMES.index("bias")] is not None
    outputs = ("q", "k", "v", "bias") if biased else ("q", "k", "v")
    gradients = dict(zip(outputs, _run(_backward, "bwd", setting, inputs, (g,), outputs), strict=True))
    return tuple(gradients.get(name) for name in NAMES)


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
    kernel: Callable[..., None],
    direction: str,
    setting: Setting,
    inputs: Sequence[Array | None],
    gradients: Sequence[Array],
    outputs: Sequence[str],
) -> Sequence[Array]:
    """Run a kernel. A step has some heads of a row: few if it is long, so that their blocks fit on the chip.

    Args:
        kernel, direction, setting: what to run, and its name.
        inputs: named by `NAMES`.
        gradients: of the values, for the backward pass.
        outputs: the inputs whose shapes and blocks they have.
    """
    from jax.experimental import pallas as pl  # takes a third of a second
    from jax.experimental.pallas import tpu as pltpu

    named = {name: x for name, x in zip(NAMES, inputs, strict=True) if x is not None}
    (b, h, k, t), s = named["q"].shape, named["k"].shape[3]
    heads = next(n for n in range(min(h, max(1, STEP_PAIRS // (t * s))), 0, -1) if h % n == 0)

    def block(name: str) -> Any:
        if name in ("query", "key"):
            return pl.BlockSpec((1, *named[name].shape[1:]), lambda h, b: (b, 0, 0))
        row = 0 if name == "bias" and setting.shared else 1
        return pl.BlockSpec((1, heads, *named[name].shape[2:]), lambda h, b: (b * row, h, 0, 0))

    call = pl.pallas_call(
        functools.partial(kernel, setting, tuple(named)),
        grid=(h // heads, b),
        in_specs=[block(name) for name in (*named, *["q"] * len(gradients))],
        out_specs=[block(name) for name in outputs],
        out_shape=[jax.ShapeDtypeStruct(named[name].shape, named[name].dtype) for name in outputs],
        scratch_shapes=[pltpu.VMEM((k, s), jnp.float32)] * 2 * len(gradients),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=setting.interpret,
        name=f"row_attention_{'causal_' if setting.rule.causal else ''}{direction}",  # which forecasts read
    )
    return call(*named.values(), *gradients)


def _forward(setting: Setting, names: Sequence[str], *refs: Any) -> None:
    *inputs, values = refs
    named = dict(zip(names, inputs, strict=True))
    key = named["key"][0].T

    def attend(i: Array, at: Any, keys: int) -> None:
        v = named["v"][0, i, :, :keys]
        mask = _mask(setting.rule, named["query"][0, :, at], key[:keys])
        weights, drop = _weights(setting, named, mask, i, at)
        values[0, i, :, at] = _product(v, drop(weights).astype(v.dtype), (1, 0)).astype(v.dtype)

    _for_each(values.shape[1], lambda i: _for_each_part(setting.rule, named, functools.partial(attend, i)))


def _backward(setting: Setting, names: Sequence[str], *refs: Any) -> None:
    from jax.experimental import pallas as pl

    named, (g, dq, dk, dv, *d_bias, k_sum, v_sum) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    key = named["key"][0].T
    adds = setting.shared & (pl.program_id(1) > 0)  # to the bias gradient of earlier rows

    def differentiate(i: Array, at: Any, keys: int) -> None:
        mask = _mask(setting.rule, named["query"][0, :, at], key[:keys])
        weights, drop = _weights(setting, named, mask, i, at)
        q, d_values = named["q"][0, i, :, at], g[0, i, :, at]
        k, v = named["k"][0, i, :, :keys], named["v"][0, i, :, :keys]
        v_sum[:, :keys] += _product(d_values, drop(weights).astype(v.dtype), (1, 1))
        d_weights = drop(_product(v, d_values, (0, 0)))
        d_scores = weights * (d_weights - (weights * d_weights).sum(0, keepdims=True))
        d_scores = jnp.where(mask, d_scores, 0.0)
        for total in d_bias:
            total[0, i, :keys, at] += d_scores
        d_scores = d_scores.astype(q.dtype)
        dq[0, i, :, at] = _product(k, d_scores, (1, 0)).astype(q.dtype)
        k_sum[:, :keys] += _product(q, d_scores, (1, 1))

    def head(i: Array) -> None:
        k_sum[...], v_sum[...] = jnp.zeros_like(k_sum), jnp.zeros_like(v_sum)
        for total in d_bias:
            total[0, i] = jnp.where(adds, total[0, i], 0.0)
        _for_each_part(setting.rule, named, functools.partial(differentiate, i))
        dk[0, i], dv[0, i] = k_sum[...].astype(dk.dtype), v_sum[...].astype(dv.dtype)

    _for_each(dq.shape[1], head)


def _for_each(count: int, run: Callable[[Array], None]) -> None:
    jax.lax.fori_loop(0, count, lambda i, _: run(i), None)


def _for_each_part(rule: Rule, named: dict[str, Any], run: Callable[[Any, int], None]) -> None:
    """Call a function with the slice of each part of the queries, and how many keys it may see."""
    from jax.experimental import pallas as pl

    for first, end, keys in stages(named["q"].shape[3], named["k"].shape[3], rule.causal):
        size = queries_at_once(end - first, keys)

        def part(i: Array, first: int = first, keys: int = keys, size: int = size) -> None:
            run(pl.ds(pl.multiple_of(first + i * size, LANES), size), keys)

        _for_each((end - first) // size, part)


def _mask(rule: Rule, query: Int[Array, "2 t"], key: Int[Array, "s 2"]) -> Bool[Array, "s t"]:
    visible = (query[:1] == key[:, :1]) & (key[:, :1] > 0)
    return visible & shown_at(key[:, 1:] - query[1:], rule)


def _weights(
    setting: Setting, named: dict[str, Any], mask: Bool[Array, "s t"], i: Array, at: Any
) -> tuple[Float[Array, "s t"], Callable[[Array], Array]]:
    """Return the weights of some queries of a head, and what drops some of them, or of their gradients."""
    keys = len(mask)
    scores = _product(named["k"][0, i, :, :keys], named["q"][0, i, :, at], (0, 0))
    scores = scores + named["bias"][0, i, :keys, at] if "bias" in named else scores
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    powers = jnp.exp(scores - scores.max(0, keepdims=True))
    weights = powers / powers.sum(0, keepdims=True)
    if "words" not in named:
        return weights, lambda x: x
    half = named["k"].shape[3] // 2  # the first half of the keys uses half the bits of each word
    places = jax.lax.broadcasted_iota(jnp.uint32, (min(keys, half), 1), 0)
    words = hash_places(named["words"][0, i, :, at], places)  # [1 t] → [places t]
    bits = words & HALF
    bits = bits if keys <= half else jnp.concatenate([bits, words[: keys - half] >> 16])
    keep = kept(bits, setting.rate)
    return weights, lambda x: dropped(x, keep, setting.rate)


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Float[Array, "_ _"]:
    """Multiply two matrices over an axis of each."""
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)
