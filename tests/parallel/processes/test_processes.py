"""Several real processes over Gloo are one run: they train as one does, restore what others saved, end together."""

import json
import os
import shutil
import signal
import socket

import pytest

from jformer import main
from tests.parallel.processes.processes import CONFIG, running

HERE = socket.gethostname()
SHORT = ("--config.train.num_steps=10", "--config.train.eval_every=10", "--config.train.log_every=1")
PACKED = "--config.data.packed_length=64"
LONG = (
    "--config.train.num_steps=100_000",
    "--config.train.eval_every=0",
    "--config.train.log_every=5",
    "--config.data.test=()",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"--config.data.cache_dir={tmp_path_factory.mktemp('cache')}"


def rows(workdir, split="train"):
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["split"] == split]


def trained(folder, cache, *arguments, **processes):
    """Train with some processes to the end and return the workdir."""
    with running(folder / "logs", folder / "run", cache, *arguments, **processes) as group:
        group.end(*[0] * processes.get("processes", 2))
        for i in range(1, len(group.all)):  # others are silent
            assert group.said(i) == (group.folder / f"{i}.out").read_text() == ""
    return folder / "run"


def compare(workdir, expected, tolerance=1e-6):
    """Assert that a run has the rows, answers and scores of another."""
    for split in ("train", "valid"):
        assert len(rows(workdir, split)) == len(rows(expected, split)) > 0
        for row, other in zip(rows(workdir, split), rows(expected, split), strict=True):
            assert row["step"] == other["step"]
            assert row["loss"] == pytest.approx(other["loss"], rel=tolerance)
            assert row.get("padding_efficiency") == other.get("padding_efficiency")  # of all rows, each counted once
    found, wanted = (json.loads((each / "results.json").read_text())["test"] for each in (workdir, expected))
    assert found["examples"] == wanted["examples"]
    assert found["perplexity"]["score"] == pytest.approx(wanted["perplexity"]["score"], rel=10 * tolerance)
    if tolerance < 1e-5:
        assert (workdir / "outputs" / "test.txt").read_text() == (expected / "outputs" / "test.txt").read_text()


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """Return the workdir of one process with four devices: this one."""
    workdir = tmp_path_factory.mktemp("alone")
    flags = [f"--config={CONFIG}", f"--workdir={workdir}", "--config.mesh.data=-1", cache, *SHORT]
    assert main.main(["jformer", *flags]) == 0
    return workdir


@pytest.mark.slow
def test_two_processes_of_two_devices_train_and_score_as_one_of_four(alone, cache, tmp_path):
    compare(trained(tmp_path, cache, *SHORT, processes=2, devices=2), alone)


@pytest.mark.slow
def test_two_processes_go_on_with_half_an_output_as_one_does(alone, cache, tmp_path):
    source, wanted, found = tmp_path / "in.txt", tmp_path / "wanted.txt", tmp_path / "found.txt"
    source.write_text("".join(f"{'abcdefghij'[i % 7 :]} {i}\n" for i in range(300)))
    ask = ("--mode=predict", f"--input={source}")
    assert main.main(["jformer", f"--workdir={alone}", cache, *ask, f"--output={wanted}"]) == 0
    whole = wanted.read_bytes()
    found.write_bytes(whole[: len(whole) // 2])
    shutil.copy(f"{wanted}.settings.json", f"{found}.settings.json")
    with running(tmp_path / "logs", alone, cache, *ask, f"--output={found}", "--resume") as group:
        group.end(0, 0)
        assert " lines kept" in group.said(0)
        assert group.said(1) == ""
    assert found.read_bytes() == whole
    (tmp_path / "other.txt").write_text(source.read_text().replace("7", "8"))
    own = {1: [f"--input={tmp_path / 'other.txt'}"]}
    with running(tmp_path / "logs", alone, cache, *ask, f"--output={found}", "--resume", own=own) as group:
        group.end(2, 2)
        assert all("the processes differ in the text of --input: " in group.said(i) for i in range(2))


@pytest.mark.slow
def test_pipes_and_other_runs_are_refused_by_all_and_a_reader_that_leaves_ends_all(alone, cache, tmp_path):
    source, copy = tmp_path / "in.txt", tmp_path / "copy"
    source.write_text("a b c\n" * 300)
    shutil.copytree(alone, copy)
    (copy / "tokenizer" / "shared.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    ask = ("--mode=predict", f"--input={source}")
    for own, named in (
        ({0: ["--input=-"], 1: ["--input=-"]}, "--input=-: several processes need a plain file, not a pipe"),
        ({1: [f"--input={tmp_path / 'pipe'}"]}, "pipe: several processes need a plain file, not a pipe"),
        ({1: [f"--workdir={copy}"]}, "the processes differ in --workdir"),
        ({1: ["--resume"]}, "the processes differ in --resume"),
    ):
        with running(tmp_path / "logs", alone, cache, *ask, own=own) as group:
            group.end(2, 2)
            assert all(named in group.said(i) for i in range(2))
    for name, run in (("0", alone), ("1", copy)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run").symlink_to(run)
    apart = {i: f"cwd:{tmp_path / str(i)}@0" for i in range(2)}
    with running(tmp_path / "logs", "run", cache, *ask, faults=apart) as group:
        group.end(2, 2)
        assert all("differ in the config and tokenizers of run" in group.said(i) for i in range(2))
    with running(tmp_path / "logs", alone, cache, *ask, faults={0: "unread@0"}) as group:
        group.end(0, 0)
        assert [group.said(i) for i in range(2)] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 4}, ()),
        ({"data": 2, "fsdp": 2}, ()),
        ({"data": 1, "fsdp": 2, "tensor": 2}, ("--config.data.tokenizer=byte",)),
        ({"data": 4}, ("--config.train.accumulation=2", "--config.data.batching=packed", PACKED)),
    ],
)  # fmt: skip
def test_four_processes_train_and_score_as_one_whatever_the_mesh(cache, tmp_path, mesh, options):
    axes = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    wanted = trained(tmp_path / "one", cache, *SHORT, *options, processes=1, devices=4)
    compare(trained(tmp_path / "four", cache, *SHORT, *options, *axes, processes=4, devices=1), wanted)


