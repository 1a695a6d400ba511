"""Answers that are told while they grow are those of the whole search, and nothing that was told is taken back."""

import itertools
import random

import jax
import pytest

from jformer.data.tokenizers import NUM_SYMBOLS, learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference import streaming
from jformer.inference.answers import Request
from jformer.inference.streaming import Streaming, make_stream, refuse_streaming, stable_text
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_shardings
from tests.inference import untrained
from tests.inference.untrained import MODEL, ROWS
from tests.slow import slow_but

REQUESTS = [
    Request("abc", line=0),
    Request("", line=1),
    Request("hgfedcba hgfedcba hgfe", line=2),
    Request("b", "ab", line=3),
    Request("cab", line=4),
]


def told(streaming):
    """Return the texts that are told of each request, one after the other, and the outputs of each."""
    texts, outputs = {}, {}
    while streaming.running:
        for update in streaming.advance():
            texts.setdefault(update.request, []).append(update.text)
            if update.outputs:
                assert update.request not in outputs
                outputs[update.request] = update.outputs
    return texts, [outputs[i] for i in sorted(outputs)]


def started(predictor, requests=REQUESTS):
    return Streaming(predictor, make_stream(predictor.setup), predictor.inputs.pieces(requests))


CASES = {
    "beams": {"beam_size": 3, "n_best": 2},
    "a language model": {"task": "lm", "beam_size": 1},
    "in pieces": {"beam_size": 1, "max_source_length": 8, "overlong": "split"},
}


@pytest.mark.parametrize("name", slow_but(CASES, "in pieces"))
def test_answers_are_those_of_the_whole_and_what_was_told_stays(predictor, name):
    model = predictor(**CASES[name])
    texts, outputs = told(started(model))
    expected = model.generate(REQUESTS)
    assert [[each.ids for each in some] for some in outputs] == [[each.ids for each in some] for some in expected]
    assert [some[0].text for some in outputs] == [some[0].text for some in expected]
    for some, other in zip(outputs, expected, strict=True):
        assert some[0].rank == pytest.approx(other[0].rank, abs=1e-4)
    for i, growing in texts.items():
        assert all(after.startswith(before) for before, after in itertools.pairwise(growing))
        assert growing[-1] == expected[i][0].text
    assert sum(map(len, texts.values())) > 2 * len(REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (2, 2, 1)], ids=str)
def test_devices_stream_what_one_does_and_kernels_know_the_mesh(tiny, sizes, monkeypatch):
    known, begin = set(), streaming.begin_search

    def noted(*given):
        known.add(jax.sharding.get_abstract_mesh().manual_axes)
        return begin(*given)

    monkeypatch.setattr(streaming, "begin_search", noted)
    model, params = tiny(vocab_size=ROWS, **MODEL)
    mesh = make_mesh(*sizes)
    placed = jax.device_put(params, parameter_shardings(mesh, params, whole=["fsdp"]))
    options = {"batch_size": 4, "beam_size": 2, "max_extra_length": 6, "data": {"max_source_length": 64}}
    shared = untrained.predictor(model, placed, mesh=mesh, **options)
    found, others = told(started(shared))
    assert known == {("data", "fsdp")}
    texts, outputs = told(started(untrained.predictor(model, params, **options)))
    assert found == texts
    assert [[each.ids for each in some] for some in others] == [[each.ids for each in some] for some in outputs]


@pytest.mark.slow
def test_nothing_is_computed_for_those_who_leave(predictor):
    model = predictor(beam_size=1)
    begun = started(model)
    begun.advance()
    for i in (0, 2, 3):
        begun.leave(i)
    texts, outputs = told(begun)
    assert texts.keys() <= {1, 4}
    assert outputs[-1][0].text == model.predict(["cab"])[0]
    alone = started(model, REQUESTS[2:3])
    alone.advance()
    alone.leave(0)
    assert not alone.running
    assert alone.advance() == []


def test_requests_share_programs_of_few_sizes(predictor):
    model, rows = predictor(beam_size=1), []
    programs = lambda params, batch, room: rows.append(batch["source"].shape[0]), None
    for requests in (REQUESTS[:1], REQUESTS[:3], REQUESTS[:4]):
        Streaming(model, programs, model.inputs.pieces(requests))
    assert rows == [2, 2, 4]  # an empty one takes none


@pytest.mark.parametrize(("answer", "options"), [("text", {"search": "mbr", "samples": 4}), ("label", {})])
def test_answers_without_a_beginning_are_refused(answer, options):
    with pytest.raises(UserError, match="stream"):
        refuse_streaming(answer, DecodeConfig(**options))


LINES = ["Grüße, sagte er: „don't“ (5 €)", "naïve – 東京 😀 A. B! c's 'tis"] * 9


@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe", "unigram"])
def test_the_stable_text_of_any_tokens_stays_whatever_follows(kind):
    tokenizer, chance = learn(kind, LINES, 80, "identity", False), random.Random(0)
    for _ in range(200):
        ids = chance.choices(range(NUM_SYMBOLS - 1, tokenizer.vocab_size), k=12)
        ids = chance.choice([ids, *tokenizer.encode(LINES[:2])])
        whole = tokenizer.decode(ids)
        assert all(whole.startswith(stable_text(tokenizer, ids[:k])) for k in range(len(ids)))
    assert stable_text(tokenizer, tokenizer.encode(["Grüße"])[0]) == "Grüße"
