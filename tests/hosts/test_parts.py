"""What needs no second process: coordinates, messages, what must be the same, who stands still."""

import select
import socket

import pytest

from jformer import hosts
from jformer.errors import UserError
from jformer.hosts.coordinates import VARIABLES, Coordinates, from_flags
from jformer.hosts.handshake import STAMP, refuse_differences, saved_run, software
from jformer.hosts.link import Link
from jformer.hosts.stall import Pace, Standing, waited_for

SLURM = {
    "SLURM_JOB_ID": "4100", "SLURM_STEP_NODELIST": "node[007-009],other", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def test_flags_say_which_process_this_is():
    assert from_flags(False, None, None, None) is None
    assert from_flags(False, "[::1]:80", 3, 2) == Coordinates("::1", 80, 3, 2)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((False, "a:1", None, 0), "--processes is missing"),
        ((False, "a:1", 2, None), "--process is missing"),
        ((False, "a:1", 2, 2), "--process=2 must be 0 to 1"),
        ((False, "a:1", 2, -1), "--process=-1 must be 0 to 1"),
        ((False, "a:1", 0, 0), "--processes=0 must be at least 1"),
        ((False, "a", 2, 0), "--coordinator='a' must be HOST:PORT"),
        ((False, "a:99999", 2, 0), "must be HOST:PORT"),
        ((True, "a:1", 2, 0), "--distributed finds out"),
        ((True, None, None, None), "--distributed found no cluster"),
    ],
)
def test_coordinates_that_cannot_be_are_refused(flags, named):
    with pytest.raises(UserError, match=named):
        from_flags(*flags)


def test_clusters_and_variables_say_it_too(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert from_flags(True, None, None, None) == Coordinates("node007", 61440 + 4100 % 4096, 4, 2, [0])
    for name, value in zip(VARIABLES, ("b:2", "5", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert from_flags(True, None, None, None) == Coordinates("b", 2, 5, 4)
    monkeypatch.setenv(VARIABLES[2], "five")
    with pytest.raises(UserError, match="must be numbers"):
        from_flags(True, None, None, None)
    monkeypatch.delenv(VARIABLES[2])
    with pytest.raises(UserError, match="JAX_PROCESS_ID is not set"):
        from_flags(True, None, None, None)


def test_single_process_is_first_and_agrees_with_itself():
    with hosts.joined(None), hosts.in_turn():
        hosts.reach("update 1", like="update")
        hosts.same({"seed": 0})
        assert hosts.first()
        assert hosts.agree(3, sum) == 3
        assert [hosts.stopping(1, asked) for asked in (False, True)] == [False, True]


def test_the_field_that_differs_is_named_with_values_and_processes():
    alike = software()
    refuse_differences([alike, {**alike}], ["a", "b"])
    own = ("config.data.cache_dir", "config.data.dir")
    fields = [{**dict.fromkeys(own, str(i)), "x": 1, "config.seed": seed} for i, seed in enumerate((0, 7, 0))]
    with pytest.raises(UserError, match=r"config\.seed: 0 on process 0 \(a\), 2 \(c\); 7 on process 1 \(b\); start"):
        refuse_differences(fields, ["a", "b", "c"])


def test_another_run_and_an_older_copy_of_one_are_told_apart(tmp_path):
    def saved(*steps, tokenizer="a", written="today"):
        files = {"config.json": "{}", "tokenizer/shared.json": tokenizer, "checkpoints/90.tmp/" + STAMP: ""}
        files |= {f"checkpoints/{step}/{STAMP}": written for step in steps}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return saved_run(tmp_path)

    none, nine, ten = saved(), saved(9), saved(10)
    found = [none, nine, ten, saved(10, tokenizer="b"), saved(10, written="yesterday")]
    assert len({tuple(each.items()) for each in found}) == 5
    assert ten[f"the last checkpoint of {tmp_path}"].startswith("10 ")
    assert saved(10) == saved_run(tmp_path)


def test_what_comes_right_behind_the_first_message_is_not_lost():
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as other, server.accept()[0] as connection:
        other.sendall(b'{"kind": "welcome"}\n{"kind": "end"}\n')
        link = Link(connection)
        assert link.first() == {"kind": "welcome"}
        assert select.select([link], [], [], 0)[0] == [link]  # by which `peers` knows of it
        assert link.receive() == [{"kind": "end"}]


def test_pace_counts_a_busy_processor_as_progress_only_where_nothing_was_timed():
    clock, used = [0.0], [0.0]
    pace = Pace(lambda: clock[0], lambda: used[0])
    for like, limit, idle in (("here", 10, 0.0), ("here", 10, 5.0), (None, 10, 0.0), ("here", 9, 0.0)):
        pace.reach("here", like, limit)
        clock[0] += 5
        used[0] += 4
        assert pace.standing().idle == idle
    pace.reach("there")
    clock[0] += 5
    used[0] += 0.01
    assert pace.standing() == Standing(5, "there", False, 5.0)


def test_limit_is_ten_updates_at_least_a_minute_and_longer_before_one_is_known():
    pace = Pace()
    assert pace.limit(0) == 600
    for seconds in (1.0, 1.0, 400.0):
        pace.took(seconds)
    assert pace.limit(0) == 60
    assert pace.limit(7) == 7
    for _ in range(3):
        pace.took(30.0)
    assert pace.limit(0) == 300


def test_those_who_passed_the_fewest_places_are_waited_for_once_nobody_makes_progress():
    behind, ahead = Standing(4, "update 4", True, 9.0), Standing(6, "update 6", True, 8.0)
    assert waited_for([ahead, behind, ahead], 7) == [1]
    assert waited_for([ahead, behind, ahead], 8.5) == []  # who is ahead still works
    assert waited_for([ahead, ahead], 7) == [0, 1]
    assert waited_for([ahead, behind._replace(steady=False)], 7) == []
    assert waited_for([ahead, behind._replace(steady=False, idle=71)], 7) == [1]
