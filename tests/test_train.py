"""A run trains, survives kill -9 and SIGTERM to the bit, and refuses to become another run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jformer
import jformer.predict
from jformer import config as configs
from jformer import main
from jformer.checkpoint import open_run
from jformer.config_files import load_config
from jformer.errors import UserError
from jformer.evaluate import evaluate
from jformer.run import build, fingerprints
from jformer.train import sole_trainer, train
from tests.test_profile import trace_events

CONFIG = Path(__file__).parent / "small_run.py"
WALL_CLOCK = ("per_second", "seconds", "data_wait", "mfu")


def small(cache: Path, **overrides):
    """Return the resolved config of the small run, with overrides such as train__num_steps=5."""
    config = load_config(CONFIG)
    config.data.cache_dir = str(cache)
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    return configs.resolve(config)


def rows(workdir: Path, split: str | None = None):
    """Return the rows of metrics.jsonl without what a clock says."""
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found = [{key: row[key] for key in row if not any(word in key for word in WALL_CLOCK)} for row in found]
    return [row for row in found if split in (None, row["split"])]


def test_processes_compare_every_text_and_vocabulary_by_its_own_name(cache, tmp_path):
    data = build(small(cache), tmp_path / "run").data
    assert list(fingerprints(data)) == [
        "the source tokenizer", "the target tokenizer", "training text train", "validation text valid",
    ]  # fmt: skip
    assert len(set(fingerprints(data).values())) == 3  # one vocabulary for both sides


def leaves(workdir: Path):
    """Return every array of the newest checkpoint, parameters and the rest."""
    run = open_run(workdir)
    step = run.steps()[-1]
    config = configs.load(workdir / "config.json")
    state = build(config, workdir).state
    assert int(state.step) == step
    run.close()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def unbroken(cache, tmp_path_factory):
    """Return the workdir of the small run, trained and scored without interruption by the real command."""
    workdir = tmp_path_factory.mktemp("unbroken")
    end(start(workdir, cache), workdir, 0)
    return workdir


def start(workdir: Path, cache: Path) -> subprocess.Popen:
    """Start the real command on one CPU device; what it says goes to log.txt."""
    flags = [f"--config={CONFIG}", f"--workdir={workdir}", f"--config.data.cache_dir={cache}"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    with (workdir / "log.txt").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", "jformer.main", *flags], env=environment, stdout=log, stderr=log)


def end(process: subprocess.Popen, workdir: Path, code: int) -> None:
    """Wait for the command to exit with a code."""
    assert process.wait(timeout=400) == code, (workdir / "log.txt").read_text()


def wait_for_update(workdir: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until metrics.jsonl tells of an update."""
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + 400
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert process.poll() is None, (workdir / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_that_was_killed_and_stopped_ends_bit_equal_to_an_unbroken_one(unbroken, cache, tmp_path):
    process = start(tmp_path, cache)
    wait_for_update(tmp_path, 15, process)
    process.kill()
    process.wait()
    process = start(tmp_path, cache)
    wait_for_update(tmp_path, 25, process)
    process.send_signal(signal.SIGTERM)
    end(process, tmp_path, main.STOPPED)
    assert "stopped and saved" in (tmp_path / "log.txt").read_text()
    end(start(tmp_path, cache), tmp_path, 0)
    expected = leaves(unbroken)
    found = leaves(tmp_path)
    assert len(found) == len(expected) > 30
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    at_regular_steps = [row["step"] for row in rows(tmp_path, "train") if row["step"] % 5 == 0]
    assert at_regular_steps == [row["step"] for row in rows(unbroken, "train")]
    assert rows(tmp_path, "valid") == rows(unbroken, "valid")


def test_finished_run_leaves_what_the_interface_promises(unbroken):
    assert {"config.json", "metrics.jsonl", "results.json", "tokenizer", "checkpoints", "tensorboard"} <= {
        path.name for path in unbroken.iterdir()
    }
    results = json.loads((unbroken / "results.json").read_text())
    assert results["schema"] == 1
    assert set(results["test"]) >= {"bleu", "exact_match", "perplexity", "token_accuracy"}
    assert "signature" in results["test"]["bleu"]
    assert results["test"]["counts"] == {"examples read": 500, "empty examples dropped": 0, "examples used": 500}
    assert results["run"]["updates"] == 40
    assert set(results["run"]) >= {"config", "data", "seed", "tokens_per_update", "parameters", "hardware", "libraries"}
    train_rows = rows(unbroken, "train")
    assert [row["step"] for row in train_rows] == list(range(5, 41, 5))
    assert all(0 < row["flops_efficiency"] < row["padding_efficiency"] <= 1 for row in train_rows)
    clocked = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    for row in (row for row in clocked if row["split"] == "train"):
        assert row["mfu"] == row["model_flops_per_second"] / row["peak_flops_per_second"] > 0
    assert "(measured by matrix products in float32)" in (unbroken / "log.txt").read_text()
    assert train_rows[-1]["loss"] < train_rows[0]["loss"]
    assert len((unbroken / "outputs" / "test.txt").read_text().splitlines()) == results["test"]["examples"]


def test_workdir_alone_is_enough_to_predict_and_evaluate(unbroken, tmp_path, capsys):
    text = tmp_path / "in.txt"
    text.write_text("a b c\n\nd e\n")
    output = tmp_path / "out.txt"
    flags = ["jformer", f"--workdir={unbroken}", "--mode=predict", f"--input={text}", f"--output={output}"]
    assert main.main(flags) == 0
    lines = output.read_text().split("\n")
    assert len(lines) == 4
    assert lines[1] == lines[3] == ""
    assert jformer.load(unbroken).predict(["a b c", "", "d e"]) == lines[:3]


def test_finished_run_has_nothing_left_to_do_and_longer_one_goes_on(unbroken, cache, tmp_path, capfd):
    options = {"train__eval_every": 0, "train__checkpoint_every": 5, "train__profile_steps": "3:4"}
    config = small(cache, train__num_steps=5, **options)
    assert train(config, tmp_path)
    said = capfd.readouterr().err
    assert f"trace of updates 3 to 4: {tmp_path / 'profile'}\n" in said
    assert re.search(r"memory of the longest update: \d+\.\d MiB a device: parameters 0\.0, optimizer 0\.\d, ", said)
    found = trace_events(tmp_path / "profile")
    names = [event.get("name") for event in found]
    assert {event["args"]["step_num"] for event in found if event.get("name") == "update"} == {"3", "4"}
    assert "PjitFunction(step)" in names
    assert any("dot" in str(name) or "fusion" in str(name) for name in names)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert train(config, tmp_path)
    assert "nothing left to do" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert train(small(cache, train__num_steps=10, **options), tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [5, 10]
    assert "train.profile_steps='3:4' are updates of the past: none is traced\n" in capfd.readouterr().err
    assert len(trace_events(tmp_path / "profile")) == len(found)


def test_second_trainer_of_a_workdir_is_refused(cache, tmp_path):
    writing = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"
    writing.mkdir(parents=True)
    with sole_trainer(tmp_path), pytest.raises(UserError, match="another process is training here"):
        train(small(cache), tmp_path)
    assert writing.exists()
    with sole_trainer(tmp_path):
        pass


def test_resuming_as_another_run_is_refused_by_key(unbroken, cache):
    for key, value in (("seed", 3), ("model__d_model", 32), ("optim__learning_rate", 0.5), ("data__vocab_size", 9)):
        with pytest.raises(UserError, match=key.replace("__", ".")):
            train(small(cache, **{key: value}), unbroken)


def test_changed_training_text_is_refused(unbroken, cache, tmp_path):
    progress = open_run(unbroken).progress(40)
    assert progress["data"]
    copy = tmp_path / "copy"
    shutil.copytree(unbroken, copy)
    tokenizer = copy / "tokenizer" / "shared.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"ä"'))
    with pytest.raises(UserError, match="has changed since update 40"):
        train(small(cache), copy)


def test_warm_start_takes_parameters_and_tokenizer_and_freezing_keeps_some(unbroken, cache, tmp_path):
    config = small(
        cache,
        train__num_steps=5,
        train__eval_every=0,
        train__init_from=str(unbroken),
        train__freeze=("^encoder/",),
        data__name="copy",
    )
    assert train(config, tmp_path)
    parent, child = jformer.load(unbroken).params, jformer.load(tmp_path).params
    jax.tree.map(np.testing.assert_array_equal, child["encoder"], parent["encoder"])
    kernel = child["decoder"]["block"]["self_attn"]["q"]["kernel"]
    assert 0 < np.abs(kernel - parent["decoder"]["block"]["self_attn"]["q"]["kernel"]).max() < 0.1
    same = [(workdir / "tokenizer" / "shared.json").read_bytes() for workdir in (unbroken, tmp_path)]
    assert same[0] == same[1]


def test_warm_start_from_another_shape_names_the_parameter(unbroken, cache, tmp_path):
    with pytest.raises(UserError, match=r"has .* for .*, this model needs"):
        train(small(cache, model__d_ff=48, train__init_from=str(unbroken)), tmp_path)


def test_patience_ends_a_run_that_no_longer_improves(cache, tmp_path, capfd):
    config = small(
        cache, optim__learning_rate=0.0, train__eval_every=2, train__checkpoint_every=2, train__patience=2,
        train__samples=0,
    )  # fmt: skip
    assert train(config, tmp_path)
    assert rows(tmp_path, "valid")[-1]["step"] == 6
    assert "stopping" in capfd.readouterr().err
    assert open_run(tmp_path).progress(6)["best_step"] == 2
    assert train(config, tmp_path)


def test_average_and_ema_weights_are_those_of_their_definition(cache, tmp_path):
    options = {"train__num_steps": 6, "train__eval_every": 2, "train__checkpoint_every": 2, "train__samples": 0}
    options |= {"train__keep_last": 1, "train__ema_decay": 0.5, "evaluate__average_last": 2}
    config = small(cache, **options, evaluate__weights="average")
    assert train(config, tmp_path)
    saved = open_run(tmp_path)
    assert set(saved.steps()) >= {4, 6}
    by_name = {
        weights: jformer.predict.load(tmp_path, small(cache, **options, evaluate__weights=weights)).params
        for weights in ("last", "best", "average", "ema")
    }
    last, average, ema = by_name["last"], by_name["average"], by_name["ema"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ema))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last)
    fourth = saved.restore(4, {"params": shapes})["params"]
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, (b + c) / 2, rtol=1e-6), average, fourth, last)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(ema), jax.tree.leaves(last), strict=True))
    with pytest.raises(UserError, match=r"average_last=4 but .* makes 3 checkpoints"):
        small(cache, **{**options, "evaluate__average_last": 4}, evaluate__weights="average")


