"""Does a sweep survive the death of its workers and of its trials' processes, and get the same results?

Two sweeps of 20 arms and two seeds, whose trials take seconds, are run by `--workers` workers each: one undisturbed,
one while workers and processes of trials are killed at random moments drawn from `--seed`. Printed: whether each trial
has one result, whether it equals that of the undisturbed sweep to the last bit, how long a killed worker still held its
trial, and for how long the workers of the undisturbed sweep had no trial's process.

Command:  python -m experiments.faults.kill_sweep [--kills=24] [--workers=4] [--seed=0] [--smoke]
"""

import contextlib
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from absl import app, flags
from etils import epath
from optuna.trial import FrozenTrial, TrialState

from experiments.measure import ROOT, smoke_sizes
from experiments.runs import processes_with
from jformer.tools.sweep.experiment import Trial, load_experiment
from jformer.tools.sweep.queue import TrialQueue

KILLS = flags.DEFINE_integer("kills", 24, "Workers to kill; a third as many processes of trials are killed as well.")
WORKERS = flags.DEFINE_integer("workers", 4, "Workers at a time.")
SEED = flags.DEFINE_integer("seed", 0, "Seed for when to kill, and which.")

LEASE = 10.0  # seconds
SIZES: dict[bool, dict[str, object]] = {False: {"seeds": (0, 1), "rates": 10}, True: {"seeds": (0,), "rates": 1}}
WORKERS_KILLED = 0.75  # share of all that are killed; the others are processes of trials
EXPERIMENT = '''"""Small runs, forty of them where nothing else is asked for."""
from jformer.tools.sweep import product

BASE = "configs/quickstart.py"
METRIC = "valid/loss"
SEEDS = {seeds}
FIXED = {{
    "data.name": "copy", "data.num_buckets": 1, "data.num_pairs": 2_000, "data.test": (), "evaluate.scores": (),
    "model.d_model": 16, "model.d_ff": 32, "model.num_layers": 1, "model.num_heads": 2,
    "optim.schedule": "constant", "optim.warmup": 5,
    "train.num_steps": 150, "train.log_every": 25, "train.eval_every": 75, "train.checkpoint_every": 25,
    "train.samples": 0,
}}
ENVIRONMENT = {{
    "XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_COMPILATION_CACHE_DIR": {cache!r},
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}}

def sweep():
    return product({{"optim.learning_rate": [0.001 * n for n in range(1, {rates} + 1)], "model.norm": ["pre", "post"]}})
'''
# Notes when a trial's process began and ended, more exactly than a worker sees it.
TIMED = shlex.join(
    [
        "bash",
        "-c",
        (
            f'began=$EPOCHREALTIME; {sys.executable} -m jformer.main "$@"; code=$?; '
            'echo $PPID $began $EPOCHREALTIME >>"$TIMES"; exit $code'
        ),
        "timed",
    ]
)


