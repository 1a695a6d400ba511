"""The folders of a run's checkpoints, by their names: which are steps, and what is removed or set aside, and how.

What lies in a step is not read here.
"""

import contextlib
import time

import orbax.checkpoint as ocp
from etils.epath import Path

from jformer.storage import in_bucket, is_step

REMOVALS, BETWEEN_REMOVALS = 20, 0.05  # how often what a failed save has begun is removed, and the seconds between
SETTLED = 8  # so many times in a row nothing of it has come back: its threads have ended
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step's folder until all of it is written
DELETED, BROKEN = "deleted-", "broken-"  # prefixes of the names of folders that are no steps any more


def saved_steps(directory: Path) -> list[int]:
    """Return the steps that were saved to their end, oldest first, as this process sees them."""
    return sorted(int(path.name) for path in _paths(directory) if is_step(path.name) and _is_saved(path))


def delete(directory: Path, step: int) -> None:
    """Delete a step, under another name first: a killed process must not leave half of it as a step."""
    (directory / str(step) if in_bucket(directory) else _set_aside(directory, step, DELETED)).rmtree()


def quarantine(directory: Path, step: int) -> None:
    """Keep a damaged step under another name; in a bucket, where nothing is renamed, delete it."""
    if in_bucket(directory):
        delete(directory, step)
    else:
        _set_aside(directory, step, BROKEN)


def remove_unfinished(directory: Path) -> None:
    """Remove what a process that was killed has left half-written or half-deleted."""
    for path in _paths(directory):
        half = UNFINISHED in path.name or path.name.startswith(DELETED)
        if half or (in_bucket(path) and is_step(path.name) and not ocp.utils.is_checkpoint_finalized(path)):
            path.rmtree(missing_ok=True)


def remove_failed(directory: Path) -> None:
    """Remove what a failed save has begun, into which its other threads may still write for a moment.

    What cannot be removed now is removed when training goes on.
    """
    gone = 0
    for _ in range(REMOVALS):
        with contextlib.suppress(Exception):
            remove_unfinished(directory)
        time.sleep(BETWEEN_REMOVALS)
        with contextlib.suppress(OSError):
            gone = 0 if any(UNFINISHED in path.name for path in _paths(directory)) else gone + 1
        if gone == SETTLED:
            return


def _set_aside(directory: Path, step: int, prefix: str) -> Path:
    """Rename a step, in one move, so that nobody takes it for one any more; return where it lies now."""
    new = directory / f"{prefix}{step}"
    if new.exists():
        new.rmtree()
    return (directory / str(step)).rename(new)


def _paths(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:  # and no other: a folder that may not be looked into is not an empty one
        return []


def _is_saved(path: Path) -> bool:
    """Tell a saved step from an empty folder, and from one in a bucket that is still being written."""
    return path.is_dir() and any(path.iterdir()) and ocp.utils.is_checkpoint_finalized(path)