def test_mixture_adds_corpora_by_their_weights_and_test_sets_have_keys(cache, tmp_path):
    copies = {"source": "generated", "name": "copy", "num_pairs": 300, "weight": 2.5}
    config = small(
        cache, data__mixture=(copies,), data__test=("test", "again=valid"), train__num_steps=5,
        train__eval_every=0, evaluate__scores=(),
    )  # fmt: skip
    assert train(config, tmp_path)
    plan = build(config, tmp_path).data.batches.plan
    passes = np.zeros(900)
    for batch in plan.epoch(0):
        np.add.at(passes, batch.units[batch.units >= 0], 1)
    assert (passes[:600] == 1).all()
    assert sorted(set(passes[600:])) == [2, 3]
    assert passes[600:].sum() == 750
    results = evaluate(config, tmp_path)
    assert set(results) == {"schema", "test", "again", "run"}


def test_packed_bfloat16_rows_train_in_microbatches_on_four_devices(cache, tmp_path):
    config = small(
        cache, data__batching="packed", data__packed_length=96, model__dtype="bfloat16", train__accumulation=2,
        mesh__data=4, train__num_steps=6, train__log_every=2, train__eval_every=6, train__checkpoint_every=6,
    )  # fmt: skip
    assert train(config, tmp_path)
    found = rows(tmp_path, "train")
    assert [row["step"] for row in found] == [2, 4, 6]
    assert found[-1]["loss"] < found[0]["loss"]
    assert min(row["padding_efficiency"] for row in found) > 0.8


def test_row_multiple_that_devices_do_not_divide_is_refused(cache, tmp_path):
    with pytest.raises(UserError, match=r"data\.row_multiple=9 must be a multiple of 4"):
        train(small(cache, mesh__data=4, data__row_multiple=9), tmp_path)


def test_missing_text_is_refused_before_anything_is_written(cache, tmp_path):
    workdir = tmp_path / "run"
    with pytest.raises(UserError, match="nowhere"):
        train(small(cache, data__source="files", data__dir="/nowhere"), workdir)
    assert not workdir.exists()
