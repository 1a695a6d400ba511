"""Processes that this one starts, and that end with it."""

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
    """Return what a child of this process does first: ask Linux to kill it when its parent ends, however it ends."""
    parent = os.getpid()

    def ask() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which ended before we could ask
            os._exit(128 + signal.SIGKILL)

    return ask


def send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process, or SIGKILL to its whole group, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@contextlib.contextmanager
def signals_to(stop: Callable[[int, FrameType | None], None], *others: signal.Signals) -> Iterator[None]:
    """Let signals to end this process, and others, reach a handler instead; those that are ignored stay so."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *others)
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # as nohup wants it
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
