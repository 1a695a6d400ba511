"""Fused kernels attend as our own does; which is taken follows from platform, type, shapes and options."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jformer.data.plan import Shape
from jformer.errors import UserError
from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.layers import attention, kernels
from jformer.models.layers.dot_product import attend
from jformer.models.layers.kernels import (
    CHUNK,
    MAX_PAIRS,
    SLICE,
    SMALL_CHUNK,
    Call,
    KernelChoice,
    attend_cudnn,
    attend_splash,
    choose_kernel,
    splash_blocks,
)
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from jformer.models.vision_config import VisionConfig
from jformer.parallel.activations import over_rows_and_heads
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch
from jformer.tasks.task import make_loss, token_loss
from jformer.tools.forecast.topology import open_topology
from jformer.training.introduction import kernel_line
from jformer.training.step import make_gradient
from tests.conftest import TINY, make_batch, run
from tests.models.reference import random_params
from tests.slow import slow_but
from tests.tools.forecast.test_topology import compiled_for_h100, needs_cuda_compiler, needs_libtpu

HALF = Call("bfloat16", 1_024, 1_024)
CPU, TPU = Target("cpu", "cpu"), Target("tpu", "TPU v5 lite")
H100, V100 = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0"), Target("gpu", "Tesla V100-SXM2-16GB", "7.0")
A100, MI300 = Target("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), Target("gpu", "AMD Instinct MI300X", "gfx942")
SPLASH = ExecutionConfig(attention_kernel="splash")
T, S, H, G, K = 256, 128, 2, 1, 8
QUERY = np.repeat([[1, 2, 0], [1, 1, 2]], [100, 100, 56], axis=1)
KEY = np.repeat([[1, 2, 0], [1, 2, 2]], [30, 90, 8], axis=1)


class Strange(Rule):
    """A rule that no kernel makes the mask of."""


def visibility(query, key, causal=False):
    query, key = (TokenPlaces(x, jnp.arange(x.shape[1])[None]) for x in (query, key))
    return Visibility(query, key, Rule(causal))


def test_deterministic_operations_have_no_cudnn(monkeypatch):
    assert choose_kernel(ModelConfig(), H100, HALF).kernel == "cudnn"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert choose_kernel(ModelConfig(), H100, HALF) == KernelChoice("own", "with --deterministic XLA fails on cuDNN's")
    assert choose_kernel(ModelConfig(), TPU, HALF).kernel == "rows"


@pytest.mark.parametrize(
    ("target", "call", "kernel", "why"),
    [
        (CPU, HALF, "own", "on cpu there is no fused one"),
        (TPU, HALF, "rows", "on tpu"),
        (TPU, HALF._replace(dtype="float32"), "rows", "on tpu"),
        (TPU, HALF._replace(keys=1_000), "chunked", "1,024 queries and 1,000 keys: not multiples of 128"),
        (TPU, HALF._replace(queries=64), "own", "few enough to store their scores"),
        (TPU, HALF._replace(queries=512, keys=384), "rows", "on tpu"),
        (TPU, HALF._replace(rule=Rule(causal=True, window=128), drops=True), "rows", "on tpu"),
        (TPU, HALF._replace(queries=256, biased=True), "rows", "on tpu"),
        (TPU, HALF._replace(keys=2_176), "splash", "on tpu"),
        (TPU, HALF._replace(keys=2_176, rule=Rule(causal=True)), "splash", "on tpu"),
        (TPU, HALF._replace(keys=2_176, drops=True), "chunked", "model.attention_dropout=0.1 drops weights"),
        (TPU, HALF._replace(rule=Rule(causal=True, prefix=True)), "chunked", "splash attention has no mask for Rule("),
        (TPU, HALF._replace(rule=Strange()), "chunked", "splash attention has no mask for Strange("),
        (TPU, HALF._replace(biased=True), "chunked", "positions=relative add to the scores"),
        (TPU, HALF._replace(tensor=3), "chunked", "mesh.tensor=3 does not divide the heads"),
        (TPU, HALF._replace(shows=True), "own", "its weights are collected"),
        (H100, HALF, "cudnn", "on gpu"),
        (H100, HALF._replace(dtype="float16", rule=Strange(), biased=True), "cudnn", "on gpu"),
        (H100, HALF._replace(dtype="float32"), "own", "cuDNN's has no float32"),
        (H100, HALF._replace(queries=17, keys=197), "cudnn", "on gpu"),
        (A100, HALF, "cudnn", "on gpu"),
        (V100, HALF, "own", "compute capability 8.0, and Tesla V100-SXM2-16GB has 7.0"),
        (MI300, HALF, "own", "cuDNN's needs CUDA, which AMD Instinct MI300X lacks"),
        (H100, HALF._replace(drops=True), "own", "drops weights"),
    ],
)
def test_a_fused_kernel_attends_where_its_limits_hold(target, call, kernel, why):
    found = choose_kernel(ModelConfig(attention_dropout=0.1, positions="relative"), target, call)
    assert (found.kernel, found.chunk) == (kernel, SMALL_CHUNK if kernel == "chunked" else 0)
    assert why in found.why


@pytest.mark.parametrize(
    ("fields", "target", "kernel", "why"),
    [
        ({"d_k": 16}, TPU, "chunked", "keys of 16 and values of 64"),
        ({"num_kv_heads": 2}, TPU, "splash", ""),
        ({"d_model": 2_056}, TPU, "splash", ""),  # heads of 257, of which 1,024 take over 512 KiB
        ({"execution": SPLASH}, TPU, "splash", ""),
        ({"d_k": 136, "d_v": 136}, H100, "own", "no heads of 136"),
        ({"d_k": 20, "d_v": 20}, H100, "own", "no heads of 20"),
        ({"d_k": 20, "d_v": 20}, TPU, "rows", ""),
        ({"execution": ExecutionConfig(attention_kernel="own")}, TPU, "chunked", "attention_kernel=own"),
        ({"execution": ExecutionConfig(attention_kernel="own")}, H100, "own", "attention_kernel=own"),
        ({"precision": "highest"}, TPU, "rows", ""),  # of bfloat16 it changes nothing
        ({"execution": ExecutionConfig(attention_chunk=64)}, TPU, "rows", ""),
        ({"execution": ExecutionConfig(attention_chunk=64)}, CPU, "chunked", "64 queries at a time"),
    ],
)
def test_options_and_sizes_of_heads_decide_too(fields, target, kernel, why):
    found = choose_kernel(ModelConfig(**fields), target, HALF)
    assert found.kernel == kernel
    assert why in found.why


def test_scores_of_long_rows_are_made_in_chunks_where_no_fused_kernel_attends():
    config, limit = ModelConfig(attention_dropout=0.1), int(MAX_PAIRS**0.5)
    short, long = (Call("bfloat16", length, length, drops=True) for length in (limit, limit + 128))
    assert choose_kernel(config, H100, short).kernel == "own"
    why = "model.attention_dropout=0.1 drops weights"
    chosen = KernelChoice("chunked", f"up to {CHUNK} queries at a time; {why}", CHUNK)
    assert choose_kernel(config, H100, long) == chosen
    assert choose_kernel(config, TPU, short._replace(queries=200)).chunk == 100  # at most 128, which need no padding
    assert choose_kernel(config, TPU, long._replace(drops=False)).kernel == "splash"
    config = ModelConfig(execution=ExecutionConfig(attention_kernel="own"))
    t5, big = (Call("bfloat16", length, length, drops=True, arrays=8 * 16) for length in (512, 256))
    assert [choose_kernel(config, TPU, call).chunk for call in (t5, t5._replace(arrays=16 * 16))] == [128, 64]
    assert [choose_kernel(config, TPU, big._replace(arrays=rows * 16)).chunk for rows in (16, 32)] == [128, 128]
    assert choose_kernel(config, CPU, long._replace(shows=True)).kernel == "own"
    whole = dataclasses.replace(config, execution=ExecutionConfig(attention_chunk=limit + 128))
    assert choose_kernel(whole, CPU, long).kernel == "own"


def test_causal_rows_are_sliced_where_no_fused_kernel_attends():
    config, causal = ModelConfig(attention_dropout=0.1), Rule(causal=True)
    call = Call("bfloat16", 2 * SLICE, 2 * SLICE, causal, drops=True)
    why = f"{SLICE} queries at a time with the keys before them"
    dropped = KernelChoice("sliced", f"{why}; model.attention_dropout=0.1 drops weights", SLICE)
    assert choose_kernel(config, H100, call) == dropped
    assert choose_kernel(config, CPU, call._replace(drops=False)).kernel == "sliced"
    assert choose_kernel(config, CPU, call._replace(rule=Rule(causal=True, window=9), biased=True)).kernel == "sliced"
    assert choose_kernel(config, H100, call._replace(drops=False)).kernel == "cudnn"
    assert choose_kernel(config, TPU, call).kernel == "rows"
    whole = dataclasses.replace(config, execution=ExecutionConfig(attention_chunk=2 * SLICE))
    assert choose_kernel(whole, CPU, call).kernel == "own"
    others = (
        {"rule": Rule()}, {"rule": Rule(causal=True, prefix=True)}, {"shows": True}, {"queries": SLICE, "keys": SLICE},
        {"keys": 3 * SLICE},
    )  # fmt: skip
    assert {choose_kernel(config, H100, call._replace(**other)).kernel for other in others} == {"own"}


@pytest.mark.parametrize("case", slow_but(["causal", "cross", "long"], "cross"))
def test_splash_attention_gives_our_values_and_gradients(case, monkeypatch):
    """Two blocks, packed rows with padding, a head of keys that two heads of queries share, another length of keys.

    Of long rows of keys, blocks are larger than what is computed at once.
    """
    if case != "long":
        monkeypatch.setattr(kernels, "BLOCKS", (128,))
    causal, times = case == "causal", 32 if case == "long" else 1
    query, key = jnp.asarray(QUERY), jnp.asarray(QUERY if causal else np.repeat(KEY, times, axis=1))
    visible = visibility(query, key, causal)
    keys = jax.random.split(jax.random.key(0), 4)
    q, weights = (jax.random.normal(each, (2, T, H, K)) for each in keys[:2])
    k, v = (jax.random.normal(each, (2, key.shape[1], G, K)) for each in keys[2:])
    weights *= (query > 0)[..., None, None]  # nobody reads what padding gives

    def own(q, k, v):
        return attend(q, {"k": k, "v": v}, visible.mask(), scale=0.3)[0]

    def fused(q, k, v):
        return attend_splash(q, {"k": k, "v": v}, visible, 0.3, interpret=True)

    def both(function):
        def run(*x):
            values, transpose = jax.vjp(function, *x)
            return values * weights, transpose(weights)

        return jax.jit(run)(q, k, v)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), both(fused), both(own))


def test_projections_are_saved_for_the_fused_kernel_and_no_array_twice():
    """With six heads of 64: nothing of [b h t k] but the output; nor the input of the projection after it."""
    length, layers = 512, 2
    sizes = {"d_model": 384, "num_heads": 6, "d_ff": 8, "num_layers": layers}
    model = build_model(ModelConfig("decoder", vocab_size=8, norm="pre", execution=SPLASH, **sizes))
    row = jnp.arange(length)[None]
    batch = {"target_in": row % 8, "target_positions": row, "target_segments": row * 0 + 1}
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch))["params"]
    with compiling_for(TPU):
        _, pull_back = jax.eval_shape(lambda p: jax.vjp(lambda p: model.apply({"params": p}, batch), p), params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
    assert shapes.count((layers, 1, 6, length, 64)) == 1
    assert shapes.count((layers, 1, length, 384)) == 7  # x, its norm, q, k, v; x again, its norm


def test_a_model_takes_the_fused_kernel_in_all_three_places(monkeypatch):
    model = build_model(ModelConfig(**{**TINY, "num_layers": 1, "execution": SPLASH}))
    params, seen = random_params(model), {}

    def interpreted(q, kv, visible, scale):
        seen[q.shape[1], kv["k"].shape[1], visible.rule.causal] = True
        return attend_splash(q, kv, visible, scale, interpret=True)

    segments = {
        "source": np.repeat([[1, 2, 0]], [60, 60, 8], axis=1),
        "target": np.repeat([[1, 2]], [100, 156], axis=1),
    }
    batch = {f"{side}_segments": jnp.asarray(each) for side, each in segments.items()}
    for side, name in (("source", "source"), ("target", "target_in")):
        length = segments[side].shape[1]
        batch |= {name: jnp.arange(length)[None] % 7 + 4, f"{side}_positions": jnp.arange(length)[None]}
    own = run(model, params, batch)
    monkeypatch.setattr(attention, "attend_splash", interpreted)
    monkeypatch.setattr(kernels, "LEAST_PAIRS", 1)
    with compiling_for(TPU):
        fused = jax.jit(lambda p, b: model.apply({"params": p}, b))(params, batch)
    assert list(seen) == [(128, 128, False), (256, 256, True), (256, 128, False)]
    np.testing.assert_allclose(fused, own, atol=2e-5 * np.abs(own).max())


def test_devices_that_share_rows_send_the_output_of_the_fused_kernel_once(tiny, monkeypatch):
    """Queries, keys, values and the output, and their gradients; the output is not sent again for gradients."""
    monkeypatch.setattr(kernels, "LEAST_PAIRS", 1)
    model, params = tiny(family="decoder", num_layers=1, max_length=256, execution=SPLASH)
    mesh, batch = make_mesh(1, sequence=2), make_batch([64], [64])
    batch = {name: np.repeat(x, 4, axis=1) if x.ndim == 2 else x for name, x in batch.items()}
    with compiling_for(TPU):
        gradient = make_gradient(make_loss(model, token_loss(0.1)), mesh)
        arguments = params, put_batch(mesh, {name: x[None] for name, x in batch.items()}), jax.random.key(0)
        text = str(jax.make_jaxpr(gradient)(*arguments))
    assert text.count("splash_mha_dkv") > 0
    assert text.count("all_to_all[") == 4 + 4


@pytest.mark.slow
def test_every_device_attends_from_its_own_rows_and_heads():
    mesh, shapes = make_mesh(2, 2, 2), []

    def attend_here(q, k, v, query, key):
        shapes.append((q.shape, k.shape, query.shape))
        return attend(q, {"k": k, "v": v}, visibility(query, key).mask())[0]

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(each, (8, 4, heads, 3)) for each, heads in zip(keys, (4, 2, 2), strict=True))
    arguments = q, k, v, jnp.ones((8, 4), jnp.int32), jnp.ones((8, 4), jnp.int32)
    axes = "b t h k", "b s g k", "b s g u", "b t", "b s"
    expected = attend_here(*arguments)
    rows = PartitionSpec("data")
    split = jax.shard_map(
        lambda *arrays: over_rows_and_heads(attend_here, *zip(axes, arrays, strict=True)),
        mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(split)(*arguments), expected, atol=1e-6)
    assert shapes[1] == ((2, 4, 2, 3), (2, 4, 1, 3), (2, 4))


def test_blocks_of_splash_attention_are_larger_in_long_rows():
    assert splash_blocks(512, 1_536, 64) == {"fwd": (512, 512), "dkv": (512, 512)}
    assert splash_blocks(4_096, 8_192, 128) == {"fwd": (1_024, 1_024), "dkv": (512, 2_048)}
    assert splash_blocks(8_192, 8_192, 256) == {"fwd": (512, 512), "dkv": (512, 512)}
    assert splash_blocks(5_120, 640, 64) == {"fwd": (1_024, 128), "dkv": (512, 128)}


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1"])
def test_attention_to_8192_tokens_stores_no_scores_on_a_tpu(chip):
    length = 8_192
    place = NamedSharding(Mesh(np.array(open_topology(chip).devices[:1]), "x"), PartitionSpec())
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16, sharding=place)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=place)

    def total(q, k, v, segments):
        values = attend_splash(q, {"k": k, "v": v}, visibility(segments, segments, causal=True), 0.125)
        return values.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x, segments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length / 2  # of float32 scores: 8 a pair
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2


@needs_libtpu
def test_a_tpu_writes_projections_as_its_attention_kernel_reads_them():
    """Nothing but the kernel's output is transposed, forward."""
    place = NamedSharding(Mesh(np.array(open_topology("v5e:2x2").devices[:1]), "x"), PartitionSpec())
    x, kernel = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in ((4, 1_024, 768), (768, 12 * 64))
    )
    segments = jax.ShapeDtypeStruct((4, 1_024), jnp.int32, sharding=place)

    def attended(x, q, k, v, segments):
        q, k, v = ((x @ kernel).reshape(4, 1_024, 12, 64) for kernel in (q, k, v))
        return attend_splash(q, {"k": k, "v": v}, visibility(segments, segments, causal=True), 0.125)

    text = jax.jit(attended).lower(x, kernel, kernel, kernel, segments).compile().as_text()
    assert text.count(" copy(") == 1


