"""Loose runs side by side: what is shown, what is refused, and what a mistake says."""

import json
import re

import pytest

from jformer.compare import main
from tests.stored_run import store_run


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
    store_run(folder / "unscored", scored=False)
    return folder


@pytest.fixture
def told(runs, capsys):
    """Return a function: arguments, names of runs → (exit code, standard output, standard error)."""

    def call(*names, options=()):
        code = main([*(str(runs / name) for name in names), *options])
        return code, *capsys.readouterr()

    return call


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


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("longer", "budget", "80 updates of 1,024 tokens against 40 updates of 1,024 tokens"),
        ("sorted", "data", "'test' is another text"),
        ("cased", "signature", r"tok:char\S* against nrefs\S*tok:13a"),
        ("words", "budget", "tokens of data.tokenizer=byte against char"),
    ],
)
def test_what_makes_figures_incomparable_is_refused_unless_it_is_named(told, name, kind, what):
    code, text, error = told("post", name)
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert re.search(what, error)
    assert f"--despite={kind} compares them all the same" in error
    code, text, _ = told("post", name, options=[f"--despite={kind}"])
    assert code == 0
    assert f"compared despite another {kind}: {name} against post: " in text


def test_all_kinds_are_asked_for_at_once(told):
    _, _, error = told("post", "longer", "sorted", options=["--despite=signature"])
    assert "--despite=signature,budget,data compares" in error


def test_the_output_is_curves_and_a_page(told, tmp_path):
    told("post", "pre", options=[f"--output={tmp_path}/out"])
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<td>pre</td>" in page
    assert "bootstrap" in page


@pytest.mark.parametrize(
    ("names", "options", "line"),
    [
        (["post"], [], "takes two runs or more"),
        (["post", "post"], [], "each named once"),
        (["post", "nothing"], [], r"nothing/config.json: cannot be read as a saved config"),
        (["post", "unscored"], [], r"unscored: is not scored yet: python -m jformer.main --workdir=\S*unscored"),
        (["post", "pre"], ["--metric=test/blue"], "has no --metric=test/blue; did you mean test/bleu"),
        (["post", "pre"], ["--despite=bugdet"], "--despite=bugdet; did you mean budget"),
    ],
)
def test_a_mistake_is_one_line(told, names, options, line):
    code, text, error = told(*names, options=options)
    assert (code, text, error.count("\n")) == (2, "", 1)
    assert re.search(line, error)


def test_paths_tell_runs_of_the_same_name_apart(told, runs, tmp_path):
    store_run(tmp_path / "post", wrong=100)
    _, text, _ = told("post", tmp_path / "post")
    assert f"{runs}/post  {tmp_path}/post" in text


def test_a_figure_that_only_one_run_has_is_a_gap(told, runs):
    extra = store_run(runs / "extra", wrong=10)
    results = json.loads((extra / "results.json").read_text())
    results["test"]["ter"] = {"score": 4.0, "signature": "x"}
    (extra / "results.json").write_text(json.dumps(results))
    assert re.search(r"\ntest/ter +- +4\n", told("post", "extra")[1])
