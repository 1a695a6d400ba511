"""Paths, locks and atomic writes of a run, in a directory on disk or in a Google Cloud bucket (gs://).

Paths are etils paths; pathlib paths work too for files on disk.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

import fsspec
from etils.epath import Path

from jformer.errors import UnavailableError, UserError

BUCKET = "gs://"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # the disk is full or read-only
MISPLACED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP)  # an unusable path
UNLOCKABLE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a file system without locks, such as Lustre may be
AWAY = (errno.ESTALE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENOTCONN)  # storage behind a network
OUTAGE = (
    r"unavailable|too many requests|timed? ?out|deadline exceeded|connection \w+|stale file handle|try again|"
    r"temporary failure"
)
OF_A_RUN = {"checkpoints", "config.json", "metrics.jsonl", "results.json", "samples.jsonl", "tokenizer", "training.log"}
fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False  # other processes write there, too


class UnwrittenError(UserError):
    """A path could not be written; the same command may succeed later."""


class OutageError(UnwrittenError, UnavailableError):
    """A path could not be written because its storage is unavailable for a moment."""


def run_path(text: str | os.PathLike[str]) -> Path:
    """Return the path of a run; ~ is the home directory. Raise UserError for an unsupported kind of storage."""
    if "://" in str(text) and not str(text).startswith(BUCKET):
        raise UserError(f"{text}: a run is a directory or a folder of a Google bucket ({BUCKET}…)")
    if str(text).startswith(BUCKET):
        try:
            fsspec.get_filesystem_class("gs")
        except ImportError as error:
            raise UserError(f'{text} needs gcsfs: pip install -e ".[gcs]" -c constraints.txt') from error
    return Path(text).expanduser()


def new_directory(path: str | os.PathLike[str], option: str = "") -> Path:
    """Return the path of a directory to write. Raise UserError, naming the option, unless it is missing or empty."""
    target = run_path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{option}{path} exists and is not empty: name a new directory")
    return target


def new_disk_directory(path: str | os.PathLike[str], option: str = "") -> pathlib.Path:
    """Return `new_directory` for files of other libraries, which need a disk. Raise UserError for a bucket, too."""
    if "://" in str(path):
        raise UserError(f"{option}{path}: this is written to a disk: name a directory here, and copy it")
    return pathlib.Path(new_directory(path, option))


@contextlib.contextmanager
def filling(target: Path) -> Iterator[None]:
    """Create a directory on disk, if missing; an error raised inside removes everything added to it since."""
    was_there = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    before = {*target.iterdir()}
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in {*target.iterdir()} - before:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if not was_there:
                target.rmdir()
        raise


def in_bucket(path: Path) -> bool:
    """Return whether a path is in a bucket, where objects cannot be appended, locked or renamed."""
    return str(path).startswith(BUCKET)


def is_step(name: str) -> bool:
    """Return whether a checkpoint folder's name is a step number as jformer writes it; 0099 is not."""
    return name.isdecimal() and name == str(int(name))


def lock_of(path: Path) -> Path:
    """Return the file that is locked while a process trains a run; for a bucket, the lock covers this machine only."""
    return _lock_here(path) if in_bucket(path) else path / "training.lock"


def _lock_here(path: os.PathLike[str]) -> Path:
    return here() / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.lock"


def here() -> Path:
    """Return this user's folder on this machine, for files that cannot be in a bucket."""
    return Path(tempfile.gettempdir()) / f"jformer-{os.getuid()}"


def open_lock(path: os.PathLike[str], kind: int) -> IO[bytes]:
    """Open a file, creating it if needed, and lock it as `flock` does: with LOCK_NB it may raise BlockingIOError.

    Another user's file may be read-only; it can still be locked, except over NFS, where exclusive locks need writing.
    If the file system has no locks, one in `here` covers this machine only, which a line on standard error reports.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb")
    except PermissionError:
        if not Path(path).is_file():
            raise
        file = os.fdopen(os.open(path, os.O_RDONLY), "rb")
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        file.close()
        if error.errno not in UNLOCKABLE or Path(path).parent == here():
            raise
        print(f"{path}: this file system has no locks: do not start the same on two machines at once", file=sys.stderr)
        here().mkdir(exist_ok=True)
        return open_lock(_lock_here(path), kind)
    return file


def is_file(path: os.PathLike[str]) -> bool:
    """Return whether a file exists; False, not an error, for a name longer than file systems allow."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib's raises an error for such a name


