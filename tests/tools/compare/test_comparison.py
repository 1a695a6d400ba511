"""Runs taken together by their seeds, and what is said of a difference."""

import json
import math

import pytest

from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.statistics import paired_difference
from jformer.integrity import without_digest
from jformer.tools.compare.comparison import Arm, best, compare_arms, learning_curves, resampled, table
from tests.stored_run import store_run


def arm(label, *values):
    return Arm(label, dict(enumerate(values)), {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return two arms of two seeds: the second has more right answers with both."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        (label, seed): store_run(folder / f"{label}{seed}", {"seed": seed}, wrong=wrong + seed)
        for label, wrong in (("base", 200), ("better", 100))
        for seed in (0, 1)
    }


def scored(runs, *labels, metric="test/bleu"):
    members = {label: {seed: run for (name, seed), run in runs.items() if name == label} for label in labels}
    return [
        Arm(label, {seed: records.metrics(run)[metric] for seed, run in found.items()}, found)
        for label, found in members.items()
    ]


def test_arms_are_compared_over_the_seeds_they_share():
    base, other = Arm("base", {0: 2.0, 1: 2.2, 2: 2.1}, {}), Arm("other", {2: 1.9, 0: 1.7, 5: 9.0}, {})
    (first, second), notes = compare_arms([base, other], "base", "valid/loss")
    assert math.isnan(first.difference.mean)
    assert second.difference == paired_difference([1.7, 1.9], [2.0, 2.1])
    assert second.mean.n == 3
    assert notes == ["differences from 'base' over shared seeds, with Student's t intervals; p of paired t tests"]


def test_p_is_adjusted_for_the_number_of_arms():
    arms = [arm("base", 2.0, 2.2, 2.1), arm("a", 1.9, 2.0, 2.0), arm("b", 2.3, 2.2, 2.4)]
    standings, _ = compare_arms(arms, "base", "valid/loss")
    a, b = standings[1:]
    assert a.adjusted == pytest.approx(2 * a.difference.p)
    assert b.adjusted == pytest.approx(max(b.difference.p, a.adjusted))


def test_one_seed_and_a_missing_baseline_are_told():
    standings, notes = compare_arms([arm("a", 1.0), arm("b", 2.0)], "a", "valid/loss")
    assert standings[1].difference == (1.0, None, None)
    assert "one seed" in notes[-1]
    _, notes = compare_arms([arm("b", 2.0, 3.0)], "a", "valid/loss")
    assert notes == ["nothing is compared: the baseline 'a' has no result yet"]


def test_the_best_mean_is_by_the_goal_and_finite():
    standings, _ = compare_arms([arm("a", 1.0, 2.0), arm("b", 3.0, 3.0), arm("c", math.nan)], "a", "valid/loss")
    assert best(standings, "min") == "a"
    assert best(standings, "max") == "b"
    assert best(standings[2:], "max") == ""


def test_a_table_shows_as_many_digits_as_tell():
    standings, _ = compare_arms([arm("a", 1.0, 1.1), arm("b", 1.3), arm("c", math.nan)], "a", "valid/loss")
    assert table(standings, "valid/loss") == [
        ["arm", "n", "valid/loss ± 95 %", "difference ± 95 %", "p", "p (Holm)"],
        ["a", "2", "1.050 ± 0.635", "-", "-", "-"],
        ["b", "1", "1.300", "+0.300", "-", "-"],
        ["c", "1", "-", "-", "-", "-"],
    ]
    standings, _ = compare_arms([arm("a", 12_345.4), arm("b", 1.0)], "a", "valid/loss")
    assert [row[2] for row in table(standings, "valid/loss")[1:]] == ["12345", "1"]


@pytest.mark.slow
def test_text_is_compared_by_resampling_the_outputs_of_each_seed(runs):
    standings, notes = compare_arms(scored(runs, "base", "better"), "base", "test/bleu")
    by_seed = [resampled(runs["base", seed], [runs["better", seed]], "test/bleu")[1].p for seed in (0, 1)]
    assert standings[1].difference.p == max(by_seed) < 0.01
    assert standings[1].difference.mean > 0
    assert "sacreBLEU's paired bootstrap" in notes[0]


def test_seeds_that_disagree_about_which_is_better_show_no_difference(runs):
    crossed = {("base", 0): runs["base", 0], ("base", 1): runs["better", 1]}
    crossed |= {("other", 0): runs["better", 0], ("other", 1): runs["base", 1]}
    standings, _ = compare_arms(scored(crossed, "base", "other"), "base", "test/bleu")
    assert standings[1].difference.p == 1


def test_a_difference_that_one_seed_shows_and_another_does_not_is_none(runs, tmp_path):
    slight = store_run(tmp_path / "slight", {"seed": 1}, wrong=199)
    mixed = {("base", 0): runs["base", 0], ("base", 1): runs["base", 1]}
    mixed |= {("other", 0): runs["better", 0], ("other", 1): slight}
    standings, _ = compare_arms(scored(mixed, "base", "other"), "base", "test/bleu")
    assert standings[1].difference.p > 0.05
    assert standings[1].difference.p == resampled(runs["base", 1], [slight], "test/bleu")[1].p


def edited(run, path, change):
    content = (run / path).read_text()
    if path.endswith("json"):
        changed = json.dumps(change(without_digest(json.loads(content), path)))
    else:
        changed = change(content)
    (run / path).write_text(changed)
    return run


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        ("outputs/test.txt", lambda text: text.replace("?", "!").replace("a", "b"), "but its outputs give"),
        ("outputs/test.txt", lambda text: text + "one more\n", "another test set 'test'"),
        ("config.json", lambda config: config | {"data": config["data"] | {"name": "sort"}}, "has changed"),
        ("config.json", lambda config: config | {"data": config["data"] | {"source": "files"}}, "name the folder"),
    ],
)
def test_outputs_and_references_that_are_not_what_was_scored_leave_the_t_test(tmp_path, runs, path, change, reason):
    base = store_run(tmp_path / "base", wrong=200)
    edited(base, path, change)
    with pytest.raises(UserError, match=reason):
        resampled(base, [runs["better", 0]], "test/bleu")
    arms = [Arm("base", {0: 1.0, 1: 1.2}, {0: base}), Arm("better", {0: 2.0, 1: 2.1}, {0: runs["better", 0]})]
    (_, better), notes = compare_arms(arms, "base", "test/bleu")
    assert better.difference == paired_difference([2.0, 2.1], [1.0, 1.2])
    assert "paired t tests, in place of bootstraps of the outputs: " in notes[0]
    assert reason in notes[0]


