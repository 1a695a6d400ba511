"""The report of a sweep: tables with intervals and tests, failures, cost, conclusions; as text, CSV, plots and a page.

Reads the current state of trials, also while workers run, and changes none of them.
"""

import csv
import io
import math
import os
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

from etils.epath import Path

from jformer.errors import UserError
from jformer.evaluation.score_tables import aligned
from jformer.storage import in_bucket
from jformer.tools.compare import comparison
from jformer.tools.compare.comparison import Arm, Standing
from jformer.tools.pages import page
from jformer.tools.sweep.experiment import Experiment, Trial
from jformer.tools.sweep.sweep_plots import draw

Rows = list[list[object]]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet's formula begins with
FIELDS = ("name", "arm", "seed", "state", "value", "seconds", "attempts", "error")
STATES = ("complete", "running", "waiting", "pruned", "failed")
FAILURES, ARMS, BEST = 20, 50, 10  # failures, arms and best trials of a search that are shown


def report(experiment: Experiment, trials: Sequence[Trial], workdir: Path, output: Path) -> str:
    """Write the report's files into the folder `output`, and results.csv also into the workdir; return the text.

    Raises UserError if no trial is complete yet or none reports the metric, after writing results.csv.
    """
    results = {"results.csv": as_csv(trial_rows(trials))}
    for folder in (workdir, output):
        page.write(folder, results)
    done, failed = finished(experiment, trials), failed_seeds(trials)
    members = as_arms(experiment, done, workdir)
    standings, tests = comparison.compare_arms(members, experiment.baseline, experiment.metric)
    if experiment.search:
        table, below = best_table(experiment, done), list[str]()
    else:
        table, below = arm_table(experiment, standings, done, failed), [*notes(standings, failed), *tests]
    sections = {
        "": summary(experiment, trials),
        "table": below,
        "conclusions": conclusions(experiment, trials),
        "failed": _first([f"{trial.name}: {trial.error}" for trial in trials if trial.state == "failed"]),
    }
    pictures = draw(experiment, done, members, standings)
    reached = in_bucket(workdir) == in_bucket(output)  # no link leads from a disk into a bucket, or back
    folders = [
        os.path.relpath(workdir / "trials" / trial.name, output) if reached and trial.state != "waiting" else ""
        for trial in trials
    ]
    every = [["trial", "state", experiment.metric, "seconds"]]
    every += [[trial.name, trial.state, _shown(trial.value), f"{trial.seconds:.0f}"] for trial in trials]
    parts = [*_as_page(sections, table, pictures, experiment.title), page.heading("trials")]
    files: dict[str, str | bytes] = {
        "index.html": page.page(experiment.title, [*parts, page.table(every, left=2, links=folders)])
    }
    if not experiment.search:
        files["arms.csv"] = as_csv(arm_rows(standings, done))
    page.write(output, files | pictures)
    return "\n".join([*_as_text(sections, table), f"\nwritten to {output}: {', '.join([*files, *results, *pictures])}"])


def finished(experiment: Experiment, trials: Sequence[Trial]) -> list[Trial]:
    """Return the complete trials that report the metric; raise UserError if there are none."""
    complete = [trial for trial in trials if trial.state == "complete"]
    if not complete:
        first = next((f"; the first error: {trial.error}" for trial in trials if trial.error), "")
        if trials and all(trial.state == "failed" for trial in trials):
            raise UserError(f"{experiment.path}: no trial succeeded, {_counts(trials)}{first}")
        raise UserError(f"{experiment.path}: no trial has finished yet: {_counts(trials) or 'none is planned'}{first}")
    found = [trial for trial in complete if experiment.metric in trial.metrics]
    if not found:
        experiment.value({name: value for trial in complete for name, value in trial.metrics.items()})
    return found


def as_arms(experiment: Experiment, done: Sequence[Trial], workdir: Path) -> list[Arm]:
    """Return the arms with results, in the experiment's order; of a search every trial, since labels may repeat."""
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
    """Return the question, the progress and the cost so far."""
    planned = max(len(trials), experiment.trials if experiment.search else 0)
    better = "greater" if experiment.goal == "max" else "smaller"
    complete = [trial.seconds for trial in trials if trial.state == "complete"]
    hours, mean = sum(trial.seconds for trial in trials) / 3600, sum(complete) / len(complete)
    cost = f"{hours:.2f} trial-hours so far, {mean:.0f} seconds a complete trial"
    return [
        experiment.title,
        f"{experiment.path}: of {planned} trials {_counts(trials)}",
        f"{experiment.metric}, {better} is better; {cost}",
    ]


def failed_seeds(trials: Sequence[Trial]) -> dict[str, str]:
    """Return arm → how many of its seeds failed, for arms with failures."""
    planned = Counter(trial.arm for trial in trials)
    failed = Counter(trial.arm for trial in trials if trial.state == "failed")
    return {arm: f"{count} of {planned[arm]} seeds of {arm} failed" for arm, count in failed.items()}


