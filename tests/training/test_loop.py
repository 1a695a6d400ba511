"""A run trains, survives kill -9 and SIGTERM to the bit, and refuses to become another run."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath

import jformer
from jformer import main, plugins
from jformer.checkpoints.checkpoint import Checkpoints, open_run
from jformer.config import load_config, resolve
from jformer.config.config_files import run_config_file
from jformer.errors import BrokenRunError, UserError
from jformer.evaluation import records
from jformer.evaluation.evaluate import evaluate
from jformer.inference import predict
from jformer.integrity import seal
from jformer.parallel import processes
from jformer.tasks.build import build_task
from jformer.tasks.split_loss import split_sums
from jformer.tools.sweep.experiment import reported
from jformer.trainer import refuse_other_text, train
from jformer.training import forecast, machine
from jformer.training.corpora import open_data
from jformer.training.feed import make_feed
from jformer.training.lock import sole_trainer
from jformer.training.log import AHEAD
from jformer.training.loop import loop
from jformer.training.machine import Available
from jformer.training.state import Progress
from tests.opening import opened
from tests.signals import stop_run_at
from tests.training.test_profile import trace_events

CONFIG = Path(__file__).parents[1] / "small_run.py"
WALL_CLOCK = ("per_second", "seconds", "data_wait", "mfu", "digest")


def small(cache: Path, **overrides):
    """Return the resolved config of the small run, with overrides such as train__num_steps=5."""
    config = run_config_file(CONFIG)
    config.data.cache_dir = str(cache)
    config.train.peak_flops = 1e9  # which would be measured
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    return resolve(config)


def rows(workdir: Path, split: str | None = None):
    """Return the rows of metrics.jsonl without what a clock says, and without their digests."""
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    found = [{key: row[key] for key in row if not any(word in key for word in WALL_CLOCK)} for row in found]
    return [row for row in found if split in (None, row["split"])]


def leaves(workdir: Path):
    """Return every array of the newest checkpoint, parameters and the rest."""
    with tempfile.TemporaryDirectory() as folder:  # opening it writes its files
        copy = shutil.copytree(workdir, Path(folder) / "run")
        state = opened(load_config(copy / "config.json"), copy).state
    with open_run(workdir) as run:
        assert int(state.step) == run.steps()[-1]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def unbroken(cache, tmp_path_factory):
    """Return the workdir of the small run, trained and scored without interruption by its command."""
    workdir = tmp_path_factory.mktemp("unbroken")
    with (workdir / "log.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        assert main.main(["jformer", *flags(workdir, cache, "--config.train.samples=1")]) == 0
    return workdir


def flags(workdir: Path, cache: Path, *more: str) -> list[str]:
    return [f"--config={CONFIG}", f"--workdir={workdir}", f"--config.data.cache_dir={cache}", *more]


def start(workdir: Path, cache: Path, *more: str) -> subprocess.Popen:
    """Start the command, its messages in log.txt, where it may not import PyTorch, which takes seconds."""
    (workdir / "torch.py").write_text("raise RuntimeError('PyTorch is imported')\n")
    words = [sys.executable, "-m", "jformer.main", *flags(workdir, cache, *more)]
    with (workdir / "log.txt").open("w") as log:
        return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(workdir)}, stdout=log, stderr=log)


def wait_for_update(workdir: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until metrics.jsonl tells of an update."""
    path, deadline = workdir / "metrics.jsonl", time.monotonic() + 400
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert process.poll() is None, (workdir / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_that_was_killed_and_stopped_ends_bit_equal_to_an_unbroken_one(unbroken, cache, tmp_path, monkeypatch):
    process = start(tmp_path, cache, "--config.data.test=()")  # which changes nothing of what is learned
    wait_for_update(tmp_path, 15, process)
    process.kill()
    process.wait()
    with monkeypatch.context() as patch:
        stop_run_at(patch, 25)
        assert not jformer.train(small(cache, data__test=()), tmp_path)
    assert open_run(tmp_path).steps()[-1] % 10  # saved between the regular ones
    assert train(small(cache, data__test=()), tmp_path)
    told = (tmp_path / "training.log").read_text()  # of all three processes
    expected = leaves(unbroken)
    found = leaves(tmp_path)
    assert len(found) == len(expected) > 30
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert told.count("vocabulary: ") == 3
    assert told.count("resuming at update ") >= 1
    at_regular_steps = [row["step"] for row in rows(tmp_path, "train") if row["step"] % 5 == 0]
    assert at_regular_steps == [row["step"] for row in rows(unbroken, "train")]
    assert rows(tmp_path, "valid") == rows(unbroken, "valid")


@pytest.mark.slow
def test_a_run_is_stopped_before_its_first_update_with_one_line(cache, tmp_path):
    process = start(tmp_path, cache)
    log, deadline = tmp_path / "log.txt", time.monotonic() + 400
    while "memory of the longest update" not in log.read_text():  # from here on it compiles
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=400) == main.STOPPED, log.read_text()
    assert log.read_text().splitlines()[-1] == "jformer: stopped before the first update"


