"""Parts of conclusions: the values of arms by seed, and lines that compare two arms. Runs nothing."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from jformer.evaluation.statistics import estimate, paired_difference
from jformer.tools.sweep import Trial
from jformer.tools.sweep.sweep_report import failed_seeds


def values(trials: Sequence[Trial], arm: str, metric: str = "") -> dict[int, float]:
    """Return seed → the experiment's metric, or another figure, of an arm's trials that have it."""
    found = {t.seed: t.metrics.get(metric) if metric else t.value for t in trials if t.arm == arm}
    return {seed: value for seed, value in found.items() if value is not None}


def means(trials: Sequence[Trial], metric: str = "") -> dict[str, float]:
    """Return arm → mean over its seeds, in the order of the trials; arms without a value are left out."""
    arms = {arm: list(values(trials, arm, metric).values()) for arm in dict.fromkeys(t.arm for t in trials)}
    return {arm: estimate(found).mean for arm, found in arms.items() if found}


def versus(trials: Sequence[Trial], arm: str, other: str, metric: str = "") -> list[str]:
    """Return a line with the difference of two arms over the seeds that both have; no line without such seeds.

    It says which of their seeds failed. Its p is not adjusted for other comparisons.
    """
    first, second = values(trials, arm, metric), values(trials, other, metric)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return []
    difference = paired_difference([first[seed] for seed in seeds], [second[seed] for seed in seeds])
    line = f"{f'{metric}, ' if metric else ''}{arm} minus {other}: {difference.mean:+.3f}"
    failed = "".join(f"; {found}" for label, found in failed_seeds(trials).items() if label in (arm, other))
    if len(seeds) == 1:
        return [f"{line} (one seed){failed}"]
    if difference.margin is None:
        return [f"{line} ({len(seeds)} seeds, no interval){failed}"]
    tested = f"± {difference.margin:.3f}, p = {difference.p:.2g} (unadjusted)"
    return [f"{line} {tested}, {len(seeds)} seeds{failed}"]


class PowerLaw(NamedTuple):
    """y = a · x^-b, and the half width of the 95 % interval of b (Student's t)."""

    a: float
    b: float
    margin: float


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Fit y = a · x^-b to three points or more, by least squares of the logarithms."""
    line = stats.linregress(np.log(x), np.log(y))
    return PowerLaw(math.exp(line.intercept), -line.slope, line.stderr * stats.t.ppf(0.975, len(x) - 2))
