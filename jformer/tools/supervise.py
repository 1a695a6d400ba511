"""Keep a run going: start jformer.main as one process or several, and all of them again when one fails.

python -m jformer.supervise [--processes=N] [--devices=D] [--logs=DIR] [--retries=R] [--grace=S] [--pause=S]
                            [--state=FILE] -- ARGUMENTS OF jformer.main

Several processes are told where they meet; one is not. Exit codes 0 (done), 2 (a mistake that no restart mends) and all
after a request to stop are final. After any other, such as 75 and 134 (a process was lost, or a checkpoint could not be
read) and 76 (a process was stuck), the same command goes on from the last checkpoint, until it has failed more than R
times without a new one in between. Knows nothing of what the processes do and imports no JAX: the devices are theirs.
"""

import argparse
import contextlib
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
from typing import IO

from jformer.errors import ABORTED, DONE, LOST, MISTAKE, STUCK
from jformer.parallel.processes.children import die_with_parent, free_port, send_signal, signals_to
from jformer.storage import is_step, replace_content, run_path

LOOK = 0.1  # seconds between looks at the processes
WHY = {
    LOST: ", from the last checkpoint: a process was lost, or a checkpoint could not be read",
    ABORTED: ", from the last checkpoint: a process was lost",
    STUCK: ", from the last checkpoint: a process was stuck",
}
BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux's


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the last attempt."""
    options = parse(sys.argv[1:] if argv is None else argv)
    group = Group(options)
    with signals_to(group.stop):
        return supervise(group, options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; end the process with exit code 2 where they are wrong."""
    parser = argparse.ArgumentParser("jformer.supervise", allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, help="virtual CPU devices of each process")
    parser.add_argument("--logs", type=Path, help="folder of process-I.log; that of process 0 is shown as well")
    parser.add_argument("--retries", type=int, default=5, help="restarts without a new checkpoint in between")
    parser.add_argument("--grace", type=float, default=30, help="seconds for the others to end, once one has failed")
    parser.add_argument("--pause", type=float, default=2, help="seconds before a restart")
    parser.add_argument("--state", type=Path, help="file that says how the run stands")
    parser.add_argument("arguments", nargs="+", help="of jformer.main")
    return parser.parse_args(argv)


def supervise(group: "Group", options: argparse.Namespace) -> int:
    """Run the group until its end is final; say how it stands, also in the file `state`.

    That names the boot, too: what shuts a machine down stops the group as a user would, but for that boot alone.
    """
    boot = BOOT.read_text().strip() if BOOT.exists() else ""

    def tell(text: str) -> None:
        print(f"supervise: {text}", file=sys.stderr, flush=True)
        if options.state:
            try:
                replace_content(options.state, f"{socket.gethostname()}: {text} (boot {boot})\n".encode())
            except OSError as error:  # a full disk must not end the supervisor
                print(f"supervise: --state={options.state}: {error}", file=sys.stderr, flush=True)

    tell("running")
    failures = 0
    before = newest_checkpoint(options.arguments)
    while (code := group.run()) not in (DONE, MISTAKE) and not group.asked:
        after = newest_checkpoint(options.arguments)
        failures = failures + 1 if after == before else 1
        before = after
        if failures > options.retries:
            tell(f"gave up: exit code {code}, and no new checkpoint since {options.retries} restarts")
            return code
        tell(f"running again after exit code {code}{WHY.get(code, '')} (restart {failures} of {options.retries})")
        time.sleep(options.pause)
    tell({DONE: "done", MISTAKE: "mistake, see the log"}.get(code, "stopped as told"))
    return code


def newest_checkpoint(arguments: Sequence[str]) -> int:
    """Return the step of the newest complete checkpoint in the arguments' workdir, wherever that is; or -1."""
    workdirs = [argument.partition("=")[2] for argument in arguments if argument.startswith("--workdir=")]
    try:
        found = [path for workdir in workdirs for path in run_path(workdir).glob("checkpoints/*/commit_success.txt")]
    except Exception as error:  # storage that is away for a moment must not end the supervisor
        print(f"supervise: cannot look for checkpoints: {error}", file=sys.stderr, flush=True)
        return -1
    return max((int(path.parent.name) for path in found if is_step(path.parent.name)), default=-1)


class Group:
    """The processes of a run: they live and die together."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Nothing is started before `run`."""
        self.asked = False  # to stop
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Ask all processes to save and end; asked again, end them."""
        for process in self._processes:
            send_signal(process, signal.SIGKILL if self.asked else signal.SIGTERM)
        self.asked = True

    def run(self) -> int:
        """Run all processes to their end; return 0, 2 if one ended so, or else the code of the first to fail."""
        with contextlib.ExitStack() as files:
            logs: list[IO[bytes]] = []
            shown: IO[bytes] | None = None
            if self._options.logs:
                self._options.logs.mkdir(parents=True, exist_ok=True)
                paths = [self._options.logs / f"process-{i}.log" for i in range(self._options.processes)]
                logs = [files.enter_context(path.open("ab")) for path in paths]
                shown = files.enter_context(paths[0].open("rb"))
                shown.seek(0, os.SEEK_END)
            self._processes = start(self._options, logs)
            for process in self._processes if self.asked else []:  # before they were there
                send_signal(process, signal.SIGTERM)
            codes = self._wait(shown)
        failed = [code for code in codes if code]
        code = MISTAKE if MISTAKE in failed else next(iter(failed), DONE)
        return code if code >= 0 else 128 - code

    def _wait(self, shown: IO[bytes] | None) -> list[int]:
        """Return the exit codes in the order in which the processes end, and show the log of process 0 meanwhile.

        Once one has failed, the others have `grace` seconds to notice, to say so and to end.
        """
        codes: list[int] = []
        living, deadline = list(self._processes), float("inf")
        while living:
            time.sleep(LOOK)
            ended = [process for process in living if process.poll() is not None]
            living = [process for process in living if process not in ended]
            codes += [process.returncode for process in ended]
            if any(codes):
                deadline = min(deadline, time.monotonic() + self._options.grace)
            for process in living if time.monotonic() > deadline else ended:  # these may have left children behind
                send_signal(process, signal.SIGKILL)
            if shown:
                sys.stdout.buffer.write(shown.read())
                sys.stdout.flush()
        return codes


def start(options: argparse.Namespace, logs: Sequence[IO[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Start all processes, each in a group of its own: Ctrl-C reaches only us, and what they start ends with them."""
    command = shlex.split(os.environ.get("JFORMER_COMMAND", shlex.join([sys.executable, "-m", "jformer.main"])))
    environment = dict(os.environ)
    if options.devices:
        count = f"--xla_force_host_platform_device_count={options.devices}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"}
    port, processes = free_port(), []
    for i in range(options.processes):
        place = [f"--coordinator=127.0.0.1:{port}", f"--processes={options.processes}", f"--process={i}"]
        processes.append(
            subprocess.Popen(
                [*command, *options.arguments, *(place if options.processes > 1 else ())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=logs[i] if logs else None,
                stderr=logs[i] if logs else None,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        )
    return processes


if __name__ == "__main__":
    sys.exit(main())
