"""The choice of attention kernel, and the fused kernels of JAX and cuDNN, which never store the scores.

Axes: b rows, t query positions, s key positions, h query heads, g heads of keys and values, k size of a head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jformer.models.cache import KeyValue
from jformer.models.layers.visibility import Rule, Visibility
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import over_rows_and_heads

MAX_PAIRS = 2_048**2  # of a query and a key in a row; above, our own code attends in chunks: docs/decisions/0034
CHUNK = 512  # queries of a chunk
LEAST_PAIRS = 512**2  # from which splash attention pays off: a block costs a third of a microsecond (same record)
LANES = 128  # splash attention takes multiples of this many positions
BLOCKS = (512, 256, LANES)  # of positions, the largest that divides the length
FUSED = {"tpu": "splash", "gpu": "cudnn"}
SPLASH_MASKS = {Rule(): "FullMask", Rule(causal=True): "CausalMask"}  # rules that splash attention supports


class Call(NamedTuple):
    """The properties of an attention that decide on its kernel."""

    dtype: str
    queries: int
    keys: int
    rule: Rule = Rule()
    biased: bool = False
    drops: bool = False  # attention dropout is active
    shows: bool = False  # the weights are collected
    tensor: int = 1  # devices that share the heads


class KernelChoice(NamedTuple):
    """The chosen kernel, and why."""

    kernel: str  # own (all queries at once) | chunked | jax (jax.nn's, of XLA) | splash | cudnn
    why: str
    chunk: int = 0  # queries at a time


def known_length(length: object) -> int:
    """Return a length, or 1 where an exported program leaves it symbolic, so that it does not affect the choice."""
    return length if isinstance(length, int) else 1


def choose_kernel(config: ModelConfig, platform: str, call: Call) -> KernelChoice:
    """Return the kernel: a fused one within its limits, else chunks for long sequences.

    Only our own code supports dropout of weights, returns them, and has values of another size than keys. On CPU it
    is as fast as XLA's.
    """
    refused = _refusal(config, platform, call)
    if not refused:
        return KernelChoice(FUSED[platform], f"on {platform}: scores stay beside the cores")
    chunk = config.execution.attention_chunk or (CHUNK if call.queries * call.keys > MAX_PAIRS else 0)
    if 0 < chunk < call.queries and not call.shows:
        return KernelChoice("chunked", f"{chunk} queries at a time; {refused}", chunk)
    needs_own = call.drops or call.shows or config.key_size != config.value_size
    forced = config.execution.attention_kernel == "own" or platform == "cpu"
    return KernelChoice("own" if needs_own or forced else "jax", refused)


def _refusal(config: ModelConfig, platform: str, call: Call) -> str:
    """Return why no fused kernel can be used, or ''."""
    size, lengths = config.key_size, f"{call.queries:,} queries and {call.keys:,} keys"
    cudnn, splash = platform == "gpu", platform == "tpu"
    reasons = {
        "model.execution.attention_kernel=own": config.execution.attention_kernel == "own",
        f"on {platform} there is no fused one": platform not in FUSED,
        "its weights are shown": call.shows,
        f"model.attention_dropout={config.attention_dropout} drops weights": call.drops,
        f"keys of {size} and values of {config.value_size}": size != config.value_size,
        # jax.experimental.pallas.ops.tpu.splash_attention
        f"splash attention has no model.precision={config.precision}": (
            splash and call.dtype == "float32" and config.precision != "default"
        ),
        f"positions={config.positions} add to the scores": splash and call.biased,
        f"splash attention has no mask for {call.rule}": splash and call.rule not in SPLASH_MASKS,
        f"{lengths}: {LANES} do not divide them": splash and bool(call.queries % LANES or call.keys % LANES),
        f"{lengths}: few enough to store their scores": splash and call.queries * call.keys < LEAST_PAIRS,
        f"mesh.tensor={call.tensor} does not divide the heads": bool(config.kv_heads % call.tensor),
        # jax.nn.dot_product_attention: check_layout and check_is_flash_attention of its cuDNN
        f"cuDNN's has no {call.dtype}": cudnn and call.dtype not in ("bfloat16", "float16"),
        f"cuDNN's has no heads of {size}: up to 128, multiples of 8": cudnn and bool(size > 128 or size % 8),
        f"cuDNN's takes no mask for {lengths}: they must be even": cudnn and bool((call.queries | call.keys) % 2),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def block_of(length: int) -> int:
    """Return the block size of splash attention for a length."""
    return next(block for block in BLOCKS if length % block == 0)


def attend_cudnn(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    mask: Bool[Array, " b #1 #t s"] | None,
    bias: Float[Array, "#b h t s"] | None,
    scale: float,
) -> Float[Array, "b t h k"]:
    """Attend with cuDNN, which reads the mask as a bias of every row. Compiled for GPUs, run on none so far.

    Args:
        q, kv, mask, bias, scale: those of `dot_product.attend`.
    """
    arrays = {"q": ("b t h k", q), "k": ("b s g k", kv["k"]), "v": ("b s g u", kv["v"])}
    if mask is not None:
        arrays["mask"] = "b 1 t s", jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], mask.shape[3]))
    if bias is not None:
        arrays["bias"] = "b h t s" if len(bias) == len(q) else "1 h t s", bias.astype(q.dtype)

    def attend(*own: Array) -> Array:
        q, k, v, rest = *own[:3], dict(zip([*arrays][3:], own[3:], strict=True))
        return jax.nn.dot_product_attention(
            q, k, v, rest.get("bias"), rest.get("mask"), scale=scale, implementation="cudnn"
        )

    return over_rows_and_heads(attend, *arrays.values())


def attend_splash(
    q: Float[Array, "b t h k"], kv: KeyValue, visible: Visibility, scale: float, interpret: bool = False
) -> Float[Array, "b t h k"]:
    """Attend with JAX's splash kernel for TPUs, block by block, skipping blocks that the mask hides.

    Padding attends to padding, unlike in our own code; no other position reads it.

    Args:
        q, kv, scale: those of `dot_product.attend`, with t and s multiples of 128.
        visible: replaces the mask; its rule must be in SPLASH_MASKS.
        interpret: run the kernel step by step on any platform, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # takes a third of a second
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, s = q.shape[1], kv["k"].shape[1]
    rows, columns = block_of(t), block_of(s)
    sizes = splash.BlockSizes(rows, columns, columns, rows, columns, columns, rows, columns)
    mask = getattr(masks, SPLASH_MASKS[visible.rule])((t, s))

    def attend(q: Array, k: Array, v: Array, query: Array, key: Array) -> Array:
        heads = masks.MultiHeadMask([mask] * q.shape[2])
        kernel = splash.make_splash_mha(heads, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
        q, k, v = (x.swapaxes(1, 2) for x in (q * scale, k, v))  # [b t h k] → [b h t k]
        values = jax.vmap(kernel)(q, k, v, splash.SegmentIds(query, key))
        return values.swapaxes(1, 2)  # → [b t h k]

    segments = ("b t", visible.query.segments), ("b s", visible.key.segments)
    return over_rows_and_heads(attend, ("b t h k", q), ("b s g k", kv["k"]), ("b s g u", kv["v"]), *segments)
