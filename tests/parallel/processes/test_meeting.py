"""How processes find each other: here each is a thread, and JAX is not there."""

import contextlib
import fcntl
import resource
import socket
import threading

import pytest

from jformer.errors import UserError
from jformer.parallel.processes import meeting
from jformer.parallel.processes.children import free_port
from jformer.parallel.processes.meeting import AbsentError, meet
from jformer.parallel.processes.process_info import ProcessInfo

PATIENCE = 30.0  # seconds


def met(port, *numbers, count=3, seconds=PATIENCE, fields=None, counts=None, host="127.0.0.1"):
    """Let processes of these numbers meet; return what each got, an error or the machines of all."""
    results = [None] * len(numbers)

    def come(index, number):
        own = ProcessInfo(host, port, (counts or {}).get(number, count), number)
        try:
            results[index] = meet(own, (fields or {}).get(number, {}), seconds)
        except (UserError, AbsentError) as error:
            results[index] = error

    threads = [threading.Thread(target=come, args=each) for each in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def test_all_hear_on_which_machines_all_are():
    machine = socket.gethostname()
    assert met(free_port(), 2, 0, 1) == [[machine] * 3] * 3


def test_processes_of_one_machine_meet_at_its_address_of_version_6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert met(free_port(), 0, 1, count=2, host="::1") == [[socket.gethostname()] * 2] * 2


def test_the_answer_may_be_longer_than_a_message_of_a_stranger(monkeypatch):
    monkeypatch.setattr(meeting, "MAX_BYTES", 400)
    monkeypatch.setattr(socket, "gethostname", lambda: "m" * 200)
    assert met(free_port(), 2, 0, 1, seconds=3.0) == [["m" * 200] * 3] * 3


def test_who_left_is_noticed_among_over_a_thousand():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 2_000:
        if 0 <= hard < 2_000:
            pytest.skip(f"a process may open {hard} files here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2_000, hard))
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1_500)) as one:
        assert not meeting._has_left(one)
        theirs.close()
        assert meeting._has_left(one)


def test_a_certificate_that_is_not_there_is_named_at_once(monkeypatch):
    for name in meeting.CERTIFICATES[:2]:
        monkeypatch.setenv(name, f"/nowhere/{name}")
    monkeypatch.setenv(meeting.CERTIFICATES[2], __file__)
    for process in range(2):
        (refused,) = met(free_port(), process, seconds=3.0)
        with pytest.raises(
            UserError, match=r"^JAX_MTLS_CERT_FILE=/nowhere/JAX_MTLS_CERT_FILE, .*: cannot be loaded \(No"
        ):
            raise refused


def test_a_port_that_is_taken_may_be_free_later():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (refused,) = met(server.getsockname()[1], 0)
    assert isinstance(refused, AbsentError)
    assert "process 0 cannot listen there (Address already in use" in str(refused)


@pytest.mark.parametrize(
    ("numbers", "options", "kind", "says"),
    [
        ((0, 1), {"count": 4, "seconds": 1.0}, AbsentError, "processes 2, 3 of 4 did not arrive within 1 s"),
        ((0, 1, 1), {}, UserError, "--process=1 was started twice"),
        ((0, 1), {"counts": {1: 5}}, UserError, "process 1 .* was started with --processes=5, process 0 with 3"),
        ((0, 1, 2), {"fields": {2: {"jax": "0.1"}}}, UserError, "in jax: None on process 0 .*; '0.1' on"),
    ],
)  # fmt: skip
def test_who_does_not_fit_is_told_to_all(numbers, options, kind, says):
    results = met(free_port(), *numbers, **options)
    assert {type(result) for result in results} == {kind}
    for result in results:
        with pytest.raises(kind, match=says):
            raise result


def test_a_process_0_that_is_not_there_is_missed():
    port = free_port()
    (late,) = met(port, 1, seconds=0.5)
    with pytest.raises(AbsentError, match=f"process 0 was not reached at 127.0.0.1:{port} within 0 s"):
        raise late


def test_another_program_on_the_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        (refused,) = met(server.getsockname()[1], 1, seconds=1.0)
    with pytest.raises(AbsentError, match="another program answers there"):
        raise refused


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"kind": "end", "code": 0}\n',
        b"[1]\n",
        b'{"process": "1", "processes": 3, "machine": "m", "fields": {}}\n',
        b"x" * (1 << 17),
    ],
)
def test_what_strangers_say_is_ignored(words):
    port = free_port()

    def intrude():
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
                return

    stranger = threading.Thread(target=intrude)
    stranger.start()
    waiting = threading.Timer(0.3, lambda: results.extend(met(port, 1, 2)))
    results = []
    waiting.start()
    (machines,) = met(port, 0)
    stranger.join()
    waiting.join()
    assert results == [machines] * 2


def test_process_that_left_while_waiting_is_awaited_again():
    port = free_port()
    hello = b'{"process": 1, "processes": 3, "machine": "m", "fields": {}}\n'
    results = []

    def come_and_leave():
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as first:
                first.sendall(hello)
                break
        again = threading.Timer(0.3, lambda: results.extend(met(port, 1)))  # after the last of the others
        again.start()
        results.extend(met(port, 2))
        again.join()

    other = threading.Thread(target=come_and_leave)
    other.start()
    (machines,) = met(port, 0)
    other.join()
    assert results == [machines] * 2
