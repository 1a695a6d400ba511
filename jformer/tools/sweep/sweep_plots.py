"""The plots of a sweep: learning curves, arms with intervals, one for each factor, the trials of a search."""

import dataclasses
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from jformer.config.options import flatten
from jformer.evaluation.statistics import estimate
from jformer.tools.compare.comparison import Arm, Standing, learning_curves, rank
from jformer.tools.pages import plots
from jformer.tools.pages.plots import PlottedLine, is_number
from jformer.tools.sweep.experiment import Experiment, Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOGARITHMIC_FROM = 16  # largest value over smallest: four doublings would crowd at one end of a linear axis


def draw(
    experiment: Experiment, done: Sequence[Trial], members: Sequence[Arm], standings: Sequence[Standing]
) -> dict[str, bytes]:
    """Return file name → PNG."""
    order = sorted(range(len(members)), key=lambda i: rank(standings[i].mean.mean, experiment.goal))
    ranked, metric = [members[i] for i in order], experiment.metric
    pictures = {"curves.png": learning_curves(ranked, metric if experiment.reports_in_training() else "valid/loss")}
    if experiment.search:
        pictures["parallel.png"] = parallel(experiment, done)
    else:
        pictures["arms.png"] = arm_intervals(experiment, [standings[i] for i in order])
    ends = Counter(map(_last, {key for plot in experiment.plots for key in plot}))
    for x, lines in experiment.plots:  # named by the last parts of keys, or whole keys if another ends the same
        name = "-".join(_last(key) if ends[_last(key)] == 1 else key.replace(".", "-") for key in (x, lines) if key)
        pictures[f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.png"] = factor(experiment, done, x, lines)
    return {name: png for name, png in pictures.items() if png}


def arm_intervals(experiment: Experiment, ranked: Sequence[Standing]) -> bytes:
    """Draw all arms, the best at the top, and a line at the baseline's mean."""
    rows = {found.label: (found.mean.mean, found.mean.margin) for found in ranked}
    reference, _ = rows.get(experiment.baseline, (math.nan, None))
    return plots.intervals(rows, experiment.metric, reference)


def factor(experiment: Experiment, done: Sequence[Trial], x: str, lines: str) -> bytes:
    """Draw the metric over one key, with a line or a bar for each value of another ("" = none).

    A trial that does not set a key has the base's value. Other keys are averaged over, seed by seed, before intervals
    are computed. Returns b"" if there is nothing to draw.
    """
    base = flatten(dataclasses.asdict(experiment.config({})))
    cells: defaultdict[tuple[str, Any], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trial in done:
        settings = base | trial.overrides
        if x in settings and (not lines or lines in settings):
            label = f"{_last(lines)}={settings[lines]}" if lines else ""
            place = settings[x] if is_number(settings[x]) else str(settings[x])
            cells[label, place][trial.seed].append(trial.metrics[experiment.metric])
    points = {cell: estimate([sum(values) / len(values) for values in seeds.values()]) for cell, seeds in cells.items()}
    places = list(dict.fromkeys(place for _, place in points))
    numeric = len(places) > 1 and all(map(is_number, places))
    if not places:
        return b""
    found = []
    for label in dict.fromkeys(label for label, _ in points):
        at = {place: points[label, place] for place in places if (label, place) in points}
        xs = sorted(at) if numeric else list(at)
        positions = xs if numeric else [places.index(place) for place in xs]
        found.append(PlottedLine(label, positions, [at[p].mean for p in xs], [at[p].margin for p in xs]))
    if not numeric:
        return plots.bars([str(place) for place in places], found, x, experiment.metric)
    logarithmic = min(places) > 0 and max(places) >= LOGARITHMIC_FROM * min(places)
    return plots.lines(found, x, experiment.metric, logarithmic)


def parallel(experiment: Experiment, done: Sequence[Trial]) -> bytes:
    """Draw parallel coordinates, by Optuna: an axis for the metric and each key, a line for each trial of a search."""
    from matplotlib import pyplot  # takes half a second, which workers need not wait for
    from optuna.visualization.matplotlib import plot_parallel_coordinate

    values: defaultdict[str, list[Any]] = defaultdict(list)
    for trial in done:
        for key, value in trial.overrides.items():
            values[key].append(value)
    numbers = {key for key, found in values.items() if all(map(is_number, found))}
    axes: dict[str, BaseDistribution] = {}
    for key, found in values.items():
        low, high = (min(found), max(found)) if key in numbers else (0, 0)
        log = low > 0 and high >= LOGARITHMIC_FROM * low
        texts = CategoricalDistribution([*dict.fromkeys(map(_escaped, found))])
        axes[key] = FloatDistribution(low, high, log=log) if key in numbers else texts
    study = optuna.create_study(direction="maximize" if experiment.goal == "max" else "minimize")
    for trial in done:
        params = {key: value if key in numbers else _escaped(value) for key, value in trial.overrides.items()}
        own, value = {key: axes[key] for key in params}, trial.metrics[experiment.metric]
        study.add_trial(optuna.create_trial(params=params, distributions=own, value=value))
    pyplot.switch_backend("agg")  # Optuna draws with pyplot, which would open windows and keep figures
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        figure = cast("Figure", plot_parallel_coordinate(study, target_name=experiment.metric).figure)
    picture = plots.as_png(figure)
    pyplot.close(figure)
    return picture


def _escaped(value: object) -> str:
    return str(value).replace("$", r"\$")  # which matplotlib takes for the start of a formula


def _last(key: str) -> str:
    return key.rpartition(".")[2]