def check_writable(option: str, path: Path) -> None:
    """Raise UserError, naming the option, if a folder cannot be written or created. Does not create it."""
    if in_bucket(path):
        return
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{option}={path}: {place} is a file; name a folder that can be written")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{option}={path}: {place} cannot be written; name a folder that can")


def is_special(path: os.PathLike[str]) -> bool:
    """Return whether a path is a device, a pipe or a socket, or leads to an open file, as /dev/stdout may."""
    if not os.path.exists(path) or os.path.isdir(path):  # noqa: PTH110, PTH112 - as in `is_file`
        return False
    return not is_file(path) or str(Path(path).parent) in ("/dev", "/dev/fd")


def refuse_special(output: os.PathLike[str]) -> None:
    """Raise UserError for an --output such as /dev/null, which a whole file would replace."""
    if is_special(output):
        raise UserError(f"--output={output} is not a plain file and would be replaced by one: name another")


def refuse_file_of_run(workdir: Path, output: os.PathLike[str] | str) -> None:
    """Raise UserError for an --output that would overwrite a run's own files, directly or through a link."""
    if in_bucket(workdir):
        return
    run, written = (Path(os.path.realpath(path)) for path in (workdir, output))
    if any(written.is_relative_to(run / name) for name in OF_A_RUN):
        raise UserError(f"--output={output} is a file of the run and would be overwritten: name another file")


def replace_content(path: Path, content: bytes, shared: bool = False) -> None:
    """Replace a file atomically: after a kill or on a full disk, the file is either the old or the new one.

    Use this for every file that a run writes more than once, except those that grow line by line. With `shared`,
    several processes may write it at once.
    """
    if in_bucket(path):
        path.write_bytes(content)
        return
    with replacing(path, shared) as new, new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """Yield a path to write to; the file then replaces another one, which is unchanged after an error.

    With `shared`, each process has a path of its own; what a killed process leaves there is not replaced later.
    """
    own = f".{platform.node()}-{os.getpid()}" if shared else ""
    new = path.with_name(f"{path.name}{own}.new")
    try:
        yield new
        new.replace(path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk's error does not name it
        raise


@contextlib.contextmanager
def writing(path: os.PathLike[str] | str) -> Iterator[None]:
    """Turn an OSError raised inside, such as that of a full disk, into a UserError that names a path."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, error) from error


def unwritten(path: os.PathLike[str] | str, error: Exception) -> UnwrittenError:
    """Return the error for a path that could not be written; NumPy's of a full disk and buckets' have no errno."""
    if (number := getattr(error, "errno", None)) in MISPLACED:
        return UnwrittenError(f"{path}: {os.strerror(number)}; move it away, or make it readable and writable")
    if is_outage(error):
        return OutageError(f"{path}: could not be written now ({_reason(error)}); rerun the same command")
    return UnwrittenError(
        f"{path}: could not be written ({_reason(error)}); free some space, then rerun the same command"
    )


def content_of(path: Path) -> bytes | None:
    """Return what a file holds, None if there is none; raise UnavailableError while its storage is unavailable."""
    try:
        return path.read_bytes()  # `exists` would be False while storage is unavailable
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # buckets also raise errors other than OSError
        if is_outage(error):
            raise UnavailableError(
                f"{path}: could not be read now ({_reason(error)}); rerun the same command"
            ) from error
        raise


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def is_outage(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, means that storage is unavailable for a moment.

    Errors of buckets and TensorStore have only a text, no number.
    """
    while error:
        if number := getattr(error, "errno", None):
            return isinstance(error, TimeoutError | ConnectionError) or number in AWAY
        if re.search(OUTAGE, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def refusal(error: OSError) -> str:
    """Return the error message for an OSError not explained elsewhere; "" if it is a bug in jformer."""
    if error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:40]}… is longer than a file name can be: shorten it"
    if error.errno in FULL or (error.errno in MISPLACED and error.filename):
        return str(unwritten(error.filename or "a file, or standard output", error))
    return ""


@contextlib.contextmanager
def os_errors_as_user_errors() -> Iterator[None]:
    """Turn an OSError raised inside into a UserError, if `refusal` has a message for it."""
    try:
        yield
    except OSError as error:
        if not (line := refusal(error)):
            raise
        raise UserError(line) from error
