"""Intervals of a run's own scores: what other sentences would have given, by bootstrap. No JAX."""

import math
from collections.abc import Mapping
from typing import Any

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.resampling import is_resampled, resample
from jformer.evaluation.score_tables import scored_sets

TOO_LONG = ("ter",)  # it would take by far the longest


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
            if is_resampled(config, name) and name not in TOO_LONG:
                for again in resample(config, name, [outputs], pairs):
                    if math.isclose(again.score, entry["score"] or 0.0, abs_tol=1e-6):
                        found[key, name] = again.margin
    return found
