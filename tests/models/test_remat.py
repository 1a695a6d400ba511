"""What is computed again changes nothing but memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.parallel.backend import Target, compiling_for
from tests.conftest import draw_params

FIELDS = {"vocab_size": 40, "num_layers": 2, "d_model": 16, "d_ff": 64, "num_heads": 4, "dropout": 0.1}
SMOOTH = {"activation": "gelu_tanh", "norm": "pre"}


def full_batch(vocabulary, rows, length):
    """Return rows of random tokens without padding."""
    tokens = np.random.default_rng(0).integers(4, vocabulary, (rows, length)).astype(np.int32)
    ones, places = np.ones_like(tokens), np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    sides = {
        f"{side}_{name}": x for side in ("source", "target") for name, x in (("segments", ones), ("positions", places))
    }
    arrays = {"source": tokens, "target_in": tokens, "row": np.arange(rows, dtype=np.int32)} | sides
    return jax.tree.map(jnp.asarray, arrays)


def loss_of(remat, unroll=0, **options):
    model = build_model(ModelConfig(**FIELDS, **options, execution=ExecutionConfig(unroll=unroll, remat=remat)))
    batch = full_batch(FIELDS["vocab_size"], rows=8, length=16)
    params = draw_params(model)

    def loss(params):
        logits = model.apply({"params": params}, batch, True, rngs={"dropout": jax.random.key(1)})
        return jnp.square(logits).mean()

    return loss, params


def kept(remat, **options):
    """Return the bytes that wait for the backward pass."""
    loss, params = loss_of(remat, **options)
    _, pull_back = jax.eval_shape(lambda p: jax.vjp(loss, p), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull_back))


@pytest.mark.slow
def test_less_is_kept_from_policy_to_policy():
    none, dots, full = (kept(remat) for remat in ("none", "dots", "full"))
    assert none > 1.5 * dots > 1.5**2 * full


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [0, 1], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_loss_and_gradient_stay_the_same(remat, unroll):
    expected, gradient = jax.jit(jax.value_and_grad(loss_of("none")[0]))(loss_of("none")[1])
    loss, params = loss_of(remat, unroll)
    found, again = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    difference = jax.tree.map(lambda a, b: np.linalg.norm(a - b), again, gradient)
    assert sum(jax.tree.leaves(difference)) <= 1e-5 * sum(np.linalg.norm(x) for x in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [SMOOTH, {"activation": "swiglu", "norm_type": "rmsnorm"}],
    ids=["gelu", "swiglu"],
)
def test_accelerators_keep_inputs_of_norms_and_activations_alone(options):
    (loss, params), here = loss_of("none", **options), kept("none", **options)
    expected = jax.jit(jax.value_and_grad(loss))(params)
    with compiling_for(Target("tpu")):
        assert kept("none", **options) < 0.8 * here
        loss, _ = loss_of("none", 1, **options)
        found = jax.jit(jax.value_and_grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), found, expected)


@pytest.mark.parametrize(("activation", "arrays"), [("gelu_tanh", 1), ("swiglu", 2)])
def test_tpus_keep_no_input_of_the_second_projection(activation, arrays):
    with compiling_for(Target("tpu")):
        loss, params = loss_of("none", 1, activation=activation, activation_dropout=0.1)
        _, pull_back = jax.eval_shape(lambda p: jax.vjp(loss, p), params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
    assert shapes.count((FIELDS["num_layers"], 8, 16, FIELDS["d_ff"])) == 2 * arrays  # of encoder and decoder


def test_tpus_keep_no_masks_of_dropout():
    loss, params = loss_of("none", activation_dropout=0.1, **SMOOTH)

    def masks():
        _, pull_back = jax.eval_shape(lambda p: jax.vjp(loss, p), params)
        shapes = [leaf.shape[-3:] for leaf in jax.tree.leaves(pull_back) if leaf.dtype == bool]
        return {shape for shape in shapes if shape[0] == 8}  # rows: those of attention have heads there

    assert masks() == {(8, 16, 16), (8, 16, 64)}
    with compiling_for(Target("tpu")):
        assert masks() == set()
