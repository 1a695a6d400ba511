"""What the tests of sweeps share: small experiments, and a command that plays jformer.main."""

import json
import shlex
import sys
from pathlib import Path

from etils import epath
from optuna.storages import RDBStorage

from jformer.tools.sweep.experiment import load_experiment
from jformer.tools.sweep.queue import TrialQueue

ROOT = Path(__file__).parents[3]
OPEN = []  # queues whose storage is to be closed at the end of a test
ARMS = {"BASE": str(ROOT / "tests" / "small_run.py"), "METRIC": "valid/loss", "SEEDS": (0, 1)}
SWEEP = """
from jformer.tools.sweep import product

def sweep():
    return product({"optim.learning_rate": [1.0, 2.0, 3.0]})
"""
SEARCH = """
def search(trial):
    return {"optim.learning_rate": trial.suggest_float("lr", 1.0, 2.0)}
"""


def stand_in(code="", **options):
    """Return the --command of a run that is played."""
    words = [sys.executable, "-S", str(Path(__file__).parent / "stand_in.py"), f"--code={code}"]
    return shlex.join(words + [f"--{key}={value}" for key, value in options.items()])


def write(folder, code=SWEEP, name="small", **constants):
    """Write an experiment file and return its path."""
    lines = [f"{key} = {value!r}" for key, value in {**ARMS, **constants}.items()]
    path = Path(folder) / f"{name}.py"
    path.write_text('"""Small."""\n' + "\n".join(lines) + code)
    return path


def open_queue(folder, code=SWEEP, *, storage="", name="", lease=60.0, keys=(), **constants):
    """Return the queue of an experiment in FOLDER/sweep."""
    experiment = load_experiment(write(folder, code, **constants), [f"--config.{key}" for key in keys])
    queue = TrialQueue(experiment, epath.Path(folder) / "sweep", storage, name, lease)
    OPEN.append(queue)
    return queue


def close():
    """Close the databases of all queues."""
    while OPEN:
        backend = OPEN.pop().study._storage._backend
        if isinstance(backend, RDBStorage):
            backend.engine.dispose()


def rows(queue):
    """Return all rows of the study, those that do not count as well."""
    return queue.study.get_trials(deepcopy=False)


def journal(folder):
    """Return the lines of the journal."""
    return [json.loads(line) for line in (Path(folder) / "sweep" / "trials.journal").read_text().splitlines()]


def folder_of(folder, trial):
    """Return a trial's directory."""
    return Path(folder) / "sweep" / "trials" / trial.name


def starts(folder, trial):
    """Return how often the process of a trial was started."""
    return len((folder_of(folder, trial) / "starts.txt").read_text().splitlines())
