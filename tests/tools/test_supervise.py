import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jformer.tools.supervise import newest_checkpoint
from tests.watching import living, wait_until

STAND_IN = Path(__file__).parents[1] / "launch" / "stand_in.py"
DIE_ONCE = """
import os, time
if attempt == 0:
    os.kill(os.getpid(), 9) if process == 1 else time.sleep(600)
"""
SAVE_WHEN_TOLD = """
import signal, sys, time
def save(number, frame):
    print('saved', flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(600)
"""
SAVE_SLOWLY = SAVE_WHEN_TOLD.replace("print('saved'", "print('saving', flush=True); time.sleep(0.5); print('saved'")


@pytest.fixture
def supervise(tmp_path):
    """Return a function that starts a supervisor of stand-ins; at the end none may be left."""
    started = []

    def start(code, *options):
        command = [sys.executable, "-m", "jformer.supervise", "--pause=0", "--grace=0.3", *options]
        process = subprocess.Popen(
            [*command, "--", f"--workdir={tmp_path}/run", f"--code={code}"],
            env=os.environ | {"JFORMER_COMMAND": f"'{sys.executable}' '{STAND_IN}'"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outcome(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def starts(tmp_path, process=0):
    return [json.loads(line) for line in (tmp_path / "run" / f"starts-{process}.jsonl").read_text().splitlines()]


def test_processes_get_an_address_to_meet_and_end_together(supervise, tmp_path):
    logs = tmp_path / "logs"
    code, out, err = outcome(supervise("print('I am', process)", "--processes=2", f"--logs={logs}"))
    assert code == 0
    assert (out, err) == ("I am 0\n", "supervise: running\nsupervise: done\n")
    assert (logs / "process-1.log").read_text() == "I am 1\n"
    places = [starts(tmp_path, i)[0][2:] for i in range(2)]
    assert [place[1:] for place in places] == [["--processes=2", "--process=0"], ["--processes=2", "--process=1"]]
    assert places[0][0] == places[1][0]
    assert places[0][0].startswith("--coordinator=127.0.0.1:")


def test_a_part_of_a_larger_run_needs_its_first_number(supervise):
    code, _, err = outcome(supervise("pass", "--processes=2", "--", "--distributed=true"))
    assert code == 2
    assert "--processes with --distributed needs JAX_PROCESS_ID" in err


def test_a_single_process_gets_no_address(supervise, tmp_path):
    assert outcome(supervise("pass"))[0] == 0
    assert len(starts(tmp_path)[0]) == 2


def test_all_start_again_when_one_is_killed(supervise, tmp_path):
    code, _, err = outcome(supervise(DIE_ONCE, "--processes=2"))
    assert code == 0
    assert "running again after exit code 137 (restart 1 of 5)" in err
    assert [len(starts(tmp_path, i)) for i in range(2)] == [2, 2]


@pytest.mark.parametrize(
    ("end", "code", "what"),
    [
        ("os._exit(75)", 75, "missing, or storage was unavailable"),
        ("os.abort()", 134, "lost"),
        ("os._exit(76)", 76, "stuck"),
    ],
)
def test_a_run_that_lost_a_process_goes_on(supervise, tmp_path, end, code, what):
    alone = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); attempt or {end}"
    ended, _, err = outcome(supervise(alone))
    assert ended == 0
    assert f"after exit code {code}, from the last checkpoint: a process was {what} (restart 1 of 5)" in err
    assert len(starts(tmp_path)) == 2


def test_a_mistake_is_not_restarted(supervise, tmp_path):
    code, _, err = outcome(supervise("import time; time.sleep(600) if process else exit(2)", "--processes=2"))
    assert code == 2
    assert err.endswith("supervise: mistake, see the log\n")
    assert len(starts(tmp_path)) == 1


def test_it_gives_up_after_so_many_failures(supervise, tmp_path):
    state = tmp_path / "state"
    assert outcome(supervise("exit(75)", "--retries=2", f"--state={state}"))[0] == 75
    assert len(starts(tmp_path)) == 3
    assert ": gave up: exit code 75, and no new checkpoint since 2 restarts (boot " in state.read_text()


def test_failures_count_anew_after_a_checkpoint(supervise, tmp_path):
    code, _, _ = outcome(supervise("checkpoint(attempt); exit(1 if attempt < 4 else 0)", "--retries=1"))
    assert code == 0
    assert len(starts(tmp_path)) == 5


@pytest.mark.parametrize("name", ["broken-", "00"])
def test_a_folder_that_is_not_a_step_is_no_new_checkpoint(supervise, tmp_path, name):
    code, _, err = outcome(supervise(f"checkpoint(f'{name}{{attempt}}'); exit(1 if attempt < 4 else 0)", "--retries=1"))
    assert code == 1, err
    assert len(starts(tmp_path)) == 2


def test_the_newest_checkpoint_is_found_whatever_the_workdir_is_called(tmp_path):
    for step in (20, 40):
        (tmp_path / f"lr[0.1]/checkpoints/{step}").mkdir(parents=True)
    (tmp_path / "lr[0.1]/checkpoints/20/commit_success.txt").touch()
    assert newest_checkpoint([f"--workdir={tmp_path}/lr[0.1]"]) == 20
    assert newest_checkpoint([f"--workdir={tmp_path}/other"]) == newest_checkpoint([]) == -1


def test_a_state_is_replaced_whole_and_names_the_boot(supervise, tmp_path):
    state, boot = tmp_path / "state", Path("/proc/sys/kernel/random/boot_id")
    state.write_text("before\n")
    with state.open() as opened:
        assert outcome(supervise("pass", f"--state={state}"))[0] == 0
        assert opened.read() == "before\n"
    assert state.read_text().endswith(f": done (boot {boot.read_text().strip() if boot.exists() else ''})\n")


def test_a_state_that_cannot_be_written_ends_no_run(supervise, tmp_path):
    code, _, err = outcome(supervise("exit(0 if attempt else 1)", f"--state={tmp_path}/nowhere/state"))
    assert code == 0
    assert err.count("nowhere/state: ") == 3


def test_a_request_to_stop_lets_all_save_and_restarts_none(supervise, tmp_path):
    logs = tmp_path / "logs"
    process = supervise(SAVE_WHEN_TOLD, "--processes=2", f"--logs={logs}")
    wait_until(lambda: all((logs / f"process-{i}.log").is_file() for i in range(2)), 20)
    wait_until(lambda: all("ready" in (logs / f"process-{i}.log").read_text() for i in range(2)), 20)
    process.send_signal(signal.SIGTERM)
    code, out, err = outcome(process)
    assert (code, out) == (143, "ready\nsaved\n")
    assert err.endswith("supervise: stopped on request\n")
    assert "saved" in (logs / "process-1.log").read_text()
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(("stream", "signalled"), [("stdout", True), ("stderr", True), ("stdout", False)])
def test_a_reader_that_leaves_lets_all_save(supervise, tmp_path, stream, signalled):
    logs = tmp_path / "logs"
    code = SAVE_SLOWLY
    if not signalled:
        code = code.replace("time.sleep(600)", "while time.sleep(0.05) is None: print('line', flush=True)")
    process = supervise(code, "--processes=2", f"--logs={logs}")
    wait_until(lambda: all((logs / f"process-{i}.log").is_file() for i in range(2)), 20)
    wait_until(lambda: all("ready" in (logs / f"process-{i}.log").read_text() for i in range(2)), 20)
    getattr(process, stream).close()
    if signalled:
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert all("saved" in (logs / f"process-{i}.log").read_text() for i in range(2))


def test_a_second_request_kills(supervise, tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
    process = supervise(deaf + "time.sleep(600)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert outcome(process)[0] == 137


def test_a_terminal_that_hangs_up_twice_lets_all_save(supervise):
    process = supervise(SAVE_SLOWLY)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGHUP)
    code, out, _ = outcome(process)
    assert (code, out) == (143, "saved\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_no_run(tmp_path):
    command = [sys.executable, "-m", "jformer.supervise", f"--logs={tmp_path}", "--", f"--workdir={tmp_path}/run"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*command, "--code=print('line', flush=True); (workdir / 'ended').touch()"],
            env=os.environ | {"JFORMER_COMMAND": f"'{sys.executable}' '{STAND_IN}'"},
            stdout=full,
            stderr=full,
        )
    assert (tmp_path / "run" / "ended").exists()
    assert ended.returncode == 0


def test_what_a_process_started_ends_with_it(supervise, tmp_path):
    child = "[sys.executable, '-c', 'import time; time.sleep(600)', *sys.argv[1:]]"
    assert outcome(supervise(f"import subprocess, sys; subprocess.Popen({child})"))[0] == 0
    assert not living(f"--workdir={tmp_path}/run")


def test_nothing_survives_a_killed_supervisor(supervise, tmp_path):
    process = supervise(SAVE_WHEN_TOLD, "--processes=2")
    wait_until(lambda: len(living(f"--workdir={tmp_path}/run")) == 3, 20)
    process.kill()
    wait_until(lambda: not living(f"--workdir={tmp_path}/run"), 20)


def test_virtual_devices_are_those_of_each_process(supervise):
    show = "import os; print(os.environ['JAX_PLATFORMS'], os.environ['XLA_FLAGS'].split()[-1])"
    assert outcome(supervise(show, "--devices=3"))[1] == "cpu --xla_force_host_platform_device_count=3\n"


@pytest.mark.parametrize(
    ("processes", "own"), [(1, ["CUDA_VISIBLE_DEVICES=3"]), (2, ["CUDA_VISIBLE_DEVICES=3,5", "JAX_LOCAL_DEVICE_IDS=0"])]
)
def test_a_process_of_one_gpu_takes_no_other(supervise, monkeypatch, processes, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    names = ["CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"]
    show = f"import os; process or print(*(f'{{n}}={{os.environ[n]}}' for n in {names} if n in os.environ))"
    assert outcome(supervise(show, f"--processes={processes}", "--per-gpu"))[1].split() == own


@pytest.mark.parametrize("made", [{"options": ["--logs=/dev/null/logs"]}, {"command": "/no/such/command"}], ids=str)
def test_what_cannot_be_started_is_one_line(made):
    command = [sys.executable, "-m", "jformer.supervise", *made.get("options", ()), "--", "--workdir=x"]
    environment = os.environ | ({"JFORMER_COMMAND": made["command"]} if "command" in made else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    named = made.get("command", "/dev/null/logs")
    reason, end = done.stderr.splitlines()[-2:]
    assert (done.returncode, named in reason, end) == (2, True, "supervise: mistake, see the log")


@pytest.mark.parametrize("option", ["--processes=0", "--retries=-1", "--pause=-1", "--grace=nan"])
def test_counts_and_times_that_cannot_be_are_refused(supervise, option):
    code, _, err = outcome(supervise("", option))
    name, _, value = option.partition("=")
    assert (code, f"{name}={value}" in err.splitlines()[-1]) == (2, True)
