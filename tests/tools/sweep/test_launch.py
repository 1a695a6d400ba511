import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from etils import epath

from jformer.errors import UnavailableError
from jformer.tools.sweep import launch, worker
from jformer.tools.sweep.launch import DEATHS, LocalWorkers, take_share
from tests.launch.test_launch import SLICE, Cloud
from tests.tools.sweep.sweeps import ROOT, SWEEP, close, open_queue, stand_in, starts, write
from tests.watching import wait_until

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Look often; and start processes without a function between fork and exec: JAX warns of that."""
    monkeypatch.setattr(launch, "LOOK", 0.02)
    monkeypatch.setattr(launch, "die_with_parent", lambda: None)
    yield
    close()


def local(folder, code, workers=2):
    """Return workers that run some Python, which knows its share and notes it in `shares`."""
    path = folder / "worker.py"
    head = "import os, signal, sys, time\nshare = sys.argv[-1]\nprint(share, file=open('{}', 'a'))\n"
    path.write_text(head.format(folder / "shares") + code)
    return LocalWorkers(open_queue(folder), [sys.executable, "-S", str(path)], workers)


def shares(folder):
    return sorted((folder / "shares").read_text().split())


def test_a_worker_that_dies_is_started_again_with_its_share(tmp_path, monkeypatch):
    code = """
if share == "--share=1/2" and not os.path.exists("{0}"):
    open("{0}", "w").close()
    os.kill(os.getpid(), 9)
"""
    workers = local(tmp_path, code.format(tmp_path / "died"))
    monkeypatch.setattr(workers._queue, "left", lambda: 0)
    assert workers.run() == 0
    assert shares(tmp_path) == ["--share=0/2", "--share=1/2", "--share=1/2"]


@pytest.mark.parametrize("code", [1, 75])  # a crash; storage that was away
def test_workers_that_always_die_are_given_up(tmp_path, capsys, code):
    workers = local(tmp_path, f"sys.exit({code})", 1)
    assert workers.run() == code
    assert len(shares(tmp_path)) == DEATHS + 1
    assert f"sweep: gave up: {DEATHS + 1} workers died, and no trial has ended since" in capsys.readouterr().err


def test_a_mistake_of_one_worker_stops_all(tmp_path):
    workers = local(tmp_path, "sys.exit(2) if share == '--share=0/2' else time.sleep(60)")
    assert workers.run() == 2
    started = shares(tmp_path)
    assert len(started) == len(set(started))  # none a second time


def test_told_to_stop_all_workers_are_told(tmp_path, monkeypatch):
    said = tmp_path / "said"
    code = """
def say(word):
    print(word, file=open("{}", "a"))

signal.signal(signal.SIGTERM, lambda *_: (say("told"), sys.exit(143)))
say("up")
time.sleep(60)
"""
    workers = local(tmp_path, code.format(said))
    sleep = time.sleep

    def tell(seconds):
        sleep(seconds)
        if not workers.stopping and said.exists() and said.read_text().count("up") == 2:
            workers.stop(signal.SIGTERM, None)

    monkeypatch.setattr(time, "sleep", tell)
    assert workers.run() == 143
    assert said.read_text().count("told") == 2


def test_a_terminal_that_hangs_up_twice_lets_workers_save(tmp_path, monkeypatch):
    said = tmp_path / "said"
    code = """
