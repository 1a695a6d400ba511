import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models.layers.linear import Embedding
from jformer.models.layers.matmul import jax_gradients, matmul
from jformer.parallel.backend import Target, compiling_for
from jformer.tasks import losses
from tests.conftest import equations, only_on_cpus
from tests.slow import slow_but
from tests.tools.forecast.test_topology import compiled_for_h100, needs_cuda_compiler, written

V = 37
RNG = np.random.default_rng(0)
TARGETS = RNG.integers(0, V, (3, 5)).astype(np.int32)
LOGITS = (RNG.normal(size=(3, 5, V)) * 4).astype(np.float32)
LOGITS[:, ::2] += 20 * np.eye(V, dtype=np.float32)[TARGETS[:, ::2]]  # every second token is predicted right
WEIGHTS = (np.arange(5) < np.array([[5], [3], [1]])).astype(np.float32)
SMOOTHINGS = [0.0, 0.1, 0.4]


@functools.partial(jax.jit, static_argnums=3)
def cross_entropy(logits, targets, weights, smoothing=0.0):
    return losses.cross_entropy(logits, targets, weights, smoothing)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def smoothed(smoothing):
    """Write the target distribution out: 1 - ε on the target and ε spread over all entries."""
    return (1 - smoothing) * np.eye(V)[TARGETS] + smoothing / V


def loss_sum(logits, smoothing):
    return losses.cross_entropy(logits, jnp.asarray(TARGETS), jnp.asarray(WEIGHTS), smoothing)["loss"].total


gradient_of = jax.jit(jax.grad(loss_sum), static_argnums=1)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_loss_is_the_cross_entropy_with_the_smoothed_distribution(smoothing):
    log_probs = log_softmax(LOGITS.astype(np.float64))
    sums = cross_entropy(LOGITS, TARGETS, WEIGHTS, smoothing)
    expected = {
        "loss": -(smoothed(smoothing) * log_probs).sum(-1),
        "nll": -np.take_along_axis(log_probs, TARGETS[..., None], -1)[..., 0],
        "correct": LOGITS.argmax(-1) == TARGETS,
    }
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name][0], (value * WEIGHTS).sum(), rtol=1e-6, err_msg=name)
        assert float(sums[name][1]) == WEIGHTS.sum()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_equal_logits_only_the_first_counts_as_predicted(dtype):
    logits = jnp.zeros((1, 4, 3), dtype).at[0, 3].set(jnp.array([1, 2, 2]))
    for targets, correct in (([0, 0, 0, 1], 4), ([1, 2, 0, 2], 1)):
        sums = cross_entropy(logits, np.array([targets]), np.ones((1, 4)))
        assert float(sums["correct"].total) == correct


def test_logits_that_are_no_numbers_predict_nothing():
    sums = cross_entropy(np.full((1, 2, 3), np.nan, np.float32), np.array([[0, 1]]), np.ones((1, 2)))
    assert float(sums["correct"].total) == 0


def test_one_pass_finds_what_several_find():
    logits = LOGITS.copy()
    logits[0, 1, [3, 30]] = 50.0  # the first of equals
    logits[0, 2, 7:] = -np.inf
    logits[1, 0, 5] = np.nan
    arguments = jnp.asarray(logits), jnp.asarray(np.eye(V, dtype=bool)[TARGETS])
    found = jax.jit(losses.reduce_in_one_pass)(*arguments)
    for name, one, several in zip(losses.Reduced._fields, found, losses.reduce_in_passes(*arguments), strict=True):
        np.testing.assert_allclose(one, several, rtol=2e-6, atol=1e-5, err_msg=name)
        assert one.dtype == several.dtype


def test_smoothed_loss_by_hand():
    """Logits (ln 6, ln 3, ln 1) are probabilities .6, .3, .1; of ε = 0.3 every entry gets 0.1."""
    logits = np.log([[[6.0, 3.0, 1.0]]]).astype(np.float32)
    sums = cross_entropy(logits, np.array([[1]]), np.ones((1, 1)), 0.3)
    expected = -(0.8 * np.log(0.3) + 0.1 * np.log(0.6) + 0.1 * np.log(0.1))
    assert float(sums["loss"].total) == pytest.approx(expected, rel=1e-6)
    assert float(sums["nll"].total) == pytest.approx(-np.log(0.3), rel=1e-6)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_gradient_is_probabilities_less_the_smoothed_distribution(smoothing):
    expected = (np.exp(log_softmax(LOGITS.astype(np.float64))) - smoothed(smoothing)) * WEIGHTS[..., None]
    np.testing.assert_allclose(gradient_of(LOGITS, smoothing), expected, atol=2e-6)