def test_finished_run_leaves_what_the_interface_promises(unbroken):
    assert {"config.json", "metrics.jsonl", "results.json", "tokenizer", "checkpoints", "tensorboard"} <= {
        path.name for path in unbroken.iterdir()
    }
    results = json.loads((unbroken / "results.json").read_text())
    assert results["schema"] == 2
    assert results["test"]["settings"]["steps"] == [40]
    assert results["test"]["settings"]["decode"]["beam_size"] == 2
    assert set(results["test"]) >= {"bleu", "exact_match", "perplexity", "token_accuracy"}
    assert "signature" in results["test"]["bleu"]
    assert results["test"]["counts"] == {"examples read": 500, "empty examples dropped": 0, "examples used": 500}
    assert results["run"]["updates"] == 40
    assert set(results["run"]) >= {"config", "data", "seed", "tokens_per_update", "parameters", "hardware", "libraries"}
    assert (results["run"]["training_dtype"], results["run"]["decoding_dtype"]) == ("float32", "float32")
    assert (results["run"]["precision"], results["run"]["arithmetic"]) == ("default", "float32")
    assert re.match(r"[0-9a-f]{40}|\d+\.", results["run"]["code"])
    train_rows = rows(unbroken, "train")
    assert [row["step"] for row in train_rows] == list(range(5, 41, 5))
    figures = {figure for figure in records.metrics(unbroken) if not figure.startswith("run/")}
    promised = reported(load_config(unbroken / "config.json"))
    assert figures == {f"{split}/{name}" for split in promised for name in promised[split]} - {"test/chrf", "test/ter"}
    assert all(0 < row["flops_efficiency"] < row["padding_efficiency"] <= 1 for row in train_rows)
    clocked = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    for row in (row for row in clocked if row["split"] == "train"):
        assert row["mfu"] == row["model_flops_per_second"] / row["peak_flops_per_second"] > 0
    said = (unbroken / "log.txt").read_text()
    assert "(measured by matrix products in float32)" in said
    assert (
        len(re.findall(r"^    [a-z ]+\n      → .*(exact|should be: [a-z ]+)", said, re.MULTILINE)) == 2
    )  # a sample each time
    assert train_rows[-1]["loss"] < train_rows[0]["loss"]
    alive = json.loads((unbroken / "heartbeat.json").read_text())
    assert (alive["step"], alive["phase"], alive["loss"]) == (40, "ended", train_rows[-1]["loss"])
    assert len((unbroken / "outputs" / "test.txt").read_text().splitlines()) == results["test"]["examples"]


@pytest.mark.slow
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


