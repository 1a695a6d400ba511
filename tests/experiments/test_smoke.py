"""Every experiment runs: commands with --smoke in a process of their own, one arm of every sweep for two updates."""

import ast
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import quickstart
from experiments.runs import results_of, small_run
from jformer import main, plugins
from jformer.evaluation import records
from jformer.tools.sweep.experiment import load_experiment
from tests.stored_run import store_run

ROOT = Path(__file__).parents[2]
PATHS = [path for path in sorted((ROOT / "experiments").glob("*/*.py")) if path.stem != "__init__"]
FILES = {path.stem: path for path in PATHS if path.parent.name != "sources"}
STARTED_BY_OTHERS = {"steps_worker", "decoding_worker", "process_faults_worker", "accelerator_rows"}
ARGUMENTS = {  # what a command cannot do without
    "alignments": ["--workdir={folder}/run"],
    "back_translation": ["--data={folder}", "--workdir={folder}/runs"],
    "captions": ["--workdir={folder}/runs"],
    "export_digits": ["--output={folder}/digits"],
    "export_scenes": ["--output={folder}/scenes"],
    "generated_labels": ["--workdir={folder}/runs"],
    "gradient_norms": ["--output={folder}"],
    "grokking": ["--workdir={folder}", "--output={folder}/accuracy.png"],
    "inside_a_translator": ["--workdir={folder}/run", "--output={folder}/pictures"],
    "mup": ["--workdir={folder}/runs"],
    "probes": ["--workdir={folder}/runs"],
    "question_answering": ["--workdir={folder}/run"],
    "scan": ["--workdir={folder}/scan", "--output={folder}/lengths.png"],
    "sst2": ["--data={folder}", "--workdir={folder}/runs"],
    "tagging": ["--data={folder}", "--workdir={folder}/runs"],
    "vanishing_gradients": ["--workdir={folder}/runs"],
    "what_attention_bought": ["--workdir={folder}/runs"],
}
NEEDS = {
    "decoding_programs": "libtpu",
    "export_digits": "sklearn",
    "gpu_programs": "jax_cuda13_plugin",
    "programs": "libtpu",
    "published_weights": "transformers",
}
SMALL = {
    "data.num_pairs": 200,
    "data.row_multiple": 0,
    "data.tokens_per_update": 4096,
    "optim.warmup": 1,
    "train.num_steps": 2,
    "train.log_every": 2,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
}
SMALL_OF = {"scan": {"train.eval_every": 0, "decode.max_extra_length": 1}}  # it has no split to validate on
LINE = "two dogs run along the beach and a man in a red shirt reads\n"


def names(tree):
    """Return the variables of a module."""
    targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


TREES = {stem: ast.parse(path.read_text()) for stem, path in FILES.items()}
SWEEPS = [stem for stem, tree in TREES.items() if {"BASE", "METRIC"} <= names(tree)]
COMMANDS = [stem for stem, tree in TREES.items() if any(isinstance(node, ast.If) for node in tree.body)]


