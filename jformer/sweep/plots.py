"""The pictures of a sweep: learning curves, arms with their intervals, a plot for each factor, a search's trials."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jformer import visualize
from jformer.arms import Arm, Standing, learning_curves
from jformer.statistics import estimate
from jformer.sweep.experiment import Experiment, Trial
from jformer.sweep.tables import rank
from jformer.visualize import Line

WIDE = 16  # factor between the ends of an axis from which on it is logarithmic


def draw(
    experiment: Experiment, done: Sequence[Trial], members: Sequence[Arm], standings: Sequence[Standing]
) -> dict[str, bytes]:
    """Return file name → PNG."""
    order = sorted(range(len(members)), key=lambda i: rank(experiment, standings[i].mean.mean))
    ranked, metric = [members[i] for i in order], experiment.metric
    pictures = {"curves.png": learning_curves(ranked, metric if experiment.reports_in_training() else "valid/loss")}
    if experiment.search:
        pictures["parallel.png"] = parallel(experiment, done)
    else:
        pictures["arms.png"] = arm_intervals(experiment, [standings[i] for i in order])
    for x, lines in experiment.plots:
        name = "-".join(filter(None, (_last(x), _last(lines))))
        pictures[f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.png"] = factor(experiment, done, x, lines)
    return {name: png for name, png in pictures.items() if png}


def arm_intervals(experiment: Experiment, ranked: Sequence[Standing]) -> bytes:
    """Draw all arms, the best at the top, and a rule at the baseline's mean."""
    means = {found.label: found.mean for found in ranked}
    reference = means[experiment.baseline].mean if experiment.baseline in means else math.nan
    margins = [found.margin for found in means.values()]
    return visualize.intervals(list(means), [m.mean for m in means.values()], margins, experiment.metric, reference)


def factor(experiment: Experiment, done: Sequence[Trial], x: str, lines: str) -> bytes:
    """Draw the metric over one key, with a line or a bar for each value of another ("" = none).

    Other keys are averaged over, seed by seed, before intervals are made. Returns b"" if there is nothing to draw.
    """
    cells: defaultdict[tuple[str, Any], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in done:
        if x in trial.overrides and (not lines or lines in trial.overrides):
            label = f"{_last(lines)}={trial.overrides[lines]}" if lines else ""
            place = trial.overrides[x]
            place = place if _is_number(place) else str(place)
            cells[label, place][trial.seed].append(trial.metrics[experiment.metric])
    points = {cell: estimate([sum(values) / len(values) for values in seeds.values()]) for cell, seeds in cells.items()}
    places = list(dict.fromkeys(place for _, place in points))
    numeric = all(map(_is_number, places))
    if not places:
        return b""
    found = []
    for label in dict.fromkeys(label for label, _ in points):
        at = {place: points[label, place] for place in places if (label, place) in points}
        xs = sorted(at) if numeric else list(at)
        positions = xs if numeric else [places.index(place) for place in xs]
        found.append(Line(label, positions, [at[p].mean for p in xs], [at[p].margin for p in xs]))
    if not numeric or len(places) == 1:
        return visualize.bars([str(place) for place in places], found, x, experiment.metric)
    logarithmic = min(places) > 0 and max(places) >= WIDE * min(places)
    return visualize.lines(found, x, experiment.metric, logarithmic)


def parallel(experiment: Experiment, done: Sequence[Trial]) -> bytes:
    """Draw what each trial of a search tried, and what it got."""
    keys = list(dict.fromkeys(key for trial in done for key in trial.overrides))
    columns = {key: [trial.overrides.get(key) for trial in done] for key in keys}
    values = [trial.metrics[experiment.metric] for trial in done]
    return visualize.parallel(columns, values, experiment.metric, experiment.goal == "max")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
