"""A way between two processes that can be cut: by closing it, or by letting nothing through any more."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

CHUNK = 1 << 16


class Proxy:
    """Passes everything that connects to `port` on to another port of this machine, until its block ends."""

    def __init__(self, target: int) -> None:
        self.target, self._open = target, threading.Event()
        self._open.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._open.set()
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()

    def close(self) -> None:
        """Cut all connections, and take no more."""
        for end in (self._server, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """Let nothing through, as a cable that was pulled."""
        self._open.clear()

    def _start(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # process 0 is not there yet
                    near.close()
                    continue
                self._ends += [near, far]
                for start, end in ((near, far), (far, near)):
                    self._start(self._pass, start, end)

    def _pass(self, start: socket.socket, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := start.recv(CHUNK):
                self._open.wait()
                end.sendall(chunk)
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)  # the other side closed, or broke off
