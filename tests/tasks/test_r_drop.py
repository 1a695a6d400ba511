"""R-Drop: the loss is the paper's formula over two passes, and that of one pass where nothing is dropped."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import resolve
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.layers.matmul import jax_gradients
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks import losses
from jformer.tasks.task import make_loss, token_loss
from tests.conftest import TINY, draw_params, make_batch
from tests.slow import slow_but

KEY = jax.random.key(3)
TASK = SimpleNamespace(loss=token_loss(0.1))


def log_probs(logits):
    z = np.asarray(logits, np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("chunk", slow_but([2**21, 300], 300), ids=["at once", "a few positions at a time"])
def test_the_loss_is_half_of_the_papers(tiny, monkeypatch, chunk):
    """Liang et al. 2021, equations 1 to 4, with the smoothed loss in place of the first term."""
    monkeypatch.setitem(losses.CHUNK, "cpu", chunk)
    model, params = tiny(family="decoder", dropout=0.4)
    batch, alpha = make_batch([7, 5], [6, 4]), 5.0
    apply = jax.jit(lambda params, batch, key: model.apply({"params": params}, batch, True, rngs={"dropout": key}))
    p, q = (log_probs(apply(params, batch, key)) for key in jax.random.split(KEY))
    assert np.abs(p - q).max() > 0.1
    kl = (np.exp(p) * (p - q)).sum(-1) / 2 + (np.exp(q) * (q - p)).sum(-1) / 2
    right = np.eye(p.shape[-1])[batch["target_out"]] * 0.9 + 0.1 / p.shape[-1]
    expected = (((-right * (p + q)).sum(-1) + alpha * kl) * batch["weights"]).sum() / 2
    loss = make_loss(model, TASK.loss, alpha)
    sums = jax.jit(lambda *arguments: loss(*arguments))(params, batch, KEY)  # traced anew, with chunks of this size
    np.testing.assert_allclose(sums["loss"].total, expected, rtol=2e-5)
    assert sums["loss"].count == batch["weights"].sum()


def gradient_of(model, alpha):
    """Return the compiled loss of a language model's batch, with its gradient."""
    batch = jax.tree.map(jnp.asarray, make_batch([7, 5], [6, 4]))
    return jax.jit(jax.value_and_grad(lambda p: make_loss(model, TASK.loss, alpha)(p, batch, KEY)["loss"].total))


@pytest.mark.slow
def test_without_dropout_both_passes_agree(tiny):
    model, params = tiny(family="decoder")

    for one, both in zip(*(jax.tree.leaves(gradient_of(model, alpha)(params)) for alpha in (0.0, 5.0)), strict=True):
        np.testing.assert_allclose(one, both, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_differences(tiny):
    model, params = tiny(family="decoder", dropout=0.4)
    gradient = gradient_of(model, 5.0)
    _, slope = gradient(params)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(slope)))
    ahead, behind = (jax.tree.map(lambda p, g, s=s: p + s * 1e-2 / norm * g, params, slope) for s in (1, -1))
    assert float(gradient(ahead)[0] - gradient(behind)[0]) / 2e-2 == pytest.approx(norm, rel=2e-2)


def test_evaluation_makes_one_pass(tiny):
    model, params = tiny(family="decoder", dropout=0.4)
    batch = make_batch([7, 5], [6, 4])
    plain, r_drop = (
        jax.jit(make_loss(model, TASK.loss, alpha))(params, batch, None)["loss"].total for alpha in (0.0, 5.0)
    )
    assert plain == r_drop


@pytest.mark.parametrize(("options", "said"), [
    ({"optim": {"r_drop": -1.0}}, r"optim\.r_drop=-1\.0 must be"),
    ({"data": {"labels": "several"}, "optim": {"r_drop": 5.0}}, r"optim\.r_drop=5\.0 compares one prediction"),
    ({"model": {"dropout": 0.0}, "optim": {"r_drop": 5.0}}, r"optim\.r_drop=5\.0 compares two passes with dropout"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        resolve(options)


def test_the_dropout_of_adapters_can_be_compared():
    lora = {"rank": 2, "dropout": 0.1}
    resolve({"model": {"dropout": 0.0, "lora": lora}, "optim": {"r_drop": 5.0}, "train": {"init_from": "parent"}})


LSTM = {"recurrent": RecurrentConfig(cell="lstm"), "d_ff": 2048, "num_heads": 8, "tied_output": False}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"activation": "gelu"}, LSTM], ids=["transformer", "recurrent"])
def test_products_with_the_hessian_are_differences_of_gradients(options):
    model = build_model(ModelConfig(**{**TINY, **options}))
    params = draw_params(model)
    batch = jax.tree.map(jnp.asarray, make_batch([7, 5], [6, 4]))
    loss = make_loss(model, TASK.loss, 5.0)
    slope = jax.grad(lambda p: loss(p, batch, KEY)["loss"].total)
    away = jax.tree.map(lambda p: jnp.cos(7 * p) / 10, params)
    with jax_gradients(True):
        found = jax.jit(lambda p, v: jax.jvp(slope, (p,), (v,))[1])(params, away)
    shifted = [jax.tree.map(lambda p, v, e=e: p + e * v, params, away) for e in (0.01, -0.01)]
    one, other = map(jax.jit(slope), shifted)
    expected = jax.tree.map(lambda a, b: (a - b) / 0.02, one, other)
    found, expected = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (found, expected))
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
