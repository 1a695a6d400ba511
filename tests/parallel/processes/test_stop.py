"""A request to stop ends a process at once or is kept, whatever its main thread is doing."""

import errno
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jformer.parallel.processes import readers_may_leave
from jformer.parallel.processes.children import signals_to
from tests import signals

ROOT = Path(__file__).parents[3]
HEAD = """
import hashlib, os, sys, time
from jformer.parallel import processes
with processes.heed_signals("stopped before all"):
    print("ready", flush=True)
"""
BUSY = "    hashlib.pbkdf2_hmac('sha256', b'x', b'y', 200_000_000)"  # minutes in C, without a line of Python


@pytest.fixture(autouse=True)
def _children_heed_signals():
    """No test before these may have left a signal ignored."""
    signals.heed()


def start(body, head=HEAD, **streams):
    """Start a program, and return it once it says that it is ready."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams}
    process = subprocess.Popen([sys.executable, "-c", head + body], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_process_that_has_nothing_to_save_with_one_line_even_in_c(number):
    process = start(BUSY)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "jformer: stopped before all\n")


def test_handlers_of_signals_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with signals_to(lambda number, frame: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


WAITING = """
    processes.defer_stop()
    print("begun", flush=True)
    while not processes.stop_requested():
        time.sleep(0.01)
    print("asked", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_is_kept_where_there_is_something_to_save(number):
    process = start(WAITING)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.communicate(timeout=30) == ("asked\n", "")
    assert process.returncode == 0


def test_a_second_interrupt_ends_at_once_and_a_second_sigterm_changes_nothing():
    process = start(WAITING + BUSY)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err == "jformer: stopped at once: progress since the last checkpoint is lost\n"


ENDING = """
import atexit, runpy, sys, time
atexit.register(lambda: (print("ready", flush=True), time.sleep(1)))
sys.argv = ["jformer", "--help"]
runpy.run_module("jformer.main", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_after_the_last_line_does_not_change_the_exit_code(number, tmp_path):
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-c", ENDING], cwd=ROOT, stdout=said, stderr=said)
    while not (tmp_path / "said").read_text().endswith("ready\n"):
        assert process.poll() is None
    process.send_signal(number)
    process.wait(timeout=30)
    assert (process.returncode, (tmp_path / "said").read_text()[-6:]) == (0, "ready\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_command_imports_is_one_line(number, tmp_path):
    (tmp_path / "absl.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "jformer.main"], env=environment, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=30)[1] == "jformer: stopped\n"
    assert process.returncode == 143


TRAINED = """
    stubs = {"loop": SimpleNamespace(train=train), "evaluate": SimpleNamespace(evaluate=evaluate, report_scores=None)}
    sys.modules["jformer.trainer"], sys.modules["jformer.evaluation.evaluate"] = stubs.values()
    sys.modules["jformer.tools.pages.run_report"] = SimpleNamespace(write_own=None)
    sys.exit(main.train(SimpleNamespace(mode="train"), None, "DIR"))
"""
TRAINING = """
import sys, time
from types import SimpleNamespace
from jformer import main
from jformer.parallel import processes

def train(config, workdir):
    processes.defer_stop()
    while wait and not processes.stop_requested():
        print("ready", flush=True)
        time.sleep(0.01)
    return True

def evaluate(*_):
    print("ready", flush=True)
    time.sleep(600)

with processes.heed_signals("stopped"):
"""


@pytest.mark.parametrize(
    ("wait", "line"),
    [
        (True, "trained and saved; rerun the same command to score it"),
        (False, "jformer: stopped while scoring the run; --mode=evaluate scores it again"),
    ],
    ids=["the last save", "scoring"],
)
def test_a_signal_after_the_last_update_ends_with_a_line_and_the_code_of_a_stop(wait, line):
    """Real training and real scores come before and after; which of them the signal meets is what matters here."""
    process = start(TRAINED, f"wait = {wait}\n{TRAINING}")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == f"{line}\n"
    assert process.returncode == 143


def test_what_nohup_ignores_stays_ignored():
    process = start(WAITING, f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{HEAD}")
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("asked\n", "")


@pytest.mark.parametrize("stream", ["stdout", "stderr", "terminal"])
def test_a_reader_that_leaves_is_a_request_to_stop(stream, tmp_path):
    body = f"""
    processes.defer_stop()
    with processes.readers_may_leave():
        while not processes.stop_requested():
            print("line", file=sys.{stream.replace("terminal", "stderr")}, flush=True)
            time.sleep(0.01)
        print("more", file=sys.{stream.replace("terminal", "stderr")}, flush=True)
    open({str(tmp_path / "saved")!r}, "w").close()
"""
    terminal, end = pty.openpty()
    with start(body, **({"stderr": end} if stream == "terminal" else {})) as process:
        os.close(end)
        os.close(terminal)
        if stream != "terminal":
            getattr(process, stream).close()
        assert process.wait(timeout=30) == 0
    assert (tmp_path / "saved").exists()


def test_another_error_of_a_stream_is_none(tmp_path):
    with readers_may_leave(), pytest.raises(OSError, match="No space left"):
        sys.stdout._stream = SimpleNamespace(write=fails)
        print("x")


def fails(text):
    raise OSError(errno.ENOSPC, "No space left on device")