def test_no_tokens_sum_to_zero_without_nan():
    zeros = np.zeros_like(WEIGHTS)
    found = cross_entropy(LOGITS, TARGETS, zeros, 0.1)
    assert all(float(part) == 0 for pair in found.values() for part in pair)
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, TARGETS, zeros, 0.1)["loss"].total))(LOGITS)
    assert not np.asarray(gradient).any()


def test_padding_adds_nothing_whatever_its_logits():
    other = np.where(WEIGHTS[..., None] > 0, LOGITS, 50.0)
    for name, pair in cross_entropy(other, TARGETS, WEIGHTS, 0.1).items():
        np.testing.assert_array_equal(pair, cross_entropy(LOGITS, TARGETS, WEIGHTS, 0.1)[name])


def test_sums_of_parts_add_to_the_sum_of_the_whole():
    whole = cross_entropy(LOGITS, TARGETS, WEIGHTS, 0.1)
    parts = [cross_entropy(LOGITS[i], TARGETS[i], WEIGHTS[i], 0.1) for i in (slice(0, 1), slice(1, 3))]
    for name, pair in whole.items():
        np.testing.assert_allclose(pair, [sum(part[name][k] for part in parts) for k in (0, 1)], rtol=1e-6)


def test_large_logits_stay_finite_and_bfloat16_is_summed_in_float32():
    sums = cross_entropy(LOGITS * 1e4, TARGETS, WEIGHTS, 0.1)
    assert all(np.isfinite(float(total)) for total, _ in sums.values())
    half = cross_entropy(jnp.asarray(LOGITS, jnp.bfloat16), TARGETS, WEIGHTS, 0.1)
    rounded = cross_entropy(jnp.asarray(LOGITS, jnp.bfloat16).astype(jnp.float32), TARGETS, WEIGHTS, 0.1)
    for name in half:
        assert half[name][0].dtype == jnp.float32
        np.testing.assert_allclose(half[name], rounded[name], rtol=1e-6)


def test_no_distribution_over_the_vocabulary_is_built_or_scattered():
    closed = jax.make_jaxpr(jax.value_and_grad(lambda h: chunked(h, PARAMS, 0.1)["loss"].total))(HIDDEN)
    names = {equation.primitive.name for equation in equations(closed.jaxpr)}
    assert "exp" in names  # the walk sees what is computed
    assert not [name for name in names if "scatter" in name]
    assert all(np.size(const) <= np.size(PARAMS["kernel"]) for const in closed.consts)


HIDDEN = np.random.default_rng(1).normal(size=(*TARGETS.shape, 6)).astype(np.float32)
PARAMS = {
    "kernel": np.random.default_rng(2).normal(size=(6, V)).astype(np.float32),
    "bias": np.random.default_rng(3).normal(size=V).astype(np.float32),
    "unused": np.ones(3, np.float32),
}


def project(params, hidden):
    return jnp.tanh(hidden) @ params["kernel"].astype(hidden.dtype) + params["bias"].astype(hidden.dtype)


def chunked(hidden, params, smoothing):
    targets, weights = jnp.asarray(TARGETS), jnp.asarray(WEIGHTS)
    return losses.chunked_cross_entropy(jnp.asarray(hidden), lambda h: project(params, h), targets, weights, smoothing)


def plain(hidden, params, smoothing):
    return losses.cross_entropy(
        project(params, jnp.asarray(hidden)), jnp.asarray(TARGETS), jnp.asarray(WEIGHTS), smoothing
    )


plain_sums = jax.jit(lambda hidden: plain(hidden, PARAMS, 0.1))


