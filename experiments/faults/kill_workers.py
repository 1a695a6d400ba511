"""Does a run of two processes survive the death of either, again and again, and learn the same?

The quickstart, with frequent checkpoints, runs under `launch.sh local 2`, once undisturbed and once while one of its
workers is killed at `--kills` updates drawn from `--seed`. Printed: the number of restarts, how long until the next row
after a death, and whether the rows of both runs are the same.

Command:  python -m experiments.faults.kill_workers [--kills=20] [--seed=0] [--smoke]
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from experiments.measure import ROOT, smoke_sizes
from experiments.runs import processes_with, small_run
from jformer.config.config_files import as_flags
from jformer.evaluation import records

KILLS = flags.DEFINE_integer("kills", 20, "Workers to kill.")
SEED = flags.DEFINE_integer("seed", 0, "Seed for when to kill, and which.")

EVERY = 10  # updates between checkpoints; two deaths lie at least as far apart
APART = 30
COMPARED = ("loss", "nll", "grad_norm")
OPTIONS = {
    "train.log_every": 1,
    "train.checkpoint_every": EVERY,
    "train.eval_every": 0,
    "optim.schedule": "constant",
    "optim.warmup": 10,
    "data.num_buckets": 1,
    "data.test": "()",
}


class Run:
    """A run of two processes in progress."""

    def __init__(self, workdir: Path, steps: int) -> None:
        self.workdir, self._log = workdir, workdir.with_suffix(".log")
        options = (small_run(steps) if smoke_sizes() else {}) | OPTIONS | {"train.num_steps": steps}
        command = ["bash", str(ROOT / "launch.sh"), "local", "2", "--devices=1", "--", "--config=configs/quickstart.py"]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, f"--workdir={workdir}", *as_flags(options)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows so far."""
        return records.rows(self.workdir)

    def reach(self, step: int) -> None:
        """Wait for the row of an update."""
        while not ((rows := self.rows()) and rows[-1]["step"] >= step):
            if self._process.poll() is not None:
                raise SystemExit(f"the run ended before update {step}:\n{self.told()}")
            time.sleep(0.02)

    def kill(self, process: int) -> None:
        """Kill one of the two, as the loss of its machine would."""
        for pid in processes_with(f"--workdir={self.workdir}", f"--process={process}")[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> tuple[int, int]:
        """Wait for the end; return the exit code and the number of restarts."""
        code = self._process.wait()
        return code, self._log.read_text().count("supervise: running again")

    def told(self) -> str:
        """Return the end of its output."""
        return self._log.read_text()[-2_000:]

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._process.terminate()
        self._process.wait()


def unbroken(workdir: Path, steps: int) -> list[dict[str, float]]:
    """Return the rows of an undisturbed run."""
    run = Run(workdir, steps)
    try:
        code, again = run.finish()
    finally:
        run.stop()
    if code or again:
        raise SystemExit(f"the unbroken run ended with exit code {code} after {again} restarts:\n{run.told()}")
    return run.rows()


def broken(workdir: Path, steps: int, deaths: list[int], draw: random.Random) -> tuple[list[dict[str, float]], int]:
    """Return the rows of a run whose workers die at the given updates, and the number of restarts."""
    run, waits = Run(workdir, steps), []
    try:
        for number, step in enumerate(deaths, start=1):
            run.reach(step)
            victim = draw.randrange(2)
            run.kill(victim)
            began, last = time.monotonic(), run.rows()[-1]["step"]
            run.reach(int(last) + 2)  # the update that was under way may have got its row
            waits.append(time.monotonic() - began)
            print(
                f"death {number}: process {victim} at update {step}, beyond it again after {waits[-1]:.1f} s",
                flush=True,
            )
        code, again = run.finish()
    finally:
        run.stop()
    typical, longest = statistics.median(waits), max(waits)
    print(f"exit code {code}; new rows {typical:.1f} s after a death (median), {longest:.1f} s at most")
    return run.rows(), again


def main(_: list[str]) -> None:
    """Run both and compare them."""
    smoke_sizes(kills=1)
    draw = random.Random(SEED.value)
    deaths = [APART * (n + 1) + draw.randrange(APART - EVERY) for n in range(KILLS.value)]
    steps = deaths[-1] + APART
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-workers-") as folder:
        expected = unbroken(Path(folder) / "unbroken", steps)
        found, again = broken(Path(folder) / "broken", steps, deaths, draw)
    print(f"{KILLS.value} workers killed, {again} recoveries, {len(found)} rows of {len(expected)}")
    same = [row["step"] for row in found] == [row["step"] for row in expected]
    for name in COMPARED if same else ():
        pairs = [(one[name], other[name]) for one, other in zip(found, expected, strict=True)]
        most = max(abs(a - b) / abs(b) for a, b in pairs)
        equal = sum(a == b for a, b in pairs)
        print(f"{name}: {equal} of {len(pairs)} rows equal to the last bit; largest relative difference {most:.1e}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    if again < KILLS.value:
        raise SystemExit("a death was not noticed")
    if not same:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    app.run(main)
