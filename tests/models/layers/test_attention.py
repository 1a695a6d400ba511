"""Attention: worked examples to the digit, agreement of the two kernels, and dropout of weights."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jformer.models import ModelConfig
from jformer.models.layers.attention import Attention, project_self
from jformer.models.layers.dot_product import MAX_QUERIES_FOR_SUMS, attend, attend_few_queries
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.matmul import jax_gradients
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility
from jformer.parallel.backend import Target, compiling_for
from tests.conftest import equations, only_on_cpus
from tests.tools.forecast.test_topology import compiled_for_h100, needs_cuda_compiler, written


def everything(rows, keys):
    """Return the mask that lets every query attend to every key."""
    return jnp.ones((rows, 1, 1, keys), bool)


def attention(params, x, y, key=None, rate=0.0):
    """Return the output of one head that attends from x to y, without biases, and its weights."""
    config = ModelConfig(d_model=4, num_heads=1, bias=False, attention_dropout=rate)
    tokens = (TokenPlaces(jnp.ones(z.shape[:2], jnp.int32), jnp.arange(z.shape[1])[None]) for z in (x, y))
    visible = Visibility(*tokens)
    run = nn.apply(
        lambda m: m(x, m.project_kv(y), visible, dropout_key=key),
        Attention(config, Site.SELF_WEIGHTS),
        mutable=True,
    )
    output, sown = jax.jit(run)({"params": params})
    return output, sown["intermediates"]["weights"][0]


IDENTITIES = {name: {"kernel": jnp.eye(4)} for name in "qkvo"}


def test_the_cat_sat():
    """Identity projections, d_k = 4: scores, weights and output as they are worked out by hand."""
    x = jnp.array([[[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]]], jnp.float32)
    output, weights = attention(IDENTITIES, x, x)
    expected = [[0.4223, 0.1554, 0.4223], [0.1554, 0.4223, 0.4223], [0.2119, 0.2119, 0.5761]]
    np.testing.assert_allclose(weights[0, 0], expected, atol=6e-5)
    np.testing.assert_allclose(output[0, 0], [0.8446, 0.5777, 0.8446, 0.5777], atol=6e-5)


attend_at_once = jax.jit(attend, static_argnames="scale")


def weights_of(scores, mask=None):
    """Return the weights that scores [t s] turn into."""
    q, keys = jnp.array(scores)[None, :, None], jnp.eye(len(scores[0]))[None, :, None]
    mask = everything(1, len(scores[0])) if mask is None else mask
    return np.asarray(attend_at_once(q, {"k": keys, "v": keys}, mask)[1])[0, 0]


def test_the_look_ahead_mask_hides_the_future_before_the_softmax():
    scores = np.array([[0.5, 0.2, 0.1], [0.1, 0.6, 0.2], [0.1, 0.2, 0.3]])
    tokens = TokenPlaces(jnp.ones((1, 3), jnp.int32), jnp.arange(3)[None])
    weights = weights_of(scores.tolist(), Visibility(tokens, tokens, Rule(causal=True)).mask())
    hidden = np.exp(np.where(np.tri(3) == 1, scores, -np.inf))
    np.testing.assert_allclose(weights, hidden / hidden.sum(-1, keepdims=True), atol=1e-6)
    assert (weights[np.triu_indices(3, 1)] == 0).all()


def bfloat16_inputs(*shapes):
    """Return arrays of bfloat16 numbers, and the same numbers in float32."""
    keys = jax.random.split(jax.random.key(1), len(shapes))
    half = [3 * jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    return half, [x.astype(jnp.float32) for x in half]


@only_on_cpus
def test_scores_are_float32_where_activations_are_bfloat16():
    """The weights are those of float32, rounded once: q · k is not rounded to bfloat16."""
    half, full = bfloat16_inputs((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    weights = [attend_at_once(q, {"k": k, "v": v}, None, scale=0.25)[1] for q, k, v in (half, full)]
    np.testing.assert_allclose(*(w.astype(np.float32) for w in weights), rtol=2**-8)


@pytest.mark.parametrize("queries", [3, MAX_QUERIES_FOR_SUMS + 1])
def test_scores_of_a_cache_are_float32_where_activations_are_bfloat16(queries):
    half, full = bfloat16_inputs((2, 2, queries, 16), (2, 2, 16, 7), (2, 2, 7, 16))
    at_once = jax.jit(functools.partial(attend_few_queries, scale=0.25))
    weights = [at_once(q, {"k": k, "v": v}, None)[1] for q, k, v in (half, full)]
    np.testing.assert_allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_gradient_written_by_hand_is_that_of_autodiff(platform):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(keys), (2, size, heads, 8)) for size, heads in ((5, 4), (7, 2), (7, 2)))
    bias, mask = jax.random.normal(next(keys), (1, 4, 5, 7)), jax.random.bernoulli(next(keys), 0.7, (2, 1, 5, 7))
    mask = mask.at[0, 0, 1].set(False)  # a query that sees no key

    def gradients():
        def total(q, k, v, bias):
            values, _ = attend(q, {"k": k, "v": v}, mask, bias, 0.3, dropping(2, 0.1))
            return jnp.sin(values).sum()

        return jax.jit(jax.grad(total, (0, 1, 2, 3)))(q, k, v, bias)

    with jax_gradients(True):
        expected = gradients()
    with compiling_for(Target(platform)):
        found = gradients()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


class DoubledKeys(Attention):
    """Attention that projects keys in its own way."""

    def project_kv(self, y, positions=None):
        kv = super().project_kv(y, positions)
        return {**kv, "k": 2 * kv["k"]}


def test_gpus_project_queries_keys_and_values_in_one_product_with_one_gradient():
    config = ModelConfig(d_model=8, num_heads=4, num_kv_heads=2, d_k=4, d_v=3, positions="rotary")
    x, positions = jax.random.normal(jax.random.key(0), (2, 5, 8)), jnp.tile(jnp.arange(5), (2, 1))
    places = TokenPlaces(jnp.ones((2, 5), jnp.int32), positions)

    def products(layer):
        module = layer(config, Site.SELF_WEIGHTS)

        def attend(module, x):
            return module(x, project_self(module, x, positions), Visibility(places, places), positions)

        def total(params, x):
            return jnp.sin(nn.apply(attend, module)(params, x)).sum()

        params = jax.tree.map(lambda leaf: leaf + 0.1, nn.init(attend, module)(jax.random.key(1), x))  # biases too
        expected = jax.value_and_grad(total, (0, 1))(params, x)
        with compiling_for(Target("gpu")):
            found = jax.value_and_grad(total, (0, 1))(params, x)
            program = jax.make_jaxpr(jax.grad(total, (0, 1)))(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
        return [each.primitive.name for each in equations(program.jaxpr)].count("dot_general")

    assert products(Attention) == products(DoubledKeys) - 6


def dropping(rows, rate):
    """Return the dropout of the weights of some rows."""
    key = DropoutKey(jnp.uint32(7), jnp.arange(rows))
    return Partial(lambda key, weights, _: dropout(weights, rate, key, Site.SELF_WEIGHTS), key)


@needs_cuda_compiler
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_gpus_write_scores_kept_weights_and_gradients_once_and_transpose_none(dtype, stored, learned):
    x, bias = jax.ShapeDtypeStruct((2, 256, 4, 64), dtype), jax.ShapeDtypeStruct((1, 4, 256, 256), "float32")

    def total(q, k, v, bias):
        values, _ = attend(q, {"k": k, "v": v}, None, bias, 0.125, dropping(2, 0.1))
        return jnp.sin(values.astype(jnp.float32)).sum()

    compiled = compiled_for_h100(jax.grad(total, (0, 1, 2, 3)[: 3 + learned]), x, x, x, bias)
    transposed = re.findall(r"\[([\d,]+)\]\S* transpose\(", compiled.as_text())
    assert transposed  # of queries, keys or values
    assert [shape for shape in transposed if shape.count("256") > 1] == []
    made = written(compiled)
    large = re.findall(r"(\w+)\[(?:2,4|8),256,256\]", made)
    # Scores; weights after dropout; their gradient; the same weights again, and the gradient of scores.
    assert large == 5 * [stored]
    assert ("f32[4,256,256]" in made) == learned  # the sum of the bias's gradient


@needs_cuda_compiler
@pytest.mark.parametrize("groups", [4, 2])
def test_gpus_transpose_heads_with_their_last_axis_last_and_nothing_larger(groups):
    q, kv = (jax.ShapeDtypeStruct((2, 256, heads, 64), "bfloat16") for heads in (4, groups))

    def total(q, k, v):
        values, _ = attend(q, {"k": k, "v": v}, None, None, 0.125, dropping(2, 0.1))
        return jnp.sin(values.astype(jnp.float32)).sum()

    text = compiled_for_h100(jax.grad(total, (0, 1, 2)), q, kv, kv).as_text()
    found = re.findall(r"\[([\d,]+)\]\S* transpose\(.*?dimensions=\{([\d,]+)\}", text)
    assert len(found) >= 4  # of queries, keys, values and their gradients
    for shape, axes in found:
        assert shape.count("256") == 1
        assert int(axes.split(",")[-1]) == axes.count(",")


@pytest.mark.slow
def test_weights_are_kept_in_bfloat16_alone_and_give_the_gradient_of_float32():
    half, full = bfloat16_inputs((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))

    def pulled_back(q, k, v):
        values, pull_back = jax.vjp(lambda q, k, v: attend(q, {"k": k, "v": v}, None, scale=0.25)[0], q, k, v)
        return jax.tree.leaves(pull_back), pull_back(jnp.ones_like(values) * jnp.arange(16, dtype=values.dtype))

    kept, found = pulled_back(*half)
    assert {str(x.dtype) for x in kept if x.size > 1} == {"bfloat16"}
    for x, wanted in zip(found, pulled_back(*full)[1], strict=True):
        np.testing.assert_allclose(x.astype(np.float32), wanted, atol=0.03 * np.abs(wanted).max())


def test_a_row_that_may_attend_to_nothing_stays_finite():
    assert np.isfinite(weights_of([[1.0, 2.0]], ~everything(1, 2))).all()


def test_dropout_of_weights_has_the_rate_and_keeps_their_mean():
    size, rate = 256, 0.25
    zeros, identity = (
        np.zeros((2, size, 1, 1), np.float32),
        np.tile(np.eye(size, dtype=np.float32)[:, None], (2, 1, 1, 1)),
    )

    @jax.jit
    def attended(q, kv, mask):
        return attend(q, kv, mask, drop_weights=dropping(2, rate))

    kv = {"k": zeros, "v": identity}  # the output is the weights that were kept
    kept, weights = attended(zeros, kv, everything(2, size))
    np.testing.assert_allclose(weights, 1 / size, rtol=1e-6)
    assert set(np.unique(kept).tolist()) == {0.0, np.float32(1 / size / (1 - rate)).item()}
    assert abs((np.asarray(kept) == 0).mean() - rate) < 4 * (rate * (1 - rate) / kept.size) ** 0.5


@pytest.mark.slow
def test_dropped_weights_of_a_row_ignore_its_neighbours():
    x = np.random.default_rng(0).standard_normal((3, 6, 4)).astype(np.float32)

    def output(*rows, rate=0.5):
        y = jnp.asarray(x[list(rows)])
        return np.asarray(attention(IDENTITIES, y, y, DropoutKey(jnp.uint32(7), jnp.array(rows)), rate)[0])

    np.testing.assert_allclose(output(2, 0), output(0, 1, 2)[[2, 0]], atol=1e-6)
    assert np.abs(output(0) - output(0, rate=0.0)).max() > 0.1
