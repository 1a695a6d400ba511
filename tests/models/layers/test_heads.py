"""What leaves a stack: logits over a vocabulary, or one pooled vector for a classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ModelConfig
from jformer.models.head_config import HeadConfig
from jformer.models.layers.dropout import DropoutKey
from jformer.models.layers.heads import Pooler, TokenHead
from jformer.models.layers.linear import Embedding

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


def test_the_mean_of_a_row_of_padding_is_zero():
    x, nothing = states()[:1], jnp.zeros((1, 5), bool)
    config = ModelConfig(d_model=D, head=HeadConfig(num_classes=3, pooling="mean"))
    assert not Pooler(config).apply({}, x, nothing, None).any()


def test_the_pooler_projects_and_bounds():
    x = states()
    kernel = jnp.eye(D) * 2
    np.testing.assert_allclose(pooled(x, kernel=kernel)[:, 0], jnp.tanh(2 * x[:, 0]), atol=1e-6)


def test_the_pooled_vector_is_dropped_in_training():
    x = jnp.ones((2, 5, D))
    found = pooled(x, dropout_key=DropoutKey(jnp.uint32(1), jnp.arange(2)))
    assert set(np.unique(found).tolist()) == {0.0, 2.0}


def token_head(hidden, **fields):
    """Return logits of a head whose table, kernel and bias are simple numbers."""
    c = ModelConfig(d_model=D, vocab_size=V, **fields)
    params = {"head": {"output": {"kernel": jnp.full((D, V), 3.0)}}, "table": {"embedding": jnp.ones((V, D))}}
    if c.head.transform:
        params["head"]["transform"] = {"kernel": jnp.eye(D), "bias": jnp.zeros(D)}
        params["head"]["norm"] = {"scale": jnp.ones(D), "bias": jnp.zeros(D)}
        params["head"]["bias"] = jnp.arange(V, dtype=jnp.float32)
    table = Embedding(V, D, jax.nn.initializers.zeros).bind({"params": params["table"]})
    return TokenHead(c, V).apply({"params": params["head"]}, hidden, table)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, D),
        ({"embedding_scale": "none"}, D),
        ({"embedding_scale": "output"}, D * D**-0.5),
        ({"tied_output": False}, 3 * D),
    ],
)
def test_logits_come_from_the_table_or_a_projection_of_their_own(fields, expected):
    np.testing.assert_allclose(token_head(jnp.ones((1, 2, D)), **fields), expected, rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_berts_transform_normalises_and_adds_a_bias_to_every_row(tied):
    logits = token_head(states(), head=HeadConfig(transform=True), tied_output=tied, activation="gelu")
    # The normalised features sum to zero, so constant rows of the table leave the bias alone.
    np.testing.assert_allclose(logits, np.broadcast_to(np.arange(V), logits.shape), atol=1e-4)