def test_a_fused_kernel_that_does_not_run_here_falls_back_unless_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(kernels, "target_of", lambda device: H100)  # without cuDNN, as this is none
    config, shape = ModelConfig(family="decoder", dtype="bfloat16"), Shape(8, 0, 64)
    line = kernel_line(config, H100, [shape])
    assert re.fullmatch(r"attention kernel: own \(cudnn does not run on cpu: \w+: .*\)", line)
    assert kernel_line(config, A100, [shape]) == "attention kernel: cudnn (on gpu: scores stay beside the cores)"
    asked = dataclasses.replace(config, execution=ExecutionConfig(attention_kernel="cudnn"))
    with pytest.raises(
        UserError, match=r"^model\.execution\.attention_kernel='cudnn' cannot be used .* does not run on cpu"
    ):
        kernel_line(asked, H100, [shape])
    assert "cudnn" in kernel_line(asked, A100, [shape])


def test_an_empty_row_has_one_position_for_cudnn():
    rows = [jnp.array([[1, 1, 1, 0], [0, 0, 0, 0]]), jnp.array([[1, 0], [1, 1]])]
    assert [each.tolist() for each in visibility(*rows).lengths()] == [[3, 1], [1, 2]]


CUDNN_CASES = {  # rule, one text a row, rows of the bias, arrays and options beside queries, keys, values
    "packed, a bias": (Rule(), False, 1, {"mask", "bias"}),
    "packed, causal": (Rule(causal=True), False, 0, {"mask"}),
    "packed, across": (Rule(), False, 0, {"mask"}),
    "causal": (Rule(causal=True), True, 0, {"is_causal"}),
    "causal, biases": (Rule(causal=True), True, 4, {"is_causal", "bias"}),
    "window": (Rule(causal=True, window=3), True, 0, {"is_causal", "local_window_size"}),
    "window, a bias": (Rule(causal=True, window=3), True, 1, {"mask", "bias"}),
    "two sides": (Rule(window=3), True, 0, {"mask"}),
    "prefix": (Rule(causal=True, prefix=True), True, 0, {"mask"}),
    "across": (Rule(), True, 0, {"query_seq_lengths", "key_value_seq_lengths"}),
}
MESHES = [(4, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    ("case", "mesh"),
    [(case, None) for case in CUDNN_CASES] + list(itertools.product(["packed, a bias", "across"], MESHES)),
)
def test_cudnn_gets_what_its_device_needs_of_rows_heads_and_who_sees_whom(monkeypatch, case, mesh):
    """With XLA's attention in its place, values and gradients are those of our own, on every mesh.

    Lengths are odd, a row is empty, and one is full.
    """
    rule, one_text, biases, names = CUDNN_CASES[case]
    given = []

    def library(query, key, value, *, implementation, **rest):
        given.append((query.shape, key.shape, {name for name in rest if name != "scale"}))
        assert implementation == "cudnn"
        return real(query, key, value, **rest)

    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    t, s = 7, 5 if "across" in case else 7
    keys = jax.random.split(jax.random.key(0), 5)
    q, weights = (jax.random.normal(each, (4, t, 4, 8)) for each in keys[:2])
    k, v = (jax.random.normal(each, (4, s, 2, 8)) for each in keys[2:4])
    bias = jax.random.normal(keys[4], (biases, 4, t, s)) if biases else None
    rows = [(jnp.arange(n) < jnp.array([[n - 1], [0], [n], [3]])).astype(jnp.int32) for n in (t, s)]
    if not one_text:
        rows = [each.at[2, 2:].set(2) for each in rows]
    prefix = jnp.arange(t) < jnp.array([[2], [0], [4], [1]]) if rule.prefix else None
    weights *= (rows[0] > 0)[..., None, None]  # nobody reads what padding gives

    def attend_by(attention, q, k, v, bias, query, key):
        query, key = (TokenPlaces(x, jnp.arange(x.shape[1])[None], prefix) for x in (query, key))
        return attention(q, {"k": k, "v": v}, Visibility(query, key, rule, one_text), bias)

    def both(attention, *arrays):
        def total(*x):
            values = attention(*x, *arrays[4:]) * weights
            return values.sum(), values

        gradients, values = jax.grad(total, tuple(range(4 if biases else 3)), has_aux=True)(*arrays[:4])
        return gradients, values

    split = cudnn = functools.partial(attend_by, lambda q, kv, visible, bias: attend_cudnn(q, kv, visible, bias, 0.3))
    own = functools.partial(attend_by, lambda q, kv, visible, bias: attend(q, kv, visible.mask(), bias, 0.3)[0])
    if mesh:
        split_rows = PartitionSpec("data")
        specs = (*[split_rows] * 3, PartitionSpec() if biases < 4 else split_rows, split_rows, split_rows)
        split = jax.shard_map(
            cudnn, mesh=make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)]),
            in_specs=specs, out_specs=split_rows, axis_names={"data"}, check_vma=False,
        )  # fmt: skip
    arrays = (q, k, v, bias, *rows)
    found, expected = (jax.jit(functools.partial(both, function))(*arrays) for function in (split, own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), found, expected)
    data, fsdp, tensor = mesh or (1, 1, 1)
    here, heads = 4 // (data * fsdp), 4 // tensor
    assert given[0] == ((here, 8, heads, 8), (here, 8, heads // 2, 8), names)


MODELS_OF_ONE_TEXT = {  # what else each has, and whether some attention needs a mask
    "relative": ({"positions": "relative", "num_kv_heads": 2}, True),  # of its encoder
    "window": ({"family": "decoder", "window": 3}, False),
    "images": (
        {"family": "vit", "vision": VisionConfig(image_size=8, patch_size=2), "head": HeadConfig(num_classes=3)}, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(MODELS_OF_ONE_TEXT, "window"))
def test_models_on_a_gpu_compute_what_they_do_on_a_cpu(monkeypatch, case):
    """In float32, with XLA's attention in cuDNN's place: odd lengths, an empty row, 17 patches with the class token."""
    fields, has_mask = MODELS_OF_ONE_TEXT[case]
    real, given = jax.nn.dot_product_attention, []

    def library(query, key, value, *, implementation, **rest):
        given.append((implementation, "mask" in rest))
        return real(query, key, value, **rest)

    execution = ExecutionConfig(unroll=1, rows="one_text")
    model = build_model(ModelConfig(**{**TINY, "num_layers": 1, "execution": execution} | fields))
    params, batch = random_params(model), make_batch([9, 0, 4], [7, 0, 5])
    image = np.random.default_rng(0).integers(0, 255, (3, 8, 8, 3), np.uint8)
    batch = {"image": image, "row": batch["row"]} if case == "images" else batch
    real_tokens = batch.get("weights", np.ones((3, 1), np.float32))[..., None]

    def total(params, batch):
        logits = model.apply({"params": params}, batch) * real_tokens
        return jnp.sin(logits).sum(), logits

    own = jax.jit(jax.grad(total, has_aux=True))(params, batch)
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    monkeypatch.setattr(kernels, "_refusal", lambda *_: "")  # which refuses float32
    with compiling_for(H100):
        found = jax.jit(lambda *x: jax.grad(total, has_aux=True)(*x))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max())), found, own)
    assert {each for each, _ in given} == {"cudnn"}
    assert any(masked for _, masked in given) == has_mask


@needs_cuda_compiler
@pytest.mark.parametrize(("length", "most"), [(2_048, 50), (8_192, 1_219 / 5)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "lengths"])
def test_cudnn_stores_no_mask_of_rows_with_one_text(length, most, causal):
    x = jax.ShapeDtypeStruct((8, length, 12, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((8, length), jnp.int32)

    def total(q, k, v, segments):
        visible = dataclasses.replace(visibility(segments, segments, causal), one_text=True)
        return attend_cudnn(q, {"k": k, "v": v}, visible, None, 0.125).astype(jnp.float32).sum()

    compiled = compiled_for_h100(jax.grad(total, (0, 1, 2)), x, x, x, segments)
    assert compiled.memory_analysis().temp_size_in_bytes < most * 2**20
    assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} == set(
        re.findall(r"__cudnn\$\w+", compiled.as_text())
    )
