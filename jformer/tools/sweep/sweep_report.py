"""What a sweep says so far: a table with intervals and tests, failures, cost and conclusions; CSV files, plots, a page.

Reads trials as they stand, also while workers run, and changes none of them.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from etils.epath import Path

from jformer.errors import UserError
from jformer.evaluation.score_tables import aligned
from jformer.tools.compare.comparison import Arm, Standing, compare_arms
from jformer.tools.pages import page
from jformer.tools.sweep.experiment import Experiment, Trial
from jformer.tools.sweep.sweep_plots import draw
from jformer.tools.sweep.sweep_tables import SHOWN, Rows, arm_rows, arm_table, best_table, list_table, trial_rows

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a formula begins with
FAILURES = 20  # shown
STATES = ("complete", "running", "waiting", "pruned", "failed")


def report(experiment: Experiment, trials: Sequence[Trial], workdir: Path, output: Path) -> str:
    """Write the report's files into the folder `output`, and results.csv into the workdir as well; return its text.

    Raises UserError if no trial is complete yet, or none reports the metric: results.csv is written all the same.
    """
    results = {"results.csv": as_csv(trial_rows(trials))}
    for folder in (workdir, output):
        page.write(folder, results)
    done, failed = finished(experiment, trials), failed_seeds(trials)
    members = as_arms(experiment, done, workdir)
    standings, tests = compare_arms(members, experiment.baseline, experiment.metric)
    table = best_table(experiment, done) if experiment.search else arm_table(experiment, standings, done, failed)
    sections = {
        "": summary(experiment, trials),
        "table": [] if experiment.search else [*left_out(standings), *star(failed), *tests],
        "conclusions": conclusions(experiment, trials),
        "failed": failures(trials),
    }
    pictures = draw(experiment, done, members, standings)
    folders = [
        "" if trial.state == "waiting" else os.path.relpath(workdir / "trials" / trial.name, output) for trial in trials
    ]
    parts = [_as_page(sections, table, pictures, experiment.title), page.heading("trials")]
    parts.append(page.table(list_table(experiment, trials), left=2, links=folders))
    pages = {"index.html": page.page(experiment.title, parts)}
    if not experiment.search:
        pages["arms.csv"] = as_csv(arm_rows(standings, done))
    page.write(output, {**pages, **pictures})
    written = ", ".join((*pages, *results, *pictures))
    return "\n".join([*_as_text(sections, table), f"\nwritten to {output}: {written}"])


def finished(experiment: Experiment, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that are complete and have the metric; raise UserError if there are none."""
    complete = [trial for trial in trials if trial.state == "complete"]
    if not complete:
        first = next((f"; the first error: {trial.error}" for trial in trials if trial.error), "")
        if trials and all(trial.state == "failed" for trial in trials):
            raise UserError(f"{experiment.path}: no trial worked, {_counts(trials)}{first}")
        raise UserError(f"{experiment.path}: no trial has finished yet: {_counts(trials) or 'none is planned'}{first}")
    found = [trial for trial in complete if experiment.metric in trial.metrics]
    if not found:
        experiment.value({name: value for trial in complete for name, value in trial.metrics.items()})
    return found


def as_arms(experiment: Experiment, done: Sequence[Trial], workdir: Path) -> list[Arm]:
    """Return the arms that have results, in the experiment's order; of a search each trial, since labels may repeat."""
    members: dict[str, list[Trial]] = {label: [] for label in experiment.arms}
    for trial in done:
        members.setdefault(trial.name if experiment.search else trial.arm, []).append(trial)
    return [
        Arm(
            label,
            {trial.seed: trial.metrics[experiment.metric] for trial in group},
            {trial.seed: workdir / "trials" / trial.name for trial in group},
        )
        for label, group in members.items()
        if group
    ]


def summary(experiment: Experiment, trials: Sequence[Trial]) -> list[str]:
    """Return what was asked, how far it is and what it has cost."""
    planned = max(len(trials), experiment.trials if experiment.search else 0)
    better = "greater" if experiment.goal == "max" else "smaller"
    complete = [trial.seconds for trial in trials if trial.state == "complete"]
    hours = sum(trial.seconds for trial in trials) / 3600
    return [
        experiment.title,
        f"{experiment.path}: of {planned} trials {_counts(trials)}",
        (
            f"{experiment.metric}, {better} is better; {hours:.2f} trial-hours so far, "
            f"{sum(complete) / len(complete):.0f} seconds a complete trial"
        ),
    ]


def left_out(standings: Sequence[Standing]) -> list[str]:
    """Return a line that says how many arms the table has no room for."""
    return [f"and {len(standings) - SHOWN} more arms, in arms.csv"] if len(standings) > SHOWN else []


def failed_seeds(trials: Sequence[Trial]) -> dict[str, str]:
    """Return arm → how many of its seeds failed, for arms of which any did."""
    planned = Counter(trial.arm for trial in trials)
    failed = Counter(trial.arm for trial in trials if trial.state == "failed")
    return {arm: f"{count} of {planned[arm]} seeds of {arm} failed" for arm, count in failed.items()}


def star(failed: Mapping[str, str]) -> list[str]:
    """Return what the star in the table means, and which means are not those of all seeds."""
    if not failed:
        return ["* the best mean"]
    lines = [f"{found} and are not in its mean" for found in failed.values()]
    return ["* the best mean of arms without failed seeds", *_first(lines)]


def conclusions(experiment: Experiment, trials: Sequence[Trial]) -> list[str]:
    """Return the lines of the experiment's own conclude(trials); half of a sweep may be too little for it."""
    if experiment.conclude is None:
        return []
    try:
        return [str(line) for line in experiment.conclude(trials)]
    except Exception as error:  # of a file that is not ours; the rest of the report stands
        return [f"conclude() failed: {type(error).__name__}: {error}"]


def failures(trials: Sequence[Trial]) -> list[str]:
    """Return the trials that failed, and why."""
    lines = [f"{trial.name}: {trial.error}" for trial in trials if trial.state == "failed"]
    return _first(lines)


def _first(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - FAILURES} more, in results.csv"] if len(lines) > FAILURES else []
    return [*lines[:FAILURES], *more]


def _counts(trials: Sequence[Trial]) -> str:
    found = Counter(trial.state for trial in trials)
    return ", ".join(f"{found[state]} {state}" for state in STATES if found[state])


def _as_text(sections: Mapping[str, Sequence[str]], table: Sequence[Sequence[str]]) -> list[str]:
    lines: list[str] = []
    for name, part in sections.items():
        if name == "table":
            lines += ["", *aligned(table, 1)]
        elif name and part:
            lines += ["", f"{name}:"]
        lines += part
    return lines


def _as_page(
    sections: Mapping[str, Sequence[str]], table: Sequence[Sequence[str]], pictures: Mapping[str, bytes], title: str
) -> str:
    parts = []
    for name, lines in sections.items():
        if name == "table":
            parts.append(page.table(table))
            parts += [page.image(png, picture) for picture, png in pictures.items()]
        elif name and lines:
            parts.append(page.heading(name))
        parts.append(page.paragraph("\n".join(line for line in lines if line != title)))  # the page has its own
    return "\n".join(parts)


def _as_cell(value: Any) -> Any:
    """Return a value of a CSV file; a text that a spreadsheet would compute as a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def as_csv(rows: Rows) -> str:
    """Return rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([list(map(_as_cell, row)) for row in rows])
    return text.getvalue()
