"""Layers with the same parameters compute what layers with equal ones do, in any way that blocks are run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.checkpoints.untie_layers import own_layers
from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.models.layers import layer_scan
from jformer.models.parts import count_params
from jformer.parallel.backend import Target, compiling_for
from tests.conftest import TINY, draw_params, equations, make_batch, run

FIELDS = {"shared_layers": True, "num_decoder_layers": 3, "positions": "relative"}
RUNS = {
    "a loop": ExecutionConfig(unroll=1),
    "written out": ExecutionConfig(),
    "computed again": ExecutionConfig(unroll=1, remat="full"),
}


@pytest.mark.slow
def test_a_stack_has_the_parameters_of_one_layer(tiny):
    (_, shared), (_, own) = tiny(**FIELDS), tiny(**FIELDS | {"shared_layers": False})
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        assert {leaf.shape[0] for leaf in jax.tree.leaves(shared[stack]["block"])} == {1}
        assert count_params(own[stack]["block"]) == layers * count_params(shared[stack]["block"])
    jax.tree.map(np.testing.assert_array_equal, shared["source_embedding"], own["source_embedding"])


def value_and_gradient(config, params):
    batch = jax.tree.map(jnp.asarray, make_batch([5, 7], [6, 4]))

    def loss(params):
        dropped = {"rngs": {"dropout": jax.random.key(1)}}  # another mask in every layer
        return jnp.square(build_model(config).apply({"params": params}, batch, True, **dropped)).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def equal_layers():
    """Return a config and parameters of shared layers, and the value and gradient of equal ones in their place."""
    config = ModelConfig(**TINY | FIELDS | {"dropout": 0.3})
    params = draw_params(build_model(config))
    return config, params, value_and_gradient(*own_layers(config, params))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_outputs_and_gradients_are_those_of_equal_layers(equal_layers, name):
    config, params, (expected, each) = equal_layers
    value, gradient = value_and_gradient(dataclasses.replace(config, execution=RUNS[name]), params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for stack in ("encoder", "decoder"):
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0, keepdims=True), each[stack]["block"])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient[stack]["block"], total)
    assert max(np.ptp(leaf, axis=0).max() for leaf in jax.tree.leaves(each["decoder"]["block"])) > 1e-4


@pytest.mark.parametrize(
    ("platform", "execution", "written_out"),
    [
        ("cpu", ExecutionConfig(remat="full"), 2),
        ("gpu", ExecutionConfig(), 2),
        ("gpu", ExecutionConfig(unroll=1), 1),
        ("gpu", ExecutionConfig(remat="full"), 1),
        ("tpu", ExecutionConfig(), 2),
        ("tpu", ExecutionConfig(remat="full"), 1),
    ],
)
def test_a_program_has_its_layers_in_a_loop_or_written_out(tiny, platform, execution, written_out, monkeypatch):
    model, params = tiny(execution=execution, num_decoder_layers=3)
    monkeypatch.setattr(layer_scan, "MOST_UNROLLED", dict.fromkeys(layer_scan.MOST_UNROLLED, 2))
    batch = jax.tree.map(jnp.asarray, make_batch([5], [6]))
    with compiling_for(Target(platform)):
        program = jax.make_jaxpr(lambda params: model.apply({"params": params}, batch))(params)
    loops = [
        (each.params["length"], each.params["unroll"]) for each in equations(program.jaxpr) if "unroll" in each.params
    ]
    assert loops == [(2, written_out), (3, {"cpu": 3}.get(platform, 1))]


def test_layers_of_their_own_are_left_as_they_are(tiny):
    model, params = tiny()
    assert own_layers(model.config, params) == (model.config, params)
    shared, few = tiny(**FIELDS)
    config, many = own_layers(shared.config, few)
    assert config == dataclasses.replace(shared.config, shared_layers=False)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(many["decoder"]["block"])} == {3}
    batch = make_batch([5], [6])
    np.testing.assert_allclose(run(shared, few, batch), run(build_model(config), many, batch), atol=1e-5)
