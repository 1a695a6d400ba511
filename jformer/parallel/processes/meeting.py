"""How the processes of a run find each other, before JAX: each writes its number to process 0, which waits for all.

JAX's coordination service ends every process with a C++ abort if one of them does not come, counts differently or has
the wrong number, and lets nobody write anything until all are there (JAX 0.10.2 and 0.12). So they meet on the port of
the coordinator first, once, and JAX's service takes over that port. If JAX's certificates are set (JAX_MTLS_*), the
same ones are asked for here.
"""

import contextlib
import json
import os
import select
import socket
import ssl
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jformer.errors import LOST, MISTAKE, UserError
from jformer.parallel.processes.coordinates import Coordinates, here, is_loopback
from jformer.parallel.processes.handshake import refuse_differences

FIRST_REMARK = 10.0  # seconds until process 0 says whom it is waiting for
HELLO_SECONDS = 5.0  # for who connects to say who it is
RETRY_SECONDS = 0.2  # between attempts to connect
MAX_BYTES = 1 << 16  # of a message; a stranger may send any
MAX_LISTED = 8
CERTIFICATES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")


class Hello(NamedTuple):
    """What a process writes to process 0."""

    process: int
    processes: int
    machine: str
    fields: dict[str, object]  # what must be the same in all processes


Came = dict[int, tuple[socket.socket | None, Hello]]  # process → its connection, and what it said


class AbsentError(Exception):
    """A process of the run did not come, or process 0 is not there or cannot serve."""


def meet(own: Coordinates, fields: Mapping[str, object], seconds: float) -> list[str]:
    """Return the machines of all processes, once all are there.

    Raises AbsentError if that takes longer than so many seconds; UserError if two say that they are the same one, they
    count themselves differently, or their fields differ.
    """
    hello = Hello(own.process, own.processes, here(), dict(fields))
    if own.process:
        return _come(own, hello, seconds)
    try:
        server = _listen(own)
    except OSError as error:
        raise UserError(
            f"coordinator {own.host}:{own.port}: process 0 cannot listen there ({error.strerror or error}); its host "
            "must be this machine, its port free"
        ) from error
    with server, contextlib.ExitStack() as connections:
        return _gather(own, hello, seconds, server, connections)


def _gather(
    own: Coordinates, hello: Hello, seconds: float, server: socket.socket, stack: contextlib.ExitStack
) -> list[str]:
    """Wait for the others, as process 0, and tell all of them how it went."""
    came: Came = {0: (None, hello)}
    try:
        _admit_all(own, seconds, server, stack, came)
        everybody = [came[i][1] for i in range(own.processes)]
        machines = [each.machine for each in everybody]
        refuse_differences([each.fields for each in everybody], machines)
        answer: dict[str, Any] = {"machines": machines}
    except (UserError, AbsentError) as error:
        answer = {"error": str(error), "code": MISTAKE if isinstance(error, UserError) else LOST}
        raise
    finally:
        for connection, _ in came.values():
            if connection:
                with contextlib.suppress(OSError):  # it left; JAX will miss it
                    connection.sendall(json.dumps(answer).encode() + b"\n")
    return machines


def _admit_all(
    own: Coordinates, seconds: float, server: socket.socket, stack: contextlib.ExitStack, came: Came
) -> None:
    began, said, tls = time.monotonic(), False, _tls(ssl.PROTOCOL_TLS_SERVER)
    while True:
        for process in [i for i, (connection, _) in came.items() if _has_left(connection)]:
            del came[process]  # a supervisor starts it again
        if len(came) == own.processes:
            return
        waited = time.monotonic() - began
        if waited > seconds:
            raise AbsentError(f"{_absent(own, came)} did not come within {seconds:.0f} s: start the command for each")
        if waited > FIRST_REMARK and not said:
            said = True
            print(f"waiting for {_absent(own, came)}", file=sys.stderr, flush=True)
        server.settimeout(min(1.0, max(0.01, seconds - waited)))
        try:
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(HELLO_SECONDS)
            if tls:
                connection = stack.enter_context(tls.wrap_socket(connection, server_side=True))
            hello = Hello(**_read(connection))
            if not all(isinstance(value, kind) for value, kind in zip(hello, (int, int, str, dict), strict=True)):
                continue
        except (OSError, ValueError, TypeError):  # nobody came, or a stranger
            continue
        _admit(own, connection, hello, came)


