"""Dropout masks depend on what an element is, never on where it lies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jformer.models import ModelConfig
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.embeddings import InputEmbedding
from jformer.models.layers.transformer import Stack
from jformer.models.layers.visibility import TokenPlaces
from jformer.parallel.activations import constrain_rows
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import FSDP, TENSOR, make_mesh
from tests.conftest import TINY, make_batch, run

drop = jax.jit(dropout, static_argnums=(1, 3))


def mask(rows=range(8), seed=1, site=Site.SELF_ATTN, shape=(40, 64), rate=0.3):
    rows = np.array(list(rows), np.int32)
    x = np.ones((len(rows), *shape), np.float32)
    return np.asarray(drop(x, rate, DropoutKey(np.uint32(seed), rows), site))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_share_and_scale_match_the_rate(rate):
    y = mask(range(64), rate=rate)
    assert abs((y == 0).mean() - rate) < 4 * (rate * (1 - rate) / y.size) ** 0.5
    assert set(np.unique(y).tolist()) == {0.0, np.float32(1 / (1 - round(rate * 65536) / 65536)).item()}


def test_mask_of_a_row_ignores_its_neighbours_and_padding():
    whole = mask(range(8))
    np.testing.assert_array_equal(mask([5, 2]), whole[[5, 2]])
    np.testing.assert_array_equal(mask(shape=(10, 64)), whole[:, :10])


def test_seed_site_layer_row_position_and_feature_all_matter():
    key = DropoutKey(jnp.uint32(1), jnp.arange(8))
    keys = [key.at_layer(jnp.int32(i)) for i in range(3)]
    layers = [np.asarray(drop(jnp.ones((8, 40, 64)), 0.5, layer, Site.SELF_ATTN)) for layer in keys]
    masks = [mask(rate=0.5), mask(rate=0.5, seed=2), mask(rate=0.5, site=Site.CROSS_ATTN), *layers]
    flat = np.array([(m > 0).ravel() for m in masks], float)
    flat = np.concatenate([flat, [np.roll(masks[0] > 0, 1, axis=axis).ravel() for axis in range(3)]])
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < 5 / flat.shape[1] ** 0.5


def test_gpus_draw_the_same_mask():
    for features in (63, 64):
        x, key = jnp.ones((8, 40, features)), DropoutKey(jnp.uint32(1), jnp.arange(8))
        expected = mask(shape=x.shape[1:])
        with compiling_for(Target("gpu")):
            found = jax.jit(lambda x, key: dropout(x, 0.3, key, Site.SELF_ATTN))(x, key)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("features", [10, 11])
def test_a_part_of_the_features_has_its_part_of_the_mask(target, features):
    key, x = DropoutKey(jnp.uint32(1), jnp.arange(8)), jnp.ones((8, 40, features))
    with compiling_for(Target(target, target)):
        whole = np.asarray(dropout(x, 0.3, key, Site.SELF_WEIGHTS))
        for first, last in ((0, 3), (2, 5), (4, 9), (7, features)):
            found = dropout(x[..., first:last], 0.3, key, Site.SELF_WEIGHTS, part=(first, features))
            np.testing.assert_array_equal(found, whole[..., first:last])


def test_devices_that_share_features_draw_their_parts_of_the_mask_without_an_exchange():
    def drop_part(x):
        key = DropoutKey(jnp.uint32(1), jnp.arange(8))
        return constrain_rows(dropout(constrain_rows(x, TENSOR), 0.3, key, Site.SELF_ATTN), TENSOR)

    mesh = make_mesh(1, 2, 4, jax.devices())
    x = jax.device_put(np.ones((8, 40, 64), np.float32), NamedSharding(mesh, PartitionSpec(FSDP, None, TENSOR)))
    with jax.set_mesh(mesh):
        compiled = jax.jit(drop_part).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), mask())
    assert not re.findall(r"all-to-all|all-gather|collective-permute", compiled.as_text())


def test_no_key_is_the_identity():
    x = jnp.ones((2, 3, 4))
    assert dropout(x, 0.5, None, Site.INPUT) is x


@pytest.mark.slow
def test_what_a_stack_gives_is_dropped_as_in_t5():
    options = TINY | {"dropout": 0.5, "norm": "pre"}
    kept, dropped = (Stack(ModelConfig(**options, output_dropout=last), 2, False, True) for last in (False, True))
    x = jax.random.normal(jax.random.key(0), (3, 8, 32))
    tokens = TokenPlaces(jnp.ones((3, 8), jnp.int32), jnp.tile(jnp.arange(8), (3, 1)))
    key = DropoutKey(jnp.uint32(5), jnp.arange(3))

    @jax.jit
    def passes(x):
        params = kept.init(jax.random.key(0), x, tokens)
        return [stack.apply(params, x, tokens, None, None, each) for each in (key, None) for stack in (kept, dropped)]

    whole, holes, *plain = map(np.asarray, passes(x))
    np.testing.assert_array_equal(holes, drop(whole, 0.5, key, Site.OUTPUT))
    assert 0.4 < (holes == 0).mean() < 0.6
    np.testing.assert_array_equal(*plain)


@pytest.mark.slow
def test_the_embedded_input_is_dropped_unless_it_is_not_to_be():
    x, key = jnp.ones((3, 8, 32)), DropoutKey(jnp.uint32(5), jnp.arange(3))
    plain, holes, kept = (
        InputEmbedding(ModelConfig(**TINY | {"dropout": 0.5}, embedding_dropout=dropped), 8).apply(
            {}, x, jnp.tile(jnp.arange(8), (3, 1)), 8, each
        )
        for dropped, each in ((True, None), (True, key), (False, key))
    )
    np.testing.assert_array_equal(holes, drop(plain, 0.5, key, Site.INPUT))
    np.testing.assert_array_equal(kept, plain)


@pytest.mark.slow
def test_a_model_drops_only_in_training_and_each_key_differently(tiny):
    model, params = tiny(family="decoder", dropout=0.5)
    batch = make_batch([5, 6], [4, 5])
    calm = [run(model, params, batch) for _ in range(2)]
    noisy = [run(model, params, batch, True, rngs={"dropout": jax.random.key(k)}) for k in (0, 0, 1)]
    np.testing.assert_array_equal(*calm)
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert np.abs(noisy[0] - noisy[2]).max() > 0.1
    assert np.abs(noisy[0] - calm[0]).max() > 0.1
