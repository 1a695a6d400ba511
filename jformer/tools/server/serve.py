"""--mode=serve: load a run, listen at a port, and answer requests until a signal stops the server."""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
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

TOKEN = "JFORMER_TOKEN"  # an environment variable, as other users can read the arguments of a command
# The only host names accepted on a loopback address, against DNS rebinding by a web page.
LOCAL = ("127.0.0.1", "localhost")
LONGEST_WAIT = 0.2  # seconds between checks for a request to stop


def serve(
    config: Config, workdir: Path, host: str, port: int, adapters: Sequence[str] = (), limits: Limits | None = None
) -> bool:
    """Serve a run over HTTP until a signal asks to stop, then finish the requests in progress.

    Returns False if the server stopped by itself; it has logged the reason.

    Args:
        config: overrides the run's own, for decoding.
        workdir: of the run.
        host: a name or an IPv4 address of this machine.
        port: 0 = any free port, which is printed.
        adapters: runs of adapters whose base is the run; the last part of a path is its name in requests.
        limits: of requests; None = the defaults.

    Raises:
        UserError: the extra is missing, the run cannot be served, or the address is not available.
    """
    try:
        from jformer.tools.server.app import build_app, make_server
        from jformer.tools.server.guard import Access
    except ImportError as error:
        raise UserError(f'--mode=serve needs {error.name}: pip install "jformer[serve]"') from error
    limits = limits or Limits()
    token = os.environ.get(TOKEN, "")
    with contextlib.closing(opened(host, port)) as listener:
        engine = Engine(load(workdir, config), limits)
        named = load_adapters(engine, adapters, limits)
        with show_progress("compiling the programs for the first requests"):
            for each in (engine, *named.values()):
                each.warm_up()
        name, own_port = listener.getsockname()[:2]
        local = ipaddress.ip_address(name).is_loopback
        names = tuple(dict.fromkeys((*LOCAL, name))) if local else ()
        app = build_app(engine, limits, Access(token, names), named)
        processes.defer_stop()  # until the requests in progress are answered
        print(introduction(workdir, f"{name}:{own_port}", engine.route), file=sys.stderr, flush=True)
        if not (token or local):
            print(
                f"anyone who can reach this machine can send requests: set {TOKEN} to require a token", file=sys.stderr
            )
        with running(make_server(app, limits), listener) as thread:
            while thread.is_alive() and not processes.stop_requested():
                thread.join(LONGEST_WAIT)
    return processes.stop_requested()


def load_adapters(engine: Engine, workdirs: Sequence[str], limits: Limits) -> dict[str, Engine]:
    """Return name → engine of runs of adapters that share the parameters of a run.

    Raises UserError for two of one name, for one that does not answer on the run's path, and as `with_adapter` does.
    """
    found: dict[str, Engine] = {}
    for workdir in workdirs:
        name = Path(workdir.rstrip("/")).name
        if not name or name in found:
            raise UserError(f"--adapters: the name {name!r} of {workdir!r} is empty or taken: rename the directory")
        found[name] = Engine(engine.predictor.with_adapter(workdir), limits)
        if found[name].route != engine.route:
            raise UserError(f"--adapters: {workdir} answers at /v1/{found[name].route}, the run at /v1/{engine.route}")
    return found


def opened(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raise UserError if the address is not available."""
    try:
        return socket.create_server((host, port), backlog=1_024)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on --host={host} --port={port} ({why}): choose another") from error


def introduction(workdir: Path, address: str, route: str) -> str:
    """Return a line with the address and the routes of the server."""
    return (
        f"serving {workdir} at http://{address}: a page to type into, and POST /v1/{route} for programs, which "
        "/openapi.json describes; Ctrl-C stops it"
    )


@contextlib.contextmanager
def running(server: "Server", listener: socket.socket) -> Iterator[threading.Thread]:
    """Run a server in a thread, as jformer handles signals in the main one; at the end, let it finish its requests."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    try:
        yield thread
    finally:
        server.should_exit = True
        thread.join()
