"""SIGTERM and Ctrl-C at a random moment of the real command, from its imports to its scores."""

import shutil
import signal
import time
from random import Random

from tests.faults.children import Child, End
from tests.faults.runs import LONG, Runs, rows_until, saved_steps, wait_for_moment
from tests.faults.verdicts import Verdict, ending

STOPPED = 143
LIMIT = 10.0  # seconds
NEAR = 0.05  # seconds between two signals


def stop(runs: Runs, draw: Random, number: int) -> tuple[str, Verdict]:
    """Stop the run of all these cases once more; one that ends before is judged, and begins anew."""
    workdir = runs.folder / "stopped"
    while True:
        kind, twice = draw.choice([signal.SIGTERM, signal.SIGINT]), draw.random() < 0.3
        child = Child(runs.arguments(workdir, LONG), runs.folder / "logs" / "stops.txt")
        moment = wait_for_moment(draw, workdir, child, runs.seconds_of_command)
        asked = time.monotonic()
        child.signal(kind)
        if twice:
            time.sleep(NEAR)
            child.signal(signal.SIGTERM)  # a second SIGINT ends at once: docs/guide.md
        end = child.wait()
        seconds = time.monotonic() - asked
        fault = f"{kind.name}{' twice' if twice else ''} {moment}: {seconds:.1f} s until the end"
        if end.code:
            return fault, judge_stop(runs, end, kind, seconds)
        verdict = runs.judge(end, workdir, LONG)
        shutil.rmtree(workdir)
        if verdict.outcome != "unharmed":
            return fault, verdict


def judge_stop(runs: Runs, end: End, kind: signal.Signals, seconds: float) -> Verdict:
    """Tell whether a command that was asked to stop did so in time, with its exit code, and lost nothing."""
    workdir = runs.folder / "stopped"
    if end.code == -kind and not end.said:
        return Verdict("stopped", "before the command began")
    if end.code != STOPPED or "Traceback" in end.said:
        return ending(end, ())
    lost = rows_until(workdir) - max(saved_steps(workdir), default=0)
    if lost > 1 and "saved" in end.said.splitlines()[-1]:
        return Verdict(f"{lost} updates lost", end.said.splitlines()[-1])
    if seconds > LIMIT:
        return Verdict("stopped late", f"{seconds:.1f} s")
    return Verdict("stopped", end.said.splitlines()[-1])
