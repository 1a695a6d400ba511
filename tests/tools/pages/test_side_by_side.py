"""Answers of two runs side by side: the largest difference first, and texts stay texts."""

import re

from etils.epath import Path

from jformer.config import resolve
from jformer.data.sources.split import Pair
from jformer.evaluation import records
from jformer.tools.pages.side_by_side import side_by_side

PAIRS = [Pair("s0", "a red cat"), Pair("<script>", "two dogs"), Pair("s2", "three birds"), Pair("s3", "same")]
ANSWERS = {"a": ["a red cat", "two dogs", "zzz", "same"], "b": ["a red cap", "<script>", "three birds", "same"]}


def parts_of(monkeypatch, answers, pairs=PAIRS, **options):
    monkeypatch.setattr(records, "outputs", lambda run, key: answers[run.name])
    monkeypatch.setattr(records, "examples", lambda run, key, data: pairs)
    config = resolve({"data": {"dir": "nowhere"}, **options})
    return "".join(side_by_side(config, {"a": Path("runs/a"), "b": Path("runs/b")}, "test"))


def test_the_largest_difference_comes_first(monkeypatch):
    text = parts_of(monkeypatch, ANSWERS)
    assert "3 of 4 lines are answered differently" in text
    worse, better = text.split("b is better than a:")
    assert re.findall(r"<tr><td[^>]*>(\d)</td>", worse) == ["2", "1"]
    assert re.findall(r"<tr><td[^>]*>(\d)</td>", better) == ["3"]
    assert "+100.0" in better
    assert "<script>" not in text


def test_too_few_answers_are_reported(monkeypatch):
    assert "1 answer to 4 examples: score the run again" in parts_of(monkeypatch, {**ANSWERS, "b": ["a"]})


CLASSIFIER = {"task": "classify", "model": {"family": "encoder"}}


def test_several_labels_are_right_in_any_order(monkeypatch):
    data = {"dir": "nowhere", "labels": "several"}
    pairs, answers = [Pair("s", "glad, calm")], {"a": ["calm,glad"], "b": ["calm"]}
    assert "-100.0" in parts_of(monkeypatch, answers, pairs, data=data, **CLASSIFIER)


def test_numbers_that_are_nearer_are_better(monkeypatch):
    data = {"dir": "nowhere", "labels": "number"}
    pairs, answers = [Pair("s", "3"), Pair("t", "2")], {"a": ["2.5", "2.25"], "b": ["3.25", "1"]}
    text = parts_of(monkeypatch, answers, pairs, data=data, **CLASSIFIER)
    worse, better = text.split("b is better than a:")
    assert ("-0.75" in worse, "+0.25" in better) == (True, True)
