"""The choice of attention kernel, and the fused kernels of JAX and cuDNN, which never store the scores.

Axes: b rows, t query positions, s key positions, h query heads, g heads of keys and values, k size of a head.
"""

import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jformer.models.cache import KeyValue
from jformer.models.layers.row_kernel import LANES, SAVED, STEP_PAIRS, attend_rows
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility, self_attention_rule
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import over_rows_and_heads
from jformer.parallel.backend import Target, target_of
from jformer.parallel.chunks import even_size
from jformer.parallel.deterministic import asks_deterministic

MAX_PAIRS = 2_048**2  # of a query and a key in a row; above, our own code attends in chunks: docs/decisions/0034
CHUNK = 512  # queries of a chunk
SLICE = 256  # queries of a slice of causal attention; 128 or 512 move more bytes of GPT-2 on an H100
SMALL_CHUNK, LEAST_CHUNK = 128, 64  # queries of a chunk on TPUs: products with fewer leave most of a core idle
ON_CHIP = 2**23  # scores of a chunk there, tens of MB, that stay beside the cores, forward and backward
LEAST_SCORES = 2**15  # of a head in a chunk: with fewer, a chunk moves as many bytes
LEAST_PAIRS = 512**2  # from which splash attention pays off: each block costs a third of a microsecond (same record)
BLOCKS = (2_048, 1_024, 512, 256, LANES)  # of positions
BLOCK = 512  # up to which they may be as long as a row
ROWS = "rows"  # the kernel of row_kernel
ROW_BYTES = 2**19  # of the queries or keys of a head, in it
FUSED = {"tpu": (ROWS, "splash"), "gpu": ("cudnn",)}  # the first that supports a call is taken
MULTIPLES = {"tpu": LANES, "gpu": 8}  # of positions: lengths that fused kernels take without padding
CUDNN_NEEDS = 8.0  # compute capability: Ampere
SPLASH_MASKS = {Rule(): "FullMask", Rule(causal=True): "CausalMask"}  # rules that splash attention supports


class Call(NamedTuple):
    """The properties of an attention call that determine its kernel."""

    dtype: str
    queries: int
    keys: int
    rule: Rule = Rule()
    biased: bool = False
    drops: bool = False  # attention dropout is active
    shows: bool = False  # the attention weights are collected
    tensor: int = 1  # devices that share the heads
    arrays: int = 1  # of queries x keys on a device: its rows times its heads


class KernelChoice(NamedTuple):
    """The chosen kernel, and why."""

    kernel: str  # own (all queries at once) | sliced | chunked | rows | splash | cudnn
    why: str
    chunk: int = 0  # queries at a time


def known_length(length: object) -> int:
    """Return a length, or 1 if an exported program leaves it symbolic, so that it does not affect the choice."""
    return length if isinstance(length, int) else 1


