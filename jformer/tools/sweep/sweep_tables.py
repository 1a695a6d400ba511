"""Trials and arms as rows of cells: what the report prints, and its CSV files. Computes nothing that is compared."""

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jformer.tools.compare import comparison
from jformer.tools.compare.comparison import Standing
from jformer.tools.sweep.experiment import Experiment, Trial

Rows = list[list[object]]
FIELDS = ("name", "arm", "seed", "state", "value", "seconds", "attempts", "error")
SHOWN = 50  # arms
BEST = 10  # trials of a search


def trial_rows(trials: Sequence[Trial]) -> Rows:
    """Return a row for each trial, after a head: what it is, every key that any of them overrides, every figure."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.overrides))
    names = sorted({name for trial in trials for name in trial.metrics})
    return [
        [*FIELDS, *keys, *names],
        *(
            [getattr(trial, field) for field in FIELDS]
            + [trial.overrides.get(key) for key in keys]
            + [trial.metrics.get(name) for name in names]
            for trial in trials
        ),
    ]


def arm_rows(standings: Sequence[Standing], done: Sequence[Trial]) -> Rows:
    """Return a row for each arm, after a head: its mean and difference, with the ends of their intervals, and cost."""
    costs = _costs(done)
    head = ["arm", "n", "mean", "low", "high", "difference", "difference_low", "difference_high", "p", "p_holm"]
    rows: Rows = [[*head, "mean_seconds", "parameters"]]
    for found in standings:
        mean, difference = found.mean, found.difference
        compared = _ends(difference.mean, difference.margin) if math.isfinite(difference.mean) else [None] * 3
        figures = [*_ends(mean.mean, mean.margin), *compared, difference.p, found.adjusted]
        rows.append([found.label, mean.n, *figures, *costs[found.label]])
    return rows


def arm_table(
    experiment: Experiment, standings: Sequence[Standing], done: Sequence[Trial], partial: Container[str]
) -> list[list[str]]:
    """Return the table of arms in the file's order; of very many only the best, in their order.

    The best one is marked, unless it is `partial`: a mean without the seeds that failed is that of the lucky ones.
    """
    costs, best = (
        _costs(done),
        comparison.best([found for found in standings if found.label not in partial], experiment.goal),
    )
    if len(standings) > SHOWN:
        shown = sorted(standings, key=lambda found: comparison.rank(found.mean.mean, experiment.goal))[:SHOWN]
    else:
        shown = list(standings)
    head, *rows = comparison.table(shown, experiment.metric)
    for row, found in zip(rows, shown, strict=True):
        seconds, parameters = costs[found.label]
        row[0] += " *" if found.label == best else ""
        row[1] = _of(found.mean.n, len(experiment.seeds))
        row += [f"{seconds:.0f}", "-" if parameters is None else f"{parameters:,.0f}"]
    missing = [label for label in experiment.arms if label not in {found.label for found in standings}]
    rows += [[label, _of(0, len(experiment.seeds)), *["-"] * 6] for label in missing[:SHOWN]]
    return [[*head, "seconds", "parameters"], *rows]


def best_table(experiment: Experiment, done: Sequence[Trial]) -> list[list[str]]:
    """Return the best trials of a search, with what it tried in them."""
    shown = sorted(done, key=lambda trial: comparison.rank(trial.metrics[experiment.metric], experiment.goal))[:BEST]
    keys = list(dict.fromkeys(key for trial in shown for key in trial.overrides))
    head = ["trial", *(key.rpartition(".")[2] for key in keys), experiment.metric, "seconds"]
    return [
        head,
        *(
            [trial.name]
            + [_shown(trial.overrides.get(key)) for key in keys]
            + [f"{trial.metrics[experiment.metric]:.4g}", f"{trial.seconds:.0f}"]
            for trial in shown
        ),
    ]


def list_table(experiment: Experiment, trials: Sequence[Trial]) -> list[list[str]]:
    """Return what became of every trial."""
    return [
        ["trial", "state", experiment.metric, "seconds"],
        *([trial.name, trial.state, _shown(trial.value), f"{trial.seconds:.0f}"] for trial in trials),
    ]


def _costs(done: Sequence[Trial]) -> Mapping[str, tuple[float, float | None]]:
    """Return arm → mean seconds of a trial, and its parameters."""
    members = defaultdict[str, list[Trial]](list)
    for trial in done:
        members[trial.arm].append(trial)
    return {
        label: (sum(trial.seconds for trial in group) / len(group), group[0].metrics.get("run/parameters"))
        for label, group in members.items()
    }


def _ends(mean: float, margin: float | None) -> list[float | None]:
    return [mean, None, None] if margin is None else [mean, mean - margin, mean + margin]


def _of(number: int, planned: int) -> str:
    return str(number) if number >= planned else f"{number} of {planned}"


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
