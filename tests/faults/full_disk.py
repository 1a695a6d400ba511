"""A disk that fills up, and files that may not grow: one line, whole steps, nothing left behind, and on it goes."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

from tests.faults.children import End, run
from tests.faults.runs import FURTHER, LONG, Runs, command
from tests.faults.verdicts import Verdict, ending

LEAST_FILE = 1 << 14  # bytes: what the child says must have room
ROOMY = 1 << 28  # bytes
PAGE = 4096  # bytes


def fill(runs: Runs, draw: Random, number: int) -> tuple[str, Verdict]:
    """Let a run go on where there is too little room, then where there is enough.

    Every second one goes on for long: updates go on where rows and events have no room, before anything is saved.
    """
    log = runs.folder / "logs" / f"full_disk_{number}.txt"
    steps = LONG if number % 4 in (1, 2) else FURTHER
    if number % 2 or not can_mount(runs.folder / "mounted"):
        limit = round(LEAST_FILE * draw.uniform(0.7, 2))
        workdir = runs.copy(runs.folder / "full", runs.base)
        full = run(command(runs.training(workdir, steps)), log, lambda: limit_files(limit))
        return f"no file above {limit} bytes until update {steps}", judge(runs, full, workdir, steps, log)
    size = sum(-(-file.stat().st_size // PAGE) * PAGE for file in runs.base.rglob("*"))
    room = round(draw.uniform(0.0, 0.6) * size)
    with mounted(runs.folder / "mounted", size + room) as folder:
        workdir = runs.copy(folder / "run", runs.base)
        full = run(command(runs.training(workdir, steps)), log)
        return f"{room} bytes free until update {steps}", judge(runs, full, workdir, steps, log)


def judge(runs: Runs, full: End, workdir: Path, steps: int, log: Path) -> Verdict:
    """Tell whether the end was one line, nothing is left behind, and the run goes on to the same bits."""
    if full.code or "Traceback" in full.said:
        verdict = ending(full, (workdir.name,))
        if verdict.outcome != "refused":
            return verdict
    left = [path.name for path in workdir.glob("checkpoints/*") if not path.name.isdecimal()]
    left += [path.name for path in workdir.rglob("*.new")]
    if left:
        return Verdict("left behind", " ".join(left))
    if str(workdir).startswith(str(runs.folder / "mounted")):
        mount("-o", f"remount,size={ROOMY}", str(runs.folder / "mounted"))
    again = runs.judge(run(command(runs.training(workdir, steps)), log), workdir, steps)
    if again.outcome != "unharmed" or not full.code:
        return again
    return Verdict("refused", full.said.splitlines()[-1])


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond a size; Python makes an OSError of the signal."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as long as this lasts.

    No bytecode is written meanwhile: Python would cut it off at that size and keep it for later processes.
    """
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    unwritten = mock.patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    with unwritten, mock.patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system in memory of so many bytes."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Tell whether this user may mount."""
    try:
        with mounted(folder, ROOMY):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def mount(*arguments: str) -> None:
    """Mount something."""
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
