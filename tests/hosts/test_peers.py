"""Processes without JAX: who dies, sleeps, errs or comes late, and what the others say and do about it."""

import contextlib
import os
import signal
import socket
import sys
import time

import pytest

from tests.hosts.processes import ROOT, Processes

FIRST, OTHER = 0, 1


@pytest.fixture
def start(tmp_path):
    """Return a function: what happens to each process → the running processes."""
    started = []

    def start(*happens, count=None, limit=0):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        program = [sys.executable, "-m", "tests.hosts.places", str(port), str(count or len(happens))]
        commands = [[*program, str(i), what, str(limit)] for i, what in enumerate(happens)]
        started.append(Processes(tmp_path, commands, [{**os.environ, "PYTHONPATH": str(ROOT)}] * len(commands)))
        return started[-1]

    yield start
    for group in started:
        group.kill()


def places(group, process):
    return (group.folder / f"{process}.out").read_text().split("\n")[:-1]


def test_values_of_all_meet_and_all_come_to_the_end(start):
    group = start("nothing", "late:1", "nothing")
    group.end(0, 0, 0)
    assert [len(places(group, i)) for i in range(3)] == [100] * 3
    assert [group.said(i) for i in range(3)] == [""] * 3


@pytest.mark.parametrize("dead", [FIRST, OTHER])
def test_death_of_a_process_ends_all_others_at_once_with_one_line_that_names_it(start, dead):
    group = start("nothing", "nothing", "nothing")
    group.wait_for(group.folder / "2.out", "60\n")
    group.all[dead].kill()
    codes, seconds = group.wait()
    assert codes == [-signal.SIGKILL if i == dead else 75 for i in range(3)]
    assert seconds < 5
    for i in {0, 1, 2} - {dead}:
        assert group.said(i).startswith(f"jformer: process {dead} ({socket.gethostname()}) died at place ")
        assert group.said(i).count("\n") == 1


@pytest.mark.parametrize("stuck", [FIRST, OTHER])
def test_process_that_stands_still_is_named_by_all_with_their_stacks(start, stuck):
    happens = ["nothing"] * 3
    happens[stuck] = "sleep:1000"
    group = start(*happens, limit=2)
    seconds = group.end(75, 75, 75)
    assert seconds < 2 + 5 + 2  # two for the start
    for i in range(3):
        assert group.lines(i)[0].startswith(
            f"jformer: process {stuck} ({socket.gethostname()}) stands still at place 19"
        )
        assert "places.py" in group.said(i)  # in the stack of the main thread


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [FIRST, OTHER])
def test_process_that_is_stopped_altogether_is_named_too(start, frozen):
    group = start("nothing", "nothing", limit=2)
    group.wait_for(group.folder / "1.out", "60\n")  # it has been heard of at a place like others
    group.all[frozen].send_signal(signal.SIGSTOP)
    assert group.all[1 - frozen].wait(10) == 75
    assert f"jformer: process {frozen} " in group.lines(1 - frozen)[0]
    assert "stands still at place" in group.lines(1 - frozen)[0]


def test_slow_process_is_waited_for_and_named(start):
    group = start("nothing", "sleep:3", "nothing", limit=6)
    group.end(0, 0, 0)
    assert f"all waited 3 s for process 1 ({socket.gethostname()}) at place 19" in group.said(0).replace(" 4 s", " 3 s")
    assert group.said(1) == group.said(2) == ""


@pytest.mark.slow
def test_process_that_cannot_even_beat_for_a_while_is_not_ended(start):
    group = start("nothing", "lock:4", limit=6)
    group.end(0, 0)


def test_mistake_of_one_is_told_by_all(start):
    group = start("nothing", "mistake", "nothing")
    group.end(2, 2, 2)
    assert group.said(1) == "jformer: a file is missing\n"
    assert group.said(0) == group.said(2) == f"jformer: process 1 ({socket.gethostname()}): a file is missing\n"


def test_output_that_nobody_reads_ends_all_without_a_word(start):
    group = start("nothing", "unread", "nothing")
    group.end(0, 0, 0)
    assert [group.said(i) for i in range(3)] == [""] * 3
    assert len(places(group, 1)) == 19


def test_error_of_one_ends_the_others_naming_it(start):
    group = start("nothing", "nothing", "bug")
    group.end(75, 75, 1)
    line = f"jformer: process 2 ({socket.gethostname()}) failed at place 19: ValueError: a bug\n"
    assert group.said(0) == group.said(1) == line


@pytest.mark.parametrize("asked", [FIRST, OTHER])
def test_request_to_one_stops_all_after_the_same_place(start, asked):
    happens = ["nothing"] * 3
    happens[asked] = "stop"
    group = start(*happens)
    group.end(0, 0, 0)
    last = [places(group, i)[-1] for i in range(3)]
    assert last[0] == last[1] == last[2]
    assert last[0].startswith("stopped after 2")


def test_process_that_does_not_come_is_named_and_so_is_a_process_0_that_is_not_there(start):
    group = start("nothing", "nothing", count=4)
    group.end(75, 75)
    assert [group.said(i) for i in range(2)] == [
        "jformer: processes 2, 3 of 4 did not come within 3 s: start the command for each\n"
    ] * 2
    group = start("late:100", "nothing")
    assert group.all[1].wait(20) == 75
    assert "process 0 was not reached at localhost:" in group.said(1)
    assert "within 3 s" in group.said(1)


@pytest.mark.slow
def test_strangers_at_the_door_are_sent_away(start, tmp_path):
    group = start("nothing", "late:2")
    deadline = time.monotonic() + 10
    port = int(group.all[0].args[3])
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\n")
            break
    group.end(0, 0)
