"""Processes of a run without devices that enter one phase after another.

Command:  python -m tests.parallel.processes.phases PORT COUNT I WHAT LIMIT

WHAT is what happens to this one before phase 20: nothing; sleep:S, once its beats have told of phase 19; lock:S, which
holds the interpreter; mistake; bug; unread, nobody reads its output; or stop, a request to stop. late:S comes late;
far:PORT reaches process 0 by another port, and waits for its beats as sleep does.
"""

import ctypes
import os
import sys
import time

from jformer.errors import UserError
from jformer.parallel import processes
from jformer.parallel.processes import group

PORT, COUNT, INDEX, WHAT, LIMIT = sys.argv[1:]
NAME, _, SECONDS = WHAT.partition(":")
PHASES, HERE = 60, 20


def wait_for_beats():
    """Wait until process 0 has heard of a steady phase: before that, only JAX's heartbeat tells who is dead."""
    for _ in range(2):  # the first may have begun in an earlier phase
        last = group._service._beaten
        while group._service._beaten == last:
            time.sleep(0.01)
    print("beaten", flush=True)


def happen(asked):
    """Do what is to happen in a phase."""
    if NAME in ("sleep", "far"):
        wait_for_beats()
    if NAME == "sleep":
        time.sleep(float(SECONDS))
    elif NAME == "lock":
        ctypes.PyDLL(None).sleep(int(SECONDS))
    elif NAME == "mistake":
        raise UserError("a file is missing")
    elif NAME == "unread":
        raise BrokenPipeError
    elif NAME == "bug":
        raise ValueError("a bug")
    elif NAME == "stop":
        asked.append(True)


def main():
    processes.set_stall_limit(float(LIMIT))
    asked = []
    for number in range(1, PHASES + 1):
        if number == HERE:
            happen(asked)
        processes.enter_phase(f"phase {number}", kind="phase")
        expected = [[i, number] for i in range(int(COUNT))]
        assert processes.agree([int(INDEX), number], lambda values: values) == expected
        print(number, flush=True)
        if processes.should_stop(number, bool(asked)):
            print(f"stopped after {number}", flush=True)
            break
        time.sleep(0.05)


port = SECONDS if NAME == "far" else PORT
seconds = float(os.environ.get("MEETING_SECONDS", "60"))
try:
    if NAME == "late":
        time.sleep(float(SECONDS))
    own = processes.from_flags(False, f"127.0.0.1:{port}", int(COUNT), int(INDEX))
    with processes.join_run(own, seconds):
        main()
except (UserError, processes.AbsentError) as error:
    print(f"jformer: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, UserError) else 75)
