"""Answers of one pass: the best spans of a context in one window and in several, a tag for every word of a line."""

import dataclasses
import functools
import itertools
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import resolve
from jformer.data.aligned import WORDS_CUT
from jformer.data.sources.split import Pair
from jformer.data.spans import END, MAY_END, MAY_START, START, SpanEncoder, Window
from jformer.data.tokenizers import NUM_SYMBOLS, learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import CUT, EMPTY, SPLIT, UNKNOWN, Output, Piece, Request, TaggedWord
from jformer.inference.batching import read_row
from jformer.inference.formats import write_outputs
from jformer.inference.one_pass import (
    HEADS,
    Spans,
    best_of_windows,
    likeliest_spans,
    marked_pair,
    pieces_with_masks,
    read_spans,
)
from jformer.models import ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.mesh import make_mesh
from jformer.tasks.build import build_task
from jformer.tasks.losses import span_log_probs
from tests.conftest import draw_params
from tests.inference import untrained
from tests.slow import slow_but

RNG = np.random.default_rng(0)
BOTH = MAY_START | MAY_END


def random_marks(length, real):
    """Return the marks of a window: BOS, some of a question, words of 1 to 3 tokens, padding."""
    marks, at = [BOTH, 0, 0], 3
    while at < real - 1:
        size = min(int(RNG.integers(1, 4)), real - 1 - at)
        marks += [BOTH] if size == 1 else [MAY_START, *[0] * (size - 2), MAY_END]
        at += size
    return [*marks, *[0] * (length - len(marks))]


def all_spans(log_probs, marks, longest):
    """Yield (score, first, last) of every span, word by word."""
    starts = [i for i, mark in enumerate(marks) if mark & MAY_START and i]
    ends = [i for i, mark in enumerate(marks) if mark & MAY_END and i]
    for first, last in itertools.product(starts, ends):
        words = sum(first <= i <= last for i in starts)
        if first <= last and words <= longest:
            yield float(log_probs[first, 0] + log_probs[last, 1]), first, last


@pytest.mark.parametrize(("longest", "best"), [(1, 1), (3, 4), (30, 7), (30, 200)])
def test_the_best_spans_are_those_of_all_spans(longest, best):
    length = 24
    marks = np.array([random_marks(length, real) for real in (24, 17, 9, 6, 5)])
    logits = jnp.array(RNG.normal(size=(len(marks), length, 2)), jnp.float32)
    options = DecodeConfig(max_answer_length=longest, n_best=best, beam_size=best)
    found = jax.jit(lambda x, y: likeliest_spans(x, {"target_out": y}, options))(logits, jnp.array(marks))
    log_probs = np.asarray(span_log_probs(logits, jnp.array(marks)))
    for row in range(len(marks)):
        assert found.ends[row, 0].tolist() == [0, 0]
        assert float(found.log_probs[row, 0]) == pytest.approx(log_probs[row, 0].sum(), abs=1e-5)
        expected = sorted(all_spans(log_probs[row], marks[row], longest), reverse=True)[:best]
        real = np.flatnonzero(~np.isneginf(found.log_probs[row, 1:])) + 1
        assert len(real) == len(expected) > 0
        assert real[-1] == len(real)  # unused slots come last
        for i, (score, first, last) in zip(real, expected, strict=True):
            assert float(found.log_probs[row, i]) == pytest.approx(score, abs=1e-5)
            assert found.ends[row, i].tolist() == [first, last]


def test_a_span_is_read_as_the_characters_of_its_context():
    window = Window(
        "Ada, Lee", [1, 9, 2, 5, 6, 7, 2], [12, 0, 0, 12, 12, 12, 0], [(0, 0)] * 3 + [(0, 3), (3, 4), (5, 8), (0, 0)]
    )
    found = Spans(np.array([[0, 0], [3, 5], [4, 4], [0, 1]]), np.array([-3.0, -1.0, -2.0, -np.inf]))
    outputs = read_spans(found, None, Piece(window.ids, 0, window=window))
    assert outputs == [
        Output("", log_prob=-3.0),
        Output("Ada, Lee", log_prob=-1.0, span=(0, 8)), Output(",", log_prob=-2.0, span=(3, 4)),
    ]  # fmt: skip


def windows(*each):
    return [[Output(text, log_prob=value, span=span) for text, value, span in one] for one in each]


def test_of_several_windows_a_span_counts_where_it_is_best_and_none_where_it_is_worst():
    found = windows(
        [("", -0.1, None), ("Lee", -4.0, (9, 12)), ("Ada", -5.0, (0, 3))],
        [("", -2.0, None), ("Lee", -1.0, (9, 12)), ("Bo", -3.0, (20, 22))],
    )

    def best(n, threshold=0.0):
        options = DecodeConfig(n_best=n, beam_size=max(n, 4), no_answer_threshold=threshold)
        return [(output.text, output.log_prob) for output in best_of_windows(found, options)]

    assert best(1) == [("Lee", -1.0)]
    assert best(9) == [("Lee", -1.0), ("", -2.0), ("Bo", -3.0), ("Ada", -5.0)]
    assert best(2, threshold=1.5) == [("", -2.0), ("Lee", -1.0)]
    assert best(1, threshold=1.0) == [("", -2.0)]  # a span must be more probable, and not as probable
    assert best(1, threshold=-1000.0) == [("Lee", -1.0)]
    assert best(4, threshold=-1000.0)[-1] == ("", -2.0)
    assert best_of_windows([], DecodeConfig()) == [Output("", log_prob=0.0)]