def test_a_tokenizer_of_another_run_is_refused_by_whoever_answers(unbroken, tmp_path):
    run = epath.Path(shutil.copytree(unbroken, tmp_path / "run"))
    path = run / "tokenizer" / "shared.json"
    content = json.loads(path.read_text())
    content["tokens"][5:7] = content["tokens"][6], content["tokens"][5]
    path.write_text(json.dumps(content))
    seal(run / "tokenizer")  # whole, as that of another run would be
    with pytest.raises(UserError, match="tokenizer: its tokens are not those that the run was trained with: restore"):
        jformer.load(run)


@pytest.mark.slow
def test_finished_run_has_nothing_left_to_do_and_longer_one_goes_on(unbroken, cache, tmp_path, capfd):
    options = {"train__eval_every": 0, "train__checkpoint_every": 5}
    config = small(cache, train__num_steps=5, **options)
    assert train(config, tmp_path)
    said = capfd.readouterr().err
    assert re.search(r"memory of the longest update: \d+\.\d MiB a device: parameters 0\.0, optimizer 0\.\d, ", said)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert train(config, tmp_path)
    assert "already trained to update 5\n" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert train(small(cache, train__num_steps=10, **options), tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [5, 10]


@pytest.mark.slow
def test_a_trace_of_updates_is_written_once(cache, tmp_path, capfd):
    options = {"train__eval_every": 0, "train__checkpoint_every": 5, "train__profile_steps": "3:4"}
    assert train(small(cache, train__num_steps=5, **options), tmp_path)
    assert f"trace of updates 3 to 4: {tmp_path / 'profile'}\n" in capfd.readouterr().err
    found = trace_events(tmp_path / "profile")
    names = [event.get("name") for event in found]
    assert {event["args"]["step_num"] for event in found if event.get("name") == "update"} == {"3", "4"}
    assert "PjitFunction(step)" in names
    assert any("dot" in str(name) or "fusion" in str(name) for name in names)
    assert train(small(cache, train__num_steps=10, **options), tmp_path)
    assert "train.profile_steps='3:4' have passed: no update is traced\n" in capfd.readouterr().err
    assert len(trace_events(tmp_path / "profile")) == len(found)


@pytest.mark.slow
def test_a_run_lasts_as_many_epochs_as_are_asked_for(cache, tmp_path):
    config = small(cache, train__num_epochs=0.5)
    batches = open_data(config.data, config.train, config.seed, build_task(config), tmp_path, learned=False).batches
    assert opened(config, tmp_path).train.num_steps == round(0.5 * len(batches)) < 40


def test_a_run_that_no_memory_holds_is_refused_and_leaves_none_behind(cache, tmp_path, monkeypatch):
    for room, size, line in (
        (
            forecast,
            2**20,
            r"more than the 1 MiB of memory: raise train\.accumulation=1, lower data\.tokens_per_update=",
        ),
        (machine, 2**12, r"parameters and optimizer alone need 0\.\d of 0\.0 MiB of memory: use a smaller model"),
    ):
        monkeypatch.setattr(
            room, "available", lambda device, size=size: Available(total=size, free=size, held=size // 2)
        )
        with pytest.raises(UserError, match=line):
            train(small(cache), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_run_ends_and_saves_by_the_clock(cache, tmp_path, monkeypatch, capfd):
    seconds = itertools.count(0.0, 1.0)  # every look at the clock takes a second
    monkeypatch.setattr("jformer.training.clock.time", SimpleNamespace(monotonic=seconds.__next__))
    limits = {"train__max_minutes": 0.5, "train__checkpoint_minutes": 0.1, "train__log_every": 2}
    config = small(cache, **limits, train__checkpoint_every=100, train__eval_every=100, train__keep_last=9)
    saved = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *rest: saved.append(step))
    assert train(config, tmp_path)
    assert len(saved) > 2
    assert saved[0] % 2 == 0  # together with a row
    assert saved[-1] < 40
    assert [row["step"] for row in rows(tmp_path, "valid")] == saved[-1:]


def written(workdir: Path) -> dict:
    """Return the newest row that an update wrote."""
    return rows(workdir, "train")[-1]


@pytest.fixture
def poison(monkeypatch):
    """Return a function that lets the losses of runs be no numbers from an update on."""

    def poison_from(first):
        def poisoned(*given):
            feed = make_feed(*given)

            def fed(step):
                batch, works = feed(step)
                return ({**batch, "weights": batch["weights"] * np.nan} if step + 1 >= first else batch), works

            return fed

        monkeypatch.setattr("jformer.trainer.make_feed", poisoned)

    return poison_from


@pytest.mark.slow
def test_skipped_updates_end_a_run_soon_with_the_reason_and_push_no_checkpoint_out(cache, tmp_path, poison):
    few = {"train__keep_last": 2, "train__checkpoint_every": 2, "train__eval_every": 2, "train__samples": 0}
    config, steps = small(cache, **few, train__max_skipped=8, train__log_every=1_000), []
    poison(5)
    reason = "the first non-finite value is the loss, or its logits"
    said = rf"updates in a row were not finite and were skipped \(train\.max_skipped=8\): {reason}; use a new"
    with pytest.raises(UserError, match=said):
        train(config, tmp_path, lambda **given: steps.append(given["progress"]) or loop(**given))
    assert (tmp_path / "training.log").read_text().count(f"update 5 was skipped: {reason}\n") == 1
    assert 12 <= steps[0].step + 1 <= 12 + AHEAD
    assert open_run(tmp_path).steps() == [2, 4]
    assert [row["step"] for row in rows(tmp_path, "valid")] == [2, 4]


@pytest.mark.slow
def test_a_row_speaks_of_the_updates_that_were_applied(cache, tmp_path, poison):
    poison(4)
    train(small(cache, train__num_steps=4, train__log_every=4, train__eval_every=0), tmp_path / "skips")
    skipping = written(tmp_path / "skips")
    train(small(cache, train__num_steps=3, train__log_every=3, train__eval_every=0), tmp_path / "stops")
    assert skipping["skipped"] == 1
    assert {key: skipping[key] for key in ("loss", "accuracy", "grad_norm")} == {
        key: written(tmp_path / "stops")[key] for key in ("loss", "accuracy", "grad_norm")
    }


@pytest.mark.parametrize(("part", "named"), [("batches", "update 1"), ("valid", "batch 1 of what is scored")])
def test_a_token_that_the_model_has_not_ends_a_run(cache, tmp_path, monkeypatch, part, named):
    def foreign(*given):
        data = open_data(*given)
        batches = data.batches if part == "batches" else data.valid["1"]
        source = dataclasses.replace(batches.source, values=np.full_like(batches.source.values, 255))
        changed = dataclasses.replace(batches, source=source)
        return dataclasses.replace(data, **{part: changed if part == "batches" else {"1": changed}})

    monkeypatch.setattr("jformer.trainer.open_data", foreign)
    with pytest.raises(UserError, match=f"{named}: source holds the token id "):
        train(small(cache, train__num_steps=4), tmp_path)


def test_a_run_that_waits_for_others_to_tokenize_is_not_stuck(cache, tmp_path, monkeypatch):
    class OpenedError(Exception):
        """The rest of the run is of no interest."""

    def opened_by(*_):
        assert working == ["elsewhere"]
        raise OpenedError

    @contextlib.contextmanager
    def elsewhere():
        working.append("elsewhere")
        yield
        working.pop()

    working = []
    monkeypatch.setattr(processes, "working_elsewhere", elsewhere)
    monkeypatch.setattr("jformer.trainer.open_data", opened_by)
    with pytest.raises(OpenedError):
        train(small(cache), tmp_path)


def test_an_error_in_the_loop_loses_no_save_that_was_begun(cache, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("jformer.trainer.validate", broken)
    config = small(cache, train__num_steps=4, train__checkpoint_every=2, train__eval_every=4)
    with pytest.raises(RuntimeError, match="broken"):
        train(config, tmp_path)
    assert open_run(tmp_path).steps() == [2]
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))


def test_a_failed_save_ends_the_run_at_the_next_update(cache, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *rest: saved.append(step))

    def check(self):
        if saved:
            raise OSError("disk is full")

    monkeypatch.setattr(Checkpoints, "check_save", check)
    with pytest.raises(OSError, match="disk is full"):
        train(small(cache, train__checkpoint_every=2, train__eval_every=4, train__log_every=1), tmp_path)
    assert saved == [2]


def test_a_score_that_fails_costs_no_update(cache, tmp_path):
    options = {"train__num_steps": 4, "train__eval_every": 2, "train__checkpoint_every": 2, "train__log_every": 1}
    plugins.allow("false")
    failing = small(cache, evaluate__command="false", evaluate__during=("false",), **options)
    with pytest.raises(BrokenRunError, match=r"evaluate\.command='false' ended with exit status 1"):
        train(failing, tmp_path)
    assert open_run(tmp_path).steps() == [2]
    assert train(small(cache, **options), tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 4]  # the last is of the validation


@pytest.mark.slow
def test_answers_are_scored_in_the_course_of_training_and_decide_what_is_best(cache, tmp_path, monkeypatch):
    config = small(
        cache, evaluate__during=("exact_match", "chrf"), evaluate__during_examples=20, train__best_by="chrf",
        train__num_steps=6, train__eval_every=2, train__checkpoint_every=2, train__keep_last=1, train__ema_decay=0.5,
        train__accumulation=2,
    )  # fmt: skip
    shapes = set()

    def summed(step, *given):
        return split_sums(lambda params, batch: shapes.add(batch["row"].shape[0]) or step(params, batch), *given)

    monkeypatch.setattr("jformer.trainer.split_sums", summed)
    assert train(config, tmp_path)
    assert shapes == {2}  # microbatches
    said = (tmp_path / "training.log").read_text()
    assert re.search(r"memory of the longest validation batch: \d+\.\d MiB a device beside the state\n", said)
    found, averages = rows(tmp_path, "valid"), rows(tmp_path, "valid_ema")
    assert [row["step"] for row in found] == [row["step"] for row in averages] == [2, 4, 6]
    assert all(0 <= row["exact_match"] <= 1 and 0 <= row["chrf"] <= 100 for row in found)
    assert any(row["loss"] != other["loss"] for row, other in zip(found, averages, strict=True))
    best = max(found, key=lambda row: row["chrf"])
    with open_run(tmp_path) as saved:
        progress = saved.newest_manifest().progress
        assert (progress["best"], progress["best_step"]) == (best["chrf"], best["step"])
        assert saved.manifest(best["step"]).selection_cost == -best["chrf"]
    for steps, options, forgotten in (
        (8, {"beam_size": 4}, False),
        (10, {"max_length": 1}, True),
    ):  # answers are greedy
        decode, trained = (
            dataclasses.replace(config.decode, **options),
            dataclasses.replace(config.train, num_steps=steps),
        )
        assert train(dataclasses.replace(config, decode=decode, train=trained), tmp_path)
        text = (tmp_path / "training.log").read_text()
        assert ("this changes train.best_by" in text) == forgotten
    progress = open_run(tmp_path).newest_manifest().progress
    assert "decode.max_length=1 (was 0): this changes train.best_by" in text
    assert (progress["best_step"], progress["measured"]["decode.max_length"]) == (10, 1)


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


def test_checkpoints_know_their_run_should_its_config_be_lost(unbroken, cache, tmp_path):
    lost = tmp_path / "lost"
    shutil.copytree(unbroken, lost)
    (lost / "config.json").unlink()
    with pytest.raises(UserError, match=r"optim\.learning_rate=0\.5 but this workdir was trained with 0\.003"):
        train(small(cache, optim__learning_rate=0.5), lost)
    assert not (lost / "config.json").exists()
    assert train(small(cache), lost)
    assert (lost / "config.json").exists()


def test_changed_training_text_is_refused(unbroken, cache, tmp_path):
    progress = open_run(unbroken).manifest(40).progress
    assert progress["data"]
    copy = tmp_path / "copy"
    shutil.copytree(unbroken, copy)
    tokenizer = copy / "tokenizer" / "shared.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"ä"'))
    with pytest.raises(UserError, match=r"shared\.json is damaged: it has changed since the run began"):
        train(small(cache), copy)
    (copy / "tokenizer" / "digests.json").unlink()
    with pytest.raises(UserError, match="training text or tokenizer has changed since update 40"):
        train(small(cache), copy)


def test_changed_validation_text_is_refused():
    def texts_of(*fingerprints):
        texts = {str(i): SimpleNamespace(fingerprint=each) for i, each in enumerate(fingerprints)}
        return SimpleNamespace(texts=texts, corpora=["the one"])

    progress = Progress()
    refuse_other_text(texts_of("a", "b"), progress, Path("run"))
    refuse_other_text(texts_of("a"), progress, Path("run"))  # without evaluations
    with pytest.raises(UserError, match="run: its validation text or tokenizer has changed since update 0: restore"):
        refuse_other_text(texts_of("a", "c"), progress, Path("run"))
    with pytest.raises(UserError, match="run: its training text"):
        refuse_other_text(texts_of("c", "b"), progress, Path("run"))


@pytest.mark.slow
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


def test_patience_ends_a_run_that_no_longer_improves(cache, tmp_path, capfd, monkeypatch):
    config = small(cache, train__eval_every=2, train__checkpoint_every=2, train__patience=2)
    first = []

    def as_before(*given):
        first.append(first[0] if first else split_sums(*given))
        return first[0]

    monkeypatch.setattr("jformer.trainer.split_sums", as_before)
    assert train(config, tmp_path)
    assert rows(tmp_path, "valid")[-1]["step"] == 6
    assert "stopping" in capfd.readouterr().err
    assert open_run(tmp_path).manifest(6).progress["best_step"] == 2
    assert train(config, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    best = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, weights="best"))
    with pytest.raises(UserError, match=r"evaluate\.weights='best': .* has no checkpoint of update 2, the best; use"):
        predict.load(tmp_path, best)


