"""Gradients written by hand are those of the plain expressions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models.layers.matmul import add_bias, jax_gradients, matmul, query_key_scores, weighted_values
from jformer.parallel.backend import Target, compiling_for
from tests.conftest import equations

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, 8)).astype(np.float32)
QUERIES, KEYS = X.reshape(3, 5, 2, 2, 2), X.reshape(3, 5, 2, 4)[..., 2:]  # [b t g r k], [b s g k]
WEIGHTS = RNG.normal(size=(3, 2, 2, 4, 5)).astype(np.float32)  # [b g r t s]
W, B = RNG.normal(size=(8, 6)).astype(np.float32), RNG.normal(size=6).astype(np.float32)


def gradients(function, x, *rest):
    return jax.jit(jax.grad(lambda *args: jnp.sin(function(*args).astype(jnp.float32)).sum(), (0, 1)))(x, *rest)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    ("ours", "plain", "first", "second"),
    [
        (matmul, lambda x, w: x @ w.astype(x.dtype), X, W),
        (add_bias, lambda y, b: y + b.astype(y.dtype), X @ W, B),
    ],
    ids=["matmul", "add_bias"],
)
def test_gradients_are_those_of_the_plain_expression(ours, plain, first, second, dtype, tolerance):
    first, second = jnp.asarray(first, dtype), jnp.asarray(second)
    np.testing.assert_array_equal(ours(first, second), plain(first, second))
    for found, expected in zip(gradients(ours, first, second), gradients(plain, first, second), strict=True):
        assert found.dtype == expected.dtype
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "bfloat16"), ("gpu", "float32"), ("tpu", "float32")])
def test_a_weight_gradient_leaves_its_product_in_float32_but_on_cpus(platform, dtype):
    with compiling_for(Target(platform)):
        program = jax.make_jaxpr(jax.grad(lambda w: matmul(jnp.asarray(X, "bfloat16"), w).sum().astype("float32")))(W)
    products = [each.outvars[0].aval for each in equations(program.jaxpr) if each.primitive.name == "dot_general"]
    assert [product.dtype for product in products if product.shape == W.shape] == [dtype]


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_scores_of_bfloat16_models_are_rounded_but_on_cpus(platform, dtype):
    with compiling_for(Target(platform)):
        program = jax.make_jaxpr(lambda *x: query_key_scores(*x))(
            *(jnp.asarray(x, "bfloat16") for x in (QUERIES, KEYS))
        )
    products = [each.outvars[0].aval for each in equations(program.jaxpr) if each.primitive.name == "dot_general"]
    assert [product.dtype for product in products] == [dtype]
    assert program.out_avals[0].dtype == "float32"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("ours", "names", "first", "second"),
    [
        (weighted_values, "bgrts,bsgu->btgru", WEIGHTS, KEYS),
        (query_key_scores, "btgrk,bsgk->bgrts", QUERIES, KEYS),
    ],
    ids=["values", "scores"],
)
def test_products_of_attention_and_their_gradients_are_those_of_einsum(platform, ours, names, first, second):
    plain = functools.partial(jnp.einsum, names)
    with compiling_for(Target(platform)):
        np.testing.assert_allclose(jax.jit(ours)(first, second), plain(first, second), rtol=1e-5, atol=1e-6)
        found = gradients(ours, first, second)
    expected = gradients(plain, first, second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_a_bias_has_its_gradient_summed_in_float32():
    ones = jnp.ones((64, 64, 2), jnp.bfloat16)  # a sum in bfloat16 stands still at 256
    gradient = jax.grad(lambda b: add_bias(ones, b).astype(jnp.float32).sum())(jnp.zeros(2))
    np.testing.assert_array_equal(gradient, [4_096, 4_096])


def test_a_policy_of_rematerialisation_sees_the_product():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(lambda x, w: jnp.tanh(matmul(x, w)), policy=policy)
    _, pull_back = jax.eval_shape(lambda x, w: jax.vjp(layer, x, w), X, W)
    assert (3, 5, 6) in [leaf.shape for leaf in jax.tree.leaves(pull_back)]


@pytest.mark.parametrize(
    ("ours", "plain", "primals"),
    [
        (matmul, jnp.matmul, (X, W)),
        (add_bias, jnp.add, (X @ W, B)),
        (query_key_scores, lambda q, k: jnp.einsum("btgrk,bsgk->bgrts", q, k), (QUERIES, KEYS)),
        (weighted_values, lambda w, v: jnp.einsum("bgrts,bsgu->btgru", w, v), (WEIGHTS, KEYS)),
    ],
    ids=["matmul", "add_bias", "query_key_scores", "weighted_values"],
)
def test_derived_by_jax_it_has_every_mode_and_order(ours, plain, primals):
    def derivatives(function, primals):
        def total(*args):
            return jnp.sin(function(*args)).sum()

        tangents = jax.tree.map(jnp.cos, primals)
        return jax.jvp(total, primals, tangents), jax.jvp(jax.grad(total, (0, 1)), primals, tangents)

    with jax_gradients(True):
        found = derivatives(ours, primals)
    with jax.enable_x64(True):
        expected = derivatives(plain, tuple(x.astype(np.float64) for x in primals))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_a_compiled_program_is_traced_anew_for_it():
    product = jax.jit(matmul)
    product(X, W)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(product, (X, W), (X, W))
    with jax_gradients(True):
        np.testing.assert_allclose(jax.jvp(product, (X, W), (X, W))[1], 2 * X @ W, rtol=1e-4, atol=1e-5)
