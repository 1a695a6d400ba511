"""Loose runs side by side: what is shown, what is refused, and what a mistake says."""

import errno
import html
import json
import re

import pytest
from etils.epath import Path

from jformer.evaluation import records
from jformer.tools.compare.__main__ import main
from jformer.tools.pages import page as pages
from jformer.tools.pages import run_report as report
from tests import browser
from tests.stored_run import score, store_run


def edit(run, change):
    """Change the results of a run."""
    results = json.loads((run / "results.json").read_text())
    change(results)
    (run / "results.json").write_text(json.dumps(results))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    store_run(folder / "post", wrong=200)
    store_run(folder / "pre", {"model.norm": "pre"}, wrong=100)
    store_run(folder / "post1", {"seed": 1}, wrong=210)
    store_run(folder / "pre1", {"seed": 1, "model.norm": "pre"}, wrong=90)
    store_run(folder / "longer", {"train.num_steps": 80}, wrong=50)
    store_run(folder / "sorted", {"data.name": "sort"})
    store_run(folder / "cased", {"evaluate.tokenize": "char"})
    store_run(folder / "words", {"data.tokenizer": "byte"})
    for name, rate in (("subwords", 0.0), ("recut", 0.1)):
        store_run(folder / name, {"data.tokenizer": "bpe", "data.bpe_dropout": rate})
    for name in ("trained", "otherwise"):
        edit(store_run(folder / name), lambda results, name=name: results["run"].update(data=[f"{name} on this text"]))
    store_run(folder / "bytes", {"data.tokenizer": "bpe", "data.byte_fallback": True})
    store_run(folder / "unscored", scored=False)
    edit(store_run(folder / "unjudged"), lambda results: results.pop("test"))
    return folder


@pytest.fixture
def told(runs, capsys):
    """Return a function: arguments, names of runs → (exit code, standard output, standard error)."""

    def call(*names, options=()):
        code = main([*(str(runs / name) for name in names), *options])
        return code, *capsys.readouterr()

    return call


@pytest.mark.slow
def test_figures_settings_and_a_tested_difference_are_shown(told):
    code, text, _ = told("post", "pre")
    assert code == 0
    assert re.search(r"\n +post +pre\n", text)
    assert re.search(r"\ntest/exact_match +0.6 +0.8\n", text)
    assert re.search(r"\nmodel.norm +post +pre\n", text)
    assert not re.search(r"\nmodel.d_model ", text)
    assert re.search(r"\npre +1 +\d\d\.\d\d +\+\d\.\d\d +<0.001 +<0.001\n", text)
    assert "sacreBLEU's paired bootstrap of the outputs (1,000 samples)" in text


def test_a_run_and_its_copy_do_not_differ(told, runs):
    store_run(runs / "again", wrong=200)
    _, text, _ = told("post", "again")
    assert re.search(r"\nagain +1 +[\d.]+ +\+0.00 +1.000 +1.000\n", text)


def test_runs_that_differ_in_their_seed_are_taken_together(told):
    code, text, _ = told("post", "pre", "post1", "pre1", options=["--metric=valid/loss"])
    assert code == 0
    assert re.search(r"\n +post \(2 seeds\) +pre \(2 seeds\)\n", text)
    assert re.search(r"\npre \(2 seeds\) +2 +2.200 ± 0.000 +\+0.000 ± 0.000 +1.000", text)
    _, text, _ = told("post", "post1")
    assert re.search(r"\nseed +0 +1\n", text)


def test_seeds_stay_what_they_are_where_any_runs_are_taken_together(told, runs):
    store_run(runs / "post2", {"seed": 2}, losses=(4.0, 3.0, 2.5, 2.4))
    _, text, _ = told("pre", "pre1", "post2", options=["--metric=valid/loss"])
    assert re.search(r"\npost2 \(1 seeds\) +1 +2.400 +- +- +-\n", text)
    assert re.search(r"\nseed +0, 1 +2\n", text)
    _, text, _ = told("pre", "post2", options=["--metric=valid/loss"])
    assert re.search(r"\npost2 +1 +2.400 +\+0.200 +- +-\n", text)


def test_runs_that_were_trained_on_other_text_are_refused_unless_it_is_named(told):
    code, _, error = told("trained", "otherwise")
    assert code == 2
    assert "data (otherwise against trained: trained on otherwis against trained )" in error
    code, text, _ = told("trained", "otherwise", options=["--despite=data"])
    assert code == 0
    assert "compared although the data differs: otherwise against trained: trained on" in text


