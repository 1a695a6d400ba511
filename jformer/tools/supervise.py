"""Keep a run going: start jformer.main as one or several processes, and restart all of them when one fails.

python -m jformer.supervise [--processes=N] [--devices=D] [--per-gpu] [--logs=DIR] [--retries=R] [--grace=S] [--pause=S]
                            [--state=FILE] -- ARGUMENTS OF jformer.main

Several processes get the coordinator's address; with --distributed they are part of a run on several machines, and
JAX_PROCESS_ID in the environment is the number of the first of them. Exit codes 0 (done), 2 (a mistake; no restart
fixes it) and any after a request to stop are final. After any other, such as 75 and 134 (a process was missing, or
storage was unavailable) and 76 (a process was stuck), the same command resumes from the last checkpoint, until it has
failed more than R times without a new one in between. Knows nothing of what the processes do and imports no JAX: the
devices are theirs.
"""

import argparse
import contextlib
import errno
import itertools
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from jformer.errors import ABORTED, DONE, LOST, MISTAKE, STUCK
from jformer.parallel.processes import discard_output, readers_may_leave
from jformer.parallel.processes.children import die_with_parent, free_port, send_signal, signals_to
from jformer.storage import MISPLACED, is_step, replace_content, run_path

LOOK = 0.1  # seconds between checks of the processes
REASONS = {
    LOST: ", from the last checkpoint: a process was missing, or storage was unavailable",
    ABORTED: ", from the last checkpoint: a process was lost",
    STUCK: ", from the last checkpoint: a process was stuck",
}
BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux's


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the last attempt."""
    parser = argparse.ArgumentParser("jformer.supervise", allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, help="virtual CPU devices of each process")
    parser.add_argument("--per-gpu", action="store_true", help="each process takes the GPU of its number alone")
    parser.add_argument("--logs", type=run_path, help="folder of process-I.log; that of process 0 is shown as well")
    parser.add_argument("--retries", type=int, default=5, help="restarts without a new checkpoint in between")
    parser.add_argument("--grace", type=float, default=30, help="seconds for the others to end, once one has failed")
    parser.add_argument("--pause", type=float, default=2, help="seconds before a restart")
    parser.add_argument("--state", type=Path, help="file for the state of the run")
    parser.add_argument("arguments", nargs="+", help="of jformer.main")
    options = parser.parse_args(argv)
    if is_part(options) and not os.environ.get("JAX_PROCESS_ID", "").isdecimal():
        parser.error("--processes with --distributed needs JAX_PROCESS_ID, the number of the first of these processes")
    if options.processes < 1:
        parser.error(f"--processes={options.processes} must be 1 or more")
    for name in ("retries", "grace", "pause"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"--{name}={getattr(options, name)} must be 0 or more, and finite")
    group = ProcessGroup(options)
    with signals_to(group.stop), readers_may_leave(lambda: group.stop(signal.SIGHUP, None)):
        code = supervise(group, options)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # a full disk would fail again at exit, and change the exit code: discard the rest
            discard_output(stream)
    return code


def supervise(group: "ProcessGroup", options: argparse.Namespace) -> int:
    """Run the group until its exit code is final; report its state on standard error and in the file `state`.

    The state names the boot: a shutdown of the machine stops the group as a user would, but only for that boot.
    """
    boot = BOOT.read_text().strip() if BOOT.exists() else ""

    def report(text: str) -> None:
        say(text)
        if options.state:
            try:
                replace_content(options.state, f"{socket.gethostname()}: {text} (boot {boot})\n".encode())
            except OSError as error:  # a full disk must not end the supervisor
                say(f"--state={options.state}: {error}")

    report("running")
    failures, before = 0, newest_checkpoint(options.arguments)
    while (code := group.run()) not in (DONE, MISTAKE) and not group.stopping:
        after = newest_checkpoint(options.arguments)
        failures = failures + 1 if after == before else 1
        before = after
        if failures > options.retries:
            report(f"gave up: exit code {code}, and no new checkpoint since {options.retries} restarts")
            return code
        report(f"running again after exit code {code}{REASONS.get(code, '')} (restart {failures} of {options.retries})")
        time.sleep(options.pause)
    report({DONE: "done", MISTAKE: "mistake, see the log"}.get(code, "stopped on request"))
    return code


def say(text: str) -> None:
    """Print a line on standard error, unless a full disk refuses it."""
    with contextlib.suppress(OSError):
        print(f"supervise: {text}", file=sys.stderr, flush=True)


def newest_checkpoint(arguments: Sequence[str]) -> int:
    """Return the step of the newest complete checkpoint in the arguments' workdir, wherever that is; or -1."""
    workdir = flag(arguments, "workdir")
    if not workdir:
        return -1
    try:
        folder = run_path(workdir) / "checkpoints"
        steps = [path for path in folder.iterdir() if is_step(path.name)] if folder.is_dir() else []
        whole = [int(path.name) for path in steps if (path / "commit_success.txt").exists()]
    except Exception as error:  # storage that is unreachable for a moment must not end the supervisor
        say(f"cannot look for checkpoints: {error}")
        return -1
    return max(whole, default=-1)


