"""What does a run cost beside its compiled updates? The loop, saving, and the way to the first update.

The loop is timed against the bare updates on batches that lie on the device, in turns of `--steps` each; saving by how
long it keeps the loop from going on; the first update, on a small corpus with a table of 8,000 rows, from the start
of the process until its row is written, with nothing kept from earlier runs (neither tokens nor compiled programs),
then again.

Command:  python -m experiments.speed.host_overhead [--size=base|tiny] [--steps=10] [--turns=3] [--nostart] [--smoke]
"""

import dataclasses
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags

from experiments.measure import smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.evaluation import records
from jformer.models.flops import update_flops
from jformer.training.log import Cost, TrainingLog
from jformer.training.loop import explain, feed, loop, save
from jformer.training.profile import Profile
from jformer.training.run import Run, build

SIZE = flags.DEFINE_enum("size", "base", ["base", "tiny"], "Which model.")
STEPS = flags.DEFINE_integer("steps", 10, "Updates of a turn.")
TURNS = flags.DEFINE_integer("turns", 3, "Turns of the loop and of the bare updates.")
START = flags.DEFINE_bool("start", True, "Time the way to the first update, cold and warm.")

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.py"
OPTIONS = {
    "data.vocab_size": 8_000,
    "data.num_buckets": 1,
    "data.tokens_per_update": 2_048,
    "train.eval_every": 0,
    "train.checkpoint_every": 100_000,
    "train.log_every": 100_000,
}


def model_options() -> dict[str, object]:
    """Return the fields in which the model differs from the quickstart's."""
    model = default_config(f"transformer_{SIZE.value}").model
    return {f"model.{key}": model[key] for key in ("num_layers", "d_model", "d_ff", "num_heads", "norm", "dropout")}


def timed_run(folder: Path) -> Config:
    """Return the config of the run whose loop is timed."""
    config = default_config(f"transformer_{SIZE.value}")
    config.data.update(source="generated", name="quickstart", tokenizer="bpe", split_digits=True)
    config.update_from_flattened_dict({**OPTIONS, "data.cache_dir": str(folder / "cache")})
    return resolve(config)


def bare(run: Run, steps: int) -> float:
    """Return seconds of an update when nothing but updates is asked for."""
    made = feed(run, run.progress.step)
    batches = [batch for batch, _ in itertools.islice(made, steps)]
    jax.block_until_ready((run.state, batches))
    began = time.perf_counter()
    for batch in batches:
        run.state, _ = run.train_step(run.state, batch)
    jax.block_until_ready(run.state)
    return (time.perf_counter() - began) / steps


def looped(run: Run, folder: Path, steps: int) -> float:
    """Return seconds of an update in the training loop, with its batches and its report, until it would save."""
    cost = Cost(lambda work: update_flops(run.sampler.model.config, work), 1e12)
    train = dataclasses.replace(run.config.train, num_steps=run.progress.step + steps)
    run.config = dataclasses.replace(run.config, train=train)
    with TrainingLog(folder, run.config, run.progress, run.schedule, cost, functools.partial(explain, run)) as log:
        loop(run, log, Profile(folder, range(0), log.say))
    return records.rows(folder)[-1]["seconds_per_update"]


def blocked(run: Run) -> float:
    """Return for how many seconds a save keeps the loop from its next update."""
    run.progress.step += 1
    jax.block_until_ready(run.state)
    began = time.perf_counter()
    save(run, None)
    return time.perf_counter() - began


def first_update(folder: Path, name: str) -> float:
    """Return the seconds from the start of the command to the row of its first update."""
    workdir = folder / name
    options = {**OPTIONS, **model_options(), "train.num_steps": 1, "train.log_every": 1, "optim.warmup": 1}
    options |= {"data.cache_dir": folder / "start", "data.name": "reverse", "data.num_pairs": 5_000}
    options |= {"data.tokenizer": "char", "model.vocab_size": 8_000}  # a corpus that takes no time
    flags_of_run = [f"--config.{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "jformer.main", f"--config={CONFIG}", f"--workdir={workdir}", *flags_of_run]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    began = time.perf_counter()
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        rows = workdir / "metrics.jsonl"
        while not (rows.exists() and rows.read_text()):
            if process.poll() is not None:
                raise RuntimeError((folder / f"{name}.log").read_text())
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        process.kill()  # what it compiled is kept by now
        process.wait()
    return seconds


def main(argv: Sequence[str]) -> None:
    """Print the figures."""
    del argv
    smoke_sizes(size="tiny", steps=1, turns=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if START.value:
            for state in ("cold", "warm"):
                print(f"first update, {state:<22}{first_update(folder, state):>9.2f} s", flush=True)
        run = build(timed_run(folder), folder / "run")
        every = resolve(default_config()).train.checkpoint_every
        bare(run, 1)
        looped(run, folder / "run", 1)
        turns = [(bare(run, STEPS.value), looped(run, folder / "run", STEPS.value)) for _ in range(TURNS.value)]
        alone, within = (statistics.median(times) for times in zip(*turns, strict=True))
        print(f"update alone, in the loop         {alone:>9.4f} s {within:>9.4f} s: {within / alone - 1:+.1%}")
        seconds = statistics.median(blocked(run) for _ in range(3))
        share = seconds / (seconds + every * within)
        print(f"a save blocks                     {seconds:>9.4f} s: {share:.3%} of the time, every {every:,} updates")
        run.checkpoints.close()


if __name__ == "__main__":
    app.run(main)