@pytest.mark.slow
def test_average_and_ema_weights_are_those_of_their_definition(cache, tmp_path):
    options = {"train__num_steps": 6, "train__eval_every": 2, "train__checkpoint_every": 2, "train__samples": 0}
    options |= {"train__keep_last": 1, "train__ema_decay": 0.5, "evaluate__average_last": 2}
    config = small(cache, **options, evaluate__weights="average")
    assert train(config, tmp_path)
    saved = open_run(tmp_path)
    assert set(saved.steps()) >= {4, 6}
    by_name = {
        weights: predict.load(tmp_path, small(cache, **options, evaluate__weights=weights)).params
        for weights in ("last", "best", "average", "ema")
    }
    last, average, ema = by_name["last"], by_name["average"], by_name["ema"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ema))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last)
    fourth = saved.restore(4, {"params": shapes})["params"]
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, (b + c) / 2, rtol=1e-6), average, fourth, last)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(ema), jax.tree.leaves(last), strict=True))


@pytest.mark.slow
def test_mixture_adds_corpora_by_their_weights_and_test_sets_have_keys(cache, tmp_path):
    copies = {"source": "generated", "name": "copy", "num_pairs": 300, "weight": 2.5}
    config = small(
        cache, data__mixture=(copies,), data__test=("test", "again=valid"), train__num_steps=5,
        train__eval_every=0, evaluate__scores=(),
    )  # fmt: skip
    assert train(config, tmp_path)
    data = open_data(config.data, config.train, config.seed, build_task(config), epath.Path(tmp_path), learned=True)
    plan = data.batches.plan
    passes = np.zeros(900)
    for batch in plan.epoch(0):
        np.add.at(passes, batch.units[batch.units >= 0], 1)
    assert (passes[:600] == 1).all()
    assert sorted(set(passes[600:])) == [2, 3]
    assert passes[600:].sum() == 750
    results = evaluate(config, tmp_path)
    assert set(results) == {"schema", "test", "again", "run"}


