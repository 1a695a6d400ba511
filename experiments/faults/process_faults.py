"""How soon does a run of several processes end when one dies, freezes, is stuck or is cut off, and what does it lose?

A small run goes from fault to fault: its processes train for `--apart` updates, a fault hits one of them, and all must
end by themselves, except for one that is frozen or stuck in C, which is killed afterwards. The next ones resume from
what is saved. Printed: seconds from the fault to the end of each process, exit codes, the line that says why, and
whether every checkpoint from before the fault is still the newest or older than the newest.

  dead    SIGKILL           frozen  SIGSTOP
  stuck   the main thread sleeps from the next update on, under train.stall_seconds=4
  cut     messages between process 1 and the coordinator no longer arrive, or their connection closes

Command:  python -m experiments.faults.process_faults [--processes=2] [--rounds=5] [--apart=15] [--smoke]
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from experiments.measure import ROOT, smoke_sizes
from experiments.runs import small_run
from jformer.config.config_files import as_flags
from jformer.errors import LOST, STUCK
from jformer.evaluation import records
from jformer.parallel.processes.children import die_with_parent, free_port
from tests.parallel.processes.proxy import Proxy

PROCESSES = flags.DEFINE_integer("processes", 2, "Processes of the run; the fault hits 0 or 1.", lower_bound=2)
ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each of the four faults happens.")
APART = flags.DEFINE_integer("apart", 15, "Updates before a fault.")

FAULTS = ("dead", "frozen", "stuck", "cut")
EVERY = 5  # updates between checkpoints
STALL_SECONDS = 4
LIMIT = 20.0  # seconds in which all must have ended
PATIENCE = 300.0
COMPILING = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}  # alike in all
OPTIONS = small_run(100_000) | {"train.checkpoint_every": EVERY, "train.stall_seconds": STALL_SECONDS}


class Fault(NamedTuple):
    """A fault and its victim; `how` is one of two ways to cut it off."""

    kind: str
    victim: int
    how: str


def main(_: Sequence[str]) -> None:
    """Print a line for each fault, and how many went well."""
    smoke = smoke_sizes(rounds=1, apart=6)
    faults = [
        Fault(kind, 1 if kind == "cut" else turn % 2, ("silence", "close")[turn % 2])
        for turn in range(ROUNDS.value)
        for kind in (FAULTS[:1] if smoke else FAULTS)
    ]
    ended = []
    with tempfile.TemporaryDirectory(prefix="process-faults-") as folder:
        for fault in faults:
            ended.append(happen(fault, Path(folder)))
    well = [seconds for seconds in ended if seconds is not None]
    print(f"{len(well)} of {len(faults)} ended with a reason printed and nothing lost")
    print(f"{sum(seconds < LIMIT for seconds in well)} of these within {LIMIT:.0f} s")
    if len(well) < len(faults):
        raise SystemExit(1)


def happen(fault: Fault, folder: Path) -> float | None:
    """Start the processes and hit one; return the seconds until all ended, None if one did not end as it should."""
    workdir = folder / "run"
    begun = newest(workdir)
    with started(folder) as (processes, proxy):
        if not is_on_its_way(processes, workdir, begun):
            raise SystemExit("\n".join((folder / f"{i}.log").read_text()[-2_000:] for i in range(PROCESSES.value)))
        before = newest(workdir)
        victim = processes[fault.victim]
        if fault.kind == "dead":
            victim.kill()
        elif fault.kind == "frozen":
            victim.send_signal(signal.SIGSTOP)
        elif fault.kind == "stuck":
            victim.send_signal(signal.SIGUSR1)
        else:
            getattr(proxy, fault.how)()
        hurt = time.monotonic()
        waited = [i for i in range(PROCESSES.value) if not (fault.kind == "frozen" and i == fault.victim)]
        ends = {i: processes[i].wait(PATIENCE) for i in waited}
        seconds = time.monotonic() - hurt
    after = newest(workdir)
    lines = (folder / f"{waited[0] if fault.kind != 'dead' else 1 - fault.victim}.log").read_text().splitlines()
    why = next((line for line in lines if line.startswith("jformer: ")), "nothing but JAX's own words")
    expected = [i for i in waited if not (fault.kind == "dead" and i == fault.victim)]
    good = all(is_an_end(fault.kind, ends[i]) for i in expected) and after >= before > begun
    codes = ", ".join(f"{i}: {code}" for i, code in ends.items())
    print(
        f"{fault.kind:6} {fault.how if fault.kind == 'cut' else '':7} process {fault.victim}: {seconds:5.1f} s, exit "
        f"codes {codes}; checkpoint {begun} → {before} → {after}; {why}",
        flush=True,
    )
    return seconds if good else None


def is_an_end(kind: str, code: int) -> bool:
    """Return whether a process that a fault ends should have this exit code: from us, or from JAX's C++."""
    return code in (STUCK if kind == "stuck" else LOST, -signal.SIGABRT)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[list[subprocess.Popen[bytes]], Proxy]]:
    """Start them, process 1 by way of a proxy, and kill what is left of them in the end."""
    port = free_port()
    given = [
        "--config=configs/quickstart.py",
        f"--workdir={folder / 'run'}",
        *as_flags(OPTIONS),
        f"--processes={PROCESSES.value}",
    ]
    program = [sys.executable, "-m", "experiments.faults.process_faults_worker"]
    options: dict[str, Any] = {
        "cwd": ROOT,
        "env": {**os.environ, "JAX_PLATFORMS": "cpu"},
        "preexec_fn": die_with_parent(),
    }
    processes: list[subprocess.Popen[bytes]] = []
    with Proxy(port) as proxy:
        try:
            for i in range(PROCESSES.value):
                place = [f"--coordinator=127.0.0.1:{proxy.port if i == 1 else port}", f"--process={i}"]
                with (folder / f"{i}.log").open("w") as log:
                    processes.append(subprocess.Popen([*program, *given, *place], stdout=log, stderr=log, **options))
            yield processes, proxy
        finally:
            for process in processes:
                process.kill()
                process.wait()


def is_on_its_way(processes: Sequence[subprocess.Popen[bytes]], workdir: Path, begun: int) -> bool:
    """Wait for `--apart` updates after the checkpoint it began with, and a newer one; return whether both came."""
    deadline, update = time.monotonic() + PATIENCE, max(begun, 0) + APART.value
    while not ((rows := records.rows(workdir)) and rows[-1]["step"] >= update and newest(workdir) > begun):
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            return False
        time.sleep(0.05)
    return True


def newest(workdir: Path) -> int:
    """Return the newest checkpoint that is complete; -1 if there is none."""
    steps = [path.parent.name for path in workdir.glob("checkpoints/*/_CHECKPOINT_METADATA")]
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


if __name__ == "__main__":
    app.run(main)
