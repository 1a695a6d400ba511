"""Recurrent layers against PyTorch's, forward and backward; skipped, and said so, where there is no torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models.layers.recurrent import RecurrentLayer

torch = pytest.importorskip("torch", reason="parity with PyTorch needs it: pip install torch==2.13.0")

MODULES = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
B, T, D, H = 4, 9, 12, 8
LENGTHS = [9, 5, 7, 1]


@pytest.fixture(params=MODULES)
def pair(request):
    """Return a layer, its parameters, and PyTorch's module with the same numbers."""
    layer = RecurrentLayer(request.param, H)
    x, real = jnp.zeros((B, T, D)), jnp.ones((B, T), bool)
    params = layer.init(jax.random.key(0), x, real)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape, scale=0.4), jnp.float32), params)
    module = MODULES[request.param](D, H, batch_first=True)
    numbers = {
        "weight_ih_l0": params["input"]["kernel"].T,
        "weight_hh_l0": params["state_kernel"].T,
        "bias_ih_l0": params["input"]["bias"],
        "bias_hh_l0": params.get("state_bias", jnp.zeros_like(params["input"]["bias"])),
    }
    with torch.no_grad():
        for name, value in numbers.items():
            getattr(module, name).copy_(torch.tensor(np.array(value)))
    return layer, params, module


def test_outputs_and_gradients_are_those_of_pytorch(pair):
    layer, params, module = pair
    rng = np.random.default_rng(1)
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    real = np.arange(T) < np.array(LENGTHS)[:, None]
    weights = rng.normal(size=(B, T, H)).astype(np.float32) * real[..., None]

    theirs = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(theirs, LENGTHS, batch_first=True, enforce_sorted=False)
    outputs, last = module(packed)
    outputs, _ = torch.nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
    (outputs * torch.tensor(weights)).sum().backward()

    def total(params, x):
        outputs, state = layer.apply({"params": params}, x, jnp.asarray(real))
        return (outputs * weights).sum(), (outputs, state)

    (_, (ours, state)), (d_params, d_x) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        params, jnp.asarray(x)
    )
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