@pytest.mark.slow
def test_request_to_one_saves_everywhere_and_a_death_is_told_and_one_process_goes_on(cache, tmp_path):
    workdir = tmp_path / "run"
    with running(tmp_path / "stopped", workdir, cache, *LONG) as group:
        group.wait_for(workdir / "metrics.jsonl", '"step": 10,')
        group.all[1].send_signal(signal.SIGTERM)
        group.end(143, 143)
        assert "stopped and saved" in group.said(0)
    step = rows(workdir)[-1]["step"]
    assert (workdir / "checkpoints" / str(step)).is_dir()
    with running(tmp_path / "killed", workdir, cache, *LONG) as group:
        group.wait_for(workdir / "metrics.jsonl", f'"step": {step // 5 * 5 + 10},')
        group.all[1].kill()
        group.end(75, -signal.SIGKILL)
        assert group.lines(0)[0].startswith(f"jformer: process 1 ({HERE}) died or is frozen at ")
    saved = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())
    last = f"--config.train.num_steps={saved + 5}"
    with running(tmp_path / "alone", workdir, cache, *LONG, last, processes=1) as group:
        group.end(0)
    steps = [row["step"] for row in rows(workdir)]
    assert steps == sorted(set(steps))
    assert steps[-1] == saved + 5


@pytest.mark.slow
def test_a_process_alone_that_is_stuck_shows_its_stacks_and_ends(cache, tmp_path):
    options = (*LONG, cache, "--config.train.stall_seconds=4")
    with running(tmp_path, tmp_path / "run", *options, processes=1, faults={0: "sleep:1000@12"}) as group:
        group.end(76)
        assert group.lines(0)[-1].startswith("jformer: stuck at update 12 for ")
        assert group.lines(0)[-1].endswith("; rerun the same command to resume from the last checkpoint")
        assert "(most recent call first)" in group.said(0)
        assert "faulty.py" in group.said(0)


@pytest.mark.slow
def test_stuck_process_ends_the_run_naming_it(cache, tmp_path):
    stuck = {1: "sleep:1000@12"}
    with running(tmp_path, tmp_path / "run", cache, *LONG, "--config.train.stall_seconds=4", faults=stuck) as group:
        group.wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 10,')
        group.end(76, 76)
        for i in range(2):
            assert group.lines(i)[0].startswith(f"jformer: process 1 ({HERE}) is stuck at update 12 for ")
            assert "(most recent call first)" in group.said(i)
        assert "faulty.py" in group.said(1)


