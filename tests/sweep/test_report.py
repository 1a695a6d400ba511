"""The report of a sweep, whole, under way and with nothing to tell."""

import csv
import dataclasses
import re

import pytest
from scipy import stats

from jformer import records
from jformer.errors import UserError
from jformer.sweep.experiment import load_experiment
from jformer.sweep.report import report
from tests.stored_run import store_run
from tests.sweep.sweeps import SEARCH, write

FACTORS = """
from jformer.sweep import product

def sweep():
    return product({"model.norm": ["post", "pre"], "optim.warmup_steps": [0, 5]})
"""
CONCLUDE = """
def conclude(trials):
    yield f"seen: {len(trials)}"
    yield f"the first: {trials[0].value / (trials[0].state == 'complete'):.1f}"
"""
FIGURES = {"run/parameters": 1234.0, "run/updates": 40.0}


@pytest.fixture
def sweep(tmp_path):
    """Return a function: code, constants → (experiment, trials planned, workdir)."""

    def make(code=FACTORS, **constants):
        experiment = load_experiment(write(tmp_path, code, **{"SEEDS": (0, 1, 2), **constants}))
        (tmp_path / "sweep").mkdir()
        return experiment, experiment.planned(), tmp_path / "sweep"

    return make


def finish(trial, workdir, value, **fields):
    """Return a trial that is done, with a directory of its rows of metrics."""
    store_run(workdir / "trials" / trial.name, losses=(4.0, 3.0, 2.5, value), scored=False)
    metrics = {"valid/loss": value, **FIGURES}
    done = {"state": "complete", "value": value, "metrics": metrics, "seconds": 30.0, "attempts": 1}
    return dataclasses.replace(trial, **{**done, **fields})


def finish_all(trials, workdir):
    """Return all trials done: those with norm=pre are better by a half, the seeds differ a little."""
    return [
        finish(trial, workdir, 2.0 - ("norm=pre" in trial.arm) / 2 + trial.seed / 10 + i * i % 7 / 1000)
        for i, trial in enumerate(trials)
    ]


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_finished_sweep_is_reported_in_text_csv_pictures_and_a_page(sweep):
    experiment, trials, workdir = sweep(CONCLUDE + FACTORS, PLOTS=[("optim.warmup_steps", "model.norm")])
    trials = finish_all(trials, workdir)
    text = report(experiment, trials, workdir, workdir / "report")
    assert text.startswith("Small.\n")
    assert "of 12 trials 12 complete" in text
    assert "smaller is better; 0.10 trial-hours so far, 30 seconds a complete trial" in text
    assert re.search(
        r"\nnorm=pre, warmup_steps=5 \* +3 +1.60\d ± 0.2\d\d +-0.\d\d\d ± 0.0\d\d +<0.001 .* 30 +1,234\n", text
    )
    assert [line.partition("  ")[0].strip(" *") for line in text.splitlines() if line.startswith("norm=")] == [
        *experiment.arms
    ]
    assert "conclusions:\nseen: 12\nthe first: 2.0\n" in text
    pictures = ["curves.png", "arms.png", "warmup_steps-norm.png"]
    assert sorted(path.name for path in (workdir / "report").iterdir()) == sorted(
        ["index.html", "results.csv", "arms.csv", *pictures]
    )
    page = (workdir / "report" / "index.html").read_text()
    assert page.count("data:image/png") == 3
    assert "seen: 12" in page
    assert (workdir / "results.csv").read_text() == (workdir / "report" / "results.csv").read_text()


def test_results_have_a_row_for_each_trial(sweep):
    experiment, trials, workdir = sweep()
    trials = finish_all(trials, workdir)
    trials[3] = dataclasses.replace(trials[3], state="failed", value=None, metrics={}, error='out of "memory", truly')
    report(experiment, trials, workdir, workdir / "report")
    rows = table(workdir / "results.csv")
    assert [row["name"] for row in rows] == [trial.name for trial in trials]
    assert rows[0] == {
        "name": trials[0].name, "arm": "norm=post, warmup_steps=0", "seed": "0", "state": "complete", "value": "2.0",
        "seconds": "30.0", "attempts": "1", "error": "", "model.norm": "post", "optim.warmup_steps": "0",
        "run/parameters": "1234.0", "run/updates": "40.0", "valid/loss": "2.0",
    }  # fmt: skip
    assert rows[3]["error"] == 'out of "memory", truly'
    assert rows[3]["valid/loss"] == ""


def test_arms_have_the_intervals_and_tests_of_their_seeds(sweep):
    experiment, trials, workdir = sweep(BASELINE="norm=pre, warmup_steps=0")
    trials = finish_all(trials, workdir)
    trials[0] = dataclasses.replace(trials[0], state="failed", value=None, metrics={})
    report(experiment, trials, workdir, workdir / "report")
    post, _, pre, _ = table(workdir / "report" / "arms.csv")
    values = {arm: [t.value for t in trials if t.arm == arm and t.value] for arm in experiment.arms}
    ours = values["norm=post, warmup_steps=0"]
    low, high = stats.t.interval(0.95, 1, sum(ours) / 2, stats.sem(ours))
    assert [float(post[key]) for key in ("n", "low", "high")] == pytest.approx([2, low, high])
    reference = stats.ttest_rel(ours, values["norm=pre, warmup_steps=0"][1:])
    assert float(post["p"]) == pytest.approx(reference.pvalue)
    assert float(post["difference"]) == pytest.approx(0.5, abs=0.01)
    assert float(post["p_holm"]) <= 3 * float(post["p"]) + 1e-12
    assert (pre["difference"], pre["p"], pre["mean_seconds"], pre["parameters"]) == ("", "", "30.0", "1234.0")


