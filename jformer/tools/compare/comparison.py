"""Compare arms, each of which is a group of runs that differ only in their seed, with a baseline.

Metrics are compared over seeds by paired Student's t. Scores of text and F1 are compared by a paired bootstrap of the
runs' outputs instead (Koehn 2004), and so are accuracies with one seed. `compare` and the report of a sweep use it.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from etils.epath import Path

from jformer.config.options import TEXT_SCORES
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.resampling import SHARES, as_scored, is_resampled, resample, resample_segments
from jformer.evaluation.statistics import SAMPLES, Difference, Estimate, Resampled, estimate, holm, paired_difference
from jformer.tools.pages import plots
from jformer.tools.pages.plots import PlottedLine

MOST_RESAMPLED = 60  # runs; a tenth of a second to a second each
NO_DIFFERENCE = Difference(math.nan, None, None)


@dataclasses.dataclass(frozen=True)
class Arm:
    """The runs of an arm that have the metric."""

    label: str
    values: Mapping[int, float]  # seed → the metric
    runs: Mapping[int, Path]  # seed → the run's directory


@dataclasses.dataclass(frozen=True)
class Standing:
    """The result of an arm and its difference from the baseline; NO_DIFFERENCE if it is not compared."""

    label: str
    mean: Estimate
    difference: Difference  # over the seeds that both have
    adjusted: float | None  # p adjusted by Holm's method over all arms


def compare_arms(arms: Sequence[Arm], baseline: str, metric: str) -> tuple[list[Standing], list[str]]:
    """Return the standing of each arm, in their order, and lines that explain the intervals and tests."""
    base = next((arm for arm in arms if arm.label == baseline), None)
    differences = {arm.label: _difference(arm, base) for arm in arms if base and arm is not base}
    notes = [] if base else [f"nothing is compared: the baseline {baseline!r} has no result yet"]
    if base and len(arms) > 1:
        p_values, test = _tests(base, [arm for arm in arms if arm is not base], differences, metric)
        differences = {label: found._replace(p=p_values.get(label)) for label, found in differences.items()}
        notes.append(f"differences from {baseline!r} over shared seeds, with Student's t intervals; {test}")
    if all(len(arm.values) == 1 for arm in arms):
        notes.append("one seed: no intervals, as the spread over seeds is unknown")
    tested = {label: found.p for label, found in differences.items() if found.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    standings = [
        Standing(
            arm.label,
            estimate(list(arm.values.values())),
            differences.get(arm.label, NO_DIFFERENCE),
            adjusted.get(arm.label),
        )
        for arm in arms
    ]
    return standings, notes


def rank(value: float, goal: str) -> float:
    """Return a sort key, smaller for better values by goal "min" or "max"; values that are not finite are last."""
    if not math.isfinite(value):
        return math.inf
    return -value if goal == "max" else value


def best(standings: Sequence[Standing], goal: str) -> str:
    """Return the label of the arm with the best mean; "" if none is finite."""
    first = min(standings, key=lambda standing: rank(standing.mean.mean, goal), default=None)
    return first.label if first and math.isfinite(first.mean.mean) else ""


def table(standings: Sequence[Standing], metric: str) -> list[list[str]]:
    """Return the cells of a table of the arms, its header first."""
    largest = max((abs(s.mean.mean) for s in standings if math.isfinite(s.mean.mean)), default=0.0)
    decimals = min(max(3 - math.floor(math.log10(largest)), 0), 9) if largest else 1
    rows = [["arm", "n", f"{metric} ± 95 %", "difference ± 95 %", "p", "p (Holm)"]]
    for standing in standings:
        mean, difference = standing.mean, standing.difference
        rows.append(
            [
                standing.label,
                str(mean.n),
                _number(mean.mean, mean.margin, f".{decimals}f"),
                _number(difference.mean, difference.margin, f"+.{decimals}f"),
                _p(difference.p),
                _p(standing.adjusted),
            ]
        )
    return rows


def learning_curves(ranked: Sequence[Arm], name: str) -> bytes:
    """Draw the mean over seeds of a metric of metrics.jsonl; b"" if no run has it."""
    lines = [mean_curve(arm.label, list(arm.runs.values()), name) for arm in ranked]
    drawn = [line for line in lines if line.x]
    return plots.curves(drawn, "updates", name) if drawn else b""


def mean_curve(label: str, runs: Sequence[Path], name: str) -> PlottedLine:
    """Return the mean over runs of a metric of metrics.jsonl, at the updates that all of them have."""
    curves = [dict(records.curve(run, name)) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    means = [estimate([curve[step] for curve in curves]) for step in steps]
    return PlottedLine(label, steps, [found.mean for found in means], [found.margin for found in means])


def resampled(baseline: Path, others: Sequence[Path], metric: str) -> list[Resampled]:
    """Return the paired bootstrap of a score, "SET/NAME", for the baseline and the other runs.

    Raises UserError if the references have changed since scoring, or if the outputs no longer give the same scores.
    """
    key, _, name = metric.partition("/")
    runs = [baseline, *others]
    pairs = records.examples(baseline, key)
    entries = [records.results(run).get(key, {}) for run in runs]
    outputs = [records.outputs(run, key) for run in runs]
    for run, entry, lines in zip(runs, entries, outputs, strict=True):
        if not entry:
            raise UserError(f"{run}: has no scores of a test set {key!r} any more")
        if entry["checksum"] != entries[0]["checksum"] or len(lines) != len(pairs):
            raise UserError(f"{run}: was scored with another test set {key!r} than {baseline}")
        if name not in entry:
            raise UserError(f"{run}: was scored without {metric}")
    found = resample_segments([records.segment_scores(run, key, name) for run in runs])
    found = found or resample(as_scored(records.saved_config(baseline), key, entries[0]), name, outputs, pairs)
    if not found:  # such as scores of a user-defined task, or segments that only some runs have
        raise UserError(f"{metric} cannot be computed again from the outputs of these runs")
    for run, entry, again in zip(runs, entries, found, strict=True):
        if not math.isclose(entry[name]["score"], again.score, abs_tol=1e-6):
            raise UserError(
                f"{run}: {metric} is {entry[name]['score']:.2f} but its outputs give {again.score:.2f} "
                f"with the options of {baseline}; score both again"
            )
    return found


def _difference(arm: Arm, base: Arm) -> Difference:
    shared = [seed for seed in base.values if seed in arm.values]
    if not shared:
        return NO_DIFFERENCE
    return paired_difference([arm.values[seed] for seed in shared], [base.values[seed] for seed in shared])


def _tests(
    base: Arm, others: Sequence[Arm], differences: Mapping[str, Difference], metric: str
) -> tuple[dict[str, float], str]:
    """Return label → p, and the name of the test."""
    student = {label: found.p for label, found in differences.items() if found.p is not None}
    test, (key, _, name) = "p of paired t tests", metric.partition("/")
    run = next(iter(base.runs.values()), None)
    if not run or name not in records.results(run).get(key, {}):  # a figure of metrics.jsonl
        return student, test
    if not is_resampled(records.saved_config(run), name) and not records.segment_scores(run, key, name):
        return student, test
    if name in SHARES and student:
        return student, test
    if sum(len(arm.runs) for arm in others) > MOST_RESAMPLED:
        return student, f"{test}, as there are more than {MOST_RESAMPLED} runs, in place of bootstraps of their outputs"
    try:
        found = _resampled_over_seeds(base, others, metric)
    except UserError as error:
        return student, f"{test}, in place of bootstraps of the outputs: {error}"
    whose = "sacreBLEU's paired bootstrap" if name in TEXT_SCORES else "a paired bootstrap"
    return found, (
        f"p of {whose} of the outputs ({SAMPLES:,} samples), the largest of the seeds', or 1 "
        "where seeds disagree about which is better: intervals are over seeds, p is over sentences"
    )


def _resampled_over_seeds(base: Arm, others: Sequence[Arm], metric: str) -> dict[str, float]:
    """Return label → p of the hypothesis that some seed shows no difference, or one of the opposite sign.

    It is an intersection-union test (Berger 1982): the largest p of the seeds needs no adjustment.
    """
    found = defaultdict[str, list[tuple[float, float]]](list)
    for seed, run in base.runs.items():
        sharing = [arm for arm in others if seed in arm.runs]
        if sharing:
            first, *rest = resampled(run, [arm.runs[seed] for arm in sharing], metric)
            for arm, other in zip(sharing, rest, strict=True):
                found[arm.label].append((other.score - first.score, other.p))
    disagree = {label for label, pairs in found.items() if min(pairs)[0] < 0 < max(pairs)[0]}
    return {label: 1.0 if label in disagree else max(p for _, p in pairs) for label, pairs in found.items()}


def _number(value: float, margin: float | None, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:{form}}" if margin is None else f"{value:{form}} ± {margin:{form.removeprefix('+')}}"


def _p(p: float | None) -> str:
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