def test_other_cuts_of_the_same_words_are_another_budget(told):
    code, text, error = told("subwords", "recut")
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert "budget (recut against subwords: tokens of data.bpe_dropout=0.1 against 0.0)" in error
    assert (
        "budget (bytes against subwords: tokens of data.byte_fallback=True against False)"
        in told("subwords", "bytes")[2]
    )


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("longer", "budget", "80 updates of 1,024 tokens against 40 updates of 1,024 tokens"),
        ("sorted", "data", "'test' is not the same text"),
        ("cased", "signature", r"tok:char\S* against nrefs\S*tok:13a"),
        ("words", "budget", "tokens of data.tokenizer=byte against char"),
    ],
)
def test_what_makes_figures_incomparable_is_refused_unless_it_is_named(told, name, kind, what):
    code, text, error = told("post", name)
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert re.search(what, error)
    assert f"--despite={kind} compares them anyway" in error
    code, text, _ = told("post", name, options=[f"--despite={kind}"])
    assert code == 0
    assert f"compared although the {kind} differs: {name} against post: " in text


def test_all_kinds_are_asked_for_at_once(told):
    _, _, error = told("post", "longer", "sorted", options=["--despite=signature"])
    assert "--despite=signature,budget,data compares" in error


def test_the_output_is_curves_and_a_page(told, tmp_path):
    told("post", "pre", options=[f"--output={tmp_path}/out"])
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<td>pre</td>" in page
    assert page.count("data:image/png;base64,") == 1
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert {line["run"] for chart in charts for line in chart["lines"]} == {"post", "pre"}
    assert "bootstrap" in page


def test_answers_to_other_texts_are_not_set_side_by_side(told, tmp_path):
    heading = "Answers to test side by side"
    told("post", "pre", options=[f"--output={tmp_path}/same"])
    assert heading in (tmp_path / "same" / "index.html").read_text()
    told("post", "sorted", options=[f"--output={tmp_path}/other", "--despite=data"])
    assert heading not in (tmp_path / "other" / "index.html").read_text()


