"""The report of a sweep, whole, under way and with nothing to tell."""

import csv
import dataclasses
import re
import urllib.parse

import pytest
from etils.epath import Path
from matplotlib import pyplot
from scipy import stats

from jformer.errors import UserError
from jformer.evaluation import records
from jformer.tools.pages import plots
from jformer.tools.sweep.experiment import load_experiment
from jformer.tools.sweep.sweep_plots import factor
from jformer.tools.sweep.sweep_report import as_arms, as_csv, report
from tests import browser, bucket
from tests.stored_run import store_run
from tests.tools.sweep.sweeps import SEARCH, write

FACTORS = """
from jformer.tools.sweep import product

def sweep():
    return product({"model.norm": ["post", "pre"], "optim.warmup": [0, 5]})
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
    experiment, trials, workdir = sweep(CONCLUDE + FACTORS, PLOTS=[("optim.warmup", "model.norm")])
    trials = finish_all(trials, workdir)
    text = report(experiment, trials, workdir, workdir / "report")
    assert text.startswith("Small.\n")
    assert "of 12 trials 12 complete" in text
    assert "smaller is better; 0.10 trial-hours so far, 30 seconds a complete trial" in text
    assert re.search(r"\nnorm=pre, warmup=5 \* +3 +1.60\d ± 0.2\d\d +-0.\d\d\d ± 0.0\d\d +<0.001 .* 30 +1,234\n", text)
    assert [line.partition("  ")[0].strip(" *") for line in text.splitlines() if line.startswith("norm=")] == [
        *experiment.arms
    ]
    assert "conclusions:\nseen: 12\nthe first: 2.0\n" in text
    pictures = ["curves.png", "arms.png", "warmup-norm.png"]
    assert sorted(path.name for path in (workdir / "report").iterdir()) == sorted(
        ["index.html", "results.csv", "arms.csv", *pictures]
    )
    page = (workdir / "report" / "index.html").read_text()
    assert page.count("data:image/png") == 3
    assert "seen: 12" in page
    assert re.findall(r"<h1>(.*)</h1>", page) == [text.splitlines()[0]]
    assert page.count(text.splitlines()[0]) == 2  # in the tab and above the page
    links = [urllib.parse.unquote(link) for link in re.findall(r'<a href="([^"]*)">', page)]
    assert [(workdir / "report" / link).resolve().name for link in links] == [trial.name for trial in trials]
    assert all((workdir / "report" / link / "metrics.jsonl").exists() for link in links)
    assert (workdir / "results.csv").read_text() == (workdir / "report" / "results.csv").read_text()


def test_results_have_a_row_for_each_trial(sweep):
    experiment, trials, workdir = sweep()
    trials = finish_all(trials, workdir)
    trials[3] = dataclasses.replace(trials[3], state="failed", value=None, metrics={}, error='out of "memory", truly')
    report(experiment, trials, workdir, workdir / "report")
    rows = table(workdir / "results.csv")
    assert [row["name"] for row in rows] == [trial.name for trial in trials]
    assert rows[0] == {
        "name": trials[0].name, "arm": "norm=post, warmup=0", "seed": "0", "state": "complete", "value": "2.0",
        "seconds": "30.0", "attempts": "1", "error": "", "model.norm": "post", "optim.warmup": "0",
        "run/parameters": "1234.0", "run/updates": "40.0", "valid/loss": "2.0",
    }  # fmt: skip
    assert rows[3]["error"] == 'out of "memory", truly'
    assert rows[3]["valid/loss"] == ""


def test_arms_have_the_intervals_and_tests_of_their_seeds(sweep):
    experiment, trials, workdir = sweep(BASELINE="norm=pre, warmup=0")
    trials = finish_all(trials, workdir)
    trials[0] = dataclasses.replace(trials[0], state="failed", value=None, metrics={})
    report(experiment, trials, workdir, workdir / "report")
    post, _, pre, _ = table(workdir / "report" / "arms.csv")
    values = {arm: [t.value for t in trials if t.arm == arm and t.value] for arm in experiment.arms}
    ours = values["norm=post, warmup=0"]
    low, high = stats.t.interval(0.95, 1, sum(ours) / 2, stats.sem(ours))
    assert [float(post[key]) for key in ("n", "low", "high")] == pytest.approx([2, low, high])
    reference = stats.ttest_rel(ours, values["norm=pre, warmup=0"][1:])
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
    assert re.search(r"\nnorm=post, warmup=5 \* +1 of 3 +2.000 +- ", text)
    assert re.search(r"\nnorm=pre, warmup=5 +0 of 3 +- +- ", text)
    assert "nothing is compared: the baseline 'norm=post, warmup=0' has no result yet" in text
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
    assert [row["state"] for row in table(workdir / "results.csv")] == ["complete", *["waiting"] * 11]


def test_where_all_trials_failed_the_first_error_and_a_table_of_them_are_left(sweep):
    experiment, trials, workdir = sweep()
    failed = [dataclasses.replace(trial, state="failed", error=f"mistake {i}") for i, trial in enumerate(trials)]
    with pytest.raises(UserError, match="no trial succeeded, 12 failed; the first error: mistake 0"):
        report(experiment, failed, workdir, workdir / "report")
    for folder in (workdir, workdir / "report"):
        assert [row["error"] for row in table(folder / "results.csv")] == [trial.error for trial in failed]


def test_trials_of_a_bucket_are_linked_from_there_alone(sweep, tmp_path):
    experiment, trials, _ = sweep()
    bucket.pretend(tmp_path / "buckets")
    workdir = Path("gs://mine/sweep")
    trials[0] = finish(trials[0], tmp_path / "buckets" / "mine" / "sweep", 2.0)
    for output, links in ((workdir / "report", [f"../trials/{trials[0].name}"]), (Path(tmp_path) / "report", [])):
        report(experiment, trials, workdir, output)
        page = (output / "index.html").read_text()
        assert trials[0].name in page
        assert [urllib.parse.unquote(link) for link in re.findall(r'<a href="([^"]*)">', page)] == links


def test_an_output_that_cannot_be_written_is_named(sweep):
    experiment, trials, workdir = sweep()
    (workdir / "file").touch()
    with pytest.raises(UserError, match=r"sweep/file/report: Not a directory; move it away"):
        report(experiment, [finish(trials[0], workdir, 2.0)], workdir, workdir / "file" / "report")


@pytest.mark.slow
def test_an_arm_with_failed_seeds_is_not_the_best(sweep):
    experiment, trials, workdir = sweep()
    trials = finish_all(trials, workdir)
    for i in (3, 7):  # of the best arm; the seed that is left looks better still
        trials[i] = dataclasses.replace(trials[i], state="failed", value=None, metrics={}, error="loss is nan")
    trials[11] = dataclasses.replace(trials[11], metrics={"valid/loss": 0.5})
    text = report(experiment, trials, workdir, workdir / "report")
    assert re.search(r"\nnorm=pre, warmup=5 +1 of 3 +0.500 ", text)
    assert re.search(r"\nnorm=pre, warmup=0 \* +3 +1.60", text)
    assert "* the best mean of arms without failed seeds\n" in text
    assert "\n2 of 3 seeds of norm=pre, warmup=5 failed and are not in its mean\n" in text


def test_a_factor_that_an_arm_leaves_alone_is_what_the_base_says(sweep, monkeypatch):
    code = '\ndef sweep():\n    return {"plain": {}, "warm": {"optim.warmup": 9}, "pre": {"model.norm": "pre"}}\n'
    experiment, trials, workdir = sweep(code, SEEDS=(0,), PLOTS=[("optim.warmup", "model.norm")])
    drawn = []
    monkeypatch.setattr(plots, "lines", lambda lines, *_: drawn.extend(lines) or b"")
    factor(experiment, [finish(trial, workdir, 2.0 + i) for i, trial in enumerate(trials)], *experiment.plots[0])
    assert [(line.label, line.x, line.y) for line in drawn] == [
        ("norm=post", [5, 9], [2.0, 3.0]),
        ("norm=pre", [5], [4.0]),
    ]


def test_a_factor_of_one_value_has_its_bar_at_its_label(sweep, monkeypatch):
    code = '\ndef sweep():\n    return {"warm": {"optim.warmup": 9}, "warmer": {"optim.warmup": 90}}\n'
    experiment, trials, workdir = sweep(code, SEEDS=(0,), PLOTS=[("optim.warmup", "")])
    drawn = []
    monkeypatch.setattr(plots, "bars", lambda places, lines, *_: drawn.append((places, lines[0].x)) or b"")
    factor(experiment, [finish(trials[0], workdir, 2.0)], *experiment.plots[0])
    assert drawn == [(["9"], [0])]


def test_plots_of_keys_that_end_the_same_have_files_of_their_own(sweep):
    code = "\nfrom jformer.sweep import product\n\ndef sweep():\n    return product(KEYS)\n"
    keys = {"model.dtype": ["float32"], "decode.dtype": ["float32", "bfloat16"], "optim.warmup": [1]}
    experiment, trials, workdir = sweep(
        code, KEYS=keys, PLOTS=[("model.dtype", ""), ("decode.dtype", "optim.warmup")], SEEDS=(0,)
    )
    report(experiment, [finish(trial, workdir, 2.0) for trial in trials], workdir, workdir / "report")
    names = {path.name for path in (workdir / "report").glob("*.png")}
    assert names == {"curves.png", "arms.png", "model-dtype.png", "decode-dtype-warmup.png"}


@pytest.mark.slow
def test_scores_of_text_are_tested_on_the_outputs(sweep):
    experiment, trials, workdir = sweep(METRIC="test/bleu", SEEDS=(0, 1))
    done = []
    for trial in trials:
        wrong = 100 + 20 * trial.seed + 80 * ("norm=pre" in trial.arm) + ("warmup=5" in trial.arm)
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
            tried["optim.warmup"] = number
        planned = experiment.trial(f"trial {number}", tried, 0, number)
        trials.append(finish(planned, workdir, 2.0 + sign * (number - 7) ** 2))
    trials[0] = dataclasses.replace(trials[0], state="pruned", value=0.1)
    text = report(experiment, trials, workdir, workdir / "report")
    assert "of 30 trials 19 complete, 1 pruned" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("trial")]
    assert lines[0] == ["trial", "learning_rate", "norm", "warmup", "valid/loss", "seconds"]
    assert lines[1][1:] == ["1.35", "pre", "-", "2", "30"]
    assert len(lines) == 11
    assert not pyplot.get_fignums()  # which pyplot would keep for every report
    written = ["curves.png", "index.html", "parallel.png", "results.csv"]
    assert sorted(path.name for path in (workdir / "report").iterdir()) == written


def test_trials_of_a_search_that_look_the_same_are_both_kept(sweep):
    experiment, _, workdir = sweep(SEARCH, TRIALS=2, SEEDS=(0,))
    rates = enumerate((1.00001, 1.00002))
    trials = [experiment.trial("learning_rate=1", {"optim.learning_rate": rate}, 0, i) for i, rate in rates]
    found = as_arms(experiment, [finish(trial, workdir, 2.0 + i) for i, trial in enumerate(trials)], workdir)
    assert [arm.values for arm in found] == [{0: 2.0}, {0: 3.0}]
    assert len({arm.runs[0] for arm in found}) == 2


def test_names_cannot_run_anything(sweep):
    experiment, trials, workdir = sweep('\ndef sweep():\n    return {"<script>alert(1)</script>": {}}\n')
    trials = [finish(trials[0], workdir, 2.0)]
    trials.append(dataclasses.replace(trials[0], state="failed", error="<img src=x onerror=alert(1)>"))
    report(experiment, trials, workdir, workdir / "report")
    page = (workdir / "report" / "index.html").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_nothing_on_the_page_keeps_anybody_out(sweep):
    experiment, _, workdir = sweep(FACTORS, SEEDS=(0, 1), PLOTS=[("optim.warmup", "model.norm")])
    report(experiment, finish_all(experiment.planned(), workdir), workdir, workdir / "report")
    page = (workdir / "report" / "index.html").read_text()
    assert browser.barriers(page) == []
    with browser.used(page) as tab:
        assert len(browser.tabbed(tab)) > 2


@pytest.mark.slow
def test_a_thousand_trials_make_a_short_report(sweep):
    experiment, _, workdir = sweep(
        FACTORS.replace("[0, 5]", "range(40)"), SEEDS=(0, 1), PLOTS=[("optim.warmup", "model.norm")]
    )
    trials = finish_all(experiment.planned(), workdir)
    text = report(experiment, trials, workdir, workdir / "report")
    assert len(text.splitlines()) < 70
    assert "and 30 more arms, in arms.csv" in text
    assert len(table(workdir / "report" / "arms.csv")) == 80
    assert sum(path.stat().st_size for path in (workdir / "report").iterdir()) < 400_000


def test_texts_that_a_spreadsheet_would_compute_are_not_formulas():
    rows = [["name", "error", "value"], ["=HYPERLINK(1)", "@x", -1.5], ["a=b", None, 2]]
    expected = "name,error,value\n'=HYPERLINK(1),'@x,-1.5\na=b,,2\n"
    assert as_csv(rows) == expected
