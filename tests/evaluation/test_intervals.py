"""Intervals of a run's own scores: seeded, of those that its outputs give again, and as wide as a formula says."""

import math

import pytest
from etils.epath import Path

from jformer.data.sources.split import Pair
from jformer.evaluation import records
from jformer.evaluation.intervals import intervals

PAIRS = [Pair("s", f"a b c d {i}") for i in range(100)]


def found_of(monkeypatch, scores, right=60):
    outputs = [pair.target if i < right else "a b c d x" for i, pair in enumerate(PAIRS)]
    monkeypatch.setattr(records, "outputs", lambda run, key: outputs)
    monkeypatch.setattr(records, "examples", lambda run, key, data: PAIRS)
    from jformer.config import resolve

    config = resolve({"data": {"dir": "nowhere"}})
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