def test_a_sweep_under_way_says_how_far_it_is(sweep):
    experiment, trials, workdir = sweep(CONCLUDE + FACTORS)
    trials[5] = finish(trials[5], workdir, 2.0)
    trials[1] = dataclasses.replace(trials[1], state="running", attempts=1, seconds=9.0)
    trials[2] = dataclasses.replace(trials[2], state="failed", error="no room on the disk")
    text = report(experiment, trials, workdir, workdir / "report")
    assert "of 12 trials 1 complete, 1 running, 9 waiting, 1 failed" in text
    assert re.search(r"\nnorm=post, warmup_steps=5 \* +1 of 3 +2.000 +- ", text)
    assert re.search(r"\nnorm=pre, warmup_steps=5 +0 of 3 +- +- ", text)
    assert "nothing is compared: the baseline 'norm=post, warmup_steps=0' has no result yet" in text
    assert f"failed:\n{trials[2].name}: no room on the disk\n" in text
    assert "conclude() failed: TypeError" in text


def test_nothing_finished_and_a_metric_that_nobody_reports_are_one_line(sweep):
    experiment, trials, workdir = sweep()
    failed = [dataclasses.replace(trial, state="failed", error=f"mistake {i}") for i, trial in enumerate(trials[:2])]
    running = [dataclasses.replace(trials[2], state="running")]
    with pytest.raises(
        UserError, match="no trial has finished yet: 1 running, 9 waiting, 2 failed; the first error: m"
    ):
        report(experiment, [*failed, *running, *trials[3:]], workdir, workdir / "report")
    other = dataclasses.replace(experiment, metric="valid/los")
    with pytest.raises(UserError, match="no trial reports METRIC='valid/los'; did you mean valid/loss"):
        report(other, [finish(trials[0], workdir, 2.0), *trials[1:]], workdir, workdir / "report")
    assert not (workdir / "report").exists()


def test_scores_of_text_are_tested_on_the_outputs(sweep):
    experiment, trials, workdir = sweep(METRIC="test/bleu", SEEDS=(0, 1))
    done = []
    for trial in trials:
        wrong = 100 + 20 * trial.seed + 80 * ("norm=pre" in trial.arm) + ("warmup_steps=5" in trial.arm)
        run = store_run(workdir / "trials" / trial.name, wrong=wrong)
        metrics = records.metrics(run)
        done.append(dataclasses.replace(trial, state="complete", value=metrics["test/bleu"], metrics=metrics))
    text = report(experiment, done, workdir, workdir / "report")
    assert "p of sacreBLEU's paired bootstrap of the outputs" in text
    warm, pre, _ = [float(row["p"]) for row in table(workdir / "report" / "arms.csv")[1:]]
    assert pre < 0.01 < 0.05 < warm


@pytest.mark.parametrize(("goal", "sign"), [("min", 1), ("max", -1)])
def test_a_search_shows_its_best_trials_and_draws_all(sweep, goal, sign):
    experiment, _, workdir = sweep(SEARCH, TRIALS=30, SEEDS=(0,), GOAL=goal)
    trials = []
    for number in range(20):
        tried = {"optim.learning_rate": 1 + number / 20, "model.norm": "pre" if number % 2 else "post"}
        if number % 3 == 0:
            tried["optim.warmup_steps"] = number
        planned = experiment.trial(f"trial {number}", tried, 0, number)
        trials.append(finish(planned, workdir, 2.0 + sign * (number - 7) ** 2))
    trials[0] = dataclasses.replace(trials[0], state="pruned", value=0.1)
    text = report(experiment, trials, workdir, workdir / "report")
    assert "of 30 trials 19 complete, 1 pruned" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("trial")]
    assert lines[0] == ["trial", "learning_rate", "norm", "warmup_steps", "valid/loss", "seconds"]
    assert lines[1][1:] == ["1.35", "pre", "-", "2", "30"]
    assert len(lines) == 11
    assert sorted(path.name for path in (workdir / "report").glob("*.png")) == ["curves.png", "parallel.png"]


def test_names_cannot_run_anything(sweep):
    experiment, trials, workdir = sweep('\ndef sweep():\n    return {"<script>alert(1)</script>": {}}\n')
    trials = [finish(trials[0], workdir, 2.0)]
    trials.append(dataclasses.replace(trials[0], state="failed", error="<img src=x onerror=alert(1)>"))
    report(experiment, trials, workdir, workdir / "report")
    page = (workdir / "report" / "index.html").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_thousand_trials_make_a_short_report(sweep):
    experiment, _, workdir = sweep(
        FACTORS.replace("[0, 5]", "range(40)"), SEEDS=(0, 1), PLOTS=[("optim.warmup_steps", "model.norm")]
    )
    trials = finish_all(experiment.planned(), workdir)
    text = report(experiment, trials, workdir, workdir / "report")
    assert len(text.splitlines()) < 70
    assert "and 30 more arms, in arms.csv" in text
    assert len(table(workdir / "report" / "arms.csv")) == 80
    assert sum(path.stat().st_size for path in (workdir / "report").iterdir()) < 400_000
