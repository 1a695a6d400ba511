import functools

import jax
import numpy as np
import pytest

from experiments.layerwise import make_norms
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.tasks.losses import cross_entropy
from jformer.tasks.task import make_loss, token_loss
from tests.conftest import make_batch


@pytest.mark.slow
def test_gradients_are_those_of_the_mean_loss_and_activations_outputs_of_blocks_where_there_is_text(tiny):
    model, params = tiny(num_decoder_layers=1, norm="none")  # the last block's output is the stack's
    batch = jax.device_put(make_batch([5, 9, 3], [7, 4, 9]))

    def mean(params):
        logits = model.apply({"params": params}, batch)
        return cross_entropy(logits, batch["target_out"], batch["weights"], 0.1)["loss"].total / batch["weights"].sum()

    expected = jax.jit(jax.grad(mean))(params)
    norms = make_norms(model, make_loss(model, token_loss(0.1)))(params, batch)
    for key, found in norms.gradients.items():
        stack, sublayer = key.split("/")
        leaves = jax.tree.leaves(expected[stack]["block"][sublayer])
        for layer, norm in enumerate(found):
            flat = np.concatenate([np.asarray(leaf[layer], np.float64).ravel() for leaf in leaves])
            assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-4)
    whole = {"capture_intermediates": lambda module, method: module.name == "decoder" and method == "__call__"}
    run = functools.partial(model.apply, method="hidden", mutable=["intermediates"], **whole)
    _, seen = jax.jit(run)({"params": params}, batch)
    output = np.asarray(seen["intermediates"]["decoder"]["__call__"][0])[batch["target_segments"] > 0]
    assert norms.activations["decoder"] == pytest.approx(np.sqrt(np.mean(output**2)), rel=1e-5)
    assert {len(each) for each in (norms.activations["encoder"], norms.gradients["encoder/self_attn"])} == {2}


@pytest.mark.slow
def test_norms_at_initialisation_are_those_of_the_paper():
    """Xiong et al. 2020, Theorem 1, Figure 3 and Lemma 2."""
    found = {}
    for norm in ("post", "pre"):
        sizes = {"vocab_size": 200, "num_layers": 6, "d_model": 64, "d_ff": 256, "num_heads": 4, "dropout": 0.0}
        model = build_model(ModelConfig(**sizes, norm=norm, execution=ExecutionConfig(unroll=1)))
        probe, init = (
            make_norms(model, make_loss(model, token_loss(0.0))),
            jax.jit(functools.partial(init_params, model)),
        )
        batches = [make_batch([10, 8, 9, 10], [9, 10, 7, 10], seed=seed, vocab_size=200) for seed in range(3)]
        each = [probe(init(jax.random.key(seed)), batch) for seed, batch in enumerate(batches)]
        found[norm] = jax.tree.map(lambda *norms: np.mean(norms, axis=0), *each)
    post, pre = (found[norm].gradients["decoder/feed_forward"] for norm in ("post", "pre"))
    assert post[-1] > 2.5 * post[0]
    assert (np.diff(post) > 0).all()
    assert post[-1] > 2 * pre[-1]
    assert pre.max() < 2 * pre.min()
    for stack in ("encoder", "decoder"):
        post, pre = (found[norm].activations[stack] for norm in ("post", "pre"))
        np.testing.assert_allclose(post, np.ones(6), rtol=1e-4)
        assert (np.diff(pre) > 0).all()
        assert pre[-1] > 1.5 * pre[0]