def save(*_):
    time.sleep(0.3)
    print("saved", file=open("{0}", "a"))
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("up", file=open("{0}", "a"))
time.sleep(60)
"""
    workers = local(tmp_path, code.format(said), 1)
    sleep = time.sleep

    def hang_up(seconds):
        sleep(seconds)
        if said.exists():
            workers.stop(signal.SIGHUP, None)

    monkeypatch.setattr(time, "sleep", hang_up)
    assert workers.run() == 143
    assert said.read_text().split() == ["up", "saved"]


def test_workers_outlive_a_storage_that_is_away(tmp_path, monkeypatch):
    workers = local(tmp_path, "time.sleep(0.2)", 1)
    seen, looks = workers._queue.trials, []

    def trials():
        looks.append(1)
        if len(looks) == 2:
            raise UnavailableError("the trials cannot be reached")
        return seen()

    monkeypatch.setattr(workers._queue, "trials", trials)
    monkeypatch.setattr(workers._queue, "left", lambda: 0)
    assert workers.run() == 0
    assert len(looks) > 2


def test_told_to_stop_before_its_workers_are_there_it_stops_them(tmp_path):
    workers = local(tmp_path, "time.sleep(60)")
    workers.stop(signal.SIGTERM, None)
    assert workers.run() == 143


def test_what_has_ended_is_told_line_by_line(tmp_path, capsys):
    queue = open_queue(tmp_path)
    queue.claim().complete(0.25, {}, 3.0)
    progress = launch.TrialBar(queue.trials(), 0)
    queue.claim().complete(0.5, {}, 3.0)
    queue.claim().fail("out of memory", 2.0)
    assert (progress.show(queue.trials()), progress.show(queue.trials())) == (2, 0)
    assert capsys.readouterr().err.splitlines() == [
        "2/6 complete: learning_rate=2, seed 0: 0.5 (3 s)",
        "3/6 failed: learning_rate=3, seed 0: out of memory (2 s)",
    ]


@pytest.mark.parametrize(
    ("cores", "workers", "parts"),
    [(8, 3, [{0, 1}, {2, 3, 4}, {5, 6, 7}]), (2, 2, [{0}, {1}]), (2, 3, [{0}, {1}, {0}]), (4, 1, [{0, 1, 2, 3}])],
)
def test_cores_are_divided_among_workers(monkeypatch, cores, workers, parts):
    taken = []
    monkeypatch.setattr(launch, "visible_gpus", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, part: taken.append(set(part)))
    for i in range(workers):
        take_share(f"{i}/{workers}")
    assert taken == parts


def test_gpus_are_divided_among_workers(monkeypatch):
    given = []
    for i in range(2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
        take_share(f"{i}/2")
        given.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert given == ["0", "3,5"]


def test_gpus_are_numbered_as_cuda_does(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "Path", lambda name: tmp_path)
    for name in ("nvidia3", "nvidia10", "nvidiactl"):
        (tmp_path / name).touch()
    assert launch.visible_gpus() == ["0", "1"]


def test_workers_of_one_gpu_share_its_memory(monkeypatch):
    given = []
    for i in range(3):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
        take_share(f"{i}/3")
        given.append((os.environ["CUDA_VISIBLE_DEVICES"], os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]))
    assert given == [("0", "0.450"), ("1", "0.450"), ("0", "0.450")]


def sweep(folder, *options, path="", **constants):
    """Run the command of a sweep among fakes."""
    file = write(folder, **constants)
    command = [sys.executable, "-m", "jformer.sweep", f"--experiment={file}", f"--workdir={folder}/sweep", *options]
    found = f"{path}:{os.environ['PATH']}" if path else str(Path(sys.executable).parent)  # no Slurm of this machine's
    environment = os.environ | {"FAKE_SLURM": str(folder), "PATH": found}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_jobs_of_slurm_do_all_trials(tmp_path):
    options = "--slurm=slurm_partition=gpu,gpus_per_node=1,timeout_min=600"
    result = sweep(tmp_path, options, "--workers=2", f"--command={stand_in()}", path=FAKES)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("submitted: 7_0, 7_1; rerun with --report")
    (directives,) = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert {"partition=gpu", "gpus-per-node=1", "time=600", "job-name=jformer-sweep"} <= set(directives)
    queue = open_queue(tmp_path)
    wait_until(lambda: not queue.left())
    assert [trial.state for trial in queue.trials()] == ["complete"] * 6
    assert all(starts(tmp_path, trial) == 1 for trial in queue.trials())


@pytest.mark.parametrize(
    ("options", "path", "said"),
    [
        ("slurm_partition=refused", FAKES, "invalid partition specified: refused"),
        ("partitions=gpu", FAKES, "partitions"),
        ("slurm_partition=gpu", "", 'Could not detect "srun", are you indeed on a slurm cluster?'),
    ],
)
def test_what_slurm_refuses_is_one_line(tmp_path, options, path, said):
    result = sweep(tmp_path, f"--slurm={options}", path=path)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]  # after what sbatch says itself
    assert line.startswith(f"jformer: --slurm={options}: ")
    assert said in line
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_trials_on_slices_of_tpus_go_through_launch_sh(tmp_path, monkeypatch):
    cloud, seen = Cloud(tmp_path), []
    queue = open_queue(tmp_path, SWEEP.replace(", 2.0, 3.0", ""), SEEDS=(0,))
    queue.experiment.environment.update(
        FAKE_CLOUD=str(cloud.folder),
        FAKE_PYTHON=sys.executable,
        CLOUDSDK_CONFIG=str(cloud.folder),
        HOME=str(cloud.folder),
        TMPDIR=str(cloud.folder),
        PATH=f"{ROOT / 'tests' / 'launch' / 'fakes'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        JFORMER_POLL="0.1",
        JFORMER_COMMAND=f"'{sys.executable}' '{ROOT / 'tests' / 'launch' / 'stand_in.py'}' --code=pass",
    )
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr("jformer.evaluation.records.metrics", lambda run: seen.append(str(run)) or {"valid/loss": 0.5})
    command = f"bash '{cloud.repository}/launch.sh' all --yes --name=sweep-{{trial}} {' '.join(SLICE[1:])} --"
    assert worker.Worker(queue, epath.Path("gs://bucket/sweep"), command).work() == 0
    (trial,) = queue.trials()
    assert (trial.state, trial.value, trial.attempts) == ("complete", 0.5, 1)
    assert seen == [f"gs://bucket/sweep/trials/{trial.name}"]
    run = [f"--config={queue.experiment.base}", f"--workdir={seen[0]}", "--config.optim.learning_rate=1.0"]
    for host in range(2):
        assert cloud.starts(host) == [["--code=pass", "--distributed", *run, "--config.seed=0"]]
    assert cloud.count("queued-resources", "create", f"sweep-{trial.name[-8:]}") == 1
    assert not (cloud.folder / "slice.json").exists()
