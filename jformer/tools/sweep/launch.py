"""Where workers run: as processes of this machine, which share its cores or GPUs, or as jobs of Slurm."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Self, TypeVar

from etils.epath import Path
from tqdm import tqdm

from jformer.errors import DONE, FAILED, MISTAKE, STOPPED, UserError
from jformer.parallel.processes.children import die_with_parent, send_signal
from jformer.tools.sweep.experiment import Trial
from jformer.tools.sweep.queue import OPEN, Queue

T = TypeVar("T")
LOOK = 1.0  # seconds between looks at workers and queue
DEATHS = 10  # of workers in a row, with no trial done in between, before we give up


class Local:
    """Workers of this machine, started again when they die, and a bar that shows how far they are."""

    def __init__(self, queue: Queue, command: Sequence[str], workers: int) -> None:
        """`command` starts one worker; it is told its share of the machine."""
        self.asked = False  # to stop
        self._queue, self._command = queue, [*command, "--worker"]
        self._workers: list[subprocess.Popen[bytes] | None] = [None] * workers
        self._deaths, self._mistake = 0, False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Let all trials save and end; asked again, end them."""
        for worker in filter(None, self._workers):
            send_signal(worker, signal.SIGKILL if self.asked else signal.SIGTERM)
        self.asked = True

    def run(self) -> int:
        """Keep the workers going until all trials have ended; return 0, 143 when told to stop, or 2."""
        with Progress(self._queue.trials(), self._queue.experiment.trials) as progress:
            for i in range(len(self._workers)):
                self._start(i)
            while any(self._workers):
                time.sleep(LOOK)
                if progress.show(self._queue.trials()):
                    self._deaths = 0
                for i, worker in enumerate(self._workers):
                    if worker and worker.poll() is not None:
                        self._workers[i] = None
                        self._replace(i, worker.returncode)
            progress.show(self._queue.trials())
        if self._mistake:
            return MISTAKE
        if self._queue.left():
            return STOPPED if self.asked else FAILED
        return DONE

    def _replace(self, number: int, code: int) -> None:
        """Start a worker again that died; stop all where one has found a mistake."""
        if code == MISTAKE:
            self._mistake = True
            if not self.asked:
                self.stop(signal.SIGTERM, None)
        elif code not in (DONE, STOPPED) and not self.asked:
            self._deaths += 1
            if self._deaths <= DEATHS:
                self._start(number)
            elif self._deaths == DEATHS + 1:
                print(f"sweep: gave up: {self._deaths} workers died, and no trial has ended since", file=sys.stderr)

    def _start(self, number: int) -> None:
        command = [*self._command, f"--share={number}/{len(self._workers)}"]
        worker = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent())
        self._workers[number] = worker
        if self.asked:  # before it was there
            send_signal(worker, signal.SIGTERM)


class Progress:
    """A bar, and a line for each trial that ends."""

    def __init__(self, trials: Sequence[Trial], wanted: int) -> None:
        """What has ended already is not told again; `wanted` is how many trials there will be, if it is known."""
        self._ended = {trial.name for trial in trials if trial.state not in OPEN}
        self._total = max(len(trials), wanted)
        self._bar = tqdm(total=self._total, initial=len(self._ended), unit="trial", disable=not sys.stderr.isatty())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.close()

    def show(self, trials: Sequence[Trial]) -> int:
        """Tell which trials have ended since the last time, and return how many."""
        new = [trial for trial in trials if trial.state not in OPEN and trial.name not in self._ended]
        for trial in new:
            self._ended.add(trial.name)
            said = trial.error if trial.value is None else f"{trial.value:.6g}"
            text = f"{len(self._ended)}/{self._total} {trial.state}: {trial.arm}, seed {trial.seed}: {said}"
            self._bar.write(f"{text} ({trial.seconds:.0f} s)", file=sys.stderr)
        self._bar.update(len(new))
        return len(new)


def take_share(share: str) -> None:
    """Keep this process, and what it starts, to one of n parts of the machine's cores, and of its GPUs if it has any.

    `share` is "I/N". Where there are more workers than cores or GPUs, several share one, and a GPU's memory.
    """
    number, _, count = share.partition("/")
    i, n = int(number), int(count)
    os.sched_setaffinity(0, _part(sorted(os.sched_getaffinity(0)), i, n))
    if gpus := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_part(gpus, i, n))
        if n > len(gpus):  # JAX would take most of a GPU's memory for the first that comes
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 * len(gpus) / n:.3f}")


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that we may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    return [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def _part(members: list[T], i: int, n: int) -> list[T]:
    """Return part i of n: a run of members, or where there are fewer than n, one of them."""
    if len(members) < n:
        return [members[i % len(members)]]
    return members[len(members) * i // n : len(members) * (i + 1) // n]


def submit(folder: Path, command: Sequence[str], workers: int, options: str, cluster: str = "slurm") -> list[str]:
    """Submit workers as jobs of Slurm and return their numbers.

    Args:
        folder: for their logs, on a disk that the jobs see.
        command: what starts a worker, but for --worker.
        workers: how many jobs.
        options: submitit's, as "timeout_min=60,slurm_partition=…"; what is all digits is a number.
        cluster: "slurm", or what else submitit has, such as "local" or "debug".

    Raises:
        UserError: submitit is missing, or refuses the options.
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
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(name="jformer-sweep", **given)
        with executor.batch():
            jobs = [executor.submit(work) for _ in range(workers)]
    except (NameError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"--slurm={options}: {' '.join(str(error).split())}") from error
    return [str(job.job_id) for job in jobs]
