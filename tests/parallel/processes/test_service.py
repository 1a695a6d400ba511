"""Processes without devices: one dies, freezes, is stuck, errs or comes late; what do the others say and do?"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jformer.parallel.processes.children import free_port
from tests.parallel.processes.processes import ROOT, Processes
from tests.parallel.processes.proxy import Proxy

MAIN, OTHER = 0, 1
ABORTED = -signal.SIGABRT  # by JAX's C++, which a shell calls 134
HERE = socket.gethostname()
LONG = "sleep:1000"


@pytest.fixture
def start(tmp_path):
    """Return a function: what happens to each process → the running processes."""
    started = []

    def start(*happens, count=None, limit=0, meeting=60, port=None, environment=()):
        program = [sys.executable, "-m", "tests.parallel.processes.phases", str(port or free_port())]
        commands = [[*program, str(count or len(happens)), str(i), what, str(limit)] for i, what in enumerate(happens)]
        shared = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MEETING_SECONDS": str(meeting)}
        started.append(Processes(tmp_path, commands, [shared | dict(environment)] * len(commands)))
        return started[-1]

    yield start
    for group in started:
        group.kill()


def phases(group, process):
    return (group.folder / f"{process}.out").read_text().split("\n")[:-1]


def test_values_of_all_meet_and_a_request_to_one_stops_all_after_the_same_update(start):
    group = start("nothing", "late:1", "stop")
    group.end(0, 0, 0)
    last = [phases(group, i)[-1] for i in range(3)]
    assert last[0] == last[1] == last[2]
    assert last[0].startswith("stopped after ")
    assert [group.said(i) for i in range(3)] == [""] * 3


@pytest.mark.slow
@pytest.mark.parametrize("asked", [MAIN, OTHER])
def test_request_may_come_to_any_and_without_one_all_come_to_the_end(start, asked):
    happens = ["nothing"] * 4
    happens[asked] = "stop"
    group = start(*happens)
    group.end(0, 0, 0, 0)
    last = {phases(group, i)[-1] for i in range(4)}
    assert len(last) == 1
    assert last.pop().startswith("stopped after 2")
    group = start("nothing", "nothing")
    group.end(0, 0)
    assert phases(group, 0)[-1] == phases(group, 1)[-1] == "60"
    assert group.said(0) == group.said(1) == ""


@pytest.mark.slow
def test_dead_process_is_named_by_all_others_in_a_line(start):
    group = start("nothing", "nothing", LONG)
    group.wait_for(group.folder / "2.out", "beaten\n")
    group.all[2].kill()
    group.end(75, 75, -signal.SIGKILL)
    line = f"jformer: process 2 ({HERE}) died or is frozen at phase 19: "
    assert all(group.said(i).startswith(line) for i in (0, 1))
    assert all(group.said(i).count("\n") == 1 for i in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_end_of_process_0_ends_the_others_by_our_word_or_by_jaxs_abort(start, number):
    group = start(LONG, "nothing", "nothing")
    group.wait_for(group.folder / "1.out", "19\n")
    group.all[0].send_signal(number)
    others = [process.wait(60) for process in group.all[1:]]
    assert set(others) <= {75, ABORTED}
    for i, code in enumerate(others, 1):
        if code == 75:
            assert group.lines(i)[0].startswith(f"jformer: process 0 ({HERE}) ")
    group.all[0].kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "silence"])
def test_process_whose_way_is_cut_ends_and_so_do_the_others(start, how):
    port = free_port()
    with Proxy(port) as proxy:
        group = start("nothing", f"far:{proxy.port}", "nothing", port=port)
        group.wait_for(group.folder / "1.out", "beaten\n")
        getattr(proxy, how)()
        codes = group.wait()
    assert set(codes) <= {75, ABORTED}
    assert codes[0] == 75
    assert f"process 1 ({HERE}) died or is frozen at phase " in group.said(0)


@pytest.mark.slow
def test_frozen_process_ends_the_others_and_is_named(start):
    group = start("nothing", LONG)
    group.wait_for(group.folder / "1.out", "beaten\n")
    group.all[1].send_signal(signal.SIGSTOP)
    code = group.all[0].wait(60)
    assert code in (75, ABORTED)  # on a busy machine JAX's own heartbeat may be first
    assert code == ABORTED or f"process 1 ({HERE}) died or is frozen at phase 19" in group.lines(0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [MAIN, OTHER])
def test_stuck_process_is_named_by_all_with_their_stacks(start, stuck):
    happens = ["nothing"] * 3
    happens[stuck] = LONG
    group = start(*happens, limit=3)
    group.end(76, 76, 76)
    for i in range(3):
        assert group.lines(i)[0].startswith(f"jformer: process {stuck} ({HERE}) is stuck at phase 19")
        assert "phases.py" in group.said(i)  # in the stack of the main thread


@pytest.mark.slow
def test_slow_process_is_waited_for_and_named_even_if_it_cannot_beat(start):
    group = start("nothing", "lock:5", "nothing", limit=30)
    group.end(0, 0, 0)
    assert f" s for process 1 ({HERE}) at phase 1" in group.said(0)
    assert group.said(1) == group.said(2) == ""


@pytest.mark.slow
def test_mistake_of_one_is_told_by_all(start):
    group = start("nothing", "mistake", "nothing")
    group.end(2, 2, 2)
    assert group.said(1) == "jformer: a file is missing\n"
    assert group.said(0) == group.said(2) == f"jformer: process 1 ({HERE}): a file is missing\n"


@pytest.mark.slow
def test_error_of_one_ends_the_others_naming_it(start):
    group = start("nothing", "nothing", "bug")
    group.end(75, 75, 1)
    assert group.said(0) == group.said(1) == f"jformer: process 2 ({HERE}) failed at phase 19: ValueError: a bug\n"


@pytest.mark.slow
def test_output_that_nobody_reads_ends_all_without_a_word(start):
    group = start("nothing", "unread", "nothing")
    group.end(0, 0, 0)
    assert [group.said(i) for i in range(3)] == [""] * 3
    assert len(phases(group, 1)) == 19


@pytest.mark.slow
def test_coordinator_of_this_machine_listens_nowhere_else(start):
    port = free_port()
    group = start(LONG, "nothing", port=port)
    group.wait_for(group.folder / "1.out", "19\n")
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    sockets = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    listening = [own for _, own, _, state, *_ in sockets if state == "0A" and own.endswith(f":{port:04X}")]
    assert len(listening) == 1
    assert listening[0].endswith(f"0100007F:{port:04X}")  # 127.0.0.1, maybe as an address of IPv6


@pytest.mark.slow
def test_certificates_let_in_their_own_and_nobody_else(start, tmp_path):
    pytest.importorskip("jax", minversion="0.12")

    def made(name, *authority):
        subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=URI:spiffe://run/{name},IP:127.0.0.1"]
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out"]
        subprocess.run([*new, certificate, *subject, *authority], check=True, capture_output=True)
        return {"JAX_MTLS_CERT_FILE": str(certificate), "JAX_MTLS_KEY_FILE": str(key)}

    made("authority")
    signed = [
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-CA",
        tmp_path / "authority.pem",
        "-CAkey",
        tmp_path / "authority.key",
    ]
    trust = {"JAX_MTLS_CA_FILE": str(tmp_path / "authority.pem")}
    ours, strangers = made("worker", *signed) | trust, made("stranger") | trust
    start("nothing", "nothing", environment=ours).end(0, 0)
    port = free_port()
    group = start("nothing", count=2, environment=ours, port=port, meeting=12)
    other = [sys.executable, "-m", "tests.parallel.processes.phases", str(port), "2", "1", "nothing", "0"]
    for environment in (strangers, {}):
        given = {**os.environ, "PYTHONPATH": str(ROOT), "MEETING_SECONDS": "3", **environment}
        refused = subprocess.run(other, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120)
        assert refused.returncode == 75
        assert "process 0 was not reached" in refused.stderr
    group.end(75)
    assert "process 1 of 2 did not arrive" in group.said(0)
