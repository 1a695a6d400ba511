"""Where workers run: as processes of this machine, which share its cores or GPUs, or as Slurm jobs."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TypeVar

from etils.epath import Path
from tqdm import tqdm

from jformer.errors import DONE, FAILED, LOST, MISTAKE, STOPPED, UnavailableError, UserError
from jformer.parallel.processes.children import die_with_parent, send_signal
from jformer.tools.sweep.experiment import Trial
from jformer.tools.sweep.queue import OPEN, TrialQueue

T = TypeVar("T")
LOOK = 1.0  # seconds between checks of workers and queue
DEATHS = 10  # of workers in a row, without a finished trial in between, before we give up


class LocalWorkers:
    """Worker processes of this machine, restarted when they die, with a progress bar."""

    def __init__(self, queue: TrialQueue, command: Sequence[str], workers: int) -> None:
        """`command` starts a worker; its share of the machine is appended."""
        self.stopping = False
        self._queue, self._command = queue, [*command, "--worker"]
        self._workers: list[subprocess.Popen[bytes] | None] = [None] * workers
        self._deaths, self._mistake, self._given_up = 0, False, FAILED

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Ask all workers to save and end; kill them when called again, except by SIGHUP: terminals repeat it."""
        if self.stopping and number == signal.SIGHUP:
            return
        sent = signal.SIGKILL if self.stopping else signal.SIGTERM
        self.stopping = True  # first, as another signal may interrupt this call
        for worker in filter(None, self._workers):
            send_signal(worker, sent)

    def run(self) -> int:
        """Keep the workers running until all trials have ended; return 0, 143 if stopped, 2 for a mistake, 75 or 1."""
        bar = TrialBar(self._queue.trials(), self._queue.experiment.trials)
        for i in range(len(self._workers)):
            self._start(i)
        while any(self._workers):
            time.sleep(LOOK)
            with contextlib.suppress(UnavailableError):  # workers are restarted until the storage is back
                if bar.show(self._queue.trials()):
                    self._deaths = 0
            for i, worker in enumerate(self._workers):
                if worker and worker.poll() is not None:
                    self._workers[i] = None
                    self._replace(i, worker.returncode)
        bar.show(self._queue.trials())
        bar.close()
        if self._mistake:
            return MISTAKE
        if self._queue.left():
            return STOPPED if self.stopping else self._given_up
        return DONE

    def _replace(self, number: int, code: int) -> None:
        """Restart a worker that died; stop all if one found a mistake."""
        if code == MISTAKE:
            self._mistake = True
            if not self.stopping:
                self.stop(signal.SIGTERM, None)
        elif code not in (DONE, STOPPED) and not self.stopping:
            self._deaths, self._given_up = self._deaths + 1, LOST if code == LOST else FAILED
            if self._deaths <= DEATHS:
                self._start(number)
            elif self._deaths == DEATHS + 1:
                print(f"sweep: gave up: {self._deaths} workers died, and no trial has ended since", file=sys.stderr)

    def _start(self, number: int) -> None:
        command = [*self._command, f"--share={number}/{len(self._workers)}"]
        worker = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent())
        self._workers[number] = worker
        if self.stopping:  # requested before the worker existed
            send_signal(worker, signal.SIGTERM)


class TrialBar:
    """A progress bar, and a line for each trial that ends."""

    def __init__(self, trials: Sequence[Trial], planned: int) -> None:
        """`planned` is the number of trials of a search, else 0; trials that have ended already get no line."""
        self._ended = {trial.name for trial in trials if trial.state not in OPEN}
        self._total = max(len(trials), planned)
        self._bar = tqdm(total=self._total, initial=len(self._ended), unit="trial", disable=not sys.stderr.isatty())
        self.close = self._bar.close

    def show(self, trials: Sequence[Trial]) -> int:
        """Print the trials that have ended since the last call, and return how many."""
        new = [trial for trial in trials if trial.state not in OPEN and trial.name not in self._ended]
        for trial in new:
            self._ended.add(trial.name)
            result = trial.error if trial.value is None else f"{trial.value:.6g}"
            text = f"{len(self._ended)}/{self._total} {trial.state}: {trial.arm}, seed {trial.seed}: {result}"
            self._bar.write(f"{text} ({trial.seconds:.0f} s)", file=sys.stderr)
        self._bar.update(len(new))
        return len(new)


def take_share(share: str) -> None:
    """Restrict this process and its children to part I of N of the machine's cores and GPUs; `share` is "I/N".

    With more workers than cores or GPUs, several share one, and a GPU's memory.
    """
    number, _, count = share.partition("/")
    i, n = int(number), int(count)
    os.sched_setaffinity(0, _part(sorted(os.sched_getaffinity(0)), i, n))
    if gpus := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_part(gpus, i, n))
        if n > len(gpus):  # the first to start would allocate most of a GPU's memory
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / math.ceil(n / len(gpus)):.3f}")


def visible_gpus() -> list[str]:
    """Return CUDA's names of the visible NVIDIA GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    # CUDA counts from 0, also in a container that has /dev/nvidia3 alone.
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _part(members: list[T], i: int, n: int) -> list[T]:
    """Return part i of n: consecutive members, or one of them if there are fewer than n."""
    if len(members) < n:
        return [members[i % len(members)]]
    return members[len(members) * i // n : len(members) * (i + 1) // n]


def submit(folder: Path, command: Sequence[str], workers: int, options: str) -> list[str]:
    """Submit workers as Slurm jobs and return their job ids; raise UserError if submitit is missing or refuses.

    `folder` is for logs, on a disk that the jobs see; `command` starts a worker, without --worker; `options` are
    submitit's, such as "timeout_min=60,slurm_partition=gpu", where a value of digits is a number.
    """
    try:
        import submitit
        from submitit.helpers import CommandFunction
    except ImportError as error:
        raise UserError(f'--slurm needs submitit: pip install -e ".[sweep]" -c constraints.txt ({error})') from error
    given: dict[str, str | int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        given[key] = int(value) if value.isdigit() else value
    work = CommandFunction([*command, "--worker"], verbose=False)
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        executor.update_parameters(name="jformer-sweep", **given)
        with executor.batch():
            jobs = [executor.submit(work) for _ in range(workers)]
    except (NameError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"--slurm={options}: {' '.join(str(error).split())}") from error
    return [str(job.job_id) for job in jobs]
