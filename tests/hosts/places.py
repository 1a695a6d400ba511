"""Processes of a run without JAX that pass one place after another: python -m tests.hosts.places PORT COUNT I WHAT.

WHAT is what happens to this one at place 20: nothing; sleep:S; lock:S, which holds the interpreter; mistake; bug;
unread, nobody reads its output; or stop, a request to stop.
"""

import ctypes
import sys
import time

from jformer.errors import UserError
from jformer.hosts.coordinates import from_flags
from jformer.hosts.meeting import AbsentError, meet

PORT, COUNT, INDEX, WHAT, LIMIT = sys.argv[1:]
NAME, _, SECONDS = WHAT.partition(":")


def main():
    if NAME == "late":
        time.sleep(float(SECONDS))
    peers, _ = meet(from_flags(False, f"localhost:{PORT}", int(COUNT), int(INDEX)), 3.0, 1)
    peers.seconds = float(LIMIT)
    for place in range(1, 101):
        if place == 20 and NAME == "sleep":
            time.sleep(float(SECONDS))
        if place == 20 and NAME == "lock":
            ctypes.PyDLL(None).sleep(int(SECONDS))
        if place == 20 and NAME == "mistake":
            peers.end(2, "a file is missing")
        if place == 20 and NAME == "unread":
            peers.end(0)
        if place == 20 and NAME == "bug":
            peers.fail(ValueError("a bug"))
            return 1
        peers.reach(f"place {place}", like="place")
        assert peers.agree([int(INDEX), place], lambda all_of: all_of) == [[i, place] for i in range(int(COUNT))]
        print(place, flush=True)
        if peers.stopping(place, NAME == "stop" and place == 20):
            print(f"stopped after {place}", flush=True)
            break
        time.sleep(0.02)
    peers.agree(None, len)
    peers.leave()
    return 0


try:
    sys.exit(main())
except (UserError, AbsentError) as error:
    print(f"jformer: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, UserError) else 75)
