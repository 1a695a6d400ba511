"""Attention from a few queries at a time, in chunks or slices, is that from all of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jformer.models import ExecutionConfig, build_model
from jformer.models.layers import attention, dot_product, kernels
from jformer.models.layers.dot_product import KEEP_ALL, attend, attend_in_chunks, attend_in_slices
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from jformer.parallel.backend import Target, compiling_for
from tests.conftest import make_batch, run
from tests.slow import slow_but

B, T, S, H, G, K = 2, 7, 9, 4, 2, 8
DROPPED = DropoutKey(jnp.uint32(7), jnp.arange(B))


@Partial
def drop_weights(weights, first, first_key=0):
    places = jnp.arange(weights.shape[1]), first + jnp.arange(weights.shape[2])
    return dropout(weights, 0.3, DROPPED, Site.SELF_WEIGHTS, places, (first_key, S))


@functools.cache
def arrays():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q = jax.random.normal(next(keys), (B, T, H, K))
    k, v = (jax.random.normal(next(keys), (B, S, G, K)) for _ in range(2))
    bias = jax.random.normal(next(keys), (1, H, T, S))
    return q, {"k": k, "v": v}, bias


@functools.cache
def values_and_gradients(parts, chunk=None):
    """Return what attention gives for some parts of its arguments, and its gradients: from one compiled program."""
    q, kv, bias = arrays()
    bias = None if parts == "no bias" else bias
    query = TokenPlaces(jnp.array([[1] * 3 + [2] * 4, [1] * 7]), jnp.arange(T)[None] + 1)
    key = TokenPlaces(jnp.array([[1] * 4 + [2] * 5, [1] * 8 + [0]]), jnp.arange(S)[None])
    visible = Visibility(query, key, Rule(parts != "not causal", window=3 if parts == "window" else 0))

    def attention(q, kv):
        if chunk is None:
            return jnp.sin(attend(q, kv, visible.mask(), bias, 0.3, drop_weights)[0])
        return jnp.sin(attend_in_chunks(q, kv, visible, bias, 0.3, drop_weights, chunk))

    def both(q, kv):
        values, pull = jax.vjp(attention, q, kv)
        return values, pull(2 * values)

    return jax.device_get(jax.jit(both)(q, kv))


@pytest.mark.parametrize("chunk", slow_but([1, 3, 6], 3))
@pytest.mark.parametrize("parts", slow_but(["all", "no bias", "not causal", "window"], "window"))
def test_values_and_gradients_are_those_of_all_queries_at_once(chunk, parts):
    (found, gradients), (expected, theirs) = values_and_gradients(parts, chunk), values_and_gradients(parts)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, theirs)


@functools.cache
def own_values_and_gradients(target, window=0, size=None):
    """Return what causal attention gives, all at once or in slices, to queries that see a key, and its gradients."""
    _, kv, bias = arrays()
    q, bias = jax.random.normal(jax.random.key(1), (B, S, H, K)), jnp.concatenate([bias, bias[:, :, :2]], axis=2)
    segments = jnp.array([[1] * 3 + [2] * 5 + [0], [1] * 9])  # a packed row, and a whole one
    tokens = TokenPlaces(segments, jnp.array([[0, 1, 2, 0, 1, 2, 3, 4, 0], [*range(9)]]))
    visible = Visibility(tokens, tokens, Rule(causal=True, window=window))

    def attention(q, kv, bias):
        if size is None:
            found = attend(q, kv, visible.mask(), bias, 0.3, drop_weights)[0]
        else:
            found = attend_in_slices(q, kv, visible, bias, 0.3, drop_weights, size)
        return jnp.sin(found) * (segments > 0)[..., None, None]

    def both(q, kv, bias):
        values, pull = jax.vjp(attention, q, kv, bias)
        return values, pull(2 * values)

    with compiling_for(Target(target, target)):
        return jax.device_get(jax.jit(both)(q, kv, bias))


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("size", slow_but([1, 2, 4, 8], 2))
def test_slices_of_causal_attention_give_the_same_with_fewer_keys(target, window, size):
    (found, gradients), (expected, theirs) = (own_values_and_gradients(target, window, each) for each in (size, None))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, theirs)


@pytest.mark.parametrize(
    ("window", "keys"), [(0, [16, 32, 48, 64]), (1, [16, 16, 16, 16]), (17, [16, 32, 32, 32]), (18, [16, 32, 48, 48])]
)
def test_slices_have_no_keys_that_causality_or_a_window_hides_from_all(monkeypatch, window, keys):
    seen, multiply = [], dot_product.query_key_scores
    monkeypatch.setattr(dot_product, "query_key_scores", lambda q, k: seen.append(k.shape[1]) or multiply(q, k))
    tokens = TokenPlaces(jnp.ones((1, 64), jnp.int32), jnp.arange(64)[None])
    visible, x = Visibility(tokens, tokens, Rule(causal=True, window=window)), jnp.ones((1, 64, 1, 8))
    attend_in_slices(x, {"k": x, "v": x}, visible, None, 1.0, KEEP_ALL, 16)
    assert seen == keys


def temporaries(attention, length):
    """Return the bytes that values and gradients take beside what goes in and comes out."""
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    gradient = jax.jit(jax.grad(lambda q, k, v: (attention(q, {"k": k, "v": v}) ** 2).sum(), (0, 1, 2)))
    return gradient.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """The mask is no exception: it is made for one chunk at a time."""

    def visible(q):
        tokens = TokenPlaces(jnp.ones(q.shape[:2], jnp.int32), jnp.arange(q.shape[1])[None])
        return Visibility(tokens, tokens, Rule(causal=True))

    def chunked(q, kv):
        return attend_in_chunks(q, kv, visible(q), None, 1.0, KEEP_ALL, 32)

    short, long = (temporaries(chunked, length) for length in (512, 1024))
    assert long <= 2.2 * short
    assert long < temporaries(lambda q, kv: attend(q, kv, visible(q).mask())[0], 1024) / 4


CHUNKED = {"positions": "alibi"}, {"family": "decoder", "positions": "transformer_xl"}


@pytest.mark.slow
@pytest.mark.parametrize("fields", CHUNKED, ids=["encdec", "decoder"])
def test_a_model_computes_the_same_with_all_dropout_on(tiny, fields):
    model, params = tiny(**fields, attention_dropout=0.2, dropout=0.1)
    execution = ExecutionConfig(unroll=1, attention_chunk=2)
    chunked = build_model(dataclasses.replace(model.config, execution=execution))
    batch, rngs = make_batch([7, 5], [6, 3]), {"dropout": jax.random.key(1)}
    found, expected = (np.asarray(run(each, params, batch, True, rngs=rngs)) for each in (chunked, model))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("fields", [{"window": 3}, {"positions": "relative", "family": "decoder"}], ids=str)
def test_a_model_of_slices_computes_the_same_with_all_dropout_on(tiny, fields, monkeypatch):
    model, params = tiny(**fields, attention_dropout=0.2, dropout=0.1)
    batch, rngs = make_batch([7, 5], [6, 6]), {"dropout": jax.random.key(1)}
    expected = np.asarray(run(model, params, batch, True, rngs=rngs))
    monkeypatch.setattr(kernels, "SLICE", 2)
    chosen, choose = [], kernels.choose_kernel
    monkeypatch.setattr(attention, "choose_kernel", lambda *given: chosen.append(choose(*given)) or chosen[-1])
    jax.clear_caches()  # of programs that were traced with another size
    found = np.asarray(run(model, params, batch, True, rngs=rngs))
    assert "sliced" in {choice.kernel for choice in chosen}
    np.testing.assert_allclose(found, expected, atol=2e-5)
