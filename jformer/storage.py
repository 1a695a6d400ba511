"""Where a run lies: in a directory of a disk, or in a bucket (gs://). What differs between the two is here.

Paths are those of etils; pathlib's serve as well for what lies on a disk.
"""

import hashlib
import os
import tempfile

import fsspec
from etils.epath import Path

from jformer.errors import UserError

BUCKET = "gs://"
fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False  # other processes write there, too


def run_path(text: str | os.PathLike[str]) -> Path:
    """Return the path of a run; raise UserError for a kind of storage that cannot be reached or written to."""
    if "://" in str(text) and not str(text).startswith(BUCKET):
        raise UserError(f"{text}: a run lies in a directory or in a bucket of Google's ({BUCKET}…)")
    if str(text).startswith(BUCKET):
        try:
            fsspec.get_filesystem_class("gs")
        except ImportError as error:
            raise UserError(f'{text} needs gcsfs: pip install -e ".[gcs]" -c constraints.txt') from error
    return Path(text)


def in_bucket(path: Path) -> bool:
    """Return whether a path is that of an object in a bucket: written whole, never appended to, locked or renamed."""
    return str(path).startswith(BUCKET)


def lock_of(path: Path) -> Path:
    """Return the file that is locked while a process trains a run; for a bucket it speaks for this machine alone."""
    if not in_bucket(path):
        return path / "training.lock"
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"jformer-{os.getuid()}" / f"{name}.lock"


def replace_content(path: Path, content: bytes) -> None:
    """Write a file anew in one atomic move: a process that is killed leaves the old one or the new one."""
    if in_bucket(path):
        path.write_bytes(content)
        return
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