def choose_kernel(config: ModelConfig, target: Target, call: Call) -> KernelChoice:
    """Return the kernel: a fused one within its limits, else chunks on TPUs and for long rows, slices of causal ones.

    Of the fused ones, only `ROWS` drops weights. None returns weights, or supports values of another size than keys.
    """
    refused = f"on {target.platform} there is no fused one"
    for kernel in FUSED.get(target.platform, ()):
        refused = _refusal(kernel, config, target, call) or build_error(kernel, target, config.key_size, call)
        if not refused:
            return KernelChoice(kernel, f"on {target.platform}: scores stay beside the cores")
    default = CHUNK if call.queries * call.keys > MAX_PAIRS else 0
    if target.platform == "tpu":
        most = max(LEAST_CHUNK, max(LEAST_SCORES, ON_CHIP // call.arrays) // call.keys)
        default = even_size(call.queries, min(call.queries, SMALL_CHUNK, most))
    chunk = config.execution.attention_chunk or default
    if 0 < chunk < call.queries and not call.shows:
        return KernelChoice("chunked", f"up to {chunk} queries at a time; {refused}", chunk)
    ordered = call.rule.causal and not call.rule.prefix and call.queries == call.keys
    if ordered and call.queries >= 2 * SLICE and not (chunk or call.shows):
        return KernelChoice("sliced", f"{SLICE} queries at a time with the keys before them; {refused}", SLICE)
    return KernelChoice("own", refused)


def _refusal(kernel: str, config: ModelConfig, target: Target, call: Call) -> str:
    """Return why a fused kernel cannot be used, or ''."""
    asked, size, pairs = config.execution.attention_kernel, config.key_size, call.queries * call.keys
    lengths = f"{call.queries:,} queries and {call.keys:,} keys"
    largest = max(call.queries, call.keys) * size * jnp.dtype(call.dtype).itemsize
    cudnn, splash, rows = (kernel == each for each in ("cudnn", "splash", ROWS))
    tpu = splash or rows
    reasons = {
        f"model.execution.attention_kernel={asked}": asked == "own" or kernel != asked in FUSED[target.platform],
        f"cuDNN's needs CUDA, which {target.kind} lacks": cudnn and not target.cuda,
        f"cuDNN's needs compute capability {CUDNN_NEEDS}, and {target.kind} has {target.capability}": (
            cudnn and target.cuda < CUDNN_NEEDS
        ),
        # XLA's compiler looks up the second of two equal attentions under another name: openxla/xla pull request 46500
        "with --deterministic XLA fails on cuDNN's": cudnn and asks_deterministic(),
        "its weights are collected": call.shows,
        f"model.attention_dropout={config.attention_dropout} drops weights": call.drops and not rows,
        f"keys of {size} and values of {config.value_size}": size != config.value_size,
        f"{config.kv_heads} heads of keys for {config.num_heads} of queries": rows
        and config.kv_heads < config.num_heads,
        f"{kernel} has no model.precision={config.precision}": (
            tpu and call.dtype == "float32" and config.precision != "default"
        ),
        # jax.experimental.pallas.ops.tpu.splash_attention
        f"positions={config.positions} add to the scores": splash and call.biased,
        f"splash attention has no mask for {call.rule}": splash and call.rule not in SPLASH_MASKS,
        f"{lengths}: few enough to store their scores": splash and pairs < LEAST_PAIRS,
        f"{lengths}: not multiples of {LANES}": tpu and bool(call.queries % LANES or call.keys % LANES),
        # row_kernel
        f"{kernel} has no mask for {call.rule}": rows and call.rule != Rule(call.rule.causal, call.rule.window),
        f"{lengths}, of up to {STEP_PAIRS // LANES:,}": rows and call.keys > STEP_PAIRS // LANES,
        f"{lengths} of {size}: a head takes over {ROW_BYTES:,} bytes": rows and largest > ROW_BYTES,
        f"{lengths}: over {STEP_PAIRS:,} pairs and a bias": rows and call.biased and pairs > STEP_PAIRS,
        f"mesh.tensor={call.tensor} does not divide the heads": bool(config.kv_heads % call.tensor),
        # jax.nn.dot_product_attention: check_layout and check_is_flash_attention of its cuDNN
        f"cuDNN's has no {call.dtype}": cudnn and call.dtype not in ("bfloat16", "float16"),
        f"cuDNN's has no heads of {size}: up to 128, multiples of 8": cudnn and bool(size > 128 or size % 8),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def is_own_attention(config: ModelConfig) -> bool:
    """Return whether attention uses the kernels of this module: not in recurrent models, nor if user-defined."""
    return not config.recurrent.cell and config.attention == "multi_head"


def calls_of(config: ModelConfig, source: int, target: int, prefix: bool = False) -> Iterator[Call]:
    """Yield the attentions of a training step, the longest first.

    Args:
        config: of a Transformer.
        source, target: positions of a row on either side; for images their pixels, which do not matter. Vectors of an
            encoder-decoder come from its encoder.
        prefix: whether the source precedes the target in the same row.
    """
    positions = config.num_patches + (config.family == "vit" and config.head.pooling == "first")
    source = positions if config.reads_images else source
    biased, drops = config.positions in ("relative", "alibi", "transformer_xl"), config.attention_dropout > 0
    call = functools.partial(Call, config.dtype, drops=drops)
    found = []
    if config.family != "decoder":
        found.append(call(source, source, rule=self_attention_rule(config, False), biased=biased))
    if config.family == "decoder" or config.decodes:
        rule = dataclasses.replace(self_attention_rule(config, True), prefix=prefix)
        found.append(call(target, target, rule=rule, biased=biased))
    if config.family == "encdec" and config.decodes:
        found.append(call(target, source))
    yield from sorted(found, key=lambda each: -each.queries * each.keys)


def build_error(kernel: str, target: Target, size: int, call: Call) -> str:
    """Return why a fused kernel within its limits does not run here, or ''. For absent devices, compiling will show."""
    device = jax.local_devices()[0]
    if target_of(device) != target:
        return ""
    return _build_error(device, kernel, call.dtype, size, call.rule.causal, call.biased)


@functools.cache
def _build_error(device: jax.Device, kernel: str, dtype: str, size: int, causal: bool, biased: bool) -> str:
    """Return why a kernel does not run forward and backward on a local device, or ''.

    It runs in a separate thread, because this one may be tracing a program over a mesh.
    """
    length = BLOCK

    def total(x: Array, bias: Array | None) -> Array:
        kv: KeyValue = {"k": x, "v": x}
        places = TokenPlaces(jnp.ones(x.shape[:2], jnp.int32), jnp.arange(length)[None])
        whole, packed = (Visibility(places, places, Rule(causal), one_text=known) for known in (True, False))
        if kernel == "splash":
            values = attend_splash(x, kv, packed, 1.0)
        elif kernel == ROWS:
            values = attend_rows(x, kv, packed, bias, jnp.zeros((2, 2, length), jnp.uint32), 1.0, 0.5)
        else:
            values = attend_cudnn(x, kv, whole, bias, 1.0) + attend_cudnn(x, kv, packed, bias, 1.0)
        return values.astype(jnp.float32).sum()

    def run() -> None:
        with jax.default_device(device):
            bias = jnp.zeros((1, 2, length, length), dtype) if biased else None
            jax.block_until_ready(jax.jit(jax.grad(total))(jnp.zeros((2, length, 2, size), dtype), bias))

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run).result()
    except Exception as error:  # whatever JAX, XLA or cuDNN raise
        return (
            f"{kernel} does not run on {device.device_kind}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
    return ""


def splash_blocks(queries: int, keys: int, size: int) -> dict[str, tuple[int, int]]:
    """Return how many queries and keys a block has in the kernels of splash attention, `fwd` and `dkv`.

    Forward, the keys are read again for each block of queries. Backward, the queries are read again for each block of
    keys, which also writes its share of their gradient. But only whole blocks that the mask hides are skipped, and on a
    v4 and a v5p, large ones fit beside the cores only for heads of up to 128 (`size`).
    """
    forward, backward = (1_024, 2_048) if size <= LANES else (BLOCK, BLOCK)
    return {
        "fwd": (_block_of(queries, forward), _block_of(keys, forward)),
        "dkv": (_block_of(queries), _block_of(keys, backward)),
    }


def _block_of(length: int, most: int = BLOCK) -> int:
    """Return the largest block size that divides a length; above `BLOCK`, a row has at least four blocks."""
    sizes = (block for block in BLOCKS if block <= most and length % block == 0)
    return next(block for block in sizes if block <= BLOCK or 4 * block <= length)


def attend_cudnn(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    visible: Visibility,
    bias: Float[Array, "#b h t s"] | None,
    scale: float,
) -> Float[Array, "b t h k"]:
    """Attend with cuDNN.

    A dense mask becomes a bias of every row. Rows that hold one text need none: causality hides the padding at their
    end, and lengths do it where nothing else is hidden. These are the combinations with which JAX tests cuDNN's.
    Positions are padded to a multiple of 8; no query sees the padding.

    Args:
        q, kv, bias, scale: those of `dot_product.attend`.
        visible: which keys each query may attend to.
    """
    arrays: dict[str, Any] = {"query": ("b t h k", q), "key": ("b s g k", kv["k"]), "value": ("b s g k", kv["v"])}
    rule, options = visible.rule, dict[str, Any]()
    if visible.one_text and rule.causal and not rule.prefix and not (rule.window and bias is not None):
        options = {"is_causal": True} | ({"local_window_size": (rule.window - 1, 0)} if rule.window else {})
    elif visible.one_text and rule == Rule() and bias is None:
        queries, keys = visible.lengths()
        arrays |= {"query_seq_lengths": ("b", queries), "key_value_seq_lengths": ("b", keys)}
    else:
        mask = visible.mask()
        arrays["mask"] = "b 1 t s", jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], mask.shape[3]))
    if bias is not None:
        arrays["bias"] = "b h t s" if len(bias) == len(q) else "1 h t s", bias.astype(q.dtype)
    filled = [(axes, _fill(axes, x)) for axes, x in arrays.values()]

    def attend(*own: Array) -> Array:
        named: dict[str, Any] = dict(zip(arrays, own, strict=True))
        return jax.nn.dot_product_attention(**named, scale=scale, implementation="cudnn", **options)

    return over_rows_and_heads(attend, *filled)[:, : q.shape[1]]


