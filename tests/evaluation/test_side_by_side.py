"""Answers of two runs side by side: the largest difference first, and texts stay texts."""

import re

from etils.epath import Path

from jformer.config import resolve
from jformer.data.sources.split import Pair
from jformer.evaluation import records
from jformer.evaluation.side_by_side import side_by_side

PAIRS = [Pair("s0", "a red cat"), Pair("<script>", "two dogs"), Pair("s2", "three birds"), Pair("s3", "same")]
ANSWERS = {"a": ["a red cat", "two dogs", "zzz", "same"], "b": ["a red cap", "<script>", "three birds", "same"]}


def parts_of(monkeypatch, answers):
    monkeypatch.setattr(records, "outputs", lambda run, key: answers[run.name])
    monkeypatch.setattr(records, "examples", lambda run, key, data: PAIRS)
    config = resolve({"data": {"dir": "nowhere"}})
    return "".join(side_by_side(config, Path("runs/a"), Path("runs/b"), "test"))


def test_the_largest_difference_comes_first(monkeypatch):
    text = parts_of(monkeypatch, ANSWERS)
    assert "3 of 4 lines are answered differently" in text
    worse, better = text.split("b is better than a:")
    assert re.findall(r"<tr><td[^>]*>(\d)</td>", worse) == ["2", "1"]
    assert re.findall(r"<tr><td[^>]*>(\d)</td>", better) == ["3"]
    assert "+100.0" in better
    assert "<script>" not in text


def test_too_few_answers_are_told(monkeypatch):
    assert "not as many answers as examples" in parts_of(monkeypatch, {**ANSWERS, "b": ["a"]})
