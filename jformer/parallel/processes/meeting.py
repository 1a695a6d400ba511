"""How the processes of a run find each other, before JAX: each connects to process 0, which waits for all of them.

JAX's coordination service aborts every process if one is missing or has a wrong number, overlooks one that expects a
different count, and accepts no keys until all are connected (JAX 0.10.2 and 0.12; docs/decisions/0044). So the
processes meet on the coordinator's port first, and then JAX's service takes over that port. If JAX's certificates are
set (JAX_MTLS_*), the meeting requires the same ones.
"""

import contextlib
import errno
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
from jformer.parallel.processes.handshake import refuse_differences
from jformer.parallel.processes.process_info import ProcessInfo, is_loopback

FIRST_REMARK = 10.0  # seconds until process 0 prints which processes are missing
HELLO_SECONDS = 5.0  # for a new connection to introduce itself
RETRY_SECONDS = 0.2  # between attempts to connect
MAX_BYTES = 1 << 16  # of a message; strangers may send anything
MACHINE_BYTES = 256  # the same, for the name of each machine in the answer
MAX_LISTED = 8
CERTIFICATES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")


class Hello(NamedTuple):
    """The introduction that a process sends to process 0."""

    process: int
    processes: int
    machine: str
    fields: dict[str, object]  # facts that must be the same in all processes


Arrived = dict[int, tuple[socket.socket | None, Hello]]  # process → its connection and introduction


class AbsentError(Exception):
    """A process of the run did not arrive, process 0 cannot be reached, or another program has its port."""


def meet(own: ProcessInfo, fields: Mapping[str, object], seconds: float) -> list[str]:
    """Return the machines of all processes, once all have arrived.

    Raises AbsentError if that takes longer than `seconds`, or another program keeps the port; UserError if two
    processes have the same number, or if their counts or fields differ.
    """
    hello = Hello(own.process, own.processes, socket.gethostname(), dict(fields))
    if own.process:
        return _join(own, hello, seconds)
    try:
        server = _listen(own)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE  # perhaps by another program's connection, which will end
        raise (AbsentError if taken else UserError)(
            f"coordinator {own.host}:{own.port}: process 0 cannot listen there ({error.strerror or error}); its host "
            "must be this machine, its port free"
        ) from error
    with server, contextlib.ExitStack() as connections:
        return _gather(own, hello, seconds, server, connections)


def _gather(
    own: ProcessInfo, hello: Hello, seconds: float, server: socket.socket, stack: contextlib.ExitStack
) -> list[str]:
    """Wait for the other processes, as process 0, and send all of them the outcome."""
    arrived: Arrived = {0: (None, hello)}
    try:
        _admit_all(own, seconds, server, stack, arrived)
        everybody = [arrived[i][1] for i in range(own.processes)]
        machines = [each.machine for each in everybody]
        refuse_differences([each.fields for each in everybody], machines)
        answer: dict[str, Any] = {"machines": machines}
    except (UserError, AbsentError) as error:
        answer = {"error": str(error), "code": MISTAKE if isinstance(error, UserError) else LOST}
        raise
    finally:
        for connection, _ in arrived.values():
            if connection:
                with contextlib.suppress(OSError):  # it left; JAX will notice
                    connection.sendall(json.dumps(answer).encode() + b"\n")
    return machines


def _admit_all(
    own: ProcessInfo, seconds: float, server: socket.socket, stack: contextlib.ExitStack, arrived: Arrived
) -> None:
    began, remarked, tls = time.monotonic(), False, _tls(ssl.PROTOCOL_TLS_SERVER)
    while True:
        for process in [i for i, (connection, _) in arrived.items() if _has_left(connection)]:
            del arrived[process]  # a supervisor will restart it
        if len(arrived) == own.processes:
            return
        waited = time.monotonic() - began
        if waited > seconds:
            raise AbsentError(f"{_absent(own, arrived)} did not arrive within {seconds:.0f} s: start every process")
        if waited > FIRST_REMARK and not remarked:
            remarked = True
            print(f"waiting for {_absent(own, arrived)}", file=sys.stderr, flush=True)
        server.settimeout(min(1.0, max(0.01, seconds - waited)))
        try:
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(HELLO_SECONDS)
            if tls:
                connection = stack.enter_context(tls.wrap_socket(connection, server_side=True))
            hello = Hello(**_read(connection, MAX_BYTES))
        except (OSError, ValueError, TypeError):  # nobody connected, or a stranger
            continue
        if all(isinstance(value, kind) for value, kind in zip(hello, (int, int, str, dict), strict=True)):
            _admit(own, connection, hello, arrived)