def notes(standings: Sequence[Standing], failed: Mapping[str, str]) -> list[str]:
    """Return the lines below the table of arms: arms not shown, the star, and means without all seeds."""
    lines = [f"and {len(standings) - ARMS} more arms, in arms.csv"] if len(standings) > ARMS else []
    lines.append("* the best mean of arms without failed seeds" if failed else "* the best mean")
    return [*lines, *_first([f"{found} and are not in its mean" for found in failed.values()])]


def conclusions(experiment: Experiment, trials: Sequence[Trial]) -> list[str]:
    """Return the lines of the experiment's own conclude(trials), which may fail on half of a sweep."""
    if experiment.conclude is None:
        return []
    try:
        return [str(line) for line in experiment.conclude(trials)]
    except Exception as error:  # from the user's file; the rest of the report is still valid
        return [f"conclude() failed: {type(error).__name__}: {error}"]


# --- tables ---


def trial_rows(trials: Sequence[Trial]) -> Rows:
    """Return a row for each trial, after a header: its fields, every key that any trial overrides, every figure."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.overrides))
    names = sorted({name for trial in trials for name in trial.metrics})
    rows = [
        [getattr(trial, field) for field in FIELDS]
        + [trial.overrides.get(key) for key in keys]
        + [trial.metrics.get(name) for name in names]
        for trial in trials
    ]
    return [[*FIELDS, *keys, *names], *rows]


def arm_rows(standings: Sequence[Standing], done: Sequence[Trial]) -> Rows:
    """Return a row for each arm, after a header: its mean and difference with their intervals, and its cost."""
    costs = _costs(done)
    header = ["arm", "n", "mean", "low", "high", "difference", "difference_low", "difference_high", "p", "p_holm"]
    rows: Rows = [[*header, "mean_seconds", "parameters"]]
    for found in standings:
        mean, difference = found.mean, found.difference
        compared = _ends(difference.mean, difference.margin) if math.isfinite(difference.mean) else [None] * 3
        figures = [*_ends(mean.mean, mean.margin), *compared, difference.p, found.adjusted]
        rows.append([found.label, mean.n, *figures, *costs[found.label]])
    return rows


def arm_table(
    experiment: Experiment, standings: Sequence[Standing], done: Sequence[Trial], partial: Container[str]
) -> list[list[str]]:
    """Return the table of arms in the file's order, or only the best if there are many.

    The best is marked, unless it is `partial`: without failed seeds, a mean covers only the lucky ones.
    """
    costs, shown = _costs(done), list(standings)
    best = comparison.best([found for found in standings if found.label not in partial], experiment.goal)
    if len(standings) > ARMS:
        shown = sorted(standings, key=lambda found: comparison.rank(found.mean.mean, experiment.goal))[:ARMS]
    header, *rows = comparison.table(shown, experiment.metric)
    for row, found in zip(rows, shown, strict=True):
        seconds, parameters = costs[found.label]
        row[0] += " *" if found.label == best else ""
        row[1] = _of(found.mean.n, len(experiment.seeds))
        row += [f"{seconds:.0f}", "-" if parameters is None else f"{parameters:,.0f}"]
    missing = [label for label in experiment.arms if label not in {found.label for found in standings}]
    rows += [[label, _of(0, len(experiment.seeds)), *["-"] * 6] for label in missing[:ARMS]]
    return [[*header, "seconds", "parameters"], *rows]


def best_table(experiment: Experiment, done: Sequence[Trial]) -> list[list[str]]:
    """Return the best trials of a search, with their overrides."""
    shown = sorted(done, key=lambda trial: comparison.rank(trial.metrics[experiment.metric], experiment.goal))[:BEST]
    keys = list(dict.fromkeys(key for trial in shown for key in trial.overrides))
    rows = []
    for trial in shown:
        overrides = [_shown(trial.overrides.get(key)) for key in keys]
        rows.append([trial.name, *overrides, f"{trial.metrics[experiment.metric]:.4g}", f"{trial.seconds:.0f}"])
    return [["trial", *(key.rpartition(".")[2] for key in keys), experiment.metric, "seconds"], *rows]


def as_csv(rows: Rows) -> str:
    """Return rows as CSV, where a string that a spreadsheet would evaluate as a formula begins with an apostrophe."""
    text = io.StringIO()
    safe = [
        [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row] for row in rows
    ]
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue()


def _costs(done: Sequence[Trial]) -> Mapping[str, tuple[float, float | None]]:
    """Return arm → mean seconds of a trial, and its number of parameters."""
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
) -> list[str]:
    parts = []
    for name, lines in sections.items():
        if name == "table":
            parts += [page.table(table), *(page.image(png, picture) for picture, png in pictures.items())]
        elif name and lines:
            parts.append(page.heading(name))
        parts.append(page.paragraph("\n".join(line for line in lines if line != title)))  # the page has its own title
    return parts
