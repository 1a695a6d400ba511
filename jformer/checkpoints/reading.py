"""Tell a damaged checkpoint from one that cannot be read just now; of several processes, all raise what one does.

Damage is renamed, in a bucket even deleted; a network or a disk that fails for a moment must not lead to that. So an
error counts as damage only if it is of a kind that damage leads to, and every file of the checkpoint can be opened:
libraries take a file that they were not allowed to look at for one that is missing.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils.epath import Path
from jaxtyping import PyTree

from jformer.checkpoints.manifest import DamagedError, Manifest, refuse_damage
from jformer.errors import UnavailableError, UserError
from jformer.parallel import processes

T = TypeVar("T")
STATUS = re.compile(r"[A-Z_]{4,}(?=: )")  # how TensorStore begins the text of every ValueError of its own
DAMAGE_STATUS = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
KINDS = (UserError, UnavailableError, DamagedError)  # of several failures the first counts: what is in doubt must stay
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def read_together(read: Callable[[], T], where: Path) -> T:
    """Return what `read` returns. All processes call it; if it fails in one, all raise the same.

    Raises DamagedError for a step that is proven damaged, UnavailableError for one that cannot be read just now. What
    `read` does must not wait for the other processes where it can fail in one alone.
    """
    values: list[T] = []
    cause: Exception | None = None
    try:
        values.append(read())
    except Exception as error:  # Orbax, TensorStore and those of buckets raise whatever they meet
        cause = error
    own = explain(cause, where) if cause else None
    failed = (max(i for i, kind in enumerate(KINDS) if isinstance(own, kind)), str(own)) if own else None
    failure = processes.agree(failed, _first)
    if failure:
        kind, text = failure
        raise KINDS[kind](text) from cause
    return values[0]


def on_host(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return a state's shapes and dtypes as NumPy arrays without memory, to be read as such.

    No device of the CPU is asked for: JAX has none where JAX_PLATFORMS=cuda or =tpu names the only platform.
    """
    return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), dict(state))


def prove(where: Path, manifest: Manifest, abstract: Mapping[str, PyTree]) -> None:
    """Read back the step at `where`, an item at a time, as large as a copy while it is saved.

    A reader of its own does it: the one that wrote has in its cache what should be on disk. It is for one process and
    a disk: of several processes none can read all arrays alone, and those of a bucket come over the network.

    Raises DamagedError if it is not what was saved, UnavailableError if it cannot be read just now.
    """
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        for name, tree in abstract.items():
            try:
                items = reader.restore(where, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(tree)}))
            except Exception as error:  # those of buckets are not all OSErrors
                raise explain(error, where) from error
            refuse_damage(manifest.arrays[name], items[name], str(where / name))


def explain(error: Exception, where: Path) -> UserError:
    """Return what to raise for an error in reading the step at `where`: DamagedError only if damage is proven."""
    if isinstance(error, UserError):
        return error
    while type(error) is Exception and isinstance(error.__cause__, Exception):  # Orbax's wrapping of what it met
        error = error.__cause__
    if _may_be_damage(error):
        try:
            _open_all(where)
        except Exception as refusal:  # as above: those of buckets are not all OSErrors
            error = refusal
        else:
            return DamagedError(f"{where}: {first_line(error)}")
    return UnavailableError(
        f"{where}: cannot be read just now ({first_line(error)}); try again, or move it away if it stays so"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind if it has none."""
    text = str(error).strip() or type(error).__name__
    return " ".join(text.splitlines()[0].split())[:300]


def _may_be_damage(error: BaseException | None) -> bool:
    """Tell whether missing or undecodable files lead to such an error, and no error behind it is one of the storage."""
    status = STATUS.match(str(error))
    if not isinstance(error, (*MISSING, AttributeError, LookupError, TypeError, ValueError)):
        return False
    if status and status.group() not in DAMAGE_STATUS:
        return False
    while error := error.__cause__ or error.__context__:
        if isinstance(error, OSError) and not isinstance(error, MISSING):
            return False
    return True


def _open_all(folder: Path) -> None:
    """Read a byte of every file in a folder; raise what the storage raises."""
    for path in folder.iterdir():
        if path.is_dir():
            _open_all(path)
        else:
            with path.open("rb") as file:
                file.read(1)


def _first(failures: list[tuple[int, str] | None]) -> tuple[int, str] | None:
    """Return the failure, its place in KINDS and its text, whose kind stands first there, or None if there is none."""
    return min(filter(None, failures), key=lambda failure: failure[0], default=None)