@pytest.mark.slow
def test_slow_and_late_processes_are_waited_for(cache, tmp_path):
    faults = {0: "sleep:6@5", 1: "late:15@0"}
    options = (*SHORT, "--config.train.stall_seconds=30")
    with running(tmp_path, tmp_path / "run", cache, *options, faults=faults) as group:
        group.end(0, 0)
        assert "waiting for process 1 of 2" in group.said(0)
        assert f"s for process 0 ({HERE}) at update 5" in group.said(0)


@pytest.mark.slow
def test_a_slow_compiler_is_waited_for_longer_than_gloo_waits(cache, tmp_path):
    with running(tmp_path, tmp_path / "run", cache, *SHORT, faults={1: "compiler:35@0"}) as group:
        group.end(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_programs_are_cached_where_all_processes_find_them(tmp_path, monkeypatch, shared):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    own = {i: [f"--config.data.cache_dir={tmp_path}/cache{0 if shared else i}"] for i in range(2)}
    with running(tmp_path, tmp_path / "run", *SHORT, own=own) as group:
        group.end(0, 0)
    assert any((tmp_path / "cache0" / "compiled").glob("*-cache")) == shared


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("faults", "own", "named"),
    [
        pytest.param(
            {}, {1: ["--config.optim.learning_rate=0.5"]}, "config.optim.learning_rate: 0.003 on process 0", marks=slow
        ),
        pytest.param({1: "old@0"}, {}, "'0.1' on process 1", marks=slow),
        pytest.param({}, {0: ["--config.data.source=files", "--config.data.dir=/no"]}, "data.source", marks=slow),
        pytest.param({}, {1: ["--config=/nowhere.py"]}, "/nowhere.py: no such Python file", marks=slow),
        ({}, {1: ["--processes=3"]}, "--processes=3, process 0 with 2"),
    ],
)  # fmt: skip
def test_processes_that_differ_are_refused_by_all(cache, tmp_path, faults, own, named):
    with running(tmp_path, tmp_path / "run", cache, *LONG, faults=faults, own=own) as group:
        group.end(2, 2)
        assert all(named in group.said(i) for i in range(2))
        assert all(len(group.lines(i)) == 1 and "Traceback" not in group.said(i) for i in range(2))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_text_and_workdir_that_differ_are_refused_by_all(cache, tmp_path):
    for i in range(2):
        (tmp_path / f"{i}" / "text").mkdir(parents=True)
        for name in ("train.en", "train.de", "valid.en", "valid.de", "test.en", "test.de"):
            (tmp_path / f"{i}" / "text" / name).write_text("".join(f"a b c {k * (i + 1)}\n" for k in range(90)))
    files = ("--config.data.source=files", "--config.data.dir=text", "--config.train.eval_every=0")
    apart = {i: f"cwd:{tmp_path / str(i)}@0" for i in range(2)}
    with running(tmp_path / "a", tmp_path / "run", cache, *files, faults=apart) as group:
        group.end(2, 2)
        assert all("differ in training text train" in group.said(i) for i in range(2))
    with running(tmp_path / "b", tmp_path / "other", cache, *SHORT, faults={1: "blind@0"}) as group:
        group.end(2, 2)
        assert all("process 1" in group.said(i) and "must be shared" in group.said(i) for i in range(2))


@pytest.mark.slow
def test_what_any_number_of_processes_saved_any_other_restores_to_the_bit_and_goes_on(cache, tmp_path):
    unbroken = trained(tmp_path / "unbroken", cache, *SHORT, "--config.train.num_steps=40", processes=1, devices=4)
    workdir = tmp_path / "run"
    ways = [(1, 4, {}), (2, 2, {"fsdp": 2, "data": 2}), (4, 2, {"fsdp": 4, "data": 2}), (1, 8, {})]
    for turn, (processes, devices, mesh) in enumerate(ways, 1):
        axes = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
        steps = f"--config.train.num_steps={10 * turn}"
        with running(
            tmp_path / f"{turn}", workdir, cache, *SHORT, steps, *axes, processes=processes, devices=devices
        ) as group:
            group.end(*[0] * processes)
        digests = set()
        for count, each in ((1, 1), (2, 4), (4, 1)):
            options = {"processes": count, "devices": each, "program": "tests.parallel.processes.digest"}
            with running(tmp_path / "digest", workdir, cache, *SHORT, steps, **options) as group:
                group.end(*[0] * count)
                digests.add((group.folder / "0.out").read_text())
        assert len(digests) == 1
        assert len(json.loads(digests.pop())) > 30
    compare(workdir, unbroken, tolerance=1e-2)
    for row, other in zip(rows(workdir)[:20], rows(unbroken)[:20], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-6)
