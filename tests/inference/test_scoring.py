"""The forced pass says what the whole model says, alone or with others, and where it looked."""

import jax
import numpy as np
import pytest

from jformer.inference.forced_pass import make_scorer
from jformer.parallel.backend import compiling_for
from tests.conftest import make_batch, run

BATCH = make_batch([5, 3, 0], [4, 6, 0], source_size=8, target_size=8)


@pytest.fixture(scope="module")
def members(tiny):
    """Return two models of one vocabulary and their parameters; one has more rows, as for even shards."""
    sizes = {"tied_output": False, "num_layers": 1, "num_decoder_layers": 2}
    return [tiny(**sizes), tiny(**sizes, vocab_size=56, d_model=16, norm="pre")]


def distributions(model, params):
    logits = np.asarray(run(model, params, BATCH), np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def of_targets(log_probs):
    return np.take_along_axis(log_probs, BATCH["target_out"][..., None], axis=-1)[..., 0] * BATCH["weights"]


def log_probs(model, params):
    return of_targets(distributions(model, params))


def score(members, average="probability", **options):
    models, params = zip(*members, strict=True)
    return jax.device_get(make_scorer(models, average, **options)(params, BATCH))


def test_log_probs_are_those_of_the_whole_pass(members):
    expected = log_probs(*members[0])
    assert np.abs(expected).max() > 1
    for tokens in (1_024, 16):  # sentences projected together: all, two
        found = score(members[:1], tokens=tokens)
        assert set(found) == {"log_probs"}
        np.testing.assert_allclose(found["log_probs"], expected, atol=1e-5)


@pytest.mark.slow
def test_several_models_decide_by_mean_probability_or_mean_log_probability(members):
    both = np.stack([distributions(*member)[..., :50] for member in members])
    assert np.abs(of_targets(both[0]) - of_targets(both[1])).max() > 0.1
    np.testing.assert_allclose(score(members)["log_probs"], of_targets(np.log(np.exp(both).mean(0))), atol=1e-5)
    mean = both.mean(axis=0)
    mean -= np.logaddexp.reduce(mean, axis=-1, keepdims=True)
    np.testing.assert_allclose(score(members, "log_probability")["log_probs"], of_targets(mean), atol=1e-5)


def test_a_language_model_scores_its_target_alone(tiny):
    model, params = tiny(family="decoder", num_layers=1)
    np.testing.assert_allclose(score([(model, params)])["log_probs"], log_probs(model, params), atol=1e-5)


def attended(model, params):
    """Return the last layer's attention to the source, averaged over heads."""
    seen = jax.jit(lambda p, batch: model.apply({"params": p}, batch, mutable=["intermediates"])[1])(params, BATCH)
    return np.asarray(seen["intermediates"]["decoder"]["block"]["cross_attn"]["weights"][0])[-1].mean(axis=1)


@pytest.mark.slow
def test_attention_is_that_of_the_last_layer_the_mean_of_heads_and_models(members):
    found = score(members[:1], attend=True)
    np.testing.assert_allclose(found["log_probs"], log_probs(*members[0]), atol=1e-5)
    alone, both = attended(*members[0]), np.mean([attended(*member) for member in members], axis=0)
    real = BATCH["weights"] > 0
    np.testing.assert_allclose(found["attention"][real], alone[real], atol=1e-6)
    np.testing.assert_allclose(score(members, attend=True)["attention"][real], both[real], atol=1e-6)
    assert np.abs(alone - both)[real].max() > 1e-3
    assert (found["attention"].argmax(axis=-1) < np.array([[5], [3], [8]])).all()  # never padding


def test_attention_shows_its_weights_on_every_machine(members):
    here = score(members[:1], attend=True)["attention"]
    with compiling_for("gpu"):
        np.testing.assert_allclose(score(members[:1], attend=True)["attention"], here, atol=1e-6)
