"""One way to start a run: as a child of a process that has imported everything, with a log of its own and a bill.

The parent imports and never computes, so a child has JAX at once and to itself.
"""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import logging

from jformer.parallel.processes.children import die_with_parent
from tests import signals

PATIENCE = 300.0  # seconds after which a child is taken to be stuck
STUCK = -1_000  # its exit code then
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

Work = Callable[[], int] | Sequence[str]
"""What a child does: a function that returns an exit code, or the arguments of `python -m jformer.main`."""


class End(NamedTuple):
    """How a child ended."""

    code: int  # the exit code, or minus the number of the signal that ended it
    seconds: float
    memory: int  # the most bytes it held
    said: str


class Child:
    """A process that does some work; what it says is added to a log."""

    def __init__(self, work: Work, log: Path, prepare: Callable[[], None] = lambda: None) -> None:
        """Begin the work, after `prepare` was called in the child."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._begins, self.began = log, log.stat().st_size if log.exists() else 0, time.monotonic()
        follow = die_with_parent()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python and JAX warn of threads, which this process has none of
            self.pid = os.fork()
        if not self.pid:
            _work(work, log, lambda: (follow(), prepare()))

    def signal(self, number: int) -> None:
        """Send a signal, also to one that has ended and is not waited for yet."""
        os.kill(self.pid, number)

    def lives(self) -> bool:
        """Tell whether it has not ended."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def said_so_far(self) -> str:
        """Return what it has said."""
        return self._log.read_bytes()[self._begins :].decode(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> End:
        """Wait for the end; a child that is stuck is killed."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status)
            if not pid and time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                _, _, usage = os.wait4(self.pid, 0)
                code = STUCK
            if pid or code == STUCK:
                return End(code, time.monotonic() - self.began, usage.ru_maxrss * 1024, self.said_so_far())
            time.sleep(0.005)


def run(work: Work, log: Path, prepare: Callable[[], None] = lambda: None, patience: float = PATIENCE) -> End:
    """Do some work in a child, and wait for its end."""
    return Child(work, log, prepare).wait(patience)


def import_everything(compiled: Path) -> None:
    """Import what children need; what they compile is kept in a folder."""
    os.environ.update({**ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": str(compiled)})
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import jformer.evaluation.evaluate
    import jformer.inference.answer_files
    import jformer.trainer  # noqa: F401

    logging.set_verbosity(logging.WARNING)  # as where absl does not run the command


def _work(work: Work, log: Path, prepare: Callable[[], object]) -> None:
    """Do a child's work and end with its exit code."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the campaign
        signals.heed()
        with log.open("ab") as said, Path(os.devnull).open("rb") as nothing:
            for number, file in enumerate((nothing, said, said)):
                os.dup2(file.fileno(), number)
        prepare()
        if not callable(work):
            os.execv(sys.executable, [sys.executable, "-m", "jformer.main", *work])
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