@pytest.mark.parametrize("start", [None, 14])
def test_of_several_windows_the_one_with_the_answer_is_looked_into(start):
    pair = Pair("who\ta b c d e f g a", "a", start=start)  # the answer is in the first window, and in the last
    letters = learn("word", ["who a b c d e f g"], 99, "identity", False)
    encoder = SpanEncoder(letters, max_length=8, stride=2, overlong="cut")
    ids, marks, cut = marked_pair(encoder, pair)
    assert cut
    (first,) = [i for i, mark in enumerate(marks) if mark & START]
    (last,) = [i for i, mark in enumerate(marks) if mark & END]
    assert first == last > 0
    assert letters.decode(ids[first : last + 1]) == "a"
    assert (first == 3) == (start is None)  # after BOS, the question and EOS


def test_without_an_answer_the_first_window_is_looked_into():
    letters = learn("word", ["who a b c d e f g"], 99, "identity", False)
    encoder = SpanEncoder(letters, max_length=8, stride=2, overlong="cut")
    ids, marks, _ = marked_pair(encoder, Pair("who\ta b c d e f g", ""))
    assert letters.decode(ids) == letters.decode(letters.encode(["who a b c d"])[0])
    assert marks[0] & START
    assert marks[0] & END


WORDS = learn("char", ["abcdefgh "], 99, "identity", False)
TAGS = learn("tag", ["O B-x I-x"], 99, "identity", False)
EACH = HeadConfig(num_classes=3, pooling="none")
LSTM = RecurrentConfig("lstm", bidirectional=True)
LINES = ["abc de", "", "h", "hg fe dcba hg fe", " ", "a b c d e", "unknown abc"]


@functools.cache
def untrained_tagger(recurrent, crf):
    """Return a model, and parameters that give probabilities which are far from even."""
    kind = {"recurrent": recurrent} if recurrent else {"d_ff": 24, "num_heads": 2}
    head = dataclasses.replace(EACH, crf=crf)
    fields = {"num_layers": 1, "d_model": 16, "vocab_size": WORDS.vocab_size, "head": head, **kind}
    model = build_model(ModelConfig(family="encoder", **fields))
    params = jax.tree.map(lambda x: 3 * x, draw_params(model))
    if crf:
        params["transitions"] = 2 * jax.random.normal(jax.random.key(1), params["transitions"].shape)
    return model, params


@pytest.fixture(scope="module")
def tagger():
    """Return a function: options → Predictor of an untrained model."""

    def build(mesh=None, limit=64, recurrent=None, crf=False, **options):
        data = {"source": "conll", "max_source_length": limit}
        options = {"batch_size": 4, **options}
        return untrained.predictor(*untrained_tagger(recurrent, crf), "tag", (WORDS, TAGS), data, mesh=mesh, **options)

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


@pytest.mark.slow
@pytest.mark.parametrize("crf", [False, True])
@pytest.mark.parametrize("recurrent", [None, LSTM])
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


@pytest.mark.parametrize("crf", slow_but([False, True], True))
def test_several_devices_give_the_tags_of_one(tagger, crf):
    lines = ["".join(word) for word in np.random.default_rng(0).choice(list("abcdefgh  "), (20, 9))]
    assert tagger(make_mesh(4), crf=crf).predict(lines) == tagger(make_mesh(1), crf=crf).predict(lines)


@pytest.mark.parametrize("overlong", ["cut", "split"])
def test_a_long_line_is_split_between_words_and_loses_none(tagger, overlong):
    predictor = tagger(limit=9, overlong=overlong)
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


def test_a_mask_that_is_cut_off_is_not_filled_in():
    config = resolve({"task": "mlm", "model": {"family": "encoder"}, "data": {"max_source_length": 6}})
    encoder, counts = build_task(config).encoder(untrained.CHARS, untrained.CHARS, evaluating=True), Counter()
    ((piece,),) = pieces_with_masks(encoder, [Request("ab<mask>cdefgh")], counts)
    assert (piece.starts, counts[CUT]) == ([3], 1)
    with pytest.raises(UserError, match="line 5: has no <mask> to fill in within the model's limit of 6 tokens"):
        pieces_with_masks(encoder, [Request("abcdefgh<mask>", line=4)], counts)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_a_mask_stands_where_training_puts_it_and_the_text_around_it_is_cut_as_without_it(kind):
    tokenizer = learn(kind, ["the c sat on the c", "a c sat", "c c"] * 9, 30, "identity", False)
    config = resolve({"task": "mlm", "model": {"family": "encoder"}, "data": {"tokenizer": kind}})
    encoder = build_task(config).encoder(tokenizer, tokenizer, evaluating=True)
    hidden = [i for i in tokenizer.encode(["the c sat"])[0] if tokenizer.tokens[i] in ("▁c", "c")]
    for text in ("the c sat on", "c sat", "the c", "c c sat"):
        ((piece,),) = pieces_with_masks(encoder, [Request(text.replace("c", "<mask>"))], Counter())
        (ids,) = encoder.source.encode([text])
        assert piece.ids == [tokenizer.vocab_size if i in hidden else i for i in ids]


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
