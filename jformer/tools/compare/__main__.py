"""Compare two or more runs: their metrics, how their configs differ, and whether differences are significant.

python -m jformer.compare RUN RUN ... [--metric=test/bleu] [--output=DIR] [--watch=SECONDS] [--despite=KIND,...]

  RUN        the directory of a scored run; runs that differ only in their seed form a group, and the first group is
             the baseline
  --metric   the metric to test: SET/NAME of results.json, or SPLIT/NAME of metrics.jsonl (default: the first score
             of the first test set)
  --output   a folder for a page with all of this and learning curves; for two runs also with the answers that differ
             most
  --watch    while runs still train, rewrites the page every SECONDS; compares them once all are scored
  --despite  compares runs that differ in signature (of a score), data (tested or trained on), or budget (number of
             training tokens, or tokenization)
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jformer.config.options import flatten
from jformer.errors import STOPPED, UserError, nearest
from jformer.evaluation import records
from jformer.evaluation.score_tables import aligned, scored_sets
from jformer.evaluation.statistics import estimate
from jformer.storage import os_errors_as_user_errors, run_path
from jformer.tools.compare.comparable import (
    ScoredRun,
    allowed_kinds,
    named_runs,
    read,
    refuse_apart,
    refuse_few,
    trained_on,
)
from jformer.tools.compare.comparison import Arm, compare_arms, learning_curves, table
from jformer.tools.pages import page
from jformer.tools.pages.run_report import CHARTS, PROGRAMS, check_watch, curves, is_over, state
from jformer.tools.pages.side_by_side import side_by_side

IMMATERIAL = ("seed", "data.dir", "data.cache_dir", "mesh.", "model.execution.")  # keys that do not define a group


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit code: 0, that of a UserError (incomparable runs), or 143 for Ctrl-C."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        with os_errors_as_user_errors():
            allowed = allowed_kinds(options.despite)  # checked before hours of watching
            for line in watch(options.runs, options.output, options.watch) if options.watch else ():
                print(line, flush=True)
            print(compare(options.runs, options.metric, options.output, allowed))
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:  # while watching; the page remains
        return STOPPED
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; exit with code 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        "jformer.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--metric", default="")
    parser.add_argument("--output", default="")
    parser.add_argument("--watch", type=float, default=0.0)
    parser.add_argument("--despite", default="")
    return parser.parse_args(argv)


def compare(paths: Sequence[str], metric: str, output: str, allowed: Sequence[str]) -> str:
    """Return the comparison as text, and write a page if `output` names a folder.

    Raises UserError for a run that is not scored, and for runs that are not comparable.
    """
    refuse_few(paths)
    runs = [read(path) for path in paths]
    cautions = refuse_apart(runs, allowed)
    metric = metric or first_score(runs[0])
    for run in runs:
        if metric not in run.metrics:
            raise UserError(f"{run.path}: has no --metric={metric}; {nearest(metric, run.metrics)}")
    groups = by_seed(runs)
    arms = as_arms(groups, metric)
    standings, tests = compare_arms(arms, arms[0].label, metric)
    tables = {
        "figures": figures(groups),
        "how their configs differ": settings(groups),
        "differences": table(standings, metric),
    }
    notes = [*cautions, *tests]
    if output:
        curve = metric if any(records.curve(run.path, metric) for run in runs) else "valid/loss"
        html = [part for name, rows in tables.items() for part in (page.heading(name), page.table(rows))]
        html.append(page.paragraph("\n".join(notes)))
        page.write(run_path(output), files(html, runs, groups, learning_curves(arms, curve)))
    parts = ["\n".join([f"{name}:", *aligned(rows, 1)]) for name, rows in tables.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def watch(paths: Sequence[str], output: str, seconds: float) -> Iterator[str]:
    """Rewrite a page about runs, some still training, every few seconds until all are scored; yield messages.

    Raises UserError for an invalid interval or folder, and for a missing run.
    """
    check_watch(seconds)
    refuse_few(paths)
    if not output:
        raise UserError(f"--watch={seconds:g} writes a page: name a folder as --output")
    announced = False
    while not all(is_over(run_path(path)) for path in paths):
        page.write(run_path(output), {"index.html": page_of_training(paths, seconds)})
        if not announced:
            yield f"{output}/index.html: open it in a browser; it is written every {seconds:g} s until all are scored"
        announced = True
        time.sleep(seconds)
    if announced:  # browsers stop reloading it, even if the runs turn out not to be comparable
        page.write(run_path(output), {"index.html": page_of_training(paths, 0.0)})


def page_of_training(paths: Sequence[str], refresh: float) -> str:
    """Return a page with the progress of runs, their curves, and how their configs differ."""
    runs = [ScoredRun(path, records.saved_config(path), records.results(path), {}) for path in map(run_path, paths)]
    named = named_runs(runs)
    far = [f"{name}: {state(run.config, records.rows(run.path), run.results)}" for name, run in named.items()]
    apart = settings({name: [run] for name, run in named.items()})
    parts = [page.paragraph("\n".join(far)), CHARTS, page.heading("how their configs differ"), page.table(apart)]
    return page.page("Runs side by side", parts, PROGRAMS, _charts(runs), refresh)


def first_score(run: ScoredRun) -> str:
    """Return the name of the first score of the first test set."""
    for key, scores in scored_sets(run.results).items():
        return f"{key}/{next(iter(scores))}"
    raise UserError(f"{run.path}: has no scores: name a --metric such as valid/loss")


def by_seed(runs: Sequence[ScoredRun]) -> dict[str, list[ScoredRun]]:
    """Return label → runs that differ only in their seed, if that gives several groups; else each run alone."""
    groups: dict[str, list[ScoredRun]] = {}
    for run in runs:
        groups.setdefault(_material(run), []).append(run)
    repeated = any(len({run.config.seed for run in group}) < len(group) for group in groups.values())
    if repeated or len(groups) == 1 or len(groups) == len(runs):
        return {name: [run] for name, run in named_runs(runs).items()}
    names = {run.path: name for name, run in named_runs(runs).items()}
    return {f"{names[group[0].path]} ({len(group)} seeds)": group for group in groups.values()}


def as_arms(groups: Mapping[str, Sequence[ScoredRun]], metric: str) -> list[Arm]:
    """Return each group as an arm; if all are single runs, they are compared as if they had the same seed."""
    alone = all(len(group) == 1 for group in groups.values())
    arms = []
    for label, group in groups.items():
        runs = {0 if alone else run.config.seed: run for run in group}
        values = {seed: run.metrics[metric] for seed, run in runs.items()}
        arms.append(Arm(label, values, {seed: run.path for seed, run in runs.items()}))
    return arms


def figures(groups: Mapping[str, Sequence[ScoredRun]]) -> list[list[str]]:
    """Return a header, and a row for each metric that any run has: means over the runs of a group."""
    names = dict.fromkeys(name for group in groups.values() for run in group for name in run.metrics)
    rows = [["", *groups]]
    for name in names:
        values = [[run.metrics[name] for run in group if name in run.metrics] for group in groups.values()]
        rows.append([name, *(_number(estimate(found).mean) if found else "-" for found in values)])
    return rows


def settings(groups: Mapping[str, Sequence[ScoredRun]]) -> list[list[str]]:
    """Return a header, and a row for each key of a config that differs between groups."""
    flat = [flatten(dataclasses.asdict(group[0].config)) for group in groups.values()]
    for values, group in zip(flat, groups.values(), strict=True):
        values["training data"] = trained_on(group[0])
        if len(group) > 1:
            values["seed"] = ", ".join(str(run.config.seed) for run in group)
    rows = [[key, *(str(values[key]) for values in flat)] for key in flat[0]]
    return [["", *groups], *(row for row in rows if len(set(row[1:])) > 1)]


def files(
    parts: Sequence[str], runs: Sequence[ScoredRun], groups: Mapping[str, Sequence[ScoredRun]], picture: bytes
) -> dict[str, str | bytes]:
    """Return file name → content: a page with parts, curves and the answers of two groups, and the learning curves."""
    shown = [page.image(picture, "learning curves of the metric, with intervals over seeds")] if picture else []
    apart: list[str] = []
    if len(groups) == 2:
        first, other = (group[0] for group in groups.values())
        named = {name: run.path for name, run in named_runs(runs).items() if run.path in (first.path, other.path)}
        texts = [{key: run.results[key]["checksum"] for key in scored_sets(run.results)} for run in (first, other)]
        for key, text in texts[0].items():
            if texts[1].get(key) == text:  # a caution reports those that differ
                apart += side_by_side(first.config, named, key)
    whole = [*parts, page.heading("curves"), *shown, CHARTS, *apart]
    made: dict[str, str | bytes] = {"index.html": page.page("Runs compared", whole, PROGRAMS, _charts(runs))}
    return made | ({"curves.png": picture} if picture else {})


def _charts(runs: Sequence[ScoredRun]) -> list[dict[str, Any]]:
    """Return the data for the page's curves of all runs."""
    return curves({name: records.rows(run.path) for name, run in named_runs(runs).items()})


def _material(run: ScoredRun) -> str:
    """Return a key that is equal for runs which differ only in IMMATERIAL keys."""
    keys = flatten(dataclasses.asdict(run.config)).items()
    shared = {key: value for key, value in keys if not key.startswith(IMMATERIAL)}
    return json.dumps([shared, run.results["run"].get("data")])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
