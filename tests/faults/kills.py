"""kill -9 at a random moment, again and again: each start goes on from what the last one had saved."""

import shutil
import signal
from pathlib import Path
from random import Random

from tests.faults.children import Child
from tests.faults.runs import EVERY, LONG, Runs, command, reached, rows_until, saved_steps, wait_for_moment
from tests.faults.verdicts import Verdict

RESUMED = "resuming at update "


def kill(runs: Runs, draw: Random, number: int) -> tuple[str, Verdict]:
    """Kill the run of all these cases once more; one that ends before is judged, and begins anew."""
    workdir = runs.folder / "killed"
    while True:
        before = saved_steps(workdir)
        child = Child(command(runs.training(workdir, LONG)), runs.folder / "logs" / "kills.txt")
        moment = wait_for_moment(draw, workdir, child, runs.seconds)
        child.signal(signal.SIGKILL)
        end = child.wait()
        fault = f"kill -9 {moment}, then {reached(workdir)}"
        _, resumed, rest = end.said.partition(RESUMED)
        if resumed and int(rest.split()[0]) < before[-1]:
            return fault, Verdict("a save was lost", f"{before[-1]} was saved, resumed at {rest.split()[0]}")
        if end.code == -signal.SIGKILL:
            lost = max(saved_steps(workdir), default=0) < acknowledged(workdir)
            return fault, Verdict("a save was lost" if lost else "recovered" if resumed else "unharmed", "")
        verdict = runs.judge(end, workdir, LONG)
        shutil.rmtree(workdir)
        if verdict.outcome != "unharmed":
            return fault, verdict


def acknowledged(workdir: Path) -> int:
    """Return the newest step whose save must be on disk, as rows tell: the save of a step is waited for at the next.

    The row of that next step is written before, that of the update after it later.
    """
    return max(0, (rows_until(workdir) - 1 - EVERY) // EVERY * EVERY)
