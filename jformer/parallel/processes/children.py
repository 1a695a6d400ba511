"""Child processes that end with this one."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def die_with_parent() -> Callable[[], None]:
    """Return what a child runs first: it asks Linux to kill the child when its parent ends, however it ends."""
    parent = os.getpid()

    def ask() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(128 + signal.SIGKILL)

    return ask


def send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process; SIGKILL goes to its whole group, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextlib.contextmanager
def signals_to(stop: Callable[[int, FrameType | None], None], *others: signal.Signals) -> Iterator[None]:
    """Handle SIGTERM, SIGINT, SIGHUP and any others with a function; ignored signals stay ignored, as under nohup."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *others)
    before = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
