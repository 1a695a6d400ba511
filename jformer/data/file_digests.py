"""Digests of data files; those of large files are cached in the home directory, which the hosts of a cluster share.

The cache key is the file's path, inode, size and times. Programs cannot set the change time (ctime); it changes with
the content even where a copy preserves the modification time.
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jformer.data.text import PACKED, STRIDE, open_bytes
from jformer.errors import UserError
from jformer.integrity import digest_of, parse_object, with_digest, without_digest
from jformer.storage import here, replace_content

LARGE = 64 << 20  # bytes; smaller files are hashed in a tenth of a second
SETTLED = 2.0  # seconds since the last change: file system timestamps do not distinguish closer changes


class Digest(NamedTuple):
    """Digest and line index of a file's (decompressed) bytes."""

    sha256: str
    lines: int  # the last line may lack a line feed
    starts: tuple[int, ...]  # byte offset of every STRIDE-th line; empty for a compressed file


def digest(path: Path) -> Digest:
    """Return the SHA-256 of a file's bytes and the number and offsets of its lines.

    Raises UserError if it cannot be read to its end.
    """
    found = identity(path)
    if not found or path.stat().st_size < LARGE or not (folder := _own_cache() or own_folder("hashed")):
        return _hashed(path)
    remembered = folder / f"{digest_of([str(path.resolve()), *found])}.json"
    try:
        kept = without_digest(parse_object(remembered.read_bytes()), str(remembered))
        return Digest(str(kept["sha256"]), int(kept["lines"]), tuple(map(int, kept["starts"])))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        pass  # not in the cache, or the entry is damaged
    made = _hashed(path)
    if identity(path) == found and time.time() - path.stat().st_ctime > SETTLED:
        with contextlib.suppress(OSError):  # such as a full or read-only home directory
            replace_content(remembered, json.dumps(with_digest(made._asdict())).encode())
    return made


def _hashed(path: Path) -> Digest:
    sha, lines, before, last = hashlib.sha256(), 0, 0, b"\n"
    starts = [0]
    with open_bytes(path) as stream:
        while chunk := stream.read(1 << 20):
            sha.update(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
            starts += (before + 1 + ends[-(lines + 1) % STRIDE :: STRIDE]).tolist()
            lines, before, last = lines + len(ends), before + len(chunk), chunk[-1:]
    return Digest(sha.hexdigest(), lines + (last != b"\n"), () if path.suffix in PACKED else tuple(starts))


def identity(path: Path) -> list[int]:
    """Return properties that change with the content of a file, or nothing if there is no file on disk."""
    if not isinstance(path, Path):  # in a bucket
        return []
    try:
        there = path.stat()
    except OSError:
        return []
    return [there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns]


def _own_cache() -> Path | None:
    home = os.environ.get("HOME")
    return own_folder("hashed", Path(home, ".cache/jformer")) if home else None


def own_folder(name: str, within: Path | None = None) -> Path | None:
    """Return a folder that only this user can write to, so that its content can be trusted, or None.

    It is created in `within`, by default in this user's temporary folder. With the umask of many systems, a group may
    write to that folder: its members can move ours away, but would own whatever they put in its place.
    """
    folder = Path(within or here(), name)
    try:
        folder.parent.mkdir(mode=0o777 if within else 0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for each, written_by in ((folder, stat.S_IWGRP | stat.S_IWOTH), (folder.parent, stat.S_IWOTH)):
            about = each.lstat()
            if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & written_by:
                return None
    except OSError:
        return None
    return folder
