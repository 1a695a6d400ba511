"""Statistics: means and differences with intervals, tests. Independent of runs.

Intervals are for 95 %. Student's t is for values over seeds, a sample of all seeds; sacreBLEU's bootstrap is for the
sentences of a test set, a sample of all sentences.
"""

import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import special

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

CONFIDENCE = 0.95
SAMPLES = 1_000  # of a bootstrap
SEED = 12_345  # of its samples: sacreBLEU's


class Estimate(NamedTuple):
    """The mean of n values, and the half width of its interval, None for a single value."""

    mean: float
    margin: float | None
    n: int


class Difference(NamedTuple):
    """A mean difference of pairs, the half width of its interval, and p for the hypothesis of no difference.

    The last two are None if the pairs do not determine them.
    """

    mean: float
    margin: float | None
    p: float | None


class Resampled(NamedTuple):
    """A corpus score, the half width of its bootstrap interval, and p against the first system."""

    score: float
    margin: float
    p: float


class Ratios(NamedTuple):
    """A score that is a ratio of sums over lines, or the mean of one ratio per class.

    Letter in shapes: e entries of the sums; a line may have any number.
    """

    lines: np.ndarray  # int [e]: the line of an entry, from 0
    classes: np.ndarray  # int [e], from 0
    parts: np.ndarray  # f64 [e]: numerators
    wholes: np.ndarray  # f64 [e]: denominators
    empty: float = 0.0  # the score if all denominators are 0; otherwise classes with 0 are left out

    def score(self, times: np.ndarray) -> float:
        """Return the score of a test set that repeats each line the given number of times."""
        weights = times[self.lines]
        parts, wholes = (np.bincount(self.classes, weights * each) for each in (self.parts, self.wholes))
        met = wholes > 0
        return float((parts[met] / wholes[met]).mean()) if met.any() else self.empty


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its t interval; nan without an interval if any value is not finite."""
    if not all(map(math.isfinite, values)):
        return Estimate(math.nan, None, len(values))
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Estimate(mean, _quantile(n - 1) * math.sqrt(variance / n), n)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Return the mean of values minus baseline, pair by pair, with its t interval and two-sided paired t test.

    A single pair has neither. Nor do pairs that all differ by the same amount, as counts may: the noise is estimated
    from their variation, and p = 0 would overstate the evidence. If all differences are 0, p is 1.
    """
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    mean, margin, n = estimate(differences)
    if margin is None:
        return Difference(mean, None, None)
    rounding = 1e-12 * max(map(abs, (*values, *baseline)))
    if margin <= rounding:
        return Difference(mean, 0.0, 1.0) if abs(mean) <= rounding else Difference(mean, None, None)
    t = mean / margin * _quantile(n - 1)
    return Difference(mean, margin, float(2 * special.stdtr(n - 1, -abs(t))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple tests; at 5 %, the family-wise error rate is at most 5 % (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def paired_bootstrap(
    metric: "Metric", baseline: Sequence[str], systems: Sequence[Sequence[str]], references: Sequence[Sequence[Any]]
) -> list[Resampled]:
    """Score the baseline and every system by one of sacreBLEU's metrics, resampling sentences (Koehn 2004).

    `references` holds one or several whole texts, None where one is missing. p is two-sided, as in
    `sacrebleu --paired-bs` with its fixed seed, except that systems with equal scores have p = 1 (sacreBLEU, which
    counts only larger differences, returns 0.001), and that p is at least `_least_p`.
    """
    from sacrebleu.significance import PairedTest

    named: list[tuple[str, Sequence[str]]] = [(str(i), outputs) for i, outputs in enumerate([baseline, *systems])]
    test = PairedTest(named, {"score": metric}, [list(text) for text in references], test_type="bs", n_samples=SAMPLES)
    columns: dict[str, Any] = test()[1]  # "System": names; name of the score: results
    first, *others = next(column for name, column in columns.items() if name != "System")
    least = [_least_p(sum(map(operator.ne, baseline, outputs))) for outputs in systems]
    return [Resampled(first.score, float(first.ci), 1.0)] + [
        Resampled(other.score, float(other.ci), 1.0 if other.score == first.score else max(other.p_value, p))
        for other, p in zip(others, least, strict=True)
    ]


def paired_bootstrap_of_ratios(lines: int, systems: Sequence[Ratios]) -> list[Resampled]:
    """Score systems by ratios of sums, with the samples and the test of `paired_bootstrap`.

    The first system is the baseline.
    """
    draw, drawn = np.random.default_rng(SEED), np.empty((SAMPLES, len(systems)))
    for sample in drawn:
        times = np.bincount(draw.integers(0, lines, lines), minlength=lines)
        sample[:] = [system.score(times) for system in systems]
    scores = [system.score(np.ones(lines)) for system in systems]
    ordered, cut = np.sort(drawn, axis=0), SAMPLES // 40  # 2.5 % at each end
    margins = (ordered[SAMPLES - cut - 1] - ordered[cut]) / 2
    gaps = np.abs(drawn - drawn[:, :1])
    larger = (gaps - gaps.mean(axis=0) > np.abs(np.subtract(scores, scores[0]))).sum(axis=0)
    ps = [
        1.0 if score == scores[0] else max(float(count + 1) / (SAMPLES + 1), _least_p(_differing(systems[0], system)))
        for score, count, system in zip(scores, larger, systems, strict=True)
    ]
    return [Resampled(score, float(margin), p) for score, margin, p in zip(scores, margins, ps, strict=True)]


def _differing(one: Ratios, other: Ratios) -> int:
    """Return on how many lines two systems differ."""
    ours, theirs = (Counter(zip(*(part.tolist() for part in each[:4]), strict=True)) for each in (one, other))
    return len({entry[0] for entry in (ours - theirs) + (theirs - ours)})


def _least_p(differing: int) -> float:
    """Return the p value of a two-sided sign test if all lines on which two systems differ favour the same one.

    Resampling never draws a line that favours the other, so a single line would seem to be certain evidence.
    """
    return min(1.0, 2.0 ** (1 - differing))


def _quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with the given degrees of freedom."""
    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
