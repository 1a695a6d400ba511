"""Norms: what they compute, and their gradients for GPUs."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ModelConfig
from jformer.models.layers.norms import make_norm
from jformer.parallel.backend import Target, compiling_for
from tests.tools.forecast.test_topology import compiled_for_h100, needs_cuda_compiler, written

KINDS = pytest.mark.parametrize(("kind", "bias"), [("layernorm", True), ("layernorm", False), ("rmsnorm", True)])


def norms(kind, bias, dtype="float32"):
    """Return ours, and that of Flax, with the same parameters."""
    config = ModelConfig(norm_type=kind, bias=bias, dtype=dtype, norm_epsilon=1e-5)
    if kind == "rmsnorm":
        return make_norm(config), nn.RMSNorm(epsilon=1e-5, dtype=dtype)
    return make_norm(config), nn.LayerNorm(epsilon=1e-5, dtype=dtype, use_bias=bias, use_fast_variance=False)


@KINDS
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_norms_and_their_gradients_are_those_of_flax(kind, bias, platform):
    ours, theirs = norms(kind, bias)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 5, 48)) + 100 * jnp.arange(3)[:, None, None]  # means far above deviations
    wanted = jax.random.normal(keys[1], x.shape)
    params = ours.init(keys[2], x)
    params = jax.tree.map(lambda leaf: leaf + jax.random.normal(keys[2], leaf.shape), params)

    def values(norm):
        return jax.jit(jax.value_and_grad(lambda *given: (norm.apply(*given) * wanted).sum(), (0, 1)))(params, x)

    with compiling_for(Target(platform)):
        found = values(ours)
    expected = values(theirs)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@needs_cuda_compiler
@KINDS
def test_gradients_on_gpus_write_one_array_that_of_the_input(kind, bias):
    ours, _ = norms(kind, bias, "bfloat16")
    x = jax.ShapeDtypeStruct((8, 1024, 768), "bfloat16")
    params = jax.eval_shape(ours.init, jax.random.key(0), x)
    made = written(compiled_for_h100(lambda params, x, g: jax.vjp(ours.apply, params, x)[1](g), params, x, x))
    assert re.findall(r"(\w+)\[(?:8,1024|8192),768\]", made) == ["bf16"]
