"""Requests to stop: SIGTERM, SIGINT, SIGHUP, or a closed terminal or pipe.

A thread receives signals at once. A Python handler would wait until the main thread returns from C++, which may compile
for minutes, and a JAX callback may swallow what it raises. If there is nothing to save, the process ends with one line
and STOPPED; otherwise the request stays pending until the code that saves checks for it.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from jformer.errors import STOPPED
from jformer.parallel.processes.children import signals_to
from jformer.parallel.processes.group import end_all

GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader; a closed terminal
HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_requested = threading.Event()
_deferred = False
_line = "stopped"


@contextlib.contextmanager
def heed_signals(line: str) -> Iterator[None]:
    """Inside the context, a signal ends this process with a line, until `defer_stop` is called."""
    global _line
    end_at_once(line)
    _requested.clear()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_listen, args=(reader,), name="signals", daemon=True)
    listener.start()
    with signals_to(lambda number, frame: None):  # C writes to the pipe, and nothing is raised
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
    """Keep requests to stop pending from now on: there is something to save. A second SIGINT still ends the process."""
    global _deferred
    _deferred = True


def end_at_once(line: str) -> None:
    """From now on, end the process with a line when it is asked to stop."""
    global _deferred, _line
    _deferred, _line = False, line


def ignore_signals() -> None:
    """Ignore signals that ask to stop from now on."""
    for number in HEEDED:
        signal.signal(number, signal.SIG_IGN)


def stop_requested() -> bool:
    """Return whether a request to stop is pending."""
    return _requested.is_set()


def request_stop() -> None:
    """Ask to stop, as SIGTERM does."""
    if _deferred:
        _requested.set()
    else:
        end_all(STOPPED, _line)


@contextlib.contextmanager
def readers_may_leave(stop: Callable[[], None] = request_stop) -> Iterator[None]:
    """If the reader of standard output or error closes it, treat that as a request to `stop`, not as an error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Outlet(stream, stop) for stream in before)  # None: it is closed
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Outlet:
    """A stream whose reader may leave, after which output is discarded. It does not own the stream."""

    def __init__(self, stream: Any, stop: Callable[[], None]) -> None:
        self._stream, self._stop = stream, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> "_Outlet":
        return _Outlet(self._stream.buffer, self._stop)

    def write(self, text: str | bytes) -> int:
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
        discard_output(self._stream)
        self._stop()
        return written


def discard_output(stream: TextIO) -> None:
    """Discard a stream's unwritten content, and whatever is written to it from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _listen(reader: int) -> None:
    """Read the numbers of signals, which C writes into the pipe."""
    while number := os.read(reader, 1):
        if number[0] in HEEDED:
            if number[0] == signal.SIGINT and stop_requested():
                end_at_once("stopped at once: progress since the last checkpoint is lost")
            request_stop()
