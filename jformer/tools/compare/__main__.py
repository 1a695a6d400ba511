"""Two or more runs side by side: their figures, what their configs differ in, and whether a difference is one.

python -m jformer.compare RUN RUN ... [--metric=test/bleu] [--output=DIR] [--watch=SECONDS] [--despite=KIND,...]

  RUN        the directory of a run that is scored; runs that differ in nothing but their seed are taken together, and
             the first of all is what the others are compared with
  --metric   what is tested for differences: SET/NAME of results.json, or SPLIT/NAME of metrics.jsonl (default: the
             first score of the first test set)
  --output   a folder for learning curves and a page with all of this; of two runs also with the answers that
             differ most
  --watch    while runs still train, writes the page anew every so many seconds; compares them once all are scored
  --despite  compares in spite of different signature (of a score), data (tested or trained on), budget (how many
             tokens were trained on, or what a token is)
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
from jformer.storage import refusals_told, run_path
from jformer.tools.compare.comparable import Run, allowed_kinds, read, refuse_apart, refuse_few, trained_on
from jformer.tools.compare.comparison import Arm, compare_arms, learning_curves, table
from jformer.tools.pages import page
from jformer.tools.pages.run_report import CHARTS, check_watch, curves, is_over, state
from jformer.tools.pages.side_by_side import side_by_side

IMMATERIAL = ("seed", "data.dir", "data.cache_dir", "mesh.", "model.execution.")  # to what a run learns


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and return the exit code: 0, 2 for a mistake or runs that are apart, 143 for Ctrl-C."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        with refusals_told():
            allowed = allowed_kinds(options.despite)  # refused at once, not after hours of watching
            for line in watch(options.runs, options.output, options.watch) if options.watch else ():
                print(line, flush=True)
            print(compare(options.runs, options.metric, options.output, allowed))
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # of who watches; the page stays as it is
        return STOPPED
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; end the process with exit code 2 where they are wrong."""
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
    """Return the comparison as text, and write pictures and a page if there is a folder for them.

    Raises UserError for what is no scored run, and for runs that should not be compared.
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
        "what their configs differ in": settings(groups),
        "differences": table(standings, metric),
    }
    notes = [*cautions, *tests]
    if output:
        curve = metric if metric.startswith(("train/", "valid/")) else "valid/loss"
        common = [
            key for key in scored_sets(runs[0].results) if len(groups) == 2 and key in scored_sets(runs[-1].results)
        ]
        pair = [group[0] for group in groups.values()]
        apart = [part for key in common for part in side_by_side(pair[0].config, pair[0].path, pair[1].path, key)]
        page.write(run_path(output), files(tables, notes, _charts(runs), learning_curves(arms, curve), apart))
    parts = ["\n".join([f"{name}:", *aligned(rows, 1)]) for name, rows in tables.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def watch(paths: Sequence[str], output: str, seconds: float) -> Iterator[str]:
    """Write a page of runs of which some still train, every so many seconds until all are scored; yield what to say.

    Raises UserError for a pause or a folder that cannot be, and for what is no run.
    """
    check_watch(seconds)
    refuse_few(paths)
    if not output:
        raise UserError(f"--watch={seconds:g} writes a page: name a folder as --output")
    told = False
    while not all(is_over(run_path(path)) for path in paths):
        page.write(run_path(output), {"index.html": page_of_training(paths, seconds)})
        if not told:
            yield f"{output}/index.html: open it in a browser; it is written every {seconds:g} s until all are scored"
        told = True
        time.sleep(seconds)
    if told:  # a browser need not load it anew any more, also where the runs turn out not to be comparable
        page.write(run_path(output), {"index.html": page_of_training(paths, 0.0)})


def page_of_training(paths: Sequence[str], refresh: float) -> str:
    """Return a page of how far runs are, their curves, and what their configs differ in; a browser loads it anew."""
    runs = [Run(path, records.saved_config(path), records.results(path), {}) for path in map(run_path, paths)]
    named = dict(zip(_names(runs), runs, strict=True))
    far = [f"{name}: {state(run.config, records.rows(run.path), run.results)}" for name, run in named.items()]
    apart = settings({name: [run] for name, run in named.items()})
    parts = [page.paragraph("\n".join(far)), CHARTS, page.heading("what their configs differ in"), page.table(apart)]
    return page.page("Runs side by side", parts, ("run_report",), _charts(runs), refresh)


def first_score(run: Run) -> str:
    """Return the name of the first score of the first test set."""
    for key, scores in scored_sets(run.results).items():
        return f"{key}/{next(iter(scores))}"
    raise UserError(f"{run.path}: has no scores: name a --metric such as valid/loss")


def by_seed(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return label → runs: those that differ in nothing but their seed together, if that leaves several groups."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_material(run), []).append(run)
    repeated = any(len({run.config.seed for run in group}) < len(group) for group in groups.values())
    if repeated or len(groups) == 1 or len(groups) == len(runs):
        return dict(zip(_names(runs), ([run] for run in runs), strict=True))
    names = dict(zip((run.path for run in runs), _names(runs), strict=True))
    return {f"{names[group[0].path]} ({len(group)} seeds)": group for group in groups.values()}


def as_arms(groups: Mapping[str, Sequence[Run]], metric: str) -> list[Arm]:
    """Return each group as an arm; where all are of one run, they are compared as if their seeds were the same."""
    alone = all(len(group) == 1 for group in groups.values())
    arms = []
    for label, group in groups.items():
        runs = {0 if alone else run.config.seed: run for run in group}
        values = {seed: run.metrics[metric] for seed, run in runs.items()}
        arms.append(Arm(label, values, {seed: run.path for seed, run in runs.items()}))
    return arms


def figures(groups: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """Return a row for each figure that any run has, after a head: means over the runs of a group."""
    names = dict.fromkeys(name for group in groups.values() for run in group for name in run.metrics)
    rows = [["", *groups]]
    for name in names:
        values = [[run.metrics[name] for run in group if name in run.metrics] for group in groups.values()]
        rows.append([name, *(_number(estimate(found).mean) if found else "-" for found in values)])
    return rows


def settings(groups: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """Return a row for each key of a config that is not the same for all groups, after a head."""
    flat = [flatten(dataclasses.asdict(group[0].config)) for group in groups.values()]
    for values, group in zip(flat, groups.values(), strict=True):
        values["training data"] = trained_on(group[0])
        if len(group) > 1:
            values["seed"] = ", ".join(str(run.config.seed) for run in group)
    rows = [[key, *(str(values[key]) for values in flat)] for key in flat[0]]
    return [["", *groups], *(row for row in rows if len(set(row[1:])) > 1)]


def files(
    tables: Mapping[str, Sequence[Sequence[str]]],
    notes: Sequence[str],
    charts: object,
    picture: bytes,
    apart: Sequence[str],
) -> dict[str, str | bytes]:
    """Return file name → content: a page of all this, and the picture of the learning curves once more, by itself.

    Args:
        tables: heading → rows, the first of which is the head.
        notes: a line each, below the tables.
        charts: the data that the program of the page draws curves from.
        picture: the learning curves as PNG; b"" where there are none.
        apart: HTML that follows the curves.
    """
    parts = []
    for name, rows in tables.items():
        parts += [page.heading(name), page.table(rows)]
    parts += [page.paragraph("\n".join(notes)), page.heading("curves")]
    pictures = {"curves.png": picture} if picture else {}
    parts += [page.image(png, "learning curves of the metric, with intervals over seeds") for png in pictures.values()]
    return {"index.html": page.page("Runs compared", [*parts, CHARTS, *apart], ("run_report",), charts), **pictures}


def _charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the curves of all runs, for the program of the page."""
    return curves({name: records.rows(run.path) for name, run in zip(_names(runs), runs, strict=True)})


def _material(run: Run) -> str:
    """Return what two runs share that differ in nothing but their seed, and where they ran."""
    keys = flatten(dataclasses.asdict(run.config)).items()
    shared = {key: value for key, value in keys if not key.startswith(IMMATERIAL)}
    return json.dumps([shared, run.results["run"].get("data")])


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names, or their whole paths where names would not tell them apart."""
    short = [run.path.name or str(run.path) for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
