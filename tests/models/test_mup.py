"""Maximal update parametrization: the base model is the standard one, and what an update changes keeps its size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jformer.config.options import OptimConfig
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.layers.embeddings import InputEmbedding
from jformer.models.layers.initializers import kernel_init, table_init
from jformer.models.mup_config import MupConfig
from jformer.training.optim import make_optimizer
from tests.conftest import draw_params

BASE, HEADS, VOCABULARY = 32, 4, 50
WIDE = 256
UNTIED = {"family": "decoder", "tied_output": False}
RATE, UPDATES = 0.01, 4


def model_of(width, parametrization="mup", **changes):
    fields = {"vocab_size": VOCABULARY, "num_layers": 1, "d_model": width, "d_ff": 4 * width, "num_heads": HEADS,
              "norm": "pre", "dropout": 0.0, "parametrization": parametrization}  # fmt: skip
    fields |= {"mup": MupConfig(base_width=BASE)} if parametrization == "mup" else {}
    return build_model(ModelConfig(**{**fields, **changes}))


def batch():
    rng = np.random.default_rng(0)
    tokens = {side: jnp.asarray(rng.integers(1, VOCABULARY, (8, 6))) for side in ("source", "target_in", "labels")}
    ones, positions = jnp.ones((8, 6), jnp.int32), jnp.broadcast_to(jnp.arange(6), (8, 6))
    segments = {f"{side}_segments": ones for side in ("source", "target")}
    return {**tokens, **segments, "source_positions": positions, "target_positions": positions, "source_types": ones}


def trained(model, seed=0):
    """Return the logits before the first of a few updates and after the last, and the parameters there.

    All of it is one program: compiling takes longer than the updates.
    """
    data = batch()
    tx = make_optimizer(OptimConfig(clip_norm=0.0), lambda step: RATE, None, model.config.mup_width_ratio)

    def loss(params):
        logits = model.apply({"params": params}, data)
        return optax.softmax_cross_entropy_with_integer_labels(logits, data["labels"]).mean()

    def update(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train(key):
        before = init_params(model, key)
        (after, _), _ = jax.lax.scan(update, (before, tx.init(before)), length=UPDATES)
        logits = jax.lax.map(lambda params: model.apply({"params": params}, data), stacked(before, after))
        return *logits, after

    return jax.device_get(train(jax.random.key(seed)))


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def growth(**changes):
    """Return how much more the wide model's logits change than the base's, in two parametrizations.

    Both have the same base, as a test shows.
    """

    def change(width, parametrization):
        before, after, _ = trained(model_of(width, parametrization, **changes))
        return float(np.abs(after - before).mean())

    base = change(BASE, "standard")
    return {parametrization: change(WIDE, parametrization) / base for parametrization in ("standard", "mup")}


@pytest.mark.slow
def test_the_base_model_is_the_standard_one_through_training():
    ours, theirs = (trained(model_of(BASE, name, family="decoder")) for name in ("mup", "standard"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"family": "decoder", "init": "bert"}, UNTIED], ids=str)
def test_updates_change_logits_as_much_at_every_width(changes):
    """The coordinate check of Yang et al. 2022, appendix D.1, over 8 times the width."""
    found = growth(**changes)
    assert 0.4 < found["mup"] < 2.5, found
    assert found["standard"] > 2 * found["mup"], found


def test_scales_are_those_of_the_paper():
    c = model_of(4 * BASE).config
    assert (c.mup_width_ratio, c.scale_width) == (4.0, BASE)
    assert c.query_scale == pytest.approx((BASE / HEADS) ** 0.5 / (4 * BASE / HEADS))  # 1/k
    more_heads = dataclasses.replace(c, num_heads=4 * HEADS, mup=MupConfig(BASE, HEADS))
    assert more_heads.query_scale == pytest.approx((BASE / HEADS) ** -0.5)  # heads of the base's size: its scale
    assert dataclasses.replace(c, d_k=16).query_scale == pytest.approx(16**-0.5)


@pytest.mark.parametrize("init", ["glorot", "he", "small", "bert", "gpt2", "t5"])
def test_kernels_shrink_with_the_width_and_tables_do_not(init):
    def deviation(width, draw, role, *shape):
        config = dataclasses.replace(model_of(width).config, init=init)
        return float(jax.jit(lambda key: draw(config, role)(key, shape).std())(jax.random.key(0)))

    narrow, wide = (deviation(width, kernel_init, "value", width, width) for width in (64, 256))
    assert narrow / wide == pytest.approx(2, rel=0.05)
    narrow, wide = (deviation(width, table_init, "tokens", 2_000, 64) for width in (64, 256))
    assert narrow == wide


def test_embedded_tokens_are_as_large_as_in_the_base():
    x, places = jnp.ones((1, 1, 4 * BASE)), jnp.zeros((1, 1), jnp.int32)
    config = dataclasses.replace(model_of(4 * BASE).config, positions="none")
    embedded = jax.jit(lambda x: InputEmbedding(config, 1).apply({}, x, places, 1, None))(x)
    np.testing.assert_allclose(embedded, BASE**0.5 * np.ones_like(embedded), rtol=1e-6)


def test_kernels_learn_slower_and_decay_as_fast_as_in_the_base():
    model = model_of(4 * BASE)
    params = draw_params(model)
    ones, nothing = (jax.tree.map(fill, params) for fill in (np.ones_like, np.zeros_like))

    def first_update(mup_width_ratio, gradients, decay):
        options = OptimConfig(optimizer="adamw", weight_decay=decay, clip_norm=0.0)
        tx = make_optimizer(options, lambda step: RATE, None, mup_width_ratio)
        return jax.jit(lambda gradients, params: tx.update(gradients, tx.init(params), params)[0])(gradients, params)

    base, wide = (first_update(mup_width_ratio, ones, 0.0)["decoder"]["block"] for mup_width_ratio in (1.0, 4.0))
    kernel, scale = (block["feed_forward"]["up"]["kernel"] for block in (base, wide)), wide["self_attn_norm"]["scale"]
    assert np.ptp([float(array.mean()) for array in kernel]) == pytest.approx(RATE * 3 / 4, rel=1e-4)
    np.testing.assert_allclose(scale, -RATE, rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, *(first_update(w, nothing, 0.1) for w in (1.0, 4.0)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"parametrization": "standard", "mup": MupConfig(64)}, r"model\.mup\.base_width=64: a model of"),
        ({"mup": MupConfig(0)}, r"model\.mup\.base_width=0"),
        ({"mup": MupConfig(30)}, r"base_width=30 must be a multiple of the base's 4 heads"),
        ({"mup": MupConfig(BASE, -1)}, r"model\.mup\.base_heads=-1"),
        ({"attention_scale": "one"}, r"model\.attention_scale='one'"),
        ({"family": "encoder"}, "family encdec or decoder"),
        ({"parametrization": "ntk"}, r"model\.parametrization='ntk'"),
    ],
)
def test_what_has_no_base_is_refused(changes, line):
    with pytest.raises(UserError, match=line):
        model_of(BASE, **changes)
