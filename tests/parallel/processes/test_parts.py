"""What needs no second process: coordinates, what must be the same, who is dead, stuck or slow."""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from etils import epath
from jax._src import clusters
from jax._src.distributed import global_state
from jax._src.lib import _jax

from jformer.errors import LOST, UnavailableError, UserError
from jformer.parallel import processes
from jformer.parallel.processes import ending, group, service
from jformer.parallel.processes.handshake import STAMP, code_version, refuse_differences, saved_run, software
from jformer.parallel.processes.process_info import TASKS, VARIABLES, ProcessInfo, from_flags
from jformer.parallel.processes.stall import Pace, PeerWatch, Status, waited_for
from jformer.parallel.processes.watchdog import Watchdog
from jformer.storage import is_step

SLURM = {
    "SLURM_JOB_ID": "4100", "SLURM_STEP_NODELIST": "node[007-009],other", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in (*VARIABLES, *TASKS, *SLURM):
        monkeypatch.delenv(name, raising=False)


def test_flags_say_which_process_this_is():
    assert from_flags(False, None, None, None) is None
    assert from_flags(False, "[::1]:80", 3, 2) == ProcessInfo("::1", 80, 3, 2)


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
        ((True, "a:1", 2, 0), "--distributed replaces"),
        ((True, None, None, None), "--distributed found no cluster"),
    ],
)
def test_coordinates_that_cannot_be_are_refused(flags, named):
    with pytest.raises(UserError, match=named):
        from_flags(*flags)


