"""Intervals of a run's own scores: seeded, of those that its outputs give again, and as wide as a formula says."""

import math

import pytest
from etils.epath import Path

from jformer.data.sources.split import Pair
from jformer.evaluation import records
from jformer.evaluation.intervals import intervals
from jformer.tasks.span_scores import span_scores

PAIRS = [Pair("s", f"a b c d {i}") for i in range(100)]


def found_of(monkeypatch, scores, right=60):
    outputs = [pair.target if i < right else "a b c d x" for i, pair in enumerate(PAIRS)]
    return found_for(monkeypatch, scores, outputs, PAIRS)


def found_for(monkeypatch, scores, outputs, pairs, **options):
    monkeypatch.setattr(records, "outputs", lambda run, key: outputs)
    monkeypatch.setattr(records, "examples", lambda run, key, data: pairs)
    from jformer.config import resolve

    config = resolve({"data": {"dir": "nowhere", **options.pop("data", {})}, **options})
    results = {"test": {name: {"score": value} for name, value in scores.items()}}
    return [intervals(config, Path("run"), results) for _ in range(2)]


def test_a_share_has_the_interval_of_a_binomial_and_the_same_each_time(monkeypatch):
    first, again = found_of(monkeypatch, {"exact_match": 0.6, "token_accuracy": 0.9})
    assert first == again
    assert first.keys() == {("test", "exact_match")}
    assert first["test", "exact_match"] == pytest.approx(1.96 * math.sqrt(0.6 * 0.4 / 100), rel=0.1)


def test_a_score_that_the_outputs_do_not_give_again_has_none(monkeypatch):
    assert found_of(monkeypatch, {"exact_match": 0.7, "bleu": 12.0})[0] == {}


def test_bleu_is_resampled(monkeypatch):
    from jformer.tasks.metrics import text_metric

    outputs = [pair.target if i < 60 else "a b c d x" for i, pair in enumerate(PAIRS)]
    score = text_metric("bleu", "13a", False).corpus_score(outputs, [[pair.target for pair in PAIRS]]).score
    first, again = found_of(monkeypatch, {"bleu": score})
    assert first == again
    assert 0.5 < first["test", "bleu"] < 10


def test_scores_of_spans_are_resampled_by_sentence(monkeypatch):
    wanted = 40 * ["B-x I-x O", "O B-y O", "O O O"]
    outputs = 40 * ["B-x I-x O", "O O O", "O O B-y"]  # of three sentences one span is right, one lost, one invented
    scores = span_scores(*([tags.split() for tags in texts] for texts in (outputs, wanted)))
    values = {name: scores[name]["score"] for name in ("span_f1", "span_precision", "span_recall")} | {
        "accuracy": 7 / 9
    }
    assert values["span_f1"] == 0.5
    pairs = [Pair("a b c", tags) for tags in wanted]
    first, again = found_for(
        monkeypatch, values, outputs, pairs, task="tag", data={"source": "conll"}, model={"family": "encoder"}
    )
    assert first == again
    assert {name for _, name in first} == {*values}
    # Of 120 sentences each of the kinds is drawn with chance 1/3: the delta method gives the deviation of their ratio.
    assert first["test", "span_recall"] == pytest.approx(1.96 * math.sqrt(0.5 * 0.5 / 80), rel=0.2)


def test_cider_is_resampled(monkeypatch):
    from jformer.tasks.cider import cider_d

    outputs = [pair.target if i < 60 else "a b c d x" for i, pair in enumerate(PAIRS)]
    values = cider_d(outputs, [[pair.target] for pair in PAIRS])
    mean = sum(values) / len(values)
    first, again = found_of(monkeypatch, {"cider": mean})
    assert first == again
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) / len(values))
    assert first["test", "cider"] == pytest.approx(1.96 * deviation, rel=0.1)
