"""The public surface: what is in it, what docs/library.md lists, and that each part works on a small run."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import jformer
from jformer.decoding.decode_config import DecodeConfig, DecodeOptions
from jformer.inference.predict import Predictor
from tests import small_run

ROOT = Path(__file__).parents[1]


def test_the_public_surface_is_what_the_document_lists():
    text = (ROOT / "docs" / "library.md").read_text()
    assert set(re.findall(r"^\| `jformer\.(\w+)", text, re.MULTILINE)) == set(jformer.__all__)
    assert all(hasattr(jformer, name) for name in jformer.__all__)


def test_the_version_is_that_of_the_package():
    assert jformer.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_importing_it_does_not_import_jax():
    program = "import sys, jformer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train the small run for a few updates by the library."""
    config, workdir = small_run.get_config(), tmp_path_factory.mktemp("library") / "run"
    config.data.cache_dir = str(workdir.parent / "cache")
    config.data.update(num_pairs=200)
    config.train.update(num_steps=4, log_every=2, eval_every=4, checkpoint_every=2)
    assert jformer.train(config, str(workdir))
    return workdir


@pytest.mark.slow
def test_a_run_is_trained_scored_and_answers(run):
    first = jformer.evaluate(run, beam_size=1)["test"]["settings"]
    assert (first["decode"]["beam_size"], first["steps"]) == (1, [4])
    translator = jformer.load(run, n_best=2, beam_size=2, length_penalty=0.0)
    outputs = translator.generate(["a b", jformer.Request("c d", prefix="d")])
    assert [len(each) for each in outputs] == [2, 2]
    assert outputs[1][0].text.startswith("d")
    assert translator.predict(["a b"]) == [outputs[0][0].text]
    (scored,) = translator.score([("a b", outputs[0][0].text)])
    assert isinstance(scored, jformer.Scored)
    assert len(jformer.load(run, search="sample", samples=3).generate(["a b"])[0]) == 3
    assert jformer.load(run, alignments=True).generate(["a b"])[0][0].alignment.source
    assert "steps=[4]" in repr(translator)
    ((tree,),) = translator.search_trees(["a b"])
    assert isinstance(tree, jformer.SearchTree)
    assert tree.scores[tree.ranks == 1] == outputs[0][0].score
    (attended,) = translator.attend([("a b", "b a")])
    assert isinstance(attended, jformer.Attended)
    assert attended.cross.weights.shape[2:] == (len(attended.cross.rows), len(attended.cross.columns))


def test_keyword_arguments_have_the_names_and_types_of_the_options():
    types = {field.name: field.type for field in dataclasses.fields(DecodeConfig)}
    assert DecodeOptions.__annotations__ == {n: Sequence[str] if t == tuple[str, ...] else t for n, t in types.items()}


def test_the_methods_that_the_document_lists_are_there():
    table = (ROOT / "docs" / "library.md").read_text().partition("| method | returns |")[2].partition("\n\n")[0]
    names = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))
    public = {name for name, value in vars(Predictor).items() if not name.startswith("_") and callable(value)}
    assert public - {"fingerprint", "forget", "answers"} <= names  # for commands, and for servers
    assert all(hasattr(Predictor, name) for name in names)


@pytest.mark.slow
def test_scores_go_into_another_folder_and_leave_the_run_as_it_was(run, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    folder = tmp_path / "scores" / "greedy"
    found = jformer.evaluate(run, output=folder, beam_size=1)
    assert json.loads((folder / "results.json").read_text())["test"]["bleu"] == found["test"]["bleu"]
    assert len((folder / "outputs" / "test.txt").read_text().splitlines()) == found["test"]["examples"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_what_it_is_given_wrong_is_one_line(run):
    with pytest.raises(jformer.UserError, match=r"unknown config key decode\.beam_sise; did you mean beam_size\?"):
        jformer.load(run, beam_sise=3)
    with pytest.raises(jformer.UserError, match=r"decode\.beam_size='3' must be a whole number"):
        jformer.load(run, beam_size="3")
    with pytest.raises(jformer.UserError, match="nothing holds no run: name the directory of one"):
        jformer.load(run.parent / "nothing")


def test_a_signal_ends_training_by_the_library_after_its_update_saved(tmp_path):
    program = f"""
import jformer
from tests import small_run
config = small_run.get_config()
config.data.cache_dir = {str(tmp_path / "cache")!r}
config.data.update(num_pairs=200)
config.train.update(num_steps=100_000, log_every=1, eval_every=0, checkpoint_every=50_000)
print(jformer.train(config, {str(tmp_path / "run")!r}))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) as process:
        next(line for line in process.stderr if line.startswith("update 2/"))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "False\n"), err
    (step,) = (int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert step >= 2