@pytest.mark.slow
def test_packed_bfloat16_rows_train_in_microbatches_on_four_devices(cache, tmp_path):
    config = small(
        cache, data__batching="packed", data__packed_length=96, data__length_multiple=16, model__dtype="bfloat16",
        train__accumulation=2,
        mesh__data=4, train__num_steps=6, train__log_every=2, train__eval_every=6, train__checkpoint_every=6,
    )  # fmt: skip
    assert train(config, tmp_path)
    found = rows(tmp_path, "train")
    assert [row["step"] for row in found] == [2, 4, 6]
    assert found[-1]["loss"] < found[0]["loss"]
    assert min(row["padding_efficiency"] for row in found) > 0.8


@pytest.mark.slow
def test_dtype_is_chosen_once_for_a_run_and_each_time_for_its_answers(cache, tmp_path, monkeypatch, capsys):
    def devices_prefer(dtype):
        monkeypatch.setattr("jformer.tasks.build.quicker_dtype", lambda device: (dtype, "of this test"))

    devices_prefer("bfloat16")
    config = small(cache, model__dtype="auto", decode__dtype="auto", train__num_steps=2, train__checkpoint_every=2)
    assert train(config, tmp_path)
    assert "model.dtype=auto: bfloat16 (of this test)" in (tmp_path / "training.log").read_text()
    devices_prefer("float32")
    assert train(config, tmp_path)
    assert load_config(tmp_path / "config.json").model.dtype == "bfloat16"
    capsys.readouterr()
    results = evaluate(config, tmp_path)
    assert results["test"]["settings"]["decode"]["dtype"] == "float32"
    assert (results["run"]["training_dtype"], results["run"]["decoding_dtype"]) == ("bfloat16", "float32")
    assert capsys.readouterr().err.count("decode.dtype=auto: float32 (of this test)\n") == 1
    assert predict.load(tmp_path).model.config.dtype == "float32"
    assert capsys.readouterr().err.count("decode.dtype=auto: float32 (of this test)\n") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decode__ensemble": ("nope",)}, r"decode\.ensemble: nope holds no run; name the workdirs of trained ones"),
        (
            {"decode__beam_size": 1_000},
            r"decode\.beam_size=1000 is more than the \d+ entries that may be written: lower",
        ),
        ({"decode__beam_size": 30}, r"decode\.beam_size=30 is more than the 29 entries that may be written"),
        ({"decode__beam_size": 29, "decode__forbid": ("a",)}, r"decode\.beam_size=29 is more than the 28 entries"),
    ],
)
def test_what_scoring_would_refuse_is_refused_before_the_first_update(cache, tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        train(small(cache, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("english", "german", "says"),
    [
        ("", "", r"the set 'test' \(test\) holds no example; give it some or leave it out"),
        ("\n \n", "\n\n", r"all examples of the set 'test' \(test\) are blank: fill them or leave it out"),
        ("a\n\n", "\nb\n", "are blank"),  # each lacks a side
    ],
)
def test_a_test_set_without_a_usable_example_is_refused_before_the_first_update(cache, tmp_path, english, german, says):
    for name, texts in {"train": ("a\n", "a\n"), "valid": ("b\n", "b\n"), "test": (english, german)}.items():
        for side, content in zip(("en", "de"), texts, strict=True):
            (tmp_path / f"{name}.{side}").write_text(content)
    with pytest.raises(UserError, match=says):
        train(small(cache, data__source="files", data__dir=str(tmp_path)), tmp_path / "run")


def test_missing_text_is_refused_before_anything_is_written(cache, tmp_path, monkeypatch):
    workdir, closed, close = tmp_path / "run", [], Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(close(self)))
    with pytest.raises(UserError, match="nowhere"):
        train(small(cache, data__source="files", data__dir="/nowhere"), workdir)
    assert len(closed) == 1  # no thread of its checkpoints is left behind
    assert not workdir.exists()