def _admit(own: ProcessInfo, connection: socket.socket, hello: Hello, arrived: Arrived) -> None:
    """Register a process that has introduced itself; raise UserError if its number or count is wrong."""
    process, processes, machine = hello.process, hello.processes, hello.machine
    twice = process in arrived and not _has_left(arrived[process][0])
    wrong = processes != own.processes or not 0 < process < own.processes
    arrived[-1 if twice or wrong else process] = (connection, hello)  # a refused process gets the error as well
    if wrong:
        raise UserError(
            f"process {process} ({machine}) was started with --processes={processes}, process 0 with {own.processes}: "
            "start all with the same"
        )
    if twice:
        other = arrived[process][1].machine
        raise UserError(f"--process={process} was started twice, on {other} and {machine}: number them 0, 1, …")


def _join(own: ProcessInfo, hello: Hello, seconds: float) -> list[str]:
    """Connect to process 0, as another process, and return its answer; retry while an earlier run holds the port."""
    deadline, tls = time.monotonic() + seconds, _tls(ssl.PROTOCOL_TLS_CLIENT)
    while True:
        try:
            answer = _ask(own, hello, tls, seconds, max(0.1, deadline - time.monotonic()))
            break
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                why = error if isinstance(error, OSError) else "another program answers there"
                raise AbsentError(
                    f"process 0 was not reached at {own.host}:{own.port} within {seconds:.0f} s ({why}): start it too, "
                    "or give another --coordinator"
                ) from error
            time.sleep(RETRY_SECONDS)
    if "error" in answer:
        raise (AbsentError if answer["code"] == LOST else UserError)(answer["error"])
    return list(answer["machines"])


def _ask(own: ProcessInfo, hello: Hello, tls: ssl.SSLContext | None, seconds: float, left: float) -> dict[str, Any]:
    """Introduce this process within the seconds left; return process 0's answer once all have arrived."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((own.host, own.port), timeout=left))
        if tls:
            connection = stack.enter_context(tls.wrap_socket(connection))
        connection.sendall(json.dumps(hello._asdict()).encode() + b"\n")
        connection.settimeout(seconds + HELLO_SECONDS)
        return _read(connection, MAX_BYTES + MACHINE_BYTES * own.processes)


def _listen(own: ProcessInfo) -> socket.socket:
    """Open the coordinator's port: on every address, unless all processes are on this machine."""
    if is_loopback(own.host):
        family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
        return socket.create_server((own.host, own.port), family=family, backlog=own.processes)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", own.port), family=family, dualstack_ipv6=both, backlog=own.processes)


def _read(connection: socket.socket, most: int) -> dict[str, Any]:
    """Return the message of a connection; raise OSError if none comes, ValueError if it is not one of ours."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(MAX_BYTES)
        if not chunk:
            raise ConnectionError("the connection was closed without a message")
        line += chunk
        if len(line) > most:
            raise ValueError("too long")
    try:
        message = json.loads(line)
    except RecursionError as error:  # from a stranger, who must not end the meeting
        raise ValueError("nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


def _has_left(connection: socket.socket | None) -> bool:
    """Return whether a waiting process has closed its connection."""
    if connection is None:
        return False
    poll = select.poll()  # select.select cannot handle more than 1,024 files
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _absent(own: ProcessInfo, arrived: Collection[int]) -> str:
    absent = [i for i in range(own.processes) if i not in arrived]
    listed = ", ".join(map(str, absent[:MAX_LISTED])) + (", …" if len(absent) > MAX_LISTED else "")
    return f"process{'es' if len(absent) > 1 else ''} {listed} of {own.processes}"


def _tls(side: int) -> ssl.SSLContext | None:
    """Return a context that requires certificates of JAX's own authority from both sides, if they are set.

    Raises UserError for files that cannot be loaded.
    """
    files = {name: os.environ.get(name, "") for name in CERTIFICATES}
    certificate, key, authority = files.values()
    if not (certificate and authority):
        return None
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key or None)
        context.load_verify_locations(authority)
    except OSError as error:
        wrong = [name for name, file in files.items() if file and not os.access(file, os.R_OK)] or files
        listed = ", ".join(f"{name}={files[name]}" for name in wrong)
        raise UserError(
            f"{listed}: cannot be loaded ({error.strerror or error}): name PEM files that this process can read"
        ) from error
    return context