class Sweep:
    """A sweep in progress."""

    def __init__(self, folder: Path, command: str = "") -> None:
        """Start it."""
        folder.mkdir()
        self.workdir, self.times, self._log = epath.Path(folder / "sweep"), folder / "times", folder / "sweep.log"
        path = folder / "forty.py"
        path.write_text(EXPERIMENT.format(cache=str(folder.parent / "cache"), **SIZES[smoke_sizes()]))
        self.queue = TrialQueue(load_experiment(epath.Path(path)), self.workdir, lease=LEASE)
        options = [
            f"--experiment={path}",
            f"--workdir={self.workdir}",
            f"--workers={WORKERS.value}",
            f"--lease={LEASE}",
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jformer.sweep", *options, *([f"--command={command}"] if command else [])],
                env=os.environ | {"TIMES": str(self.times)},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def living(self) -> bool:
        """Return whether it is still running."""
        return self._process.poll() is None

    def rows(self) -> list[FrozenTrial]:
        """Return all rows of its study."""
        return self.queue.study.get_trials(deepcopy=False)

    def processes(self, word: str) -> list[int]:
        """Return the processes of the sweep that have a word in their command."""
        return processes_with(word, within=f"--workdir={self.workdir}")

    def finish(self) -> str:
        """Wait for the end; return a summary."""
        code = self._process.wait()
        if code:
            print(self._log.read_text()[-2_000:])
        states = Counter(trial.state for trial in self.queue.trials())
        return f"exit code {code}: {', '.join(f'{count} {state}' for state, count in states.items())}"

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()


def undisturbed(folder: Path) -> tuple[list[Trial], float]:
    """Return the trials of an undisturbed sweep, and its seconds; print for how long workers had no process."""
    began = time.time()
    sweep = Sweep(folder, TIMED)
    try:
        told = sweep.finish()
    finally:
        sweep.stop()
    seconds = time.time() - began
    spans = defaultdict[int, list[tuple[float, float]]](list)
    for line in sweep.times.read_text().splitlines():
        worker, start, end = line.split()
        spans[int(worker)].append((float(start), float(end)))
    busy = sum(end - start for times in spans.values() for start, end in times)
    between = sum(max(end for _, end in times) - min(start for start, _ in times) for times in spans.values()) - busy
    whole = WORKERS.value * seconds - busy
    trials = sweep.queue.trials()
    print(f"undisturbed: {seconds:.0f} s, {told}; a trial's process takes {busy / len(trials):.1f} s")
    print(f"workers without a process, of their processes' time: {between / busy:.2%} from one trial to the next")
    print(f"  and {whole / busy:.2%} with the start of all and the wait for the last", flush=True)
    return trials, seconds


def disturbed(folder: Path, draw: random.Random, seconds: float) -> list[Trial]:
    """Return the trials of a sweep whose workers and processes are killed; print the outcome.

    The deaths are spread over `seconds`, the time that it takes undisturbed.
    """
    began = time.monotonic()
    sweep = Sweep(folder)
    try:
        workers, processes = kill(sweep, draw, pause=seconds * WORKERS_KILLED / KILLS.value)
        told = sweep.finish()
    finally:
        sweep.stop()
    trials, rows = sweep.queue.trials(), sweep.rows()
    results = Counter(row.user_attrs["trial"]["name"] for row in rows if row.state == TrialState.COMPLETE)
    held = stuck(rows, workers)
    print(f"disturbed: {time.monotonic() - began:.0f} s, {told}")
    print(f"{len(workers)} workers and {processes} processes of trials killed, {len(held)} workers with a trial")
    print(f"results: {sum(results.values())}; trials with none: {sum(trial.name not in results for trial in trials)}")
    print(f"  trials with two: {sum(count > 1 for count in results.values())}")
    if held:
        print(
            f"taken back from a killed worker after {statistics.median(held):.1f} s (median), {max(held):.1f} s at most"
        )
    print(f"  trials held longer than the lease of {LEASE:.0f} s: {sum(seconds > LEASE for seconds in held)}")
    return trials


def kill(sweep: Sweep, draw: random.Random, pause: float) -> tuple[dict[int, float], int]:
    """Kill workers and processes at random moments, `pause` seconds apart on average, until the sweep ends.

    Return the workers, each with the time of its death, and the number of processes; a trial loses at most two, as it
    fails at its third crash.
    """
    workers, victims = dict[int, float](), list[str]()
    while sweep.living():
        time.sleep(draw.uniform(0, 2 * pause))
        if draw.random() < WORKERS_KILLED:
            if len(workers) < KILLS.value and (pids := sweep.processes("--worker")):
                pid = draw.choice(pids)
                workers[pid] = time.time()
                end(pid)
        elif len(victims) < KILLS.value // 3 and (pids := sweep.processes("jformer.main")):
            pid = draw.choice(pids)
            with contextlib.suppress(OSError):
                command = (Path("/proc") / str(pid) / "cmdline").read_text()
                if victims.count(command) < 2:
                    victims.append(command)
                    end(pid)
    return workers, len(victims)


def end(pid: int) -> None:
    """Kill a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stuck(rows: list[FrozenTrial], killed: dict[int, float]) -> list[float]:
    """Return for how many seconds each trial of a killed worker was still owned by it."""
    found = []
    for row in rows:
        death, told = killed.get(row.user_attrs.get("owner", {}).get("pid")), row.datetime_complete
        if death and told and told.timestamp() > death:
            found.append(told.timestamp() - death)
    return found


def main(_: list[str]) -> None:
    """Run both sweeps and compare them."""
    smoke_sizes(kills=1, workers=2)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-sweep-") as folder:
        expected, seconds = undisturbed(Path(folder) / "undisturbed")
        found = disturbed(Path(folder) / "disturbed", random.Random(SEED.value), seconds)
    same = sum(
        one.metrics["valid/loss"] == other.metrics.get("valid/loss") for one, other in zip(expected, found, strict=True)
    )
    print(f"results equal to the last bit: {same} of {len(expected)}; {(time.monotonic() - began) / 60:.1f} minutes")
    if same < len(expected):
        raise SystemExit("the sweeps differ")


if __name__ == "__main__":
    app.run(main)
