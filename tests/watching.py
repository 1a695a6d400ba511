"""Wait for what other processes do, and find those that are there."""

import contextlib
import time
from pathlib import Path


def wait_until(condition, seconds=40):
    """Wait until a condition holds; fail after a while."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(text):
    """Return the processes with a text in their command; zombies have none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
