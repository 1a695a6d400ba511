"""How long does the report of a big sweep take?

Stores 1,000 finished trials (250 arms, four seeds, 20 validations each) as a sweep would, in a temporary directory, and
times the command that reports on them: once as a sweep of three factors, once as a search.

Command:  python -m experiments.speed.report_speed [--trials=1000] [--smoke]
"""

import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
from absl import app, flags
from optuna.trial import TrialState

from experiments.measure import smoke_sizes
from jformer.tools.sweep.experiment import Experiment, load_experiment
from jformer.tools.sweep.queue import TrialQueue

TRIALS = flags.DEFINE_integer("trials", 1_000, "Trials of each sweep.")

HEAD = '"""A question."""\nfrom jformer.sweep import product\nBASE = "configs/quickstart.py"\nMETRIC = "valid/loss"\n'
SWEEP = f"""{HEAD}SEEDS = (0, 1, 2, 3)
PLOTS = [("optim.warmup", "model.norm"), ("model.d_ff", "model.norm")]
def sweep():
    sizes = {{"optim.warmup": [100 * i for i in range(25)], "model.d_ff": [64, 128, 256, 512, 1024]}}
    return product({{"model.norm": ["pre", "post"]}}, sizes)
"""
SEARCH = f"""{HEAD}TRIALS = 1000
def search(trial):
    return {{
        "optim.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True),
        "model.norm": trial.suggest_categorical("norm", ["pre", "post"]),
        "model.d_ff": trial.suggest_int("d_ff", 64, 1024),
    }}
"""


def store(experiment: Experiment, workdir: Path, trials: int) -> None:
    """Write trials that are done: their rows of metrics, and what the sweep's storage says of them."""
    rng = random.Random(0)
    planned = experiment.planned()[:trials]
    for number in range(trials if experiment.search else 0):
        rate, norm = 10 ** rng.uniform(-4, -2), rng.choice(["pre", "post"])
        tried = {"optim.learning_rate": rate, "model.norm": norm, "model.d_ff": rng.randint(64, 1024)}
        planned.append(experiment.trial(f"trial {number}", tried, 0, number))
    stored = []
    for trial in planned:
        losses = [5 * math.exp(-step / 6) + rng.gauss(1.5, 0.05) for step in range(20)]
        rows = [{"step": 50 * i, "split": "valid", "loss": loss, "nll": loss} for i, loss in enumerate(losses, start=1)]
        folder = workdir / "trials" / trial.name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics = {"valid/loss": losses[-1], "run/parameters": 990_208.0, "run/updates": 1000.0}
        described = {name: getattr(trial, name) for name in ("name", "arm", "overrides", "seed")}
        attributes = {"trial": described, "metrics": metrics, "seconds": 60.0, "owner": "nobody"}
        stored.append(optuna.create_trial(state=TrialState.COMPLETE, value=losses[-1], user_attrs=attributes))
    TrialQueue(experiment, workdir).study.add_trials(stored)


def processor_seconds() -> float:
    """Return what the processes we started have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(argv: list[str]) -> None:
    """Print the seconds of each report, process and imports included."""
    del argv
    smoke_sizes(trials=8)
    trials = TRIALS.value
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for name, text in (("sweep", SWEEP), ("search", SEARCH)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.py"
            path.write_text(text.replace("TRIALS = 1000", f"TRIALS = {trials}"))
            store(load_experiment(path), Path(folder) / "work", trials)
            began, used = time.monotonic(), processor_seconds()
            command = [sys.executable, "-m", "jformer.sweep", f"--experiment={path}", "--report"]
            done = subprocess.run([*command, f"--workdir={folder}/work"], capture_output=True, text=True)
            seconds, used = time.monotonic() - began, processor_seconds() - used
            print(
                f"{name}: {trials} trials reported in {seconds:.2f} s, {used:.2f} s of a core; code {done.returncode}"
            )
            print("   ", "\n    ".join((done.stdout or done.stderr).splitlines()[-6:]))


if __name__ == "__main__":
    app.run(main)
