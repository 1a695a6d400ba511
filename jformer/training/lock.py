"""One trainer of a run at a time."""

import contextlib
import fcntl
from collections.abc import Iterator

from etils.epath import Path

from jformer.errors import UserError
from jformer.storage import lock_of, open_lock


@contextlib.contextmanager
def sole_trainer(workdir: Path) -> Iterator[None]:
    """Lock the run against a second trainer; the operating system releases the lock when this process ends.

    Take the lock before opening anything of the run: opening removes half-written files of a killed run, which might
    belong to a live one. A directory created only for the lock is removed with it.
    """
    made = not workdir.exists()
    lock = lock_of(workdir)
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = open_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{workdir}: another process is training here; wait for it or use another --workdir") from error
    with file:
        try:
            yield
        finally:
            if made and list(lock.parent.iterdir()) == [lock]:
                lock.unlink()
                lock.parent.rmdir()
