"""The cache of generated corpora on a machine: a file for each split, with its fingerprint and pairs.

The key of a file is the request and the generating code: all files of its folder, and the versions of the libraries it
uses. Changed code generates the pairs again; the fingerprint of a split depends only on its pairs.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from jformer.data.file_digests import own_folder
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.integrity import digest_of, parse_object, with_digest, without_digest
from jformer.storage import replace_content

LIBRARIES = ("numpy", "babel")


class CachedSplit(NamedTuple):
    """A split: its fingerprint, and its pairs, which are read on demand."""

    fingerprint: str
    size: int  # pairs
    pairs: Callable[[], Iterator[Pair]]


def path_of(asked: Sequence[str | int], build: Callable[..., object]) -> Path | None:
    """Return the path of a split made by `build`.

    None if this machine has no private folder for the cache, or if `build` has no file to hash: it was defined in a
    notebook, or is not a function.
    """
    folder, code = own_folder("generated"), code_of(build)
    return folder / f"{digest_of([*asked, code])}.jsonl" if folder and code else None


def find(path: Path | None) -> CachedSplit | None:
    """Return the split at a path, or None if there is none or it is damaged."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            head = without_digest(parse_object(file.readline()), str(path))
            if hashlib.file_digest(file, "sha256").hexdigest() != head["sha256"]:
                return None
        return CachedSplit(str(head["fingerprint"]), int(head["size"]), functools.partial(_read, path))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


def save(path: Path | None, fingerprint: str, pairs: Sequence[Pair]) -> None:
    """Write a split to the cache if there is room."""
    if path is None:
        return
    body = b"".join(json.dumps(pair[:5]).encode() + b"\n" for pair in pairs)  # without languages
    sha256 = hashlib.sha256(body).hexdigest()
    head = with_digest({"fingerprint": fingerprint, "size": len(pairs), "sha256": sha256})
    with contextlib.suppress(OSError):
        replace_content(path, json.dumps(head).encode() + b"\n" + body)


@functools.cache  # by function: for one that was redefined, the file is read again
def code_of(build: Callable[..., object]) -> str:
    """Return the digest of all code in a function's folder and of the versions of Python and the libraries it uses.

    "" if the function has no file.
    """
    try:
        file = Path(inspect.getfile(build))
    except (TypeError, OSError):
        return ""
    if not file.is_file():
        return ""
    folder = file.parent
    files = [path for path in sorted(folder.rglob("*.py")) if path.is_file()]  # no dangling link, like an editor's lock
    contents = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return digest_of([contents, platform.python_version(), *map(version, LIBRARIES)])


def _read(path: Path) -> Iterator[Pair]:
    with path.open("rb") as file:
        next(file)
        for line in file:
            source, target, group, others, start = json.loads(line)
            yield Pair(source, target, group, others=tuple(others), start=start)
