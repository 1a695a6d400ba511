"""A connection of two processes, in lines of JSON; the operating system notices when the other machine is gone."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

SILENT = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 14_000))  # ms the last
CHUNK = 1 << 16
SENDING = 15.0  # seconds until a process that takes no messages counts as gone
PARTING = 2.0  # seconds
AGAIN = 0.2  # seconds between attempts to connect

Message = dict[str, Any]


class LostError(Exception):
    """The other process, or the way to it, is gone."""


class Link:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over an open socket."""
        self.socket = connection
        self._lock = threading.Lock()
        self._rest = b""
        self.restore_timeout()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in SILENT:
            if hasattr(socket, name):  # not every operating system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def restore_timeout(self) -> None:
        """Let sending take as long as it usually may."""
        self.socket.settimeout(SENDING)

    def fileno(self) -> int:
        """Return the socket's number, so that it can be selected."""
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raise LostError if nobody is there to take it."""
        try:
            with self._lock:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LostError from error

    def receive(self, count: int = CHUNK) -> list[Message]:
        """Wait for bytes and return the messages that they complete. Raise LostError if there will be none."""
        try:
            chunk = self.socket.recv(count)
        except OSError as error:
            raise LostError from error
        if not chunk:
            raise LostError
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> Message:
        """Wait for the first message alone: what comes right behind it stays where it can be selected."""
        while not (messages := self.receive(1)):
            pass
        return messages[0]


def part(links: Collection[Link]) -> None:
    """End connections, each once the other side has read what was sent and gone, or after a moment.

    A process that went at once, with messages unread, could take away what it sent last.
    """
    for link in links:
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + PARTING
    for link in links:
        with contextlib.suppress(OSError):
            link.socket.settimeout(max(0.01, deadline - time.monotonic()))
            while link.socket.recv(CHUNK):
                pass
        link.socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Open the port that the other processes connect to: on every address, unless process 0 is only to be met here."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return socket.create_server((host, port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connect(host: str, port: int, seconds: float) -> Link:
    """Connect to process 0, which may come up within so many seconds. Raise LostError if it does not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Link(socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostError(str(error)) from error
            time.sleep(AGAIN)