@pytest.fixture(params=[0, 2, TARGETS.shape[1]], ids="{}_positions".format)
def positions(request, monkeypatch):
    """Make chunks of so many positions, at least one, whether or not they divide the length."""
    for platform in ("cpu", "gpu"):
        monkeypatch.setitem(losses.CHUNK, platform, request.param * TARGETS.shape[0] * V)
    return request.param


@pytest.mark.parametrize(
    ("platform", "dtype", "smoothing", "tolerance"),
    [("cpu", "float32", 0.0, 2e-6), ("cpu", "bfloat16", 0.1, 2e-2), ("gpu", "float32", 0.1, 2e-6)],
)
def test_chunks_give_the_plain_loss_and_its_gradient(positions, platform, dtype, smoothing, tolerance):
    def objective(function):
        def total(hidden, params):
            sums = function(hidden, params, smoothing)
            return 0.3 * sums["loss"].total, sums  # the slope of what comes after the loss counts

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

    hidden = jnp.asarray(HIDDEN, dtype)
    with compiling_for(Target(platform)):
        (_, sums), gradient = objective(chunked)(hidden, PARAMS)
    (_, expected_sums), expected = objective(plain)(hidden, PARAMS)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6)
    for found, reference in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert found.dtype == reference.dtype
        found, reference = (np.asarray(x, np.float32) for x in (found, reference))
        assert np.linalg.norm(found - reference) <= tolerance * np.linalg.norm(reference)


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("tpu", "bfloat16"), ("gpu", "bfloat16")])
def test_logits_are_float32_on_cpus_and_elsewhere_of_the_dtype_of_products(platform, dtype):
    table, hidden = Embedding(V, 6, nn.initializers.normal()), jnp.asarray(HIDDEN, jnp.bfloat16)
    params = table.init(jax.random.key(0), hidden, method="attend")

    def total(params):
        project = functools.partial(table.apply, params, method="attend")
        return losses.chunked_cross_entropy(hidden, project, jnp.asarray(TARGETS), jnp.asarray(WEIGHTS))["loss"].total

    with compiling_for(Target(platform)):
        closed = jax.make_jaxpr(jax.grad(total))(params)
    products = [each.outvars[0].aval for each in equations(closed.jaxpr) if each.primitive.name == "dot_general"]
    assert {str(array.dtype) for array in products if array.ndim == 3 and array.shape[-1] == V} == {dtype}


def test_chunks_give_the_plain_loss_where_no_gradient_is_asked_for(positions):
    sums = jax.jit(lambda h: chunked(h, PARAMS, 0.1))(HIDDEN)
    for name, pair in plain_sums(HIDDEN).items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6)


