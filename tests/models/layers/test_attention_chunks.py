"""Attention from a few queries at a time is that from all of them, in less memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jformer.models import ExecutionConfig, build_model
from jformer.models.layers.dot_product import KEEP_ALL, attend, attend_in_chunks
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from tests.conftest import make_batch, run
from tests.slow import slow_but

B, T, S, H, G, K = 2, 7, 9, 4, 2, 8
DROPPED = DropoutKey(jnp.uint32(7), jnp.arange(B))


@Partial
def drop_weights(weights, first):
    places = jnp.arange(weights.shape[1]), first + jnp.arange(weights.shape[2])
    return dropout(weights, 0.3, DROPPED, Site.SELF_WEIGHTS, places)


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
@pytest.mark.parametrize("fields", slow_but(CHUNKED, CHUNKED[1]), ids=["encdec", "decoder"])
def test_a_model_computes_the_same_with_all_dropout_on(tiny, fields):
    model, params = tiny(**fields, attention_dropout=0.2, dropout=0.1)
    execution = ExecutionConfig(unroll=1, attention_chunk=2)
    chunked = build_model(dataclasses.replace(model.config, execution=execution))
    batch, rngs = make_batch([7, 5], [6, 3]), {"dropout": jax.random.key(1)}
    found, expected = (np.asarray(run(each, params, batch, True, rngs=rngs)) for each in (chunked, model))
    np.testing.assert_allclose(found, expected, atol=2e-5)
