"""Kill workers of a small sweep in a process of its own: python -m tests.tools.sweep.deaths WAY FOLDER.

What became of the sweep is printed as JSON. Forks take no time, but JAX, which the tests import, does not bear them.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from etils import epath
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from jformer.tools.sweep import queue, worker
from jformer.tools.sweep.experiment import load_experiment
from jformer.tools.sweep.store import FileLock
from tests.tools.sweep.sweeps import SEARCH, SWEEP, rows, stand_in, write

LEASE = 1.0  # seconds; where several work at once one may be kept from saying that it is there for as long
ONE = {"code": SWEEP.replace("2.0, 3.0", ""), "SEEDS": (0,)}
ASKED = {"code": SEARCH, "SEEDS": (0,), "TRIALS": 2, "SAMPLER": "random"}
worker.LOOK = worker.WAIT = queue.PAUSE = 0.02


def fork(experiment, workdir, command, dies_at=0, lease=LEASE):
    """Start a worker, which is killed before it writes to the storage for the `dies_at`-th time; return its number."""
    if number := os.fork():
        return number
    try:
        if dies_at:
            die_at_write(dies_at)
        os._exit(worker.Worker(open_queue(experiment, workdir, lease), epath.Path(workdir), command).work())
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def open_queue(experiment, workdir, lease=LEASE):
    return queue.TrialQueue(experiment, epath.Path(workdir), lease=lease)


def die_at_write(number):
    append, writes = JournalFileBackend.append_logs, iter(range(1, number))

    def write(backend, logs):
        if next(writes, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        append(backend, logs)

    JournalFileBackend.append_logs = write


def outcome(seen, workdir):
    """Return what is to be seen of a sweep that has ended."""
    trials, told = seen.trials(), Counter()
    for row in rows(seen):
        told[row.user_attrs.get("trial", {}).get("name")] += row.state == TrialState.COMPLETE
    folders = [workdir / "trials" / trial.name for trial in trials]
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in folders]
    return {
        "states": Counter(trial.state for trial in trials),
        "values": [trial.value for trial in trials],
        "results": [told[trial.name] for trial in trials],  # told of each
        "steps": sorted({tuple(json.loads(line)["step"] for line in run) for run in lines}),
        "shared": sum((folder / "shared").exists() for folder in folders),
        "directories": len(list(folders[0].parent.iterdir())),
    }


def every_write(folder, **constants):
    """Kill a worker before each write of a sweep, and let another finish it; return all outcomes."""
    experiment, found, ended = load_experiment(write(folder, **constants)), [], 9
    while ended:
        workdir = folder / str(len(found))
        ended = os.waitpid(fork(experiment, workdir, stand_in(), dies_at=len(found) + 1), 0)[1]
        began = time.monotonic()
        codes = ended, os.waitpid(fork(experiment, workdir, stand_in()), 0)[1]
        seconds = time.monotonic() - began
        found.append({**outcome(open_queue(experiment, workdir), workdir), "codes": codes, "seconds": seconds})
    return found


def storm(folder, kills=9, workers=3):
    """Kill workers and processes of trials at random moments."""
    draw, command = random.Random(0), stand_in(steps=5, pause=0.05)
    experiment, workdir = load_experiment(write(folder, SEEDS=(0, 1, 2, 3))), folder / "sweep"
    seen = open_queue(experiment, workdir)
    living = [fork(experiment, workdir, command, lease=5 * LEASE) for _ in range(workers)]
    deaths, victims = dict[int, float](), list[str]()
    while living:
        time.sleep(draw.uniform(0.02, 0.2))
        if len(deaths) < kills:
            number = draw.choice(living)
            deaths[number] = time.time()
            os.kill(number, signal.SIGKILL)
        running = [trial.name for trial in seen.trials() if trial.state == "running"]
        if running and len(victims) < kills // 2 and victims.count(name := draw.choice(running)) < 2:
            with contextlib.suppress(OSError, IndexError):
                process = int((workdir / "trials" / name / "starts.txt").read_text().split()[-1])
                if name in Path(f"/proc/{process}/cmdline").read_text():
                    os.kill(process, signal.SIGKILL)
                    victims.append(name)
        for number in list(living):
            if os.waitpid(number, os.WNOHANG)[0]:
                living.remove(number)
                if number in deaths:
                    living.append(fork(experiment, workdir, command, lease=5 * LEASE))
    held = [
        row.datetime_complete.timestamp() - deaths[row.user_attrs["owner"]["pid"]]
        for row in rows(seen)
        if row.state == TrialState.FAIL and row.user_attrs.get("owner", {}).get("pid") in deaths
    ]
    return {**outcome(seen, workdir), "deaths": len(deaths), "victims": len(victims), "held": max(held)}


def sleeper(folder, process_too):
    """Stop a worker, with its process or without, for longer than its lease; wake it up when another has its trial."""
    experiment, workdir, command = (
        load_experiment(write(folder, **ONE)),
        folder / "sweep",
        stand_in(steps=20, pause=0.1),
    )
    seen = open_queue(experiment, workdir)
    first = fork(experiment, workdir, command)
    run = workdir / "trials" / experiment.planned()[0].name
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()):
        time.sleep(0.02)
    process = int((run / "starts.txt").read_text().split()[0])
    lock = FileLock(workdir / "trials.journal")
    lock.acquire()  # so that the worker does not hold it while it sleeps: nobody could go on
    for number in (first, process)[: 1 + process_too]:
        os.kill(number, signal.SIGSTOP)
    lock.release()
    second = fork(experiment, workdir, command)
    while len([row for row in rows(seen) if row.state != TrialState.WAITING]) < 2:
        time.sleep(0.02)
    for number in (process, first)[1 - process_too :]:
        os.kill(number, signal.SIGCONT)
    codes = [os.waitpid(number, 0)[1] for number in (first, second)]
    return {**outcome(seen, workdir), "codes": codes}


WAYS = {
    "arms": lambda folder: every_write(folder, **ONE),
    "search": lambda folder: every_write(folder, **ASKED),
    "storm": storm,
    "sleeping worker": lambda folder: sleeper(folder, False),
    "sleeping worker and process": lambda folder: sleeper(folder, True),
}

if __name__ == "__main__":
    print(json.dumps(WAYS[sys.argv[1]](Path(sys.argv[2]))))
