"""A run's directory, whole, half-written and broken."""

import json
import math

import pytest

from jformer.errors import UserError
from jformer.evaluation import records
from jformer.integrity import with_digest
from tests.stored_run import store_run


@pytest.fixture
def run(tmp_path):
    return store_run(tmp_path / "run")


def edit_results(run, change):
    results = json.loads((run / "results.json").read_text())
    change(results)
    (run / "results.json").write_text(json.dumps(results))


def test_figures_are_last_rows_scores_and_facts(run):
    edit_results(run, lambda results: results["test"]["exact_match"].update(by_group={"date": 0.5}))
    figures = records.metrics(run)
    assert figures["valid/loss"] == 2.2
    assert figures["train/loss"] == 5.0
    assert figures["test/exact_match"] == 0.8
    assert figures["test/exact_match/date"] == 0.5
    assert 0 < figures["test/bleu"] < 100
    assert (figures["run/parameters"], figures["run/updates"], figures["run/wall_seconds"]) == (1234, 40, 2.5)
    assert math.isnan(figures["train/grad_norm"])  # it was not finite
    assert "train/step" not in figures
    assert "test/examples" not in figures


def test_a_score_stands_over_a_row_of_the_same_name(run):
    edit_results(run, lambda results: results.update(valid={"loss": {"score": 9.0}, "checksum": "0"}))
    assert records.metrics(run)["valid/loss"] == 9.0


def test_a_curve_has_the_rows_of_its_split(run):
    assert records.curve(run, "valid/loss") == [(10, 4.0), (20, 3.0), (30, 2.5), (40, 2.2)]
    assert records.curve(run, "test/bleu") == []


def test_a_run_that_has_only_begun_is_read_as_far_as_it_goes(tmp_path):
    run = store_run(tmp_path / "run", scored=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "split": "valid", "lo')  # the writer is not done, or was killed
    assert records.metrics(run)["valid/loss"] == 2.2
    assert "test/bleu" not in records.metrics(run)
    assert records.metrics(tmp_path / "waiting") == {}


NO_NUMBERS = ["true", "1e400", "9" * 400, '"2.5"']


@pytest.mark.parametrize("line", [
    "{", "[]", '{"split": "valid"}', '{"step": 50}', "7", '{"step": -1, "split": "valid"}',
    *(f'{{"step": 50, "split": "valid", "loss": {value}}}' for value in NO_NUMBERS),
    *(f'{{"step": {value}, "split": "valid"}}' for value in NO_NUMBERS),
])  # fmt: skip
def test_a_broken_row_is_named(run, line):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:6 is not a row of metrics"):
        records.metrics(run)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"run": 7}',
        *(f'{{"run": {{"updates": {n}}}}}' for n in NO_NUMBERS),
        '{"run": {}, "test": {"bleu": {"score": 1.0}}}',
    ],
)
def test_broken_results_are_named(run, content):
    (run / "results.json").write_text(content)
    with pytest.raises(UserError, match=r"results\.json: cannot be read"):
        records.metrics(run)


def test_results_that_were_changed_are_told_in_a_line_of_their_own(run):
    path = run / "results.json"
    results = {**json.loads(path.read_text()), "digest": "0123456789abcdef"}
    path.write_text(json.dumps(results))
    with pytest.raises(
        UserError, match=r"results\.json is damaged: its content does not match its digest; restore it"
    ) as error:
        records.metrics(run)
    assert "cannot be read" not in str(error.value)


def test_outputs_are_lines_that_end_at_line_feeds_alone(run):
    (run / "outputs" / "test.txt").write_bytes("a\rb\u2028c\n\nd\r\n".encode())
    assert records.outputs(run, "test") == ["a\rb\u2028c", "", "d\r"]
    with pytest.raises(UserError, match=r"other\.txt: there are no outputs"):
        records.outputs(run, "other")


def test_examples_are_those_that_the_run_was_scored_with(run):
    outputs, examples = records.outputs(run, "test"), records.examples(run, "test")
    assert sum(a == b.target for a, b in zip(outputs, examples, strict=True)) == 400
    with pytest.raises(UserError, match="has no scores of a test set 'other'; its config has test"):
        records.examples(run, "other")
    edit_results(run, lambda results: results["test"].update(checksum="another"))
    with pytest.raises(UserError, match="test set 'test' has changed"):
        records.examples(run, "test")


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no run: name the directory of one"):
        records.saved_config(tmp_path)


def test_samples_are_read_as_they_were_written(tmp_path):
    row = {"step": 5, "sample": 1, "source": "a", "reference": "b", "answer": "c"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(with_digest(row)) + '\n{"step": 6')
    assert records.samples(tmp_path) == [row]


@pytest.mark.parametrize("change", [{"step": 1.5}, {"answer": None}, {"other": "x"}])
def test_a_broken_sample_is_named(tmp_path, change):
    row = {"step": 5, "sample": 1, "source": "a", "reference": "b", "answer": "c", **change}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"samples\.jsonl:1 is not a row of samples"):
        records.samples(tmp_path)
