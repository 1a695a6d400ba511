"""Our kernel for TPUs attends as our own code does: with a bias, a window, packed rows, the same weights dropped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import Partial

from jformer.models import build_model
from jformer.models.layers import attention, row_kernel
from jformer.models.layers.dot_product import KEEP_ALL, attend
from jformer.models.layers.dropout import DropoutKey, Site, dropout, place_words
from jformer.models.layers.row_kernel import attend_rows, queries_at_once, stages
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch
from jformer.tasks.task import make_loss, token_loss
from jformer.tools.forecast.topology import open_topology
from jformer.training.step import make_gradient
from tests.conftest import make_batch
from tests.slow import slow_but
from tests.tools.forecast.test_topology import needs_libtpu

B, H, K, RATE = 3, 4, 8, 0.3
SITE, KEY = Site.SELF_WEIGHTS, DropoutKey(jnp.uint32(7), jnp.arange(B) + 3)
CASES = {  # queries, keys, rule, rows of the bias, dropout, whether several texts share a row
    "plain": (128, 256, Rule(), 0, 0.0, False),
    "t5": (128, 128, Rule(), 1, RATE, False),
    "causal": (384, 384, Rule(causal=True), 0, RATE, True),
    "causal t5": (256, 256, Rule(causal=True), 1, RATE, False),
    "window, alibi": (256, 256, Rule(causal=True, window=40), B, RATE, True),
}


def places(length, packed):
    position = np.arange(length)
    segments = np.where(position < length - 17, 1 + packed * (position >= 90), 0)
    positions = np.where(packed & (position >= 90), position - 90, position)
    return TokenPlaces(jnp.tile(segments, (B, 1)), jnp.tile(positions, (B if packed else 1, 1)))


def drop(rate, keys, weights, first, first_key=0):
    here = jnp.arange(H), first + jnp.arange(weights.shape[2])
    return dropout(weights, rate, KEY, SITE, here, (first_key, keys))


@pytest.mark.parametrize("case", slow_but(CASES, "t5", "causal t5"))
def test_values_and_gradients_are_those_of_our_own_code(case, monkeypatch):
    """A step has one head or two, and a part of a row 128 queries or all."""
    monkeypatch.setattr(row_kernel, "STEP_PAIRS", 2 * 128 * 128)
    t, s, rule, rows, rate, packed = CASES[case]
    visible = Visibility(places(t, packed), places(s, packed), rule)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"q": (B, t, H, K), "k": (B, s, H, K), "v": (B, s, H, K), "g": (B, t, H, K), "bias": (rows, H, t, s)}
    x = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    g, bias = x.pop("g") * (visible.query.segments > 0)[..., None, None], x.pop("bias")
    x |= {"bias": bias} if rows else {}

    def own(q, k, v, bias=None):
        dropping = Partial(functools.partial(drop, rate, s)) if rate else KEEP_ALL
        return attend(q, {"k": k, "v": v}, visible.mask(), bias, 0.3, dropping)[0]

    def fused(q, k, v, bias=None):
        words = place_words(KEY, SITE, (jnp.arange(H), jnp.arange(t))) if rate else None
        return attend_rows(q, {"k": k, "v": v}, visible, bias, words, 0.3, rate, interpret=True)

    def both(function):
        values, pull_back = jax.vjp(lambda x: function(**x), x)
        return values * (g != 0), pull_back(g)

    found, expected = jax.jit(both, static_argnums=0)(fused), jax.jit(both, static_argnums=0)(own)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), found, expected)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param((1, 1, 1), {"positions": "alibi", "family": "decoder", "window": 9}, marks=pytest.mark.slow),
        ((2, 1, 2), {"positions": "relative"}),
        pytest.param((2, 2, 1), {"positions": "transformer_xl"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_has_the_same_gradients_on_any_devices(tiny, mesh, fields, monkeypatch):
    """All three attentions of an encoder and a decoder, with all dropout on; a bias that all rows share, too."""
    model, params = tiny(**fields, num_layers=1, max_length=256, attention_dropout=0.2)
    batch = make_batch([64, 50, 64, 30], [64, 20, 40, 64])
    batch = {name: np.repeat(x, 2, axis=1) if x.ndim == 2 else x for name, x in batch.items()}
    seen = []

    def interpreted(q, kv, visible, bias, words, scale, rate):
        seen.append((visible.rule.causal, None if bias is None else len(bias)))
        return attend_rows(q, kv, visible, bias, words, scale, rate, interpret=True)

    monkeypatch.setattr(attention, "attend_rows", interpreted)
    gradients = []
    for platform, shape in (("cpu", (1, 1, 1)), ("tpu", mesh)):
        with compiling_for(Target(platform)):
            on = make_mesh(*shape)
            gradient = jax.jit(make_gradient(make_loss(model, token_loss(0.1)), on))
            rows = put_batch(on, {name: x[None] for name, x in batch.items()})
            gradients.append(jax.device_get(gradient(params, rows, jax.random.key(0))[0]))
    assert len(set(seen)) == (3 if model.config.family == "encdec" else 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-6), *gradients[::-1])


def test_a_causal_row_has_up_to_four_stages():
    assert stages(512, 512, causal=True) == [(0, 128, 128), (128, 256, 256), (256, 384, 384), (384, 512, 512)]
    assert stages(640, 640, causal=True) == [(0, 256, 256), (256, 512, 512), (512, 640, 640)]
    assert stages(128, 128, causal=True) == stages(128, 128, causal=False) == [(0, 128, 128)]
    assert stages(256, 512, causal=True) == [(0, 256, 512)]


def test_parts_of_a_row_divide_it_and_have_up_to_2_16_pairs():
    sizes = (512, 512), (128, 2_048), (1_024, 256), (640, 128)
    assert [queries_at_once(*each) for each in sizes] == [128, 128, 256, 128]


def test_a_kernel_keeps_projections_once_and_no_scores(tiny):
    """Six heads of 64, 512 positions, 2 layers: of [b h k t] only the output; q, k and v, as products write them."""
    length, layers = 512, 2
    model, _ = tiny()
    config = dataclasses.replace(
        model.config, family="decoder", d_model=384, num_heads=6, d_ff=8, num_layers=layers, norm="pre",
        attention_dropout=0.1, positions="relative",
    )  # fmt: skip
    model, row = build_model(config), jnp.arange(length)[None]
    batch = {"target_in": row % 8, "target_positions": row, "target_segments": row * 0 + 1, "row": jnp.zeros(1, int)}
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch))["params"]
    with compiling_for(Target("tpu")):

        def apply(params):
            return model.apply({"params": params}, batch, True, rngs={"dropout": jax.random.key(0)})

        _, pull_back = jax.eval_shape(lambda p: jax.vjp(apply, p), params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
    assert shapes.count((layers, 1, 6, 64, length)) == 1
    assert not [shape for shape in shapes if shape[:1] == (layers,) and shape[-2:] == (length, length)]


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e:2x2", pytest.param("v4:2x2x1", marks=pytest.mark.slow)])
def test_it_compiles_for_tpus_and_stores_no_scores(chip):
    place = NamedSharding(Mesh(np.array(open_topology(chip).devices[:1]), "x"), PartitionSpec())

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def total(q, k, v, bias, segments, rule):
        tokens = TokenPlaces(segments, jnp.arange(q.shape[1])[None])
        key, inner = DropoutKey(jnp.uint32(1), jnp.arange(len(q))), (jnp.arange(q.shape[2]), jnp.arange(q.shape[1]))
        visible, words = Visibility(tokens, tokens, rule), place_words(key, SITE, inner)
        values = attend_rows(q, {"k": k, "v": v}, visible, bias, words, 0.125, 0.1)
        return values.astype(jnp.float32).sum()

    for length, size, biased, rule in ((512, 64, True, Rule()), (1_024, 128, False, Rule(causal=True, window=200))):
        b, h = 4, 8
        x, bias = array((b, length, h, size), jnp.bfloat16), array((1, h, length, length), jnp.float32)
        gradient = jax.jit(jax.grad(total, (0, 1, 2, 3) if biased else (0, 1, 2)), static_argnums=5)
        arguments = x, x, x, bias if biased else None, array((b, length), jnp.int32), rule
        compiled = gradient.lower(*arguments).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1  # values are not asked for
        assert compiled.memory_analysis().temp_size_in_bytes < b * h * length**2 * 2  # of scores, bfloat16