def test_the_curve_is_that_of_the_metric(told, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("jformer.tools.compare.__main__.learning_curves", lambda _, name: drawn.append(name) or b"")
    for name in ("a", "b"):
        with (store_run(tmp_path / name) / "metrics.jsonl").open("a") as rows:
            rows.write('{"step": 40, "split": "valid_ema", "loss": 2.0}\n')
    for metric in ("valid_ema/loss", "test/bleu"):
        told(tmp_path / "a", tmp_path / "b", options=[f"--output={tmp_path}/out", f"--metric={metric}"])
    assert drawn == ["valid_ema/loss", "valid/loss"]


def test_runs_that_train_are_watched_side_by_side_until_all_are_scored(told, tmp_path, monkeypatch):
    training = Path(store_run(tmp_path / "<b>", {"model.norm": "pre"}, scored=False))
    page, contents = tmp_path / "out" / "index.html", []

    def sleep(seconds):
        contents.append(page.read_text())
        if len(contents) == 2:
            score(training, records.saved_config(training), wrong=0)

    monkeypatch.setattr(report.time, "sleep", sleep)
    code, text, error = told("post", training, options=[f"--output={tmp_path}/out", "--watch=10"])
    assert (code, error, len(contents)) == (0, "", 2)
    assert text.startswith(f"{page}: open it in a browser; it is written every 10 s until all are scored\n")
    assert "\ndifferences:\n" in text
    assert 'http-equiv="refresh' not in page.read_text()
    assert '<meta http-equiv="refresh" content="10">' in contents[0]
    drawn = browser.draw(contents[0])
    assert drawn.console == []
    assert "post, valid ends at 2.2; &lt;b&gt;, train ends at 5; &lt;b&gt;, valid ends at 2.2" in drawn.html
    assert "post: task translate, data generated, reverse: 40 of 40 updates in the rows of metrics.jsonl, scored" in (
        drawn.html
    )
    assert re.search(r"&lt;b&gt;: task .* not scored yet", drawn.html)
    assert ">model.norm</td>" in drawn.html


def test_a_page_of_runs_that_cannot_be_compared_is_loaded_no_more(told, tmp_path, monkeypatch):
    training = Path(store_run(tmp_path / "longer", {"train.num_steps": 80}, scored=False))
    monkeypatch.setattr(report.time, "sleep", lambda _: score(training, records.saved_config(training), wrong=0))
    code, _, error = told("post", training, options=[f"--output={tmp_path}/out", "--watch=10"])
    assert (code, error.count("\n")) == (2, 1)
    assert "80 updates of 1,024 tokens against 40" in error
    page = (tmp_path / "out" / "index.html").read_text()
    assert "longer: task translate" in page
    assert 'http-equiv="refresh' not in page


def test_who_watches_ends_that_without_a_trace(told, tmp_path, monkeypatch):
    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", sleep)
    code, text, error = told("post", "unscored", options=[f"--output={tmp_path}/out", "--watch=10"])
    assert (code, text.count("\n"), error) == (143, 1, "")


def test_nothing_on_the_page_keeps_anybody_out(told, tmp_path):
    told("post", "pre", options=[f"--output={tmp_path}/out"])
    assert browser.barriers((tmp_path / "out" / "index.html").read_text()) == []


def test_answers_and_names_stay_texts_on_the_pages(tmp_path):
    hostile = store_run(tmp_path / "<img src=x onerror=alert(1)>", {"model.norm": "pre"})
    store_run(tmp_path / "post")
    answers = hostile / "outputs" / "test.txt"
    answers.write_text("\n".join([browser.HOSTILE, *answers.read_text().splitlines()[1:]]) + "\n")
    assert main([str(hostile), str(tmp_path / "post"), f"--output={tmp_path}/out"]) == 0
    compared = (tmp_path / "out" / "index.html").read_text()
    own = report.report(records.saved_config(Path(hostile)), Path(hostile))
    for page in (compared, own):
        drawn = browser.draw(page)
        assert drawn.console == []
        assert html.escape(browser.HOSTILE, quote=False) in drawn.html
        assert "<img src=x" not in drawn.html
        assert "<title>broken" not in drawn.html


def test_an_output_that_cannot_be_written_is_one_line(told, tmp_path):
    (tmp_path / "file").touch()
    code, _, error = told("post", "pre", options=[f"--output={tmp_path}/file", "--metric=valid/loss"])
    assert (code, error.count("\n")) == (2, 1)
    assert f"{tmp_path}/file: File exists; move it away, or make it readable and writable" in error


def test_storage_that_is_away_is_not_a_mistake(told, tmp_path, monkeypatch):
    def away(path, content, shared=False):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(pages, "replace_content", away)
    code, _, error = told("post", "pre", options=[f"--output={tmp_path}/out", "--metric=valid/loss"])
    assert (code, error) == (
        75, f"jformer: {tmp_path}/out: could not be written now (Stale file handle); rerun the same command\n"
    )  # fmt: skip


def test_a_folder_in_the_place_of_a_file_is_one_line(told, tmp_path):
    run = store_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    code, _, error = told("post", run)
    assert (code, error.count("\n")) == (2, 1)
    assert f"{run}/metrics.jsonl: Is a directory; move it away, or make it readable" in error


@pytest.mark.parametrize(
    ("names", "options", "line"),
    [
        (["post"], [], "name two or more runs"),
        (["post", "post"], [], "to compare, each once"),
        (["post", "nothing"], [], r"nothing holds no run: name the directory of one"),
        (["post", "unscored"], [], r"unscored: is not scored yet: python -m jformer.main --workdir=\S*unscored"),
        (["unjudged", "post"], ["--despite=data"], r"unjudged: has no scores: name a --metric such as valid/loss"),
        (["post", "unscored"], ["--watch=10"], "--watch=10 writes a page: name a folder as --output"),
        (["post", "pre"], ["--watch=0.5", "--output=x"], "--watch=0.5 must be 0 or 1 to 86400 seconds"),
        (["post", "post"], ["--watch=10", "--output=x"], "to compare, each once"),
        (["post", "unscored"], ["--watch=10", "--output=x", "--despite=bugdet"], "did you mean 'budget'?"),
        (["post", "pre"], ["--metric=test/blue"], "has no --metric=test/blue; did you mean test/bleu"),
        (["post", "pre"], ["--despite=bugdet"], r"--despite='bugdet'; .* \(did you mean 'budget'\?\)"),
    ],
)
def test_a_mistake_is_one_line(told, names, options, line):
    code, text, error = told(*names, options=options)
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert re.search(line, error)


def test_paths_tell_runs_of_the_same_name_apart(told, runs, tmp_path):
    store_run(tmp_path / "post", wrong=250)
    _, text, _ = told("post", tmp_path / "post")
    assert f"{runs}/post  {tmp_path}/post" in text
    told("post", tmp_path / "post", options=[f"--output={tmp_path}/page"])
    assert f"{tmp_path}/post is worse than {runs}/post:" in (tmp_path / "page" / "index.html").read_text()


def test_a_figure_that_only_one_run_has_is_a_gap(told, runs):
    edit(
        store_run(runs / "extra", wrong=10),
        lambda results: results["test"].update(ter={"score": 4.0, "signature": "x"}),
    )
    assert re.search(r"\ntest/ter +- +4\n", told("post", "extra")[1])
