"""Whether a worker that owns a trial is still there. Clocks of machines are never compared."""

import os
import socket
from pathlib import Path
from typing import TypedDict

PROC = Path("/proc")  # Linux's


class Owner(TypedDict):
    """A process, told from every other."""

    host: str
    machine: str  # this start of it, and who numbers its processes; "" where that cannot be known
    pid: int
    started: str  # as the kernel counts


def owner() -> Owner:
    """Return this process, as others of this machine and elsewhere know it."""
    boot = PROC / "sys/kernel/random/boot_id"
    return {
        "host": socket.gethostname(),
        "machine": f"{boot.read_text().strip()} {(PROC / 'self/ns/pid').readlink()}" if boot.exists() else "",
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_gone(other: Owner) -> bool:
    """Return whether an owner is known to have ended: one of this machine whose process is not there any more."""
    here = owner()
    return bool(here["machine"]) and other["machine"] == here["machine"] and _started(other["pid"]) != other["started"]


def _started(pid: int) -> str:
    """Return when a process began, as the kernel counts; nothing where there is none: numbers of processes return."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Silence:
    """For how long owners have said nothing, by our own clock."""

    def __init__(self) -> None:
        """Nobody has been listened to."""
        self._heard: dict[int, tuple[object, float]] = {}

    def seconds(self, row: int, beat: object, now: float) -> float:
        """Return for how long the beat of a row, read after `now`, has been the same since it was asked for first."""
        if row not in self._heard or self._heard[row][0] != beat:
            self._heard[row] = (beat, now)
        return now - self._heard[row][1]