def test_a_loss_that_was_staged_can_be_differentiated():
    expected = jax.jit(jax.grad(lambda h, p: plain(h, p, 0.1)["loss"].total, (0, 1)))(HIDDEN, PARAMS)
    for stage in (jax.jit, jax.checkpoint):
        staged = stage(lambda h, p: chunked(h, p, 0.1)["loss"].total)
        found = jax.jit(jax.grad(staged, (0, 1)))(HIDDEN, PARAMS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def chunked_total(name, part):
    def total(hidden, params, weights):
        sums = losses.chunked_cross_entropy(hidden, lambda h: project(params, h), jnp.asarray(TARGETS), weights, 0.1)
        return sums[name][part]

    return total


def plain_total(name, part):
    """Write the figure out, in float64 if its arguments are."""

    def total(hidden, params, weights):
        logits = project(params, hidden)
        log_probs = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(log_probs, TARGETS[..., None], -1)[..., 0]
        values = {
            "loss": 0.9 * nll - 0.1 * log_probs.mean(-1),
            "nll": nll,
            "correct": (logits.argmax(-1) == TARGETS).astype(hidden.dtype),
        }
        return ((values[name] * weights).sum(), weights.sum())[part]

    return total


def as_float64(function, *args):
    with jax.enable_x64(True):
        return function(*jax.tree.map(lambda x: np.asarray(x, np.float64), args))


def assert_trees_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


ARGUMENTS = jax.tree.map(jnp.asarray, (HIDDEN, PARAMS, WEIGHTS))


@pytest.mark.parametrize(("name", "part"), [("loss", 0), ("loss", 1), ("nll", 0), ("correct", 0)])
@pytest.mark.parametrize("mine", slow_but([False, True], False), ids=["by_hand", "by_jax"])
def test_every_figure_has_the_gradient_of_the_plain_one(mine, name, part, positions):
    with jax_gradients(mine):
        found = jax.jit(jax.grad(chunked_total(name, part), (0, 1, 2)))(*ARGUMENTS)
        alone = jax.jit(jax.grad(chunked_total(name, part)))(*ARGUMENTS)  # where no weight has a gradient
    expected = as_float64(jax.grad(plain_total(name, part), (0, 1, 2)), *ARGUMENTS)
    assert_trees_close((*found, alone), (*expected, expected[0]))


@pytest.mark.parametrize("name", slow_but(["loss", "nll"], "nll"))
def test_forward_mode_and_products_with_the_hessian_are_those_of_the_plain_figure(name, positions):
    tangents = jax.tree.map(lambda x: jnp.cos(7 * x + 1), ARGUMENTS)

    def derivatives(function, primals, tangents):
        slope = jax.jvp(function, primals, tangents)[1]
        return slope, jax.jvp(jax.grad(function, (0, 1, 2)), primals, tangents)[1]

    with jax_gradients(True):
        found = jax.jit(lambda *args: derivatives(chunked_total(name, 0), *args))(ARGUMENTS, tangents)
    expected = as_float64(lambda *args: derivatives(plain_total(name, 0), *args), ARGUMENTS, tangents)
    assert_trees_close(found, expected)


@only_on_cpus
def test_a_large_vocabulary_takes_a_third_of_the_memory():
    shapes = jax.ShapeDtypeStruct((64, 32, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16_000), jnp.float32)
    ids, weights = jnp.zeros((64, 32), jnp.int32), jnp.ones((64, 32))

    def temporaries(loss):
        compiled = jax.jit(jax.grad(lambda h, w: loss(h, w)["loss"].total, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = temporaries(lambda h, w: losses.cross_entropy(h @ w, ids, weights, 0.1))
    assert whole >= 64 * 32 * 16_000 * 4
    assert temporaries(lambda h, w: losses.chunked_cross_entropy(h, lambda x: x @ w, ids, weights, 0.1)) < whole / 3


@needs_cuda_compiler
def test_chunks_on_gpus_share_a_rounded_table(monkeypatch):
    monkeypatch.setitem(losses.CHUNK, "gpu", 2**20)  # 8 chunks of 32 positions
    shapes = ((4, 256, 64), "bfloat16"), ((5120, 64), "float32"), ((4, 256), "int32"), ((4, 256), "float32")

    def total(hidden, table, ids, weights):
        return losses.chunked_cross_entropy(hidden, lambda h: matmul(h, table.T), ids, weights)["loss"].total

    made = written(compiled_for_h100(jax.grad(total, (0, 1)), *(jax.ShapeDtypeStruct(*each) for each in shapes)))
    logits = re.findall(r"bf16\[(?:128|4,32),5120\]", made)  # and their gradients
    assert (len(logits), len(re.findall(r"bf16\[(?:5120,64|64,5120)\]", made))) == (2 * 8, 1)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_several_labels_cost_the_cross_entropy_of_each(smoothing):
    logits, there, weights = LOGITS[:, 0], RNG.integers(0, 2, (3, V)), np.ones((3, V), np.float32)
    weights[1] = 0
    found = losses.binary_cross_entropy(jnp.asarray(logits), jnp.asarray(there), jnp.asarray(weights), smoothing)
    p, given = 1 / (1 + np.exp(-logits.astype(np.float64))), there * (1 - smoothing) + smoothing / 2
    expected = {
        "loss": -given * np.log(p) - (1 - given) * np.log1p(-p),
        "nll": -np.where(there, np.log(p), np.log1p(-p)),
        "correct": (p > 0.5) == there,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].total, (value * weights).sum(), rtol=1e-4)
        assert found[name].count == 2 * V


def test_the_squared_error_counts_what_weighs():
    found = losses.squared_error(jnp.array([[1.0], [5.0]]), jnp.array([[3.0], [9.0]]), jnp.array([[1.0], [0.0]]))
    assert {name: (float(total), float(count)) for name, (total, count) in found.items()} == {"loss": (4.0, 1.0)}
