"""Fused kernels attend as our own does; which is taken follows from platform, type, shapes and options."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.models.layers import attention, kernels
from jformer.models.layers.dot_product import attend
from jformer.models.layers.kernels import (
    CHUNK,
    MAX_PAIRS,
    Call,
    KernelChoice,
    attend_cudnn,
    attend_splash,
    choose_kernel,
)
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from jformer.parallel.activations import over_rows_and_heads
from jformer.parallel.backend import compiling_for
from jformer.parallel.mesh import make_mesh
from jformer.tools.forecast.topology import open_topology
from tests.conftest import TINY, run
from tests.models.reference import random_params
from tests.tools.forecast.test_topology import needs_libtpu

HALF = Call("bfloat16", 1_024, 1_024)
T, S, H, G, K = 256, 128, 2, 1, 8
QUERY = np.repeat([[1, 2, 0], [1, 1, 2]], [100, 100, 56], axis=1)
KEY = np.repeat([[1, 2, 0], [1, 2, 2]], [30, 90, 8], axis=1)


class Strange(Rule):
    """A rule that no kernel makes the mask of."""


def visibility(query, key, causal=False):
    query, key = (TokenPlaces(x, jnp.arange(x.shape[1])[None]) for x in (query, key))
    return Visibility(query, key, Rule(causal))


@pytest.mark.parametrize(
    ("platform", "call", "kernel", "why"),
    [
        ("cpu", HALF, "own", "on cpu there is no fused one"),
        ("tpu", HALF, "splash", "on tpu"),
        ("tpu", HALF._replace(dtype="float32"), "splash", "on tpu"),
        ("tpu", HALF._replace(keys=1_000), "jax", "1,024 queries and 1,000 keys: 128 do not divide them"),
        ("tpu", HALF._replace(queries=64), "jax", "128 do not divide them"),
        ("tpu", HALF._replace(queries=512, keys=384), "jax", "few enough to store their scores"),
        ("tpu", HALF._replace(rule=Rule(causal=True)), "splash", "on tpu"),
        ("tpu", HALF._replace(rule=Rule(causal=True, prefix=True)), "jax", "splash attention has no mask for Rule("),
        ("tpu", HALF._replace(rule=Rule(causal=True, window=128)), "jax", "splash attention has no mask for Rule("),
        ("tpu", HALF._replace(rule=Strange()), "jax", "splash attention has no mask for Strange("),
        ("tpu", HALF._replace(biased=True), "jax", "positions=relative add to the scores"),
        ("tpu", HALF._replace(tensor=3), "jax", "mesh.tensor=3 does not divide the heads"),
        ("tpu", HALF._replace(drops=True), "own", "model.attention_dropout=0.1 drops weights"),
        ("tpu", HALF._replace(shows=True), "own", "its weights are shown"),
        ("gpu", HALF, "cudnn", "on gpu"),
        ("gpu", HALF._replace(dtype="float16", rule=Strange(), biased=True), "cudnn", "on gpu"),
        ("gpu", HALF._replace(dtype="float32"), "jax", "cuDNN's has no float32"),
        ("gpu", HALF._replace(keys=1_023), "jax", "they must be even"),
        ("gpu", HALF._replace(drops=True), "own", "drops weights"),
    ],
)
def test_a_fused_kernel_attends_where_its_limits_hold(platform, call, kernel, why):
    found = choose_kernel(ModelConfig(attention_dropout=0.1, positions="relative"), platform, call)
    assert (found.kernel, found.chunk) == (kernel, 0)
    assert why in found.why


@pytest.mark.parametrize(
    ("fields", "platform", "kernel", "why"),
    [
        ({"d_k": 16}, "tpu", "own", "keys of 16 and values of 64"),
        ({"d_k": 136, "d_v": 136}, "gpu", "jax", "no heads of 136"),
        ({"d_k": 20, "d_v": 20}, "gpu", "jax", "no heads of 20"),
        ({"d_k": 20, "d_v": 20}, "tpu", "splash", ""),
        ({"execution": ExecutionConfig(attention_kernel="own")}, "tpu", "own", "attention_kernel=own"),
        ({"execution": ExecutionConfig(attention_kernel="own")}, "gpu", "own", "attention_kernel=own"),
        ({"precision": "highest"}, "tpu", "splash", ""),  # of bfloat16 it changes nothing
        ({"execution": ExecutionConfig(attention_chunk=64)}, "tpu", "splash", ""),
        ({"execution": ExecutionConfig(attention_chunk=64)}, "cpu", "chunked", "64 queries at a time"),
    ],
)
def test_options_and_sizes_of_heads_decide_too(fields, platform, kernel, why):
    found = choose_kernel(ModelConfig(**fields), platform, HALF)
    assert found.kernel == kernel
    assert why in found.why


def test_scores_of_long_rows_are_made_in_chunks_where_no_fused_kernel_attends():
    config, limit = ModelConfig(attention_dropout=0.1), int(MAX_PAIRS**0.5)
    short, long = (Call("bfloat16", length, length, drops=True) for length in (limit, limit + 128))
    assert choose_kernel(config, "tpu", short).kernel == "own"
    why = "model.attention_dropout=0.1 drops weights"
    chosen = KernelChoice("chunked", f"{CHUNK} queries at a time; {why}", CHUNK)
    assert choose_kernel(config, "tpu", long) == choose_kernel(config, "gpu", long) == chosen
    assert choose_kernel(config, "tpu", long._replace(drops=False)).kernel == "splash"
    assert choose_kernel(config, "cpu", long._replace(shows=True)).kernel == "own"
    whole = dataclasses.replace(config, execution=ExecutionConfig(attention_chunk=limit + 128))
    assert choose_kernel(whole, "cpu", long).kernel == "own"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "cross"])
def test_splash_attention_gives_our_values_and_gradients(causal, monkeypatch):
    """Two blocks, packed rows with padding, a head of keys that two heads of queries share, another length of keys."""
    monkeypatch.setattr(kernels, "BLOCKS", (128,))
    query, key = jnp.asarray(QUERY), jnp.asarray(QUERY if causal else KEY)
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


def test_a_model_takes_the_fused_kernel_in_all_three_places(monkeypatch):
    model = build_model(ModelConfig(**{**TINY, "num_layers": 1}))
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
    with compiling_for("tpu"):
        fused = jax.jit(lambda p, b: model.apply({"params": p}, b))(params, batch)
    assert list(seen) == [(128, 128, False), (256, 256, True), (256, 128, False)]
    np.testing.assert_allclose(fused, own, atol=2e-5 * np.abs(own).max())


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
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize("rows_of_bias", [1, 4])
@pytest.mark.parametrize("mesh", [None, (4, 1, 1), (2, 2, 2)], ids=str)
def test_cudnn_gets_the_rows_and_heads_of_its_device(monkeypatch, mesh, rows_of_bias):
    """With XLA's attention in its place, values and gradients are those of our own, on every mesh."""
    given = []

    def library(q, k, v, bias, mask, **options):
        given.append({**options, "q": q.shape, "k": k.shape, "bias": bias.shape, "mask": mask.shape})
        return real(q, k, v, bias, mask, scale=options["scale"])

    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(each, (4, 6, heads, 8)) for each, heads in zip(keys, (4, 2, 2), strict=False))
    bias = jax.random.normal(keys[3], (rows_of_bias, 4, 6, 6))
    mask = jnp.arange(6)[None, None, None] < jnp.array([4, 6, 5, 3])[:, None, None, None]

    def values(attention, q, k, v, mask, bias):
        found = attention(q, {"k": k, "v": v}, mask, bias, 0.3)
        return found[0] if isinstance(found, tuple) else found

    split = cudnn = functools.partial(values, attend_cudnn)
    if mesh:
        rows = PartitionSpec("data")
        specs = rows, rows, rows, rows, PartitionSpec() if rows_of_bias == 1 else rows
        split = jax.shard_map(
            cudnn, mesh=make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)]),
            in_specs=specs, out_specs=rows, axis_names={"data"}, check_vma=False,
        )  # fmt: skip
    weights = jax.random.normal(jax.random.key(1), q.shape)

    def gradients(function):
        return jax.grad(lambda q, k, v, bias: (function(q, k, v, mask, bias) * weights).sum(), (0, 1, 2, 3))

    own = functools.partial(values, attend)
    np.testing.assert_allclose(jax.jit(split)(q, k, v, mask, bias), own(q, k, v, mask, bias), atol=2e-6)
    for found, expected in zip(jax.jit(gradients(split))(q, k, v, bias), gradients(own)(q, k, v, bias), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-6)
    data, fsdp, tensor = mesh or (1, 1, 1)
    rows, heads = 4 // (data * fsdp), 4 // tensor
    assert given[0] == {
        "scale": 0.3, "implementation": "cudnn", "q": (rows, 6, heads, 8), "k": (rows, 6, heads // 2, 8),
        "bias": (min(rows, rows_of_bias), heads, 6, 6), "mask": (rows, 1, 6, 6),
    }  # fmt: skip
