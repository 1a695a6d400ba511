"""How the processes of a run find each other: they come to process 0, which tells them who is there."""

import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Collection

from jformer.errors import UserError
from jformer.hosts.coordinates import Coordinates, here
from jformer.hosts.link import Link, LostError, Message, connect, listen, part
from jformer.hosts.peers import FEW, LOST, Peers

PATIENCE = 10.0  # seconds until process 0 says whom it is waiting for
HELLO = 5.0  # seconds for who connects to say who it is


class AbsentError(Exception):
    """A process of the run did not come, or process 0 is not there."""


def meet(own: Coordinates, seconds: float, service: int) -> tuple[Peers, int]:
    """Return the other processes, once all are there, and the port that process 0 gives as that of JAX's service.

    Raises AbsentError if that takes longer than so many seconds, UserError if two say that they are the same one, or
    they count themselves differently.
    """
    return (_gather(own, seconds, service), service) if own.process == 0 else _come(own, seconds)


def _gather(own: Coordinates, seconds: float, service: int) -> Peers:
    """Wait for the others, as process 0."""
    try:
        server = listen(own.host, own.port)
    except OSError as error:
        raise UserError(
            f"coordinator {own.host}:{own.port}: process 0 cannot listen there ({error.strerror or error}); its host "
            "must be this machine, its port free"
        ) from error
    links: dict[int, Link] = {}
    names = {0: here()}
    try:
        with server:
            _admit_all(own, seconds, server, links, names)
    except (UserError, AbsentError) as error:
        code = LOST if isinstance(error, AbsentError) else 2
        _send_all(links, {"kind": "end", "code": code, "line": str(error)})
        part(links.values())
        raise
    everybody = [names[i] for i in range(own.processes)]
    _send_all(links, {"kind": "welcome", "names": everybody, "service": service})
    return Peers(0, everybody, links)


def _admit_all(
    own: Coordinates, seconds: float, server: socket.socket, links: dict[int, Link], names: dict[int, str]
) -> None:
    began, said = time.monotonic(), False
    while len(names) < own.processes:
        waited = time.monotonic() - began
        if waited > seconds:
            raise AbsentError(f"{_absent(own, names)} did not come within {seconds:.0f} s: start the command for each")
        if waited > PATIENCE and not said:
            said = True
            print(f"waiting for {_absent(own, names)}", file=sys.stderr, flush=True)
        server.settimeout(min(1.0, max(0.01, seconds - waited)))
        with contextlib.suppress(TimeoutError):
            _admit(own, Link(server.accept()[0]), links, names)


def _admit(own: Coordinates, link: Link, links: dict[int, Link], names: dict[int, str]) -> None:
    """Take in whoever connects; what does not speak like a process of ours is sent away."""
    link.socket.settimeout(HELLO)
    try:
        hello = link.first()
        process, processes, name = int(hello["process"]), int(hello["processes"]), str(hello["name"])
    except (LostError, ValueError, LookupError, TypeError):
        link.socket.close()
        return
    link.restore_timeout()
    if processes != own.processes or not 0 < process < own.processes:
        links[-1] = link  # it is to hear of it, too
        raise UserError(
            f"process {process} ({name}) was started with --processes={processes}, process 0 with {own.processes}: "
            "start all with the same"
        )
    if process in links and not _is_gone(links[process]):
        other, links[-1] = names[process], link
        raise UserError(f"--process={process} was started twice, on {other} and {name}: number them 0, 1, …")
    links[process], names[process] = link, name


def _is_gone(link: Link) -> bool:
    """Tell whether a process that has nothing to say yet has closed its connection: a supervisor starts it again."""
    return bool(select.select([link], [], [], 0)[0])


def _come(own: Coordinates, seconds: float) -> tuple[Peers, int]:
    """Go to process 0, as another."""
    late = f"process 0 was not reached at {own.host}:{own.port} within {seconds:.0f} s"
    try:
        link = connect(own.host, own.port, seconds)
        link.send({"process": own.process, "processes": own.processes, "name": here()})
        link.socket.settimeout(None)  # the others may be late
        answer = link.first()
    except LostError as error:
        why = str(error.__cause__ or error)
        raise AbsentError(f"{late} ({why}): start the command for it too, or say another --coordinator") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"coordinator {own.host}:{own.port}: another program answers there; name another port"
        ) from error
    if answer["kind"] == "end":
        raise (AbsentError if answer["code"] == LOST else UserError)(answer["line"])
    link.restore_timeout()
    return Peers(own.process, answer["names"], {0: link}), int(answer["service"])


def _send_all(links: dict[int, Link], message: Message) -> None:
    for link in links.values():
        with contextlib.suppress(LostError):  # its absence is noticed where it is listened to
            link.send(message)


def _absent(own: Coordinates, names: Collection[int]) -> str:
    absent = [i for i in range(own.processes) if i not in names]
    listed = ", ".join(map(str, absent[:FEW])) + (", …" if len(absent) > FEW else "")
    return f"process{'es' if len(absent) > 1 else ''} {listed} of {own.processes}"
