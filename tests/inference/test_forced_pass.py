"""The forced pass says what the whole model says, alone or with others, and shows what it attends to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data.tokenizers import learn
from jformer.errors import UserError
from jformer.inference.answers import AttentionWeights, Part
from jformer.inference.forced_pass import make_scorer
from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.backend import Target, compiling_for
from jformer.tasks.task import make_loss
from tests.conftest import draw_params, make_batch, run
from tests.inference import untrained
from tests.inference.untrained import CHARS

LOOP = {"execution": ExecutionConfig(unroll=1)}
LABELS = learn("label", ["good", "bad"], 99, "identity", False)
FIELDS = {"num_layers": 2, "d_model": 16, "d_ff": 24, "num_heads": 2, "tied_output": False} | LOOP
RECURRENT = {"num_layers": 1, "d_model": 16, "tied_output": False}
ADDITIVE = RecurrentConfig("gru", attention="additive")


def predictor_of(task, data=None, **fields):
    """Return an untrained run."""
    model = build_model(ModelConfig(**{"vocab_size": CHARS.vocab_size, **fields}))
    tokenizers = (CHARS, LABELS if task == "classify" else CHARS)
    params = draw_params(model)
    return untrained.predictor(model, params, task, tokenizers, data, max_extra_length=3, beam_size=1)


@pytest.fixture(scope="module")
def translator():
    """Return an untrained translator, whose programs are compiled once."""
    return predictor_of("translate", **FIELDS)


def assert_sound(found, layers, heads):
    assert found.weights.shape == (layers, heads, len(found.rows), len(found.columns))
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    assert found.mask.dtype == bool
    np.testing.assert_array_equal(found.weights > 0, np.broadcast_to(found.mask, found.weights.shape))


@pytest.mark.slow
def test_a_translation_shows_three_kinds_of_attention_and_what_scoring_says(translator):
    (shown,) = translator.attend([("abc d", "fgh")])
    encoder, decoder, cross = shown.encoder, shown.decoder, shown.cross
    assert shown.parts == (encoder, decoder, cross)
    assert [part.part for part in shown.parts] == list(Part)
    for part in shown.parts:
        assert_sound(part, 2, 2)
    assert encoder.columns == cross.columns == (*"abc d", "</s>")
    assert decoder.rows == ("<s>", *"fgh")
    assert cross.rows == tuple(choice.token for choice in shown.choices) == (*"fgh", "</s>")
    np.testing.assert_array_equal(decoder.mask, np.tri(4, dtype=bool))
    assert encoder.mask.all()
    assert cross.mask.all()
    (scored,) = translator.score([("abc d", "fgh")])
    np.testing.assert_allclose(np.log([c.probability for c in shown.choices]), scored.token_log_probs, atol=1e-5)
    for choice in shown.choices:
        probabilities = [p for _, p in choice.likeliest]
        assert probabilities == sorted(probabilities, reverse=True)
        assert probabilities[0] >= choice.probability


@pytest.mark.slow
def test_without_a_target_the_runs_own_answer_is_shown(translator):
    (shown,) = translator.attend([("abc", None)])
    assert shown.target == translator.predict(["abc"])[0]


def test_a_language_model_shows_its_own_attention():
    predictor = predictor_of("lm", family="decoder", **FIELDS)
    (shown,) = predictor.attend([("", "abc")])
    assert shown.parts == (shown.decoder,)
    assert_sound(shown.decoder, 2, 2)


def test_a_classifier_shows_its_encoder_and_the_labels():
    predictor = predictor_of("classify", family="encoder", head=HeadConfig(num_classes=2), **FIELDS)
    (shown,) = predictor.attend([("abc", "good")])
    assert_sound(shown.encoder, 2, 2)
    (choice,) = shown.choices
    assert choice.token == "good"
    assert {label for label, _ in choice.likeliest} == {"good", "bad"}
    assert sum(p for _, p in choice.likeliest) == pytest.approx(1, abs=1e-6)


def test_a_recurrent_decoder_shows_its_one_alignment():
    predictor = predictor_of("translate", **RECURRENT, recurrent=ADDITIVE)
    (shown,) = predictor.attend([("abc d", "fgh")])
    assert shown.parts == (shown.cross,)
    assert_sound(shown.cross, 1, 1)
    assert shown.cross.rollout() is None


@pytest.mark.slow
def test_activations_have_a_place_for_every_token_and_no_padding(translator):
    (attended,) = translator.attend([("abc d", "fgh")])
    names = ["*/weights", "*/block/output", "decoder/block/self_attn/heads", "source_input/output", "logits"]
    short, found = translator.activations([("a", "b"), ("abc d", "fgh")], names)
    assert found.source == attended.cross.columns
    assert found.target == attended.decoder.rows
    assert {name: array.shape for name, array in found.arrays.items() if "weights" not in name} == {
        "source_input/output": (6, 16),
        "encoder/block/output": (2, 6, 16),
        "decoder/block/output": (2, 4, 16),
        "decoder/block/self_attn/heads": (2, 4, 2, 8),
        "logits": (4, CHARS.vocab_size),
    }
    assert short.arrays["encoder/block/output"].shape == (2, 2, 16)
    for name, part in {"encoder/block/self_attn": attended.encoder, "decoder/block/cross_attn": attended.cross}.items():
        np.testing.assert_array_equal(found.arrays[f"{name}/weights"], part.weights)
    likely = jax.nn.softmax(found.arrays["logits"])
    np.testing.assert_allclose([p.max() for p in likely], [c.likeliest[0][1] for c in attended.choices], rtol=1e-5)


@pytest.mark.slow
def test_interventions_count_in_answers_and_scores(translator):
    b = int(CHARS.encode(["b"])[0][0])
    always = translator.intervene({"logits": lambda logits, _: logits.at[..., b].add(100.0)})
    assert set(always.predict(["abc"])[0]) == {"b"}
    (scored,) = always.score([("abc", "bb")])
    assert scored.token_log_probs[:2] == (0.0, 0.0)
    (found,) = always.activations([("abc", "bb")], ["logits"])
    assert found.arrays["logits"].argmax(axis=-1).tolist() == [b] * 3
    assert translator.predict(["abc"]) != always.predict(["abc"])


def test_entropy_and_rollout_by_hand():
    """Two layers of one head over two positions: sharp, then even."""
    values = np.array([[[[1.0, 0.0], [0.0, 1.0]]], [[[0.5, 0.5], [0.5, 0.5]]]], np.float32)
    weights = AttentionWeights(Part.ENCODER_SELF, values, np.ones((2, 2), bool), ("a", "b"), ("a", "b"))
    np.testing.assert_allclose(weights.entropy(), [[0.0], [np.log(2)]], atol=1e-6)
    # The first layer keeps all; of the second, half is the residual: (0.5 + 1) / 2 and 0.5 / 2.
    np.testing.assert_allclose(weights.rollout(), [[0.75, 0.25], [0.25, 0.75]])


RESTORED = "abcdefgh hgfedcb"  # as many characters as the shortest batch has places


def loss_of(predictor, text):
    """Return the loss that training has of a text, in nats, all that is hidden together."""
    loss = make_loss(predictor.model, predictor.task.loss)
    arrays = predictor.inputs.noised_arrays(predictor.inputs.encode_whole([text]))
    return float(jax.jit(loss)(predictor.params, jax.tree.map(jnp.asarray, arrays), None)["nll"].total)


def test_masked_tokens_are_shown_with_what_the_run_takes_them_for():
    predictor = predictor_of("mlm", family="encoder", **FIELDS | {"vocab_size": CHARS.vocab_size + 1})
    shown, again = predictor.attend([(RESTORED, None)] * 2)
    assert shown.parts == (shown.encoder,)
    assert_sound(shown.encoder, 2, 2)
    columns = shown.encoder.columns
    assert shown.encoder.rows == columns == again.encoder.columns
    assert (columns[0], columns[-1], len(columns)) == ("<s>", "</s>", 18)
    hidden = [i for i, (ours, wanted) in enumerate(zip(columns[1:-1], RESTORED, strict=True)) if ours != wanted]
    assert 0 < len(hidden) <= len(shown.choices) == 2  # 15 % of 16; one in ten stays what it is
    assert [choice.token for choice in shown.choices if choice.token != choice.read] == [RESTORED[i] for i in hidden]
    assert "<mask>" in [choice.read for choice in shown.choices]
    told = sum(-np.log(choice.probability) for choice in shown.choices)
    assert told == pytest.approx(loss_of(predictor, RESTORED), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["t5", "bart"])
def test_denoising_is_shown_from_the_noised_source_to_what_restores_it(noise):
    fields = FIELDS | {"vocab_size": CHARS.vocab_size + 200}
    predictor = predictor_of("denoise", data={"noise": noise}, **fields)
    (shown,) = predictor.attend([(RESTORED, None)])
    assert shown.parts == (shown.encoder, shown.decoder, shown.cross)
    for part in shown.parts:
        assert_sound(part, 2, 2)
    source, target = "".join(shown.cross.columns), "".join(shown.cross.rows)
    if noise == "t5":
        kept, back = (
            source.removesuffix("</s>").split("<extra_id_0>"),
            target.removesuffix("</s>").split("<extra_id_0>"),
        )
        assert back[1].join(kept) == RESTORED
    else:
        assert target == f"{RESTORED}</s>"
        assert "<mask>" in shown.encoder.columns
    assert tuple(choice.token for choice in shown.choices) == shown.cross.rows
    told = sum(-np.log(choice.probability) for choice in shown.choices)
    assert told == pytest.approx(loss_of(predictor, RESTORED), rel=1e-5)


@pytest.mark.parametrize("pair", [("abc", "d"), (" ", None)])
def test_a_text_to_restore_has_no_target(pair):
    predictor = predictor_of("mlm", family="encoder", **FIELDS | {"vocab_size": CHARS.vocab_size + 1})
    with pytest.raises(UserError, match="without targets: attend"):
        predictor.attend([pair])


def test_a_decoder_without_attention_to_the_source_shows_none():
    (shown,) = predictor_of("translate", **RECURRENT, recurrent=RecurrentConfig("gru")).attend([("abc", "d")])
    assert shown.parts == ()
    assert [choice.token for choice in shown.choices] == ["d", "</s>"]


def test_what_is_no_pair_is_refused(translator):
    with pytest.raises(
        UserError, match=r"'abc' is not a pair of source and target: attend\(\[\('a source', 'its target'"
    ):
        translator.attend(["abc"])


def test_broken_weights_are_refused():
    predictor = predictor_of("lm", family="decoder", **FIELDS)
    predictor.params = jax.tree.map(lambda x: x * np.nan, predictor.params)
    with pytest.raises(UserError, match="scores are NaN, so its weights are broken"):
        predictor.attend([("", "abc")])


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


def last_attention(model, params):
    """Return the last layer's attention to the source, averaged over heads."""
    seen = jax.jit(lambda p, batch: model.apply({"params": p}, batch, mutable=["intermediates"])[1])(params, BATCH)
    return np.asarray(seen["intermediates"]["decoder"]["block"]["cross_attn"]["weights"][0])[-1].mean(axis=1)


@pytest.mark.slow
def test_attention_is_that_of_the_last_layer_the_mean_of_heads_and_models(members):
    found = score(members[:1], attend=True)
    np.testing.assert_allclose(found["log_probs"], log_probs(*members[0]), atol=1e-5)
    alone, both = last_attention(*members[0]), np.mean([last_attention(*member) for member in members], axis=0)
    real = BATCH["weights"] > 0
    np.testing.assert_allclose(found["attention"][real], alone[real], atol=1e-6)
    np.testing.assert_allclose(score(members, attend=True)["attention"][real], both[real], atol=1e-6)
    assert np.abs(alone - both)[real].max() > 1e-3
    assert (found["attention"].argmax(axis=-1) < np.array([[5], [3], [8]])).all()  # never padding


@pytest.mark.slow
def test_attention_shows_its_weights_on_every_machine(members):
    here = score(members[:1], attend=True)["attention"]
    with compiling_for(Target("gpu")):
        np.testing.assert_allclose(score(members[:1], attend=True)["attention"], here, atol=1e-6)
