"""The folders of a run's checkpoints: list the steps, remove them or set them aside, without reading them."""

import contextlib
import threading
import time

import orbax.checkpoint as ocp
from etils.epath import Path

from jformer.storage import in_bucket, is_step

BETWEEN_REMOVALS = 0.05  # seconds between attempts to remove what a failed save left behind
REMOVALS, SETTLED = 200, 20  # attempts in all, and how many in a row must find nothing left
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step's folder until it is complete
DELETED, BROKEN = "deleted-", "broken-"  # prefixes of folders that are no longer steps


def saved_steps(directory: Path) -> list[int]:
    """Return the completely saved steps, oldest first, as this process sees them."""
    return sorted(int(path.name) for path in _paths(directory) if is_step(path.name) and _is_saved(path))


def delete(directory: Path, step: int) -> None:
    """Delete a step, renaming it first so that a killed process does not leave half of it as a step."""
    (directory / str(step) if in_bucket(directory) else _set_aside(directory, step, DELETED)).rmtree()


def quarantine(directory: Path, step: int) -> None:
    """Rename a damaged step to keep it; in a bucket, which has no renaming, delete it."""
    if in_bucket(directory):
        delete(directory, step)
    else:
        _set_aside(directory, step, BROKEN)


def remove_unfinished(directory: Path) -> None:
    """Remove folders that a killed process has left half-written or half-deleted."""
    for path in _paths(directory):
        half = UNFINISHED in path.name or path.name.startswith(DELETED)
        if half or (in_bucket(path) and is_step(path.name) and not ocp.utils.is_checkpoint_finalized(path)):
            path.rmtree(missing_ok=True)


def remove_failed(directory: Path) -> None:
    """Remove the files of a failed save.

    Orbax reports the failure of one item while its threads, and TensorStore's below them, still write the others, for
    seconds on a busy machine. Files that cannot be removed now are removed when training resumes.
    """
    gone = 0
    for _ in range(REMOVALS):
        with contextlib.suppress(Exception):  # buckets also raise errors other than OSError
            remove_unfinished(directory)
        time.sleep(BETWEEN_REMOVALS)
        with contextlib.suppress(Exception):
            left = any(UNFINISHED in path.name for path in _paths(directory))
            gone = 0 if left or _is_writing() else gone + 1
        if gone == SETTLED:
            return


def _is_writing() -> bool:
    """Return whether a thread of Orbax still commits an item."""
    return any(type(thread).__module__.startswith("orbax.") for thread in threading.enumerate())


def _set_aside(directory: Path, step: int, prefix: str) -> Path:
    """Rename a step atomically so that it is no longer one; return its new path."""
    new = directory / f"{prefix}{step}"
    if new.exists():
        new.rmtree()
    return (directory / str(step)).rename(new)


def _paths(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:  # only this error: a folder that cannot be read is not empty
        return []


def _is_saved(path: Path) -> bool:
    """Return whether a step is complete: not an empty folder, nor one in a bucket that is still being written."""
    return path.is_dir() and any(path.iterdir()) and ocp.utils.is_checkpoint_finalized(path)
