"""Means, tests, ranks and fits, against SciPy, sacreBLEU and plain counting."""

import math

import numpy as np
import pytest
from sacrebleu import BLEU
from sacrebleu.significance import PairedTest
from scipy import stats

from jformer.evaluation.statistics import (
    Difference,
    Estimate,
    Ratios,
    estimate,
    holm,
    paired_bootstrap,
    paired_bootstrap_of_ratios,
    paired_difference,
)
from jformer.tasks.metrics import text_metric

A, B = [2.1, 2.4, 1.9, 2.2], [2.0, 2.2, 1.95, 2.0]


def test_a_mean_has_the_interval_of_student():
    mean, margin, count = estimate(A)
    low, high = stats.t.interval(0.95, 3, np.mean(A), stats.sem(A))
    assert (mean - margin, mean + margin, count) == pytest.approx((low, high, 4))


def test_one_value_has_no_interval_and_what_is_not_finite_no_mean():
    assert estimate([3.0]) == Estimate(3.0, None, 1)
    assert estimate([3.0, 3.0]) == Estimate(3.0, 0.0, 2)
    assert math.isnan(estimate([3.0, math.inf]).mean)
    assert estimate([3.0, math.nan])[1:] == (None, 2)


def test_paired_differences_equal_those_of_scipy():
    mean, margin, p = paired_difference(A, B)
    reference = stats.ttest_rel(A, B)
    interval = reference.confidence_interval(0.95)
    assert p == pytest.approx(reference.pvalue)
    assert (mean - margin, mean + margin) == pytest.approx((interval.low, interval.high))
    assert paired_difference(A[:1], B[:1]) == Difference(pytest.approx(0.1), None, None)


def test_differences_that_are_all_alike_have_neither_an_interval_nor_a_test():
    assert paired_difference(A, A) == Difference(0.0, 0.0, 1.0)
    assert paired_difference([0.1 + 0.2, 0.3], [0.3, 0.3]) == Difference(pytest.approx(0), 0.0, 1.0)
    assert paired_difference([1.1, 2.1, 3.1], [1.0, 2.0, 3.0]) == Difference(pytest.approx(0.1), None, None)


def test_holm_rejects_what_his_steps_reject():
    rng = np.random.default_rng(0)
    for p_values in rng.uniform(0, 0.1, (50, 4)).tolist():
        rejected, order = set(), sorted(range(4), key=p_values.__getitem__)
        for step, place in enumerate(order):  # his procedure, at level 0.05
            if p_values[place] > 0.05 / (4 - step):
                break
            rejected.add(place)
        assert {i for i, p in enumerate(holm(p_values)) if p <= 0.05} == rejected
    assert holm([0.04, 0.01]) == [0.04, 0.02]
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    references = [" ".join(rng.choice(list("abcdefgh"), 9)) for _ in range(120)]

    def damaged(share):
        return [text[::-1] if rng.random() < share else text for text in references]

    return references, damaged(0.3), damaged(0.35), damaged(0.8)


@pytest.mark.parametrize("name", ["bleu", "chrf", "ter"])
def test_the_bootstrap_is_that_of_sacrebleu(texts, name):
    references, base, near, far = texts
    ours = paired_bootstrap(text_metric(name, "13a", False), base, [near, far], [references])
    named = [("base", base), ("near", near), ("far", far)]
    table = PairedTest(named, {name: text_metric(name, "13a", False)}, [references], "bs", n_samples=1000)()[1]
    theirs = next(column for key, column in table.items() if key != "System")
    assert [found.score for found in ours] == [found.score for found in theirs]
    assert [found.p for found in ours] == [1, *(found.p_value for found in theirs[1:])]
    assert ours[1].p > 0.05 > ours[2].p


@pytest.mark.slow
def test_the_bootstraps_p_is_that_of_plain_resampling(texts):
    references, base, near, _ = texts
    bleu, rng = BLEU(), np.random.default_rng(5)

    def difference(lines):
        return abs(
            bleu.corpus_score([near[i] for i in lines], [[references[i] for i in lines]]).score
            - bleu.corpus_score([base[i] for i in lines], [[references[i] for i in lines]]).score
        )

    observed = difference(range(120))
    drawn = np.array([difference(rng.integers(0, 120, 120)) for _ in range(200)])
    p = np.mean(drawn - drawn.mean() > observed)
    assert paired_bootstrap(bleu, base, [near], [references])[1].p == pytest.approx(p, abs=0.12)


def test_systems_that_score_the_same_do_not_differ(texts):
    references, base, *_ = texts
    hopeless = [["x"] * 120, ["y"] * 120]
    assert paired_bootstrap(BLEU(), base, [base], [references])[1].p == 1
    assert paired_bootstrap(BLEU(), hopeless[0], hopeless[1:], [references])[1].p == 1


@pytest.mark.parametrize(("lines", "p"), [(1, 1), (5, 1 / 16), (20, 1 / 1001)])
def test_few_lines_are_little_evidence_even_if_all_agree(lines, p):
    ones = np.ones(lines)
    wrong, right = (Ratios(np.arange(lines), 0 * np.arange(lines), share * ones, ones) for share in (0, 1))
    assert paired_bootstrap_of_ratios(lines, [wrong, right])[1].p == pytest.approx(p)
    texts = ["a b c d e"] * lines
    assert paired_bootstrap(BLEU(), ["x"] * lines, [texts], [texts])[1].p == pytest.approx(p)
    more, alike = lines + 100, np.ones(100)  # lines on which the systems agree are no evidence
    wrong, right = (Ratios(np.arange(more), 0 * np.arange(more), np.concatenate([share * ones, alike]), np.ones(more))
                    for share in (0, 1))  # fmt: skip
    assert paired_bootstrap_of_ratios(more, [wrong, right])[1].p >= p