def started(stem, folder, *more):
    """Run a command with --smoke, for a user who has allowed no parts."""
    arguments = [argument.format(folder=folder) for argument in ARGUMENTS.get(stem, ())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment.pop(plugins.ENVIRONMENT)
    command = [sys.executable, "-m", f"experiments.{FILES[stem].parent.name}.{stem}", "--smoke", *arguments, *more]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def tried(stem, folder, *more):
    """Return the lines that a command prints with --smoke."""
    done = started(stem, folder, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the files that sweeps and commands read, in few lines."""
    for name in ("train", "val", "test_2016_flickr"):
        for ending in (".lc.norm.tok.en", ".lc.norm.tok.de", ".en", ".de"):
            (tmp_path / f"{name}{ending}").write_text(40 * LINE)
    (tmp_path / "input.txt").write_text(200 * LINE)
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.conll").write_text(20 * "in\tO\nNew\tB-place\nYork\tI-place\n\n")
        for labelled in (tmp_path / f"{split}.tsv", tmp_path / "sst2" / f"{split}.tsv"):
            labelled.write_text(20 * "a fine film\tpositive\na dull film\tnegative\n")
    run = store_run(tmp_path / "trials" / "0", scored=False)
    rows = [{"step": 10, "split": split, "accuracy": 0.5} for split in ("train", "valid")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_no_experiment_hides_a_package_from_scripts_that_are_run_by_their_path():
    taken = sys.stdlib_module_names | importlib.metadata.packages_distributions().keys()
    assert not {path.stem for path in PATHS} & taken


def test_every_command_can_be_tried():
    assert set(PATHS) - set(FILES.values()) == set((ROOT / "experiments" / "sources").glob("[!_]*.py"))
    assert set(COMMANDS) > STARTED_BY_OTHERS
    for stem in set(COMMANDS) - STARTED_BY_OTHERS:
        assert f"python -m experiments.{FILES[stem].parent.name}.{stem}" in ast.get_docstring(TREES[stem])
        assert "--smoke" in ast.get_docstring(TREES[stem]), stem


@pytest.mark.slow
@pytest.mark.parametrize(
    "stem",
    [
        pytest.param(stem, marks=[pytest.mark.torch] if NEEDS.get(stem) == "transformers" else [])
        for stem in sorted(set(COMMANDS) - STARTED_BY_OTHERS)
    ],
)
def test_a_command_works(stem, folder):
    if stem in NEEDS:
        pytest.importorskip(NEEDS[stem])
    assert len(tried(stem, folder)) > 1


@pytest.mark.slow
def test_scan_reads_runs_that_another_process_trained(folder):
    trained = tried("scan", folder)[-2:]
    results = folder / "scan" / "trials" / "smoke" / "results.json"
    written = results.stat().st_mtime_ns
    assert tried("scan", folder) == trained
    assert results.stat().st_mtime_ns == written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "fewer"),
    [("mup", "--widths=16"), ("probes", "--seeds=1"), ("vanishing_gradients", "--kinds=RNN"),
     ("what_attention_bought", "--only=Transformer")],
)  # fmt: skip
def test_runs_of_other_lengths_are_others(stem, fewer, folder):
    counts = []
    for updates in (4, 6):
        tried(stem, folder, fewer, f"--updates={updates}")
        counts.append(len(list((folder / "runs").rglob("config.json"))))
    assert counts[1] == 2 * counts[0] > 0
    if stem == "what_attention_bought":
        table = (folder / "runs" / "runs.csv").read_text().splitlines()
        assert [row.split(",")[3] for row in table] == ["updates", "4", "6"]


@pytest.mark.slow
def test_half_written_sources_are_continued(folder):
    tried("back_translation", folder)
    (written,) = (folder / "runs").rglob("written-0.en")
    whole, (results,) = written.read_text(), (folder / "runs").rglob("back-translated-0/results.json")
    written.write_text(whole[: len(whole) // 2])
    results.unlink()
    tried("back_translation", folder)
    assert len(written.read_text().splitlines()) == len(whole.splitlines())


@pytest.mark.slow
def test_results_of_other_options_are_not_printed_as_those_asked_for(folder):
    found = results_of(quickstart, folder / "run", small_run(2))
    assert results_of(quickstart, folder / "run", small_run(2)) == found
    with pytest.raises(SystemExit, match=r"holds results of train\.num_steps=2, not 3: name another --workdir"):
        results_of(quickstart, folder / "run", {**small_run(2), "train.num_steps": 3})


@pytest.mark.slow
def test_alignments_refuses_pieces_that_do_not_tell_words(folder):
    results_of(quickstart, folder / "run", small_run(2))  # characters
    done = started("alignments", folder)
    assert done.returncode == 1
    assert "no pair has whole words that begin with" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stem", SWEEPS)
def test_a_sweep_has_its_metric_after_two_updates(stem, folder, monkeypatch):
    monkeypatch.chdir(ROOT)  # BASE is a path from there
    experiment = load_experiment(FILES[stem])
    flags = [f"--config={experiment.base}", *experiment.flags(experiment.planned()[0])]
    small = {**SMALL, "data.dir": folder, "data.cache_dir": folder / "cache", **SMALL_OF.get(stem, {})}
    flags += [f"--workdir={folder}/run", *(f"--config.{key}={value}" for key, value in small.items())]
    assert main.main(["jformer", *flags]) == 0
    assert math.isfinite(experiment.value(records.metrics(folder / "run")))