def test_a_run_that_is_gone_leaves_the_t_test(tmp_path, runs):
    arms = [Arm("base", {0: 1.0, 1: 1.2}, {0: runs["base", 0]}), Arm("gone", {0: 2.0, 1: 2.1}, {0: tmp_path / "gone"})]
    (_, gone), notes = compare_arms(arms, "base", "test/bleu")
    assert gone.difference == paired_difference([2.0, 2.1], [1.0, 1.2])
    assert "there are no outputs" in notes[0]
    (tmp_path / "gone" / "outputs").mkdir(parents=True)
    (tmp_path / "gone" / "outputs" / "test.txt").write_text("a\n")
    assert "has no scores of a test set 'test'" in compare_arms(arms, "base", "test/bleu")[1][0]


def test_a_figure_of_training_is_tested_over_seeds_where_a_test_set_has_its_name(tmp_path, runs):
    for metric in ("test/loss", "test/accuracy"):  # figures of a validation set called test
        arms = [Arm(name, {0: 1.0}, {0: runs[name, 0]}) for name in ("base", "better")]
        assert compare_arms(arms, "base", metric)[0][1].difference.p is None
        with pytest.raises(UserError, match=f"was scored without {metric}"):
            resampled(runs["base", 0], [runs["better", 0]], metric)


def test_a_curve_has_the_updates_that_all_seeds_reached(runs, tmp_path):
    short = store_run(tmp_path / "short")
    rows = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text("".join(rows[:3]))
    both = Arm("a", {}, {0: runs["base", 0], 1: short})
    assert learning_curves([both], "valid/loss") == learning_curves([Arm("a", {}, {0: short, 1: short})], "valid/loss")
    assert learning_curves([both], "valid/perplexity") == b""


def test_scores_that_cannot_be_computed_again_leave_the_t_test(runs, monkeypatch):
    monkeypatch.setattr("jformer.tools.compare.comparison.resample", lambda *given: [])  # as of a task of one's own
    arms = [
        Arm(name, {0: value, 1: value + 0.1}, {0: runs[name, 0]}) for name, value in (("base", 1.0), ("better", 2.0))
    ]
    _, notes = compare_arms(arms, "base", "test/bleu")
    assert "in place of bootstraps of the outputs: test/bleu cannot be computed again from the outputs" in notes[0]
