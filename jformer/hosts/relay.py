"""A way from JAX to its coordination service that does not fall silent by closing.

JAX ends a process with a C++ abort the moment the connection to the service in process 0 closes, and leaves no time to
say who died (measured on JAX 0.10.2 and 0.12; jax_enable_recoverability changes nothing about it). So JAX connects to a
socket of its own process, from where its bytes go to the service and back; when the service goes away, that socket
stays open, and `peers` ends the process instead.
"""

import contextlib
import socket
import threading
import time

CHUNK = 1 << 16
AGAIN = 0.05  # seconds until the service is looked for again


def open_relay(host: str, port: int) -> int:
    """Pass everything that connects to the returned port of this machine on to host:port, from threads of its own."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(server, (host, port)), daemon=True, name="relay").start()
    return server.getsockname()[1]


def _accept(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        near, _ = server.accept()
        far = _connect(address)
        for start, end in ((near, far), (far, near)):
            start.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pass, args=(start, end, start is near), daemon=True, name="relay").start()


def _connect(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address)
        except OSError:  # it is not up yet
            time.sleep(AGAIN)


def _pass(start: socket.socket, end: socket.socket, closes: bool) -> None:
    """Copy bytes until the start has no more; only JAX's own closing is passed on."""
    with contextlib.suppress(OSError):
        while chunk := start.recv(CHUNK):
            end.sendall(chunk)
        if closes:
            end.shutdown(socket.SHUT_WR)
