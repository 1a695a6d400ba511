"""Distinguish a damaged checkpoint from one that cannot be read now, and agree on it among all processes.

Damaged checkpoints are renamed, or in a bucket deleted, which a temporary failure of a network or disk must not cause.
So an error counts as damage only if damage can cause errors of its kind and every file of the checkpoint can be opened:
libraries report a file without read permission as missing.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils.epath import Path
from jaxtyping import PyTree

from jformer.checkpoints.manifest import DamagedError, Manifest, refuse_damage
from jformer.errors import UnavailableError, UserError
from jformer.parallel import processes

T = TypeVar("T")
STATUS = re.compile(r"[A-Z_]{4,}(?=: )")  # the beginning of every ValueError of TensorStore
DAMAGE_STATUS = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
KINDS = (UserError, UnavailableError, DamagedError)  # of several failures the first counts: keep a step when in doubt
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def read_together(read: Callable[[], T], where: Path) -> T:
    """Return the result of `read`. All processes call it; if it fails in one, all raise its error.

    Raises DamagedError for a step that is proven to be damaged, UnavailableError for one that cannot be read now.
    `read` must not wait for the other processes, because it may fail in one alone.
    """
    values: list[T] = []
    cause: Exception | None = None
    try:
        values.append(read())
    except Exception as error:  # Orbax, TensorStore and libraries for buckets raise errors of many types
        cause = error
    own = explain(cause, where) if cause else None
    failed = (max(i for i, kind in enumerate(KINDS) if isinstance(own, kind)), str(own)) if own else None
    failure = processes.agree(failed, _first)
    if failure:
        kind, text = failure
        raise KINDS[kind](text) from cause
    return values[0]


def on_host(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return a state's shapes and dtypes as NumPy arrays without memory, to restore it as NumPy arrays.

    Random keys become their raw words, which have the same digest. This needs no CPU device: JAX has none if
    JAX_PLATFORMS=cuda or =tpu names the only platform.
    """

    def empty(x: jax.Array) -> np.ndarray:
        plain = jax.eval_shape(jax.random.key_data, x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.broadcast_to(np.zeros((), plain.dtype), plain.shape)

    return jax.tree.map(empty, dict(state))


def prove(where: Path, manifest: Manifest, abstract: Mapping[str, PyTree]) -> None:
    """Read back the step at `where`, an item at a time, and compare its digests.

    A new checkpointer reads, because the one that wrote may read its own cache instead of the disk. Only for a single
    process and a disk: with several, no process can read all arrays, and those of a bucket come over the network.

    Raises DamagedError if it is not what was saved, UnavailableError if it cannot be read now.
    """
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        for name, tree in abstract.items():
            try:
                items = reader.restore(where, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(tree)}))
            except Exception as error:  # buckets also raise errors other than OSError
                raise explain(error, where) from error
            refuse_damage(manifest.arrays[name], items[name], str(where / name))


def explain(error: Exception, where: Path) -> UserError:
    """Return the error to raise for one in reading the step at `where`: DamagedError only if damage is proven."""
    if isinstance(error, UserError):
        return error
    while type(error) is Exception and isinstance(error.__cause__, Exception):  # unwrap Orbax's wrapper
        error = error.__cause__
    if _may_be_damage(error):
        try:
            _open_all(where)
        except Exception as refusal:  # as above
            error = refusal
        else:
            return DamagedError(f"{where}: {first_line(error)}")
    return UnavailableError(
        f"{where}: cannot be read now ({first_line(error)}); try again, or move it away if this persists"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    text = str(error).strip() or type(error).__name__
    return " ".join(text.splitlines()[0].split())[:300]


def _may_be_damage(error: BaseException | None) -> bool:
    """Return whether missing or corrupt files can cause this error, and no storage error is among its causes."""
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
    """Read a byte of every file in a folder, to raise the storage's errors."""
    for path in folder.iterdir():
        if path.is_dir():
            _open_all(path)
        else:
            with path.open("rb") as file:
                file.read(1)


def _first(failures: list[tuple[int, str] | None]) -> tuple[int, str] | None:
    """Return the failure (index in KINDS, text) with the lowest index, or None if there is none."""
    return min(filter(None, failures), key=lambda failure: failure[0], default=None)