class ProcessGroup:
    """The processes of a run, which start and end together."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Nothing is started before `run`."""
        self.stopping = False
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Ask all processes to save and end; kill them when called again, except by SIGHUP: terminals repeat it."""
        if self.stopping and number == signal.SIGHUP:
            return
        sent = signal.SIGKILL if self.stopping else signal.SIGTERM
        self.stopping = True  # first, as another signal may interrupt this call
        for process in self._processes:
            send_signal(process, sent)

    def run(self) -> int:
        """Run all processes to their end; return 0, 2 if any of them did, or else the code of the first to fail."""
        try:
            return self._run()
        except OSError as error:  # --logs cannot be created, or the command does not exist
            if error.errno not in (errno.ENOENT, *MISPLACED):
                raise
            say(str(error))
            return MISTAKE

    def _run(self) -> int:
        with contextlib.ExitStack() as files:
            paths: list[Path] = []
            if self._options.logs:
                self._options.logs.mkdir(parents=True, exist_ok=True)
                paths = [self._options.logs / f"process-{i}.log" for i in range(self._options.processes)]
            logs = [files.enter_context(path.open("ab")) for path in paths]
            shown = files.enter_context(paths[0].open("rb")) if paths else None
            if shown:
                shown.seek(0, os.SEEK_END)
            self._processes = start(self._options, [log.fileno() for log in logs])
            for process in self._processes if self.stopping else []:  # requested before they existed
                send_signal(process, signal.SIGTERM)
            codes: list[int] = []
            living, deadline = list(self._processes), float("inf")
            while living:
                time.sleep(LOOK)
                ended = [process for process in living if process.poll() is not None]
                living = [process for process in living if process not in ended]
                codes += [process.returncode for process in ended]
                if any(codes):  # the others have `grace` seconds to notice, to print why, and to end
                    deadline = min(deadline, time.monotonic() + self._options.grace)
                for process in living if time.monotonic() > deadline else ended:  # these may have left children
                    send_signal(process, signal.SIGKILL)
                if shown and sys.stdout:  # which may be closed
                    with contextlib.suppress(OSError):  # a full disk must not end the supervisor
                        sys.stdout.buffer.write(shown.read())
                        sys.stdout.flush()
        failed = [code for code in codes if code]
        code = MISTAKE if MISTAKE in failed else next(iter(failed), DONE)
        return code if code >= 0 else 128 - code


def is_part(options: argparse.Namespace) -> bool:
    """Return whether several processes here are part of a run on several machines."""
    return options.processes > 1 and flag(options.arguments, "distributed").lower() in ("true", "t", "1")


def flag(arguments: Sequence[str], name: str) -> str:
    """Return the value of a flag of jformer.main, "true" for one without a value; "" if it is not given."""
    found = ""  # argparse would take an argument that contains a space for a value
    for argument, following in itertools.pairwise([*arguments, "-"]):
        given, equals, value = argument.partition("=")
        if given in (f"--{name}", f"-{name}"):
            found = value if equals else "true" if following.startswith("-") else following
    return found


def start(options: argparse.Namespace, logs: Sequence[int]) -> list[subprocess.Popen[bytes]]:
    """Start all processes, each in its own group: Ctrl-C reaches only the supervisor, with which they end."""
    command = shlex.split(os.environ.get("JFORMER_COMMAND", shlex.join([sys.executable, "-m", "jformer.main"])))
    environment = dict(os.environ)
    if options.devices:
        count = f"--xla_force_host_platform_device_count={options.devices}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"}
    port, processes = free_port(), []
    for i in range(options.processes):
        place = [f"--coordinator=127.0.0.1:{port}", f"--processes={options.processes}", f"--process={i}"]
        own = {}
        if options.per_gpu and options.processes > 1:
            own["JAX_LOCAL_DEVICE_IDS"] = str(i)
        elif options.per_gpu:  # JAX reads it only in a run of several processes
            own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        if is_part(options):
            own["JAX_PROCESS_ID"], place = str(int(environment["JAX_PROCESS_ID"]) + i), []
        processes.append(
            subprocess.Popen(
                [*command, *options.arguments, *(place if options.processes > 1 else ())],
                env=environment | own,
                stdin=subprocess.DEVNULL,
                stdout=logs[i] if logs else None,
                stderr=logs[i] if logs else None,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        )
    return processes
