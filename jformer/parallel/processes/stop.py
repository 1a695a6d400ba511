"""What a request to stop does: SIGTERM, SIGINT, SIGHUP, or a terminal that nobody reads any longer.

A signal is heard at once, by a thread of its own: a handler in Python waits until the main thread comes back from C++,
which compiles for minutes, and what it raises may be swallowed by a callback of JAX. Where nothing is to be saved, the
process ends with one line and STOPPED; otherwise the request is kept, for whoever saves to ask for.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jformer.errors import STOPPED
from jformer.parallel.processes.children import signals_to
from jformer.parallel.processes.group import end_all

GONE = (errno.EPIPE, errno.EIO)  # who reads a pipe has left; a terminal is closed
HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_requested = threading.Event()
_deferred = False
_line = "stopped"


@contextlib.contextmanager
def heed_signals(line: str) -> Iterator[None]:
    """End this process, saying the line, when a signal asks to, while this lasts; see `defer_stop` for later."""
    global _line
    end_at_once(line)
    _requested.clear()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_listen, args=(reader,), name="signals", daemon=True)
    listener.start()
    with signals_to(lambda number, frame: None):  # so that the pipe is written to, and nothing raised
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)
            listener.join()
            os.close(reader)
            end_at_once("stopped")


def defer_stop() -> None:
    """Keep a request to stop from now on: there is something to save. A second SIGINT ends the process all the same."""
    global _deferred
    _deferred = True


def end_at_once(line: str) -> None:
    """Let a request to stop end the process from now on, saying a line."""
    global _deferred, _line
    _deferred, _line = False, line


def ignore_signals() -> None:
    """Let no signal that asks to stop do anything any longer."""
    for number in HEEDED:
        signal.signal(number, signal.SIG_IGN)


def stop_requested() -> bool:
    """Tell whether a request to stop came since it is kept."""
    return _requested.is_set()


def request_stop() -> None:
    """Ask to stop, as SIGTERM does."""
    if _deferred:
        _requested.set()
    else:
        end_all(STOPPED, _line)


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """Take it for a request to stop when nobody reads standard output or error any longer, instead of failing there."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Outlet(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Outlet:
    """A stream whose reader may leave: what is written then goes nowhere. Not its owner: it is never closed here."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            return self._left(len(text), error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._left(0, error)

    def _left(self, written: int, error: OSError) -> int:
        if error.errno not in GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        request_stop()
        return written


def _listen(reader: int) -> None:
    """Read the numbers of signals, which C writes into the pipe as they come."""
    while number := os.read(reader, 1):
        if number[0] in HEEDED:
            if number[0] == signal.SIGINT and stop_requested():
                end_at_once("stopped at once: what came after the last checkpoint is lost")
            request_stop()
