"""What 0.1 wrote is read by every later version: a run, an export and a sweep of commit 6dea01c (docs/stability.md).

fixtures/files-0.1.tar.gz has a translator of letters after 4 updates, a Marian of 2 updates exported for Transformers,
and a sweep of 4 trials without their checkpoints.
"""

import subprocess

import pytest

import jformer
from jformer.config import load_config
from jformer.evaluation import records
from jformer.tools.hf.__main__ import main as hf
from jformer.tools.sweep.__main__ import main as sweep

PAIRS = [("a b c", "c b a"), ("z y", "y z")]
OF_THE_RUN = [-17.15613, -13.49391]  # log-probabilities of the pairs, by the version that wrote it
OF_THE_EXPORT = [-18.2238, -16.1286]


@pytest.fixture
def files(tmp_path):
    subprocess.run(["tar", "-xzf", "tests/fixtures/files-0.1.tar.gz", "-C", tmp_path], check=True)
    return tmp_path / "0.1"


def test_a_run_answers_as_it_did_and_is_resumed(files, tmp_path):
    run = files / "run"
    scored = jformer.load(run, dtype="float32").score(PAIRS)
    assert [each.log_prob for each in scored] == pytest.approx(OF_THE_RUN, abs=1e-4)
    rows, results = records.rows(run), records.results(run)
    assert jformer.train(load_config(run / "config.json"), run)
    assert records.rows(run) == rows
    again = records.results(run)["test"]
    assert again["perplexity"]["score"] == pytest.approx(results["test"]["perplexity"]["score"], rel=1e-5)


def test_an_export_is_imported_again(files, tmp_path):
    assert not hf(["import", str(files / "export"), f"--workdir={tmp_path / 'run'}"])
    scored = jformer.load(tmp_path / "run").score(PAIRS)
    assert [each.log_prob for each in scored] == pytest.approx(OF_THE_EXPORT, abs=1e-4)


def test_a_sweep_is_reported_and_has_nothing_left_to_do(files, capsys):
    changed_since = "--config.evaluate.tokenize=13a"  # the default then; the refusal without it names it
    arguments = [f"--experiment={files / 'sweep.py'}", f"--workdir={files / 'sweep'}", changed_since]
    assert not sweep([*arguments, "--report"])
    assert not sweep([*arguments, "--worker"])
    printed = capsys.readouterr().out
    assert "of 4 trials 4 complete" in printed
    assert "3.869 ± 1.356" in printed