def _admit(own: Coordinates, connection: socket.socket, hello: Hello, came: Came) -> None:
    """Take in a process that said who it is."""
    process, processes, machine = hello.process, hello.processes, hello.machine
    twice = process in came and not _has_left(came[process][0])
    wrong = processes != own.processes or not 0 < process < own.processes
    came[-1 if twice or wrong else process] = (connection, hello)  # who is refused hears of it, too
    if wrong:
        raise UserError(
            f"process {process} ({machine}) was started with --processes={processes}, process 0 with {own.processes}: "
            "start all with the same"
        )
    if twice:
        other = came[process][1].machine
        raise UserError(f"--process={process} was started twice, on {other} and {machine}: number them 0, 1, …")


def _come(own: Coordinates, hello: Hello, seconds: float) -> list[str]:
    """Go to process 0, as another, until it answers: what is left of the run before may still hold the port."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = _ask(own, hello, seconds, max(0.1, deadline - time.monotonic()))
            break
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                why = error if isinstance(error, OSError) else "another program answers there"
                raise AbsentError(
                    f"process 0 was not reached at {own.host}:{own.port} within {seconds:.0f} s ({why}): start the "
                    "command for it too, or say another --coordinator"
                ) from error
            time.sleep(RETRY_SECONDS)
    if "error" in answer:
        raise (AbsentError if answer["code"] == LOST else UserError)(answer["error"])
    return list(answer["machines"])


def _ask(own: Coordinates, hello: Hello, seconds: float, left: float) -> dict[str, Any]:
    """Tell process 0 who this is, within the seconds left, and return its answer once the others are there, too."""
    tls = _tls(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((own.host, own.port), timeout=left))
        if tls:
            connection = stack.enter_context(tls.wrap_socket(connection))
        connection.sendall(json.dumps(hello._asdict()).encode() + b"\n")
        connection.settimeout(seconds + HELLO_SECONDS)
        return _read(connection)


def _listen(own: Coordinates) -> socket.socket:
    """Open the coordinator's port: on every address, unless all processes are on this machine."""
    if is_loopback(own.host):
        return socket.create_server((own.host, own.port), backlog=own.processes)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", own.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=own.processes)
    return socket.create_server(("", own.port), backlog=own.processes)


def _read(connection: socket.socket) -> dict[str, Any]:
    """Return the message of a connection. Raise OSError if none comes, ValueError if it is none of ours."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(MAX_BYTES)
        if not chunk:
            raise ConnectionError("it closed the connection without a word")
        line += chunk
        if len(line) > MAX_BYTES:
            raise ValueError("too long")
    try:
        message = json.loads(line)
    except RecursionError as error:  # a stranger's, which must not end the meeting
        raise ValueError("nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


def _has_left(connection: socket.socket | None) -> bool:
    """Tell whether a process that is to wait has closed its connection."""
    return connection is not None and bool(select.select([connection], [], [], 0)[0])


def _absent(own: Coordinates, came: Collection[int]) -> str:
    absent = [i for i in range(own.processes) if i not in came]
    listed = ", ".join(map(str, absent[:MAX_LISTED])) + (", …" if len(absent) > MAX_LISTED else "")
    return f"process{'es' if len(absent) > 1 else ''} {listed} of {own.processes}"


def _tls(side: int) -> ssl.SSLContext | None:
    """Return what JAX's own certificates ask for, if they are set: either side must have one of that authority."""
    certificate, key, authority = (os.environ.get(name) for name in CERTIFICATES)
    if not (certificate and authority):
        return None
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    return context
