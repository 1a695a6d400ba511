"""One worker: takes a trial, runs it as a process, tells what came of it, and so on until none is left.

The process is jformer.main, or a command that runs it elsewhere. It ends with its worker, whatever ends that.
"""

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

from jformer.errors import DONE, MISTAKE, STOPPED, UserError
from jformer.evaluation import records
from jformer.parallel.processes.children import die_with_parent, send_signal
from jformer.storage import here, in_bucket, lock_of, open_lock
from jformer.tools.sweep.experiment import Trial
from jformer.tools.sweep.queue import Claim, Queue

LOOK, WAIT = 0.02, 0.5  # seconds between looks at a process; and at the queue, while others do what is left
BEATS = 6  # in the time of a lease
PRUNE = 2.0  # seconds between looks at a curve
CRASHES = 3  # of a trial's process before it counts as failed
LEASE_LOST, OVERTAKEN = "lost", "overtaken"  # ends that are not the process's own


class Worker:
    """Does trials of a queue in a workdir."""

    def __init__(self, queue: Queue, workdir: Path, command: str = "") -> None:
        """`command` stands for `python -m jformer.main`; {trial} in it becomes a short name of the trial's own."""
        self.asked = False  # to stop
        self._queue, self._workdir, self._command = queue, workdir, command
        self._experiment = queue.experiment
        self._process: subprocess.Popen[bytes] | None = None
        self._said = 0  # bytes in its log before it began

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Let the process save and end; asked again, end it."""
        if self._process:
            send_signal(self._process, signal.SIGKILL if self.asked else signal.SIGTERM)
        self.asked = True

    def work(self) -> int:
        """Do what there is to do; return 0, or 143 when told to stop before all was done."""
        while not self.asked:
            claim = self._queue.claim()
            if claim:
                self.do(claim)
            elif self._queue.left():
                time.sleep(WAIT)
            else:
                return DONE
        return STOPPED

    def do(self, claim: Claim) -> None:
        """Run a trial of ours, or what is left of it, and tell what came of it.

        Raises UserError where it ended well but does not report the metric: no other trial would either.
        """
        began = time.monotonic()
        end = self._run(claim)
        seconds, folder = time.monotonic() - began, self._folder(claim.trial)
        if end == LEASE_LOST:
            print(f"sweep: {claim.trial.name} is another worker's now: this one was silent", file=sys.stderr)
        elif end in (DONE, OVERTAKEN):
            self._tell(claim, folder, seconds, pruned=end == OVERTAKEN)
        elif self.asked or _in_use(folder):  # by a process that was there first
            claim.give_back(seconds)
        elif end == MISTAKE or claim.crashes + 1 >= CRASHES:
            claim.fail(self._last_words(claim.trial, end), seconds)
        else:
            claim.give_back(seconds, crash=self._last_words(claim.trial, end))

    def _tell(self, claim: Claim, folder: Path, seconds: float, pruned: bool) -> None:
        """Tell the result of a trial that is done."""
        try:
            metrics = records.metrics(folder)
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

    def _run(self, claim: Claim) -> int | str:
        """Return the exit code of the trial's process, or what ended it; nothing of it is left then."""
        if not self._alone(claim):
            return STOPPED if self.asked else LEASE_LOST
        with self._log(claim.trial).open("ab") as log:
            self._said = log.tell()
            self._process = process = self._start(claim.trial, log)
        try:
            if self.asked:  # before it was there
                send_signal(process, signal.SIGTERM)
            return self._watch(claim, process)
        finally:
            send_signal(process, signal.SIGKILL)
            process.wait()

    def _watch(self, claim: Claim, process: subprocess.Popen[bytes]) -> int | str:
        """Wait for the end of the trial's process, and say all the while that we are there."""
        began = time.monotonic()
        beat = 0.0
        overtaken = False
        prune = began if self._experiment.pruner != "none" else math.inf
        while process.poll() is None:
            time.sleep(LOOK)
            now = time.monotonic()
            if now > beat:
                beat = now + self._queue.lease / BEATS
                if not claim.renew(now - began):
                    return LEASE_LOST
            if now > prune and not overtaken:
                prune = now + PRUNE
                if claim.hopeless(dict(records.curve(self._folder(claim.trial), self._experiment.metric))):
                    overtaken = True
                    send_signal(process, signal.SIGTERM)
        return OVERTAKEN if overtaken and process.returncode != DONE else process.returncode

    def _alone(self, claim: Claim) -> bool:
        """Wait until nobody trains in the trial's directory: a process may outlive its worker. False if it is lost."""
        due = 0.0
        while _in_use(self._folder(claim.trial)):
            if time.monotonic() > due:
                due = time.monotonic() + self._queue.lease / BEATS
                if not claim.renew(0.0):
                    return False
            if self.asked:
                return False
            time.sleep(LOOK)
        return not self.asked

    def _start(self, trial: Trial, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the trial's process in a group of its own: Ctrl-C reaches only us, and it ends with us."""
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
        """Return the file for what the trial's processes say."""
        path = logs_of(self._workdir) / f"{trial.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _last_words(self, trial: Trial, code: int | str) -> str:
        """Return the last line a process said, or the last that we say when something is wrong."""
        lines = self._log(trial).read_bytes()[self._said :].decode(errors="replace").splitlines()
        said = [line.strip() for line in lines[-50:] if line.strip()]
        ours = [line.removeprefix("jformer: ") for line in said if line.startswith("jformer: ")]
        return (ours or said or ["it said nothing"])[-1][:500] + ("" if code == MISTAKE else f" (exit code {code})")


def logs_of(workdir: Path) -> Path:
    """Return the folder of the logs: in the workdir, or where that is a bucket, which cannot be appended to, here."""
    if not in_bucket(workdir):
        return workdir / "logs"
    return here() / workdir.name


def _in_use(folder: Path) -> bool:
    """Return whether a process trains in a run's directory; in a bucket there is nothing that tells."""
    lock = lock_of(folder)
    if in_bucket(folder) or not lock.exists():
        return False
    with open_lock(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
