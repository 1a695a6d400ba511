"""Recurrent layers against PyTorch's, forward and backward; skipped, and said so, where there is no torch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ModelConfig
from jformer.models.layers.recurrent_cells import STATES, RecurrentLayer
from jformer.models.layers.recurrent_stack import RecurrentStack
from jformer.models.recurrent_config import RecurrentConfig

torch = pytest.importorskip("torch", reason="parity with PyTorch needs it: pip install torch==2.13.0")

MODULES = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
B, T, D, H = 4, 9, 12, 8
LENGTHS = [9, 5, 7, 1]


def weights_of(params):
    """Return the parameters of a layer, or their gradients, by the names of PyTorch."""
    return {
        "weight_ih": params["input"]["kernel"].T,
        "weight_hh": params["state_kernel"].T,
        "bias_ih": params["input"]["bias"],
        "bias_hh": params.get("state_bias", jnp.zeros_like(params["input"]["bias"])),
    }


@pytest.fixture(params=MODULES)
def pair(request):
    """Return a layer, its parameters, and PyTorch's module with the same numbers."""
    layer = RecurrentLayer(request.param, H)
    x, real = jnp.zeros((B, T, D)), jnp.ones((B, T), bool)
    params = layer.init(jax.random.key(0), x, real)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape, scale=0.4), jnp.float32), params)
    module = MODULES[request.param](D, H, batch_first=True)
    with torch.no_grad():
        for name, value in weights_of(params).items():
            getattr(module, f"{name}_l0").copy_(torch.tensor(np.array(value)))
    return layer, params, module


def through_torch(module, x, weights):
    """Return the input with its gradient, the outputs and the last state of rows of LENGTHS."""
    theirs = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(theirs, LENGTHS, batch_first=True, enforce_sorted=False)
    outputs, last = module(packed)
    outputs, _ = torch.nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
    (outputs * torch.tensor(weights)).sum().backward()
    return theirs, outputs, last


def test_outputs_and_gradients_are_those_of_pytorch(pair):
    layer, params, module = pair
    rng = np.random.default_rng(1)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    real = np.arange(T) < np.array(LENGTHS)[:, None]
    weights = rng.normal(size=(B, T, H)).astype(np.float32) * real[..., None]

    theirs, outputs, last = through_torch(module, x, weights)

    def total(params, x):
        outputs, state = layer.apply({"params": params}, x, jnp.asarray(real))
        return (outputs * weights).sum(), (outputs, state)

    gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (ours, state)), (d_params, d_x) = gradient(params, jnp.asarray(x))
    np.testing.assert_allclose(ours * real[..., None], outputs.detach().numpy(), atol=1e-5)
    output = last[0] if isinstance(last, tuple) else last
    np.testing.assert_allclose(state[:, 0], output[0].detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(d_x, theirs.grad.numpy(), atol=1e-5)
    for got, wanted in (
        (d_params["input"]["kernel"], module.weight_ih_l0.grad.T),
        (d_params["input"]["bias"], module.bias_ih_l0.grad),
        (d_params["state_kernel"], module.weight_hh_l0.grad.T),
    ):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-5)
    if "state_bias" in d_params:
        np.testing.assert_allclose(d_params["state_bias"], module.bias_hh_l0.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", MODULES)
@pytest.mark.parametrize("two", [False, True], ids=["one direction", "two directions"])
def test_stacks_of_layers_are_those_of_pytorch(cell, two):
    """Two layers on top of each other, each of one direction or of two, whose outputs are side by side."""
    recurrent = RecurrentConfig(cell, bidirectional=two, embedding_size=D)
    config = ModelConfig(family="encoder", d_model=H, num_layers=2, dropout=0.0, recurrent=recurrent)
    stack = RecurrentStack(config, 2, two)
    x, real = jnp.zeros((B, T, D)), jnp.ones((B, T), bool)
    blank = {"layers": jnp.zeros((B, 2, STATES[cell], H))}
    shapes = jax.eval_shape(lambda: stack.init(jax.random.key(0), x, real, blank, {}, None))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape, scale=0.4), jnp.float32), shapes)
    module = MODULES[cell](D, H, num_layers=2, bidirectional=two, batch_first=True)
    with torch.no_grad():
        for i, (name, ending) in itertools.product((0, 1), (("forward", ""), ("backward", "_reverse"))[: 1 + two]):
            for key, value in weights_of(params[f"{name}_{i}"]).items():
                getattr(module, f"{key}_l{i}{ending}").copy_(torch.tensor(np.array(value)))

    x = rng.normal(size=(B, T, D)).astype(np.float32)
    real = np.arange(T) < np.array(LENGTHS)[:, None]
    weights = rng.normal(size=(B, T, H * (1 + two))).astype(np.float32) * real[..., None]
    theirs, outputs, last = through_torch(module, x, weights)

    def total(params, x):
        outputs, states, _ = stack.apply({"params": params}, x, jnp.asarray(real), blank, {}, None)
        return (outputs * weights).sum(), (outputs, states["layers"])

    gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, (ours, states)), (d_params, d_x) = gradient(params, jnp.asarray(x))
    np.testing.assert_allclose(ours * real[..., None], outputs.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(d_x, theirs.grad.numpy(), atol=1e-5)
    final = (last[0] if isinstance(last, tuple) else last).detach().numpy()  # [layers x directions, B, H]
    np.testing.assert_allclose(states[:, :, 0].swapaxes(0, 1), final[1::2] if two else final, atol=1e-5)
    for i, (name, ending) in itertools.product((0, 1), (("forward", ""), ("backward", "_reverse"))[: 1 + two]):
        for key, value in weights_of(d_params[f"{name}_{i}"]).items():
            if key != "bias_hh" or "state_bias" in d_params[f"{name}_{i}"]:
                wanted = getattr(module, f"{key}_l{i}{ending}").grad.numpy()
                np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=2e-5, err_msg=f"{name}_{i} {key}")
