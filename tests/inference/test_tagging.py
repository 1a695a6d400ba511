"""Every word of an input gets a tag, whatever stands beside it in a batch, and no input is too long for that."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import resolve
from jformer.data.aligned import WORDS_CUT
from jformer.data.tokenizers import NUM_SYMBOLS, learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import CUT, EMPTY, SPLIT, UNKNOWN, Output, Piece, Request, TaggedWord
from jformer.inference.batching import read_row
from jformer.inference.formats import write_outputs
from jformer.inference.heads import HEADS
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.mesh import make_mesh
from jformer.tasks.build import build_task

WORDS = learn("char", ["abcdefgh"], 99, "identity", False)
TAGS = learn("tag", ["O B-x I-x"], 99, "identity", False)
EACH = HeadConfig(num_classes=3, pooling="none")
LSTM = RecurrentConfig("lstm", bidirectional=True)
LINES = ["abc de", "", "h", "hg fe dcba hg fe", " ", "a b c d e", "unknown abc"]


@functools.cache
def untrained(recurrent, crf):
    """Return a model, and parameters that give probabilities which are far from even."""
    kind = {"recurrent": recurrent} if recurrent else {"d_ff": 24, "num_heads": 2}
    head = dataclasses.replace(EACH, crf=crf)
    fields = {"num_layers": 1, "d_model": 16, "vocab_size": WORDS.vocab_size, "head": head, **kind}
    model = build_model(ModelConfig(family="encoder", **fields))
    params = jax.tree.map(lambda x: 3 * x, init_params(model, jax.random.key(0)))
    if crf:
        params["transitions"] = 2 * jax.random.normal(jax.random.key(1), params["transitions"].shape)
    return model, params


@pytest.fixture(scope="module")
def tagger():
    """Return a function: options → Predictor of an untrained model."""

    def build(mesh=None, limit=64, recurrent=None, crf=False, **options):
        model, params = untrained(recurrent, crf)
        config = resolve({"task": "tag", "model": {"family": "encoder"}, "data": {"source": "conll"}})
        data = dataclasses.replace(config.data, max_source_length=limit)
        config = dataclasses.replace(config, data=data, decode=DecodeConfig(batch_size=4, **options))
        tokenizers = (WORDS, TAGS)
        run = Trained(config=config, task=build_task(config), tokenizers=tokenizers, model=model, params=params)
        return Predictor(run, mesh=mesh)

    return build


def test_the_tags_of_a_pass_are_the_likeliest_of_each_position():
    logits = jnp.log(jnp.array([[[0.2, 0.5, 0.3], [0.9, 0.05, 0.05], [0.1, 0.3, 0.6], [1 / 3, 1 / 3, 1 / 3]]]))
    batch = {"weights": jnp.array([[0.0, 1.0, 1.0, 0.0]])}
    found = read_row(jax.device_get(HEADS["tags"].respond(logits, batch, DecodeConfig())), 0)
    (output,) = HEADS["tags"].read(found, TAGS, Piece([0] * 4, 0, words=["a", "b"], starts=[1, 2]))
    order = [TAGS.decode([i + NUM_SYMBOLS]) for i in range(3)]
    assert output.text == f"{order[0]} {order[2]}"
    assert output.log_prob == pytest.approx(np.log(0.9 * 0.6))
    assert [(word.word, word.tag) for word in output.tags] == [("a", order[0]), ("b", order[2])]
    assert [word.probability for word in output.tags] == pytest.approx([0.9, 0.6])


@pytest.mark.parametrize(("recurrent", "crf"), [(None, False), (LSTM, False), (None, True), (LSTM, True)])
def test_a_line_alone_gets_the_tags_it_gets_among_others(tagger, recurrent, crf):
    predictor = tagger(recurrent=recurrent, crf=crf)
    together = predictor.generate(LINES)
    assert [len(outputs[0].text.split()) for outputs in together] == [len(line.split()) for line in LINES]
    assert len({word.tag for outputs in together for word in outputs[0].tags or ()}) > 1
    for line, (output,) in zip(LINES, together, strict=True):
        ((alone,),) = predictor.generate([line])
        assert alone.text == output.text
        if alone.tags:
            expected = [word.probability for word in alone.tags]
            np.testing.assert_allclose([word.probability for word in output.tags], expected, rtol=1e-4)
            chain = [word.follows for word in output.tags]
            assert crf or chain == [word.probability for word in output.tags]
            assert output.log_prob == pytest.approx(np.log(chain).sum(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("crf", [False, True])
def test_several_devices_give_the_tags_of_one(tagger, crf):
    lines = ["".join(word) for word in np.random.default_rng(0).choice(list("abcdefgh  "), (20, 9))]
    assert tagger(make_mesh(4), crf=crf).predict(lines) == tagger(make_mesh(1), crf=crf).predict(lines)


@pytest.mark.parametrize("overlong", ["cut", "split"])
def test_a_long_line_is_split_between_words_and_loses_none(tagger, overlong):
    predictor = tagger(limit=8, overlong=overlong)
    ((whole,),) = predictor.generate(["abc def gh abcdefgh a"])
    parts = [predictor.generate([part])[0][0] for part in ("abc def", "gh", "abcdefgh", "a")]
    assert whole.text == " ".join(part.text for part in parts)
    assert [word.word for word in whole.tags] == ["abc", "def", "gh", "abcdefgh", "a"]
    assert whole.log_prob == pytest.approx(sum(part.log_prob for part in parts), rel=1e-4)
    assert (predictor.counts[SPLIT], predictor.counts[WORDS_CUT], predictor.counts[CUT]) == (1, 2, 0)


def test_empty_and_unknown_lines_are_counted(tagger):
    predictor = tagger()
    predictor.predict(LINES)
    assert (predictor.counts[EMPTY], predictor.counts[UNKNOWN]) == (2, 1)


def test_what_needs_a_written_target_is_refused(tagger):
    predictor = tagger()
    with pytest.raises(UserError, match="input line 1: tags have no prefix and no constraints"):
        predictor.generate([Request("abc", prefix="O")])
    with pytest.raises(UserError, match="task='tag' has no targets to score"):
        predictor.score([("abc", "O")])


def test_the_explorer_shows_of_a_chain_the_probabilities_that_are_written(tagger):
    predictor = tagger(crf=True)
    ((output,),) = predictor.generate(["abc de h"])
    (own,) = predictor.attend([("abc de h", None)])
    shown = [dict(choice.likeliest)[word.tag] for choice, word in zip(own.choices, output.tags, strict=True)]
    assert shown == pytest.approx([word.probability for word in output.tags], rel=1e-4)


def test_the_explorer_shows_the_tag_of_each_word(tagger):
    given, own = tagger().attend([("abc de", "O B-x"), ("abc de", None)])
    assert [choice.token for choice in given.choices] == ["O", "B-x"]
    assert [choice.likeliest[0][0] for choice in given.choices] == own.target.split()
    assert sum(p for _, p in given.choices[0].likeliest) == pytest.approx(1, abs=1e-5)
    with pytest.raises(UserError, match="2 words but 1 tags"):
        tagger().attend([("abc de", "O")])


def test_json_has_the_tags_and_their_spans():
    words = [TaggedWord("New", "B-place", 0.5, 0.6), TaggedWord("York", "I-place", 0.8, 0.9)]
    words.append(TaggedWord("is", "O", 0.9, 0.9))
    output = Output("B-place I-place O", (4, 5, 6), log_prob=-1.0, tags=tuple(words))

    def written(scores):
        return json.loads(write_outputs([output], "jsonl", scores, False))["outputs"][0]

    span = {"type": "place", "start": 0, "end": 2, "text": "New York"}
    assert written(False) == {"text": output.text, "tags": ["B-place", "I-place", "O"], "spans": [span]}
    assert written(True)["spans"] == [{**span, "probability": 0.45}]
    assert written(True)["probabilities"] == [0.5, 0.8, 0.9]
    nouns = output._replace(tags=(TaggedWord("is", "VERB", 0.9, 0.9),))
    assert json.loads(write_outputs([nouns], "jsonl", False, False))["outputs"][0]["spans"] == []
