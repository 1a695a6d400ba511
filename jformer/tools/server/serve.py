"""--mode=serve: opens a run and a port, and answers until a signal asks to stop."""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etils.epath import Path

from jformer.config.options import Config
from jformer.data.progress import show_progress
from jformer.errors import UserError
from jformer.inference.predict import load
from jformer.parallel import processes
from jformer.tools.server.engine import Engine
from jformer.tools.server.limits import Limits

if TYPE_CHECKING:
    from uvicorn import Server

TOKEN = "JFORMER_TOKEN"  # the variable of the environment, as others can read a command's arguments
# Names of this machine for itself. A page of the web that gives its own name this address is not let in by them.
LOCAL = ("127.0.0.1", "localhost")
LONGEST_WAIT = 0.2  # seconds until a request to stop is seen


def serve(config: Config, workdir: Path, host: str, port: int, limits: Limits | None = None) -> bool:
    """Answer at an IPv4 host and a port (0: any that is free) until a signal asks to stop; then end what was begun.

    Returns False if it stopped by itself, which it says why on standard error.

    Args:
        config: what takes the place of the run's own, to decode otherwise.
        workdir: of the run.
        host: a name or an IPv4 address of this machine.
        port: 0 = any that is free; what is printed has its number.
        limits: of requests and connections; None = the usual ones.

    Raises:
        UserError: the extra is missing, the run cannot be served, or the address is not ours to listen at.
    """
    try:
        from jformer.tools.server.app import build_app
        from jformer.tools.server.connections import make_server
        from jformer.tools.server.guard import Access
    except ImportError as error:
        raise UserError(f'--mode=serve needs {error.name}: pip install "jformer[serve]"') from error
    limits = limits or Limits()
    token = os.environ.get(TOKEN, "")
    with contextlib.closing(opened(host, port)) as listener:
        engine = Engine(load(workdir, config), limits)
        with show_progress("compiling what the first clients need"):
            engine.warm_up()
        name, own_port = listener.getsockname()[:2]
        local = ipaddress.ip_address(name).is_loopback
        app = build_app(engine, limits, Access(token, (*LOCAL, name) if local else ()))
        processes.defer_stop()  # there are requests to end
        print(introduction(workdir, f"{name}:{own_port}", engine.route), file=sys.stderr, flush=True)
        if not (token or local):
            print(f"whoever reaches this machine may ask: set {TOKEN} to answer those who send it", file=sys.stderr)
        with running(make_server(app, limits), listener) as thread:
            while thread.is_alive() and not processes.stop_requested():
                thread.join(LONGEST_WAIT)
    return processes.stop_requested()


def opened(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, and so this process's own; raise UserError where that cannot be done."""
    try:
        return socket.create_server((host, port), backlog=1_024)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--host={host} --port={port} cannot be listened at ({why}): choose another") from error


def introduction(workdir: Path, address: str, route: str) -> str:
    """Return where the server is and what it answers to."""
    return (
        f"serving {workdir} at http://{address}: a page to type into, and POST /v1/{route} for programs, which "
        "/openapi.json describes; Ctrl-C stops it"
    )


@contextlib.contextmanager
def running(server: "Server", listener: socket.socket) -> Iterator[threading.Thread]:
    """Run a server in a thread, as signals are heard by jformer's own; at the end, let it answer what was begun."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    try:
        yield thread
    finally:
        server.should_exit = True
        thread.join()
