"""This process among those of its run, for all other rooms: a single process is first, agrees with itself, never waits.

Which processes there are is a fact of the whole process, as it is in JAX; so it is kept here, not passed around.
"""

import contextlib
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jformer.errors import UserError
from jformer.hosts.coordinates import Coordinates
from jformer.hosts.handshake import refuse_differences, software
from jformer.hosts.meeting import meet
from jformer.hosts.peers import Peers
from jformer.hosts.relay import open_relay

MEETING = 300.0  # seconds in which all processes must have been started
SEEING = 5.0  # seconds until what one process wrote must be there for others
SHUTDOWN = 30  # seconds of JAX's own parting
NEVER = 24 * 3600  # seconds until JAX itself, with a C++ abort, gives up a process: `peers` is there long before

_peers: Peers | None = None


@contextlib.contextmanager
def joined(own: Coordinates | None, seconds: float = MEETING) -> Iterator[None]:
    """Be one of the processes of a run while this lasts; None is a run of one process, which needs nothing.

    However it ends, it ends for all: a mistake of the user in one process is told by all with exit code 2, one whose
    output nobody reads any longer ends all without a word, and any other error ends the others with 75. Raises
    AbsentError and UserError if the processes do not come together.
    """
    global _peers
    if own is None or own.processes == 1:
        yield
        return
    peers, service = meet(own, seconds, _free_port())
    _peers = peers
    try:
        same(software())
        _start_jax(own, service)
        with _quiet():
            yield
        peers.reach("the end")
        peers.agree(None, len)
        _stop_jax()
        peers.leave()
    except UserError as error:
        peers.end(2, " ".join(str(error).split()))
    except BrokenPipeError:  # who read the answers has left, as head does
        peers.end(0)
    except BaseException as error:
        peers.fail(error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not by way of Python's end, where JAX waits for the others
    finally:
        _peers = None


def alone() -> bool:
    """Tell whether this is the only process of its run."""
    return _peers is None


def first() -> bool:
    """Tell whether this process writes and speaks for all."""
    return _peers is None or _peers.process == 0


def index() -> int:
    """Return the number of this process."""
    return 0 if _peers is None else _peers.process


def reach(place: str, like: Hashable = None) -> None:
    """Say where this process is: so the others can tell if it stays behind, stands still or dies.

    All processes pass the same places in the same order. A place that is `like` one before is done as quickly: standing
    still there is soon noticed, even while the processor is busy.
    """
    if _peers is not None:
        _peers.reach(place, like)


def limit(seconds: float) -> None:
    """Set how long a process may stand still; 0 is ten times as long as an update takes, at least a minute."""
    if _peers is not None:
        _peers.seconds = seconds


def took(seconds: float) -> None:
    """Say how long an update takes."""
    if _peers is not None:
        _peers.took(seconds)


def agree(value: Any, join: Callable[[list[Any]], Any]) -> Any:
    """Return what process 0 makes of the values of all processes, as plain JSON. All call it in the same order."""
    return join([value]) if _peers is None else _peers.agree(value, join)


def wait() -> None:
    """Wait until all processes are here."""
    agree(None, len)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Let process 0 do something before all others do it: they find what it left."""
    if not first():
        wait()
    yield
    if first():
        wait()


def stopping(update: int, asked: bool) -> bool:
    """Tell whether to stop after this update: the same one in all processes, once one of them is asked to."""
    return asked if _peers is None else _peers.stopping(update, asked)


def same(fields: Mapping[str, Any]) -> None:
    """Raise UserError, in all processes, if a field is not the same in all, naming it."""
    if _peers is not None:
        names = _peers.names
        agree(fields, lambda everybody: refuse_differences(everybody, names))


def refuse_unshared(folder: Path) -> None:
    """Raise UserError, in all processes, if one of them does not see what process 0 writes into a folder."""
    if _peers is None:
        return
    peers, path = _peers, folder / "processes.token"
    token = agree(secrets.token_hex(8), lambda tokens: tokens[0])
    if first():
        path.write_text(token)
    wait()
    seen = agree(_appears(path, token), list)
    if first():
        path.unlink()
    if not all(seen):
        blind = ", ".join(peers.name(i) for i, sees in enumerate(seen) if not sees)
        raise UserError(f"--workdir={folder}: {blind} does not see what process 0 writes there: it must be shared")


def _appears(path: Path, text: str) -> bool:
    """Tell whether a file holds a text, which on a network's file system may take a moment."""
    deadline = time.monotonic() + SEEING
    while not (found := path.exists() and path.read_text() == text) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _start_jax(own: Coordinates, service: int) -> None:
    """Start jax.distributed; the service is reached through a relay, so that its end is not ours: see `relay`."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    port = service if own.process == 0 else open_relay(own.host, service)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", own.processes, own.process, local_device_ids=own.local_devices,
        coordinator_bind_address=f"[::]:{service}", cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=NEVER, shutdown_timeout_seconds=SHUTDOWN,
    )  # fmt: skip


def _stop_jax() -> None:
    import jax

    jax.distributed.shutdown()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let what C++ prints on standard output go nowhere: it is for answers, and Gloo greets every process there."""
    before, answers = sys.stdout, os.dup(1)
    before.flush()
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    with os.fdopen(answers, "w", buffering=1, encoding=before.encoding) as sys.stdout:
        yield
        sys.stdout.flush()
        os.dup2(answers, 1)
    sys.stdout = before


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