def _fill(axes: str, x: Array) -> Array:
    """Pad the axes of positions to a multiple that cuDNN's attention takes."""
    missing = [-size % MULTIPLES["gpu"] * (axis in "ts") for axis, size in zip(axes.split(), x.shape, strict=True)]
    return jnp.pad(x, [(0, each) for each in missing]) if any(missing) else x


def attend_splash(
    q: Float[Array, "b t h k"], kv: KeyValue, visible: Visibility, scale: float, interpret: bool = False
) -> Float[Array, "b t h k"]:
    """Attend with JAX's splash kernel for TPUs, block by block, skipping blocks that the mask hides.

    Padding attends to padding, unlike in our own code; no other position reads it. One kernel computes all gradients,
    where separate ones would make scores twice; it needs the output and the logarithms of the sums, named `SAVED`.
    Positions are the last axis in memory: projections are written that way without a transpose, and TPUs do not pad
    them, whereas they pad an axis of head size to 128.

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
    blocks, at_once = splash_blocks(t, s, q.shape[3]), _block_of(s)
    order = dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.SEQ_MINOR)  # [b h k t] in memory
    sizes = splash.BlockSizes(*blocks["fwd"], at_once, *blocks["dkv"], at_once, use_fused_bwd_kernel=True, **order)
    mask = getattr(masks, SPLASH_MASKS[visible.rule])((t, s))

    def attend(q: Array, k: Array, v: Array, query: Array, key: Array) -> Array:
        heads = masks.MultiHeadMask([mask] * q.shape[2])
        kernel = splash.make_splash_mha(
            heads,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        q, k, v = (x.swapaxes(1, 2) for x in (q * scale, k, v))  # [b t h k] → [b h t k]
        values = jax.vmap(kernel)(q, k, v, splash.SegmentIds(query, key))
        return values.swapaxes(1, 2)  # → [b t h k]

    segments = ("b t", visible.query.segments), ("b s", visible.key.segments)
    return over_rows_and_heads(attend, ("b t h k", q), ("b s g k", kv["k"]), ("b s g u", kv["v"]), *segments)
