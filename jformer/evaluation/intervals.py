"""Intervals of a run's own scores: what other sentences would have given, by bootstrap (Koehn 2004). No JAX."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils.epath import Path

from jformer.config.options import Config
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.statistics import CONFIDENCE, SAMPLES, paired_bootstrap
from jformer.evaluation.tables import scored_sets
from jformer.tasks.cider import cider_d
from jformer.tasks.metrics import reference_texts, text_metric
from jformer.tasks.spans import span_counts

RESAMPLED = ("bleu", "chrf")  # TER would take by far the longest
SHARES = ("exact_match", "accuracy")  # of lines that are right
OF_TAGS = ("accuracy", "span_f1", "span_precision", "span_recall")  # of task tag, whose lines count unequally
SEED = 0


def intervals(config: Config, run: Path, results: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return (test set, score) → half the width of its 95 % interval, of those scores that the outputs give again.

    Sentences are drawn with the same seed every time. A run whose outputs or data are not there has none.
    """
    found = {}
    for key, scores in scored_sets(results).items():
        try:
            outputs, pairs = records.outputs(run, key), records.examples(run, key, config.data)
        except (UserError, OSError):
            continue
        if not outputs or len(outputs) != len(pairs):
            continue
        for name, entry in scores.items():
            score, margin = _resampled(config, name, outputs, pairs)
            if math.isclose(score, entry["score"] or 0.0, abs_tol=1e-6):
                found[key, name] = margin
    return found


def _resampled(config: Config, name: str, outputs: list[str], pairs: list[Pair]) -> tuple[float, float]:
    """Return a score of the outputs and its margin; nan for one that is not made line by line."""
    if name in RESAMPLED:
        metric = text_metric(name, config.evaluate.tokenize, config.evaluate.lowercase)
        first, _ = paired_bootstrap(metric, outputs, [outputs], reference_texts(pairs))
        return first.score, first.margin
    if name == "cider":
        values = cider_d(outputs, list(zip(*reference_texts(pairs), strict=True)))
        return _of_sums(values, [1.0] * len(values))
    if config.task == "tag" and name in OF_TAGS:
        counts = [_tags(name, out.split(), pair.target.split()) for out, pair in zip(outputs, pairs, strict=True)]
        return _of_sums([part for part, _ in counts], [whole for _, whole in counts])
    if name in SHARES:
        right = np.array([out in (pair.target, *pair.others) for out, pair in zip(outputs, pairs, strict=True)])
        count = len(right)
        drawn = np.random.default_rng(SEED).binomial(count, right.mean(), SAMPLES) / count  # lines drawn with return
        return float(right.mean()), _half_width(drawn)
    return math.nan, math.nan


def _tags(name: str, found: Sequence[str], wanted: Sequence[str]) -> tuple[float, float]:
    """Return what a sentence adds to both sides of a ratio."""
    if name == "accuracy":
        return float(sum(map(str.__eq__, found, wanted))), float(len(wanted))
    right, of_found, of_wanted = (float(each.total()) for each in span_counts(found, wanted))
    return {
        "span_f1": (2 * right, of_found + of_wanted),
        "span_precision": (right, of_found),
        "span_recall": (right, of_wanted),
    }[name]


def _of_sums(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float]:
    """Return a ratio of sums over lines, 0 where there is nothing to be divided by, and its margin."""
    part, whole = np.array(parts, np.float64), np.array(wholes, np.float64)
    draw = np.random.default_rng(SEED)
    drawn = []
    for _ in range(SAMPLES):
        lines = draw.integers(0, len(part), len(part))
        drawn.append(float(part[lines].sum()) / max(float(whole[lines].sum()), 1.0))
    return float(part.sum()) / max(float(whole.sum()), 1.0), _half_width(drawn)


def _half_width(drawn: np.ndarray | Sequence[float]) -> float:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(high - low) / 2
