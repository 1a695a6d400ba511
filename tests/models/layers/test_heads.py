"""What leaves a stack: logits over a vocabulary, or one pooled vector for a classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ModelConfig
from jformer.models.head_config import HeadConfig
from jformer.models.layers.dropout import DropoutKey
from jformer.models.layers.heads import Pooler

D, V = 8, 11
REAL = jnp.array([[True] * 3 + [False] * 2, [True] * 5])


def states(seed=0):
    return jax.random.normal(jax.random.key(seed), (2, 5, D))


def pooled(x, dropout_key=None, kernel=None, **fields):
    params = {"dense": {"kernel": kernel, "bias": jnp.zeros(D)}} if kernel is not None else {}
    head = HeadConfig(num_classes=3, pooler=kernel is not None, **fields)
    return Pooler(ModelConfig(d_model=D, dropout=0.5, head=head)).apply({"params": params}, x, REAL, dropout_key)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_pooling_ignores_padding(pooling):
    x = states()
    found = pooled(x, pooling=pooling)
    np.testing.assert_array_equal(found, pooled(x.at[0, 3:].set(9.0), pooling=pooling))
    expected = x[:, 0] if pooling == "first" else [x[0, :3].mean(0), x[1].mean(0)]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_padding_may_come_first(pooling):
    x, behind = states()[:1], REAL[:1]
    config = ModelConfig(d_model=D, head=HeadConfig(num_classes=3, pooling=pooling))
    expected = Pooler(config).apply({}, x, behind, None)
    found = Pooler(config).apply({}, jnp.roll(x, 2, axis=1), jnp.roll(behind, 2, axis=1), None)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_mean_of_a_row_of_padding_is_zero():
    x, nothing = states()[:1], jnp.zeros((1, 5), bool)
    config = ModelConfig(d_model=D, head=HeadConfig(num_classes=3, pooling="mean"))
    assert not Pooler(config).apply({}, x, nothing, None).any()


@pytest.mark.slow
def test_the_pooled_vector_is_dropped_in_training():
    x = jnp.ones((2, 5, D))
    found = pooled(x, dropout_key=DropoutKey(jnp.uint32(1), jnp.arange(2)))
    assert set(np.unique(found).tolist()) == {0.0, 2.0}