def test_clusters_and_variables_say_it_too(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for nodes, local in (("4", None), ("2", [0])):  # one task a node has all of its devices
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", nodes)
        assert from_flags(True, None, None, None) == ProcessInfo("node007", 61440 + 4100 % 4096, 4, 2, local)
    for name, value in zip(VARIABLES, ("b:2", "5", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert from_flags(True, None, None, None) == ProcessInfo("b", 2, 5, 4)
    monkeypatch.setenv(VARIABLES[2], "five")
    with pytest.raises(UserError, match="must be numbers"):
        from_flags(True, None, None, None)
    monkeypatch.delenv(VARIABLES[2])
    with pytest.raises(UserError, match="JAX_PROCESS_ID is not set"):
        from_flags(True, None, None, None)


def test_a_slice_of_tpus_meets_at_the_port_that_its_firewall_leaves_open(monkeypatch):
    found = ["t1v-0:8482", 4, 2, None]
    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: found)
    assert from_flags(True, None, None, None) == ProcessInfo("t1v-0", 8476, 4, 2)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "8482")
    assert from_flags(True, None, None, None) == ProcessInfo("t1v-0", 8482, 4, 2)


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_cannot_be_written_is_not_shared(tmp_path, monkeypatch, shared):
    alone = SimpleNamespace(process=0, agree=lambda value, combine: combine([value]), name=str)
    monkeypatch.setattr(group, "_service", alone)
    monkeypatch.setattr(group, "SHARED_SECONDS", 0.0)
    if not shared:
        (tmp_path / "cache").write_text("a file")
    assert processes.is_shared(tmp_path / "cache" / "compiled") == shared
    assert not [*tmp_path.rglob("processes-*")]


def test_a_cluster_that_does_not_answer_may_do_so_later(monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to recognize coordinator address run-0")

    monkeypatch.setattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params", fail)
    with pytest.raises(UnavailableError, match="coordinates cannot be read: Failed to recognize"):
        from_flags(True, None, None, None)


def refuse(error):
    raise error


def test_single_process_is_process_0_and_agrees_with_itself():
    with processes.join_run(None), processes.main_process_first():
        processes.enter_phase("update 1", kind="update")
        processes.check_same({"seed": 0})
        assert processes.is_main_process()
        assert processes.agree(3, sum) == 3
        for kind in (UserError, UnavailableError):
            with pytest.raises(UserError, match="no file") as error:
                processes.from_main_process(functools.partial(refuse, kind("no file")))
            assert type(error.value) is kind
        assert [processes.should_stop(1, asked) for asked in (False, True)] == [False, True]


def test_the_field_that_differs_is_named_with_values_and_processes():
    alike = software()
    refuse_differences([alike, {**alike}], ["a", "b"])
    own = ("config.data.cache_dir", "config.data.dir")
    fields = [{**dict.fromkeys(own, str(i)), "x": 1, "config.seed": seed} for i, seed in enumerate((0, 7, 0))]
    with pytest.raises(UserError, match=r"config\.seed: 0 on process 0 \(a\), 2 \(c\); 7 on process 1 \(b\); start"):
        refuse_differences(fields, ["a", "b", "c"])


def test_another_run_and_an_older_copy_of_one_are_told_apart(tmp_path):
    def saved(*steps, tokenizer="a", written="today"):
        files = {"config.json": "{}", "tokenizer/shared.json": tokenizer}
        files |= {f"checkpoints/{name}/{STAMP}": "" for name in ("90.tmp", "0099")}  # which are no steps
        files |= {f"checkpoints/{step}/{STAMP}": written for step in steps}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return saved_run(tmp_path, is_step)

    none, nine, ten = saved(), saved(9), saved(10)
    found = [none, nine, ten, saved(10, tokenizer="b"), saved(10, written="yesterday")]
    assert len({tuple(each.items()) for each in found}) == 5
    assert ten[f"the last checkpoint of {tmp_path}"].startswith("10 ")
    assert saved(10) == saved_run(tmp_path, is_step)
    moved = saved_run(epath.Path(tmp_path.rename(tmp_path.parent / "run[1]")), is_step)
    assert [*moved.values()] == [*ten.values()]


def test_pace_counts_a_busy_processor_as_progress_only_where_nothing_was_timed():
    clock, used = [0.0], [0.0]
    pace = Pace(lambda: clock[0], lambda: used[0])
    for kind, limit, idle in (("here", 10, 0.0), ("here", 10, 5.0), (None, 10, 0.0), ("here", 9, 0.0)):
        pace.enter("here", kind, limit)
        clock[0] += 5
        used[0] += 4
        assert pace.status().idle == idle
    pace.enter("there")
    clock[0] += 5
    used[0] += 0.01
    assert pace.status() == Status(entered=5, phase="there", idle=5.0)
    with pace.working_elsewhere():  # such as a command that scores, while this process waits
        clock[0] += 5
        assert pace.status().idle == 0.0
    clock[0] += 5
    assert pace.status().idle == 5.0


def test_a_process_alone_is_stuck_where_an_update_takes_long_and_nowhere_else():
    clock = [0.0]
    alone = Watchdog(lambda: clock[0])

    def stands(seconds, step=1.0):
        found = []
        for _ in range(round(seconds / step)):
            clock[0] += step
            found.append(alone.stuck())
        return next(filter(None, found), None)

    alone.enter_phase("update 1", "update")
    assert stands(200) is None  # compiling
    for number in (2, 3, 4):
        alone.enter_phase(f"update {number}", "update")
        assert stands(20) is None
        alone.pace.record_step_time(20.0)
    assert stands(170) is None
    assert stands(30) == "stuck at update 4 for 201 s (train.stall_seconds); the stacks are above"
    alone.stall_seconds = 5.0
    alone.enter_phase("update 5", "update")
    assert stands(1_000, step=1_000) is None  # suspended, and on it goes
    alone.enter_phase("saving update 5", None)
    assert stands(1_000) is None


def test_limit_is_ten_updates_at_least_a_minute_and_longer_before_one_is_known():
    pace = Pace()
    assert pace.limit(0) == 600
    for seconds in (1.0, 1.0, 400.0):
        pace.record_step_time(seconds)
    assert pace.limit(0) == 60
    assert pace.limit(7) == 7
    for _ in range(3):
        pace.record_step_time(30.0)
    assert pace.limit(0) == 300


def test_those_who_entered_the_fewest_phases_are_waited_for_once_nobody_makes_progress():
    behind, ahead = Status(1, 4, "update 4", True, 9.0), Status(1, 6, "update 6", True, 8.0)
    assert waited_for([ahead, behind, ahead], 7) == [1]
    assert waited_for([ahead, behind, ahead], 8.5) == []  # who is ahead still works
    assert waited_for([ahead, ahead], 7) == [0, 1]
    assert waited_for([ahead, behind._replace(steady=False)], 7) == []
    assert waited_for([ahead, behind._replace(steady=False, idle=71)], 7) == [1]


@pytest.fixture
def watch():
    """Return what process 0 sees of itself and two others, and a function: after some seconds, their statuses."""
    now = [0.0]
    found = PeerWatch(["a", "b", "c"], lambda: now[0])
    beats = itertools.count(1)

    def after(seconds, *statuses):
        now[0] += seconds
        found.update({i: each._replace(beat=next(beats)) for i, each in enumerate(statuses) if each})

    return found, after


def test_silence_is_death_in_a_steady_phase_or_once_a_process_failed(watch):
    found, after = watch
    working = Status(phase="update 3", steady=True)
    after(1, working, working, working._replace(steady=False, phase="saving"))
    after(7, working, None, None)
    assert found.dead(8, 3) is None
    after(2, working, None, None)
    assert found.dead(8, 3) == "b died or is frozen at update 3: no beat for 9 s"
    after(1, working, working, None)
    assert found.dead(8, 3) is None  # c may hold its interpreter
    after(1, working._replace(failed=True), working, None)
    assert found.dead(8, 3) == "c died or is frozen at saving: no beat for 11 s"


def test_one_that_is_stuck_is_named_and_so_is_one_that_was_slow(watch):
    found, after = watch
    ahead, behind = Status(entered=5, phase="update 5", steady=True), Status(entered=4, phase="update 4", steady=True)
    after(1, ahead, ahead, behind)
    after(4, *(each._replace(idle=4.0) for each in (ahead, ahead, behind)))
    assert found.stuck(10) is None
    assert found.stuck(3) == "c is stuck at update 4 for 4 s (train.stall_seconds); the stacks are above"
    assert found.slow(0) == []
    after(1, ahead, ahead, ahead)
    assert found.slow(0) == ["all waited 5 s for c at update 4"]
    assert found.slow(0) == []
    after(9, *(each._replace(idle=9.0) for each in (ahead, ahead, ahead)))
    assert found.stuck(3).startswith("all processes are stuck at update 5 for 9 s")


def test_client_of_jaxs_coordination_service_has_the_methods_that_service_uses():
    source = Path(service.__file__).read_text()
    used = set(re.findall(r"_client\.(\w+)\(", source))
    assert used == {"key_value_set", "blocking_key_value_get", "key_value_delete", "key_value_dir_get"}
    assert all(hasattr(_jax.DistributedRuntimeClient, name) for name in used)
    assert hasattr(global_state, "client")
    assert "global_state.client" in source
    others = [path for path in Path(processes.__file__).parents[2].rglob("*.py") if path != Path(service.__file__)]
    assert not [path for path in others if "_src.distributed" in path.read_text()]


class Store:
    """A client whose requests for a key end after their milliseconds, as JAX's do, or once it is closed."""

    def __init__(self):
        self.values, self.timeouts, self.closed = {}, 0, False
        self.news = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.news:
            self.values[key] = value
            self.news.notify_all()

    def key_value_delete(self, key):
        self.values.pop(key, None)

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(folder)]

    def blocking_key_value_get(self, key, milliseconds):
        with self.news:
            self.news.wait_for(lambda: key in self.values or self.closed, milliseconds / 1000)
            if self.closed:
                raise jax.errors.JaxRuntimeError("CANCELLED: the client is shut down")
            if key not in self.values:
                self.timeouts += 1
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]


