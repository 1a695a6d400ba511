"""One worker: claims a trial, runs it as a process, records the result, and continues until no trial is left.

The process is jformer.main, or a command that runs it elsewhere. It never outlives its worker.
"""

import contextlib
import fcntl
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import IO

from etils.epath import Path

from jformer.errors import DONE, MISTAKE, STOPPED, UnavailableError, UserError
from jformer.evaluation import records
from jformer.parallel.processes.children import die_with_parent, send_signal
from jformer.storage import here, in_bucket, lock_of, open_lock
from jformer.tools.sweep.experiment import Trial
from jformer.tools.sweep.queue import Claim, TrialQueue

LOOK, WAIT = 0.02, 0.5  # seconds between checks of a process; and of the queue, while other workers run what is left
BEATS = 6  # per lease
PRUNE = 2.0  # seconds between checks of the learning curve
CRASHES = 3  # of a trial's process before the trial counts as failed
LEASE_LOST, PRUNED = "lost", "pruned"  # why the worker ended the process


class Worker:
    """Runs trials of a queue in a workdir."""

    def __init__(self, queue: TrialQueue, workdir: Path, command: str = "") -> None:
        """`command` replaces `python -m jformer.main`; {trial} in it becomes a short, unique name of the trial."""
        self.stopping = False
        self._queue, self._workdir, self._command = queue, workdir, command
        self._experiment = queue.experiment
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # bytes in the process's log when it started

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the process to save and end; kill it when called again, except by SIGHUP: terminals repeat it."""
        if self.stopping and number == signal.SIGHUP:
            return
        sent = signal.SIGKILL if self.stopping else signal.SIGTERM
        self.stopping = True  # first, as another signal may interrupt this call
        if self._process:
            send_signal(self._process, sent)

    def work(self) -> int:
        """Run trials until none is left; return 0, or 143 if stopped before."""
        while not self.stopping:
            if claim := self._queue.claim():
                self.run(claim)
            elif self._queue.left():
                time.sleep(WAIT)
            else:
                return DONE
        return STOPPED

    def run(self, claim: Claim) -> None:
        """Run or resume a claimed trial, and record how it ended.

        Raises UserError if it succeeded but does not report the metric: no other trial would either.
        """
        began = time.monotonic()
        end = self._run_process(claim)
        seconds, folder = time.monotonic() - began, self._folder(claim.trial)
        if end == LEASE_LOST:
            print(f"sweep: {claim.trial.name}: another worker took over, because this one was silent", file=sys.stderr)
        elif end in (DONE, PRUNED):
            self._record(claim, folder, seconds, pruned=end == PRUNED)
        elif self.stopping or _in_use(folder):  # by a process that came first
            claim.give_back(seconds)
        elif end == MISTAKE:
            claim.fail(self._last_line(claim.trial, end), seconds)
        else:
            self._retry_or_fail(claim, self._last_line(claim.trial, end), seconds)

    @staticmethod
    def _retry_or_fail(claim: Claim, why: str, seconds: float) -> None:
        """Let the trial be resumed, unless it has failed CRASHES times."""
        if claim.crashes + 1 >= CRASHES:
            claim.fail(why, seconds)
        else:
            claim.give_back(seconds, crash=why)

    def _record(self, claim: Claim, folder: Path, seconds: float, pruned: bool) -> None:
        """Record the result of a trial that has ended."""
        try:
            metrics = records.metrics(folder)
        except UnavailableError as error:
            self._retry_or_fail(claim, str(error), seconds)
            return
        except UserError as error:
            claim.fail(str(error), seconds)
            return
        if pruned:
            claim.prune(metrics, seconds)
            return
        try:
            value = self._experiment.value(metrics)
        except UserError as error:
            claim.fail(str(error), seconds)
            raise
        if math.isfinite(value):
            claim.complete(value, metrics, seconds)
        else:
            claim.fail(f"{self._experiment.metric} is {value}: the trial diverged", seconds)

    def _run_process(self, claim: Claim) -> int | str:
        """Run the trial's process; return its exit code, or why this worker ended it."""
        if not self._wait_until_unused(claim):
            return STOPPED if self.stopping else LEASE_LOST
        with self._log(claim.trial).open("ab") as log:
            self._log_start = log.tell()
            self._process = process = self._start(claim.trial, log)
        try:
            if self.stopping:  # requested before the process existed
                send_signal(process, signal.SIGTERM)
            return self._watch(claim, process)
        finally:
            send_signal(process, signal.SIGKILL)
            process.wait()

    def _watch(self, claim: Claim, process: subprocess.Popen[bytes]) -> int | str:
        """Wait for the end of the trial's process, renewing the claim and consulting the pruner meanwhile."""
        began = time.monotonic()
        next_beat, pruned = 0.0, False
        next_check = began if self._experiment.pruner != "none" else math.inf
        while process.poll() is None:
            time.sleep(LOOK)
            now = time.monotonic()
            if now > next_beat:
                next_beat = now + self._queue.lease / BEATS
                if not claim.renew(now - began):
                    return LEASE_LOST
            if now > next_check and not pruned:
                next_check = now + PRUNE
                curve: list[tuple[int, float]] = []
                with contextlib.suppress(UserError):  # rows that cannot be read: seen again when the trial ends
                    curve = records.curve(self._folder(claim.trial), self._experiment.metric)
                if claim.should_prune(dict(curve)):
                    pruned = True
                    send_signal(process, signal.SIGTERM)
        return PRUNED if pruned and process.returncode != DONE else process.returncode

    def _wait_until_unused(self, claim: Claim) -> bool:
        """Wait while a process that outlived its worker trains in the directory; False if we stop or lose the claim."""
        next_beat = 0.0
        while _in_use(self._folder(claim.trial)):
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + self._queue.lease / BEATS
                if not claim.renew(0.0):
                    return False
            if self.stopping:
                return False
            time.sleep(LOOK)
        return not self.stopping

    def _start(self, trial: Trial, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the trial's process in its own group, so that Ctrl-C reaches only this worker."""
        command = [word.replace("{trial}", trial.name[-8:]) for word in shlex.split(self._command)]
        arguments = [
            f"--config={self._experiment.base}",
            f"--workdir={self._folder(trial)}",
            *self._experiment.flags(trial),
        ]
        return subprocess.Popen(
            [*(command or [sys.executable, "-m", "jformer.main"]), *arguments],
            env={**os.environ, **self._experiment.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def _folder(self, trial: Trial) -> Path:
        return self._workdir / "trials" / trial.name

    def _log(self, trial: Trial) -> Path:
        """Return the log file of a trial's processes."""
        path = log_folder(self._workdir) / f"{trial.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _last_line(self, trial: Trial, code: int | str) -> str:
        """Return the last error line that a process printed, or else its last line."""
        lines = self._log(trial).read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        printed = [line.strip() for line in lines[-50:] if line.strip()]
        errors = [line.removeprefix("jformer: ") for line in printed if line.startswith("jformer: ")]
        return (errors or printed or ["no output"])[-1][:500] + ("" if code == MISTAKE else f" (exit code {code})")


def log_folder(workdir: Path) -> Path:
    """Return the folder of the logs: in the workdir, or on this machine if that is a bucket, which has no appending."""
    return here() / workdir.name if in_bucket(workdir) else workdir / "logs"


def _in_use(folder: Path) -> bool:
    """Return whether a process trains in a run's directory; a bucket has no lock that could tell."""
    lock = lock_of(folder)
    if in_bucket(folder) or not lock.exists():
        return False
    try:
        open_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
    except BlockingIOError:
        return True
    return False