def test_run_outlasts_its_requests_for_keys_and_can_still_stop(monkeypatch):
    store, ended = Store(), []
    monkeypatch.setattr(service, "WAIT_MILLISECONDS", 5)
    monkeypatch.setattr(service, "_connect", lambda own: store)
    monkeypatch.setattr(service.Service, "_exit", lambda self, *order, **more: ended.append((order, more)))
    own = service.Service(ProcessInfo("a", 1, 2, 0), ["a", "b"])
    while store.timeouts < 6 and not ended:
        time.sleep(0.005)
    late = threading.Timer(0.05, store.key_value_set, ("agree/1/1", "3"))
    late.start()
    try:
        assert own.agree(4, sum) == 7
        store.key_value_set("frozen/1", "8")
        own.should_stop(1, asked=True)
        own._threads[-1].join(10)
        assert own.should_stop(9, asked=False)
        assert ended == []
    finally:
        store.closed = True
        own._closing.set()
        for thread in own._threads:
            thread.join()


def test_process_ends_with_its_code_even_if_nobody_reads_what_it_says(monkeypatch):
    def broken(*_, **__):
        raise BrokenPipeError

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(ending, "os", SimpleNamespace(write=broken, _exit=leave))
    monkeypatch.setattr(ending, "faulthandler", SimpleNamespace(dump_traceback=broken))
    for stacks in (False, True):
        with pytest.raises(SystemExit) as ended:
            service.Service._exit(SimpleNamespace(process=1), LOST, "a line", stacks)
        assert ended.value.code == LOST
    monkeypatch.setattr(service.sys, "stderr", SimpleNamespace(write=broken, flush=broken))
    service._log("a line")


@pytest.mark.parametrize(("looks", "ends"), [([1.0] * 9, True), ([1.0, 1.0, 9.0, 1.0, 1.0], False)])
def test_process_that_was_held_does_not_take_process_0_for_frozen(monkeypatch, looks, ends):
    clock, rest = [0.0], iter(looks)  # seconds between two looks, without an answer in between

    def wait(_):
        clock[0] += (step := next(rest, 0.0))
        return not step

    def leave(*_):
        raise SystemExit

    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    own = SimpleNamespace(
        process=1, count=2, name=str, pace=Pace(), _every=1.0, _beaten=0.0, _failed=False, _exit=leave,
        _closing=SimpleNamespace(wait=wait), _ending=threading.Lock(),
    )  # fmt: skip
    with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
        service.Service._judge(own)


def test_service_of_jax_that_does_not_start_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server\nand a trace")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(
        processes.AbsentError, match=r"^coordinator a:1: .*\(UNKNOWN: Failed to start RPC server\): .*$"
    ):
        service._connect(ProcessInfo("a", 1, 2, 0))


def test_the_code_is_named_by_its_commit_or_else_by_its_version(tmp_path, monkeypatch):
    def git(*arguments):
        names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        return subprocess.run(
            ["git", "-C", tmp_path, *arguments], check=True, capture_output=True, text=True, env={**os.environ, **names}
        ).stdout.strip()

    package, installed = tmp_path / "package", tmp_path / "env" / "package"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    assert code_version(package) == version("jformer")
    git("init")
    git("add", "package")
    git("commit", "-m", "x")
    git("tag", "v1")
    assert code_version(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert code_version(package) == git("rev-parse", "HEAD") + "-dirty"
    assert code_version(installed) == version("jformer")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(package) == version("jformer")
