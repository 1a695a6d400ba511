"""What does dropout cost? One training step with it and without it, in turns, medians.

Command:  python -m experiments.dropout_cost [--size=base|tiny] [--steps=7] [--dtype=float32]
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
from absl import app, flags

from experiments.speed_shapes import LENGTH, SIZES, make_batch, model_config
from jformer import optim
from jformer.data.config import DataConfig
from jformer.heap import keep_freed_memory
from jformer.models import build_model, init_params
from jformer.sharding import make_mesh, put_batch, replicated
from jformer.step import create_state, make_loss, make_train_step
from jformer.tasks import TASKS

SIZE = flags.DEFINE_enum("size", "base", ["base", "tiny"], "Which model.")
STEPS = flags.DEFINE_integer("steps", 7, "Timed steps of each.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of activations.")


def prepare(rate: float) -> tuple[Any, Any, Any]:
    """Return a compiled step, its state and its batch."""
    config = dataclasses.replace(model_config(SIZE.value), dropout=rate, dtype=DTYPE.value)
    model, batch = build_model(config), make_batch("full", SIZES[SIZE.value][2], config.vocab_size)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    schedule = optim.make_schedule("noam", 1.0, 4_000, 100_000, model.config.d_model)
    tx = optim.make_optimizer("adam", schedule, params, b1=0.9, b2=0.98, epsilon=1e-9, weight_decay=0.0, clip_norm=1.0)
    task = TASKS["translate"](DataConfig(), label_smoothing=0.1, scores=(), tokenize="none", lowercase=False)
    mesh = make_mesh(1)
    step = make_train_step(make_loss(model, task), tx, mesh, seed=0)
    state = jax.device_put(create_state(params, tx, ema=False), replicated(mesh))  # as a step leaves it
    return step, state, put_batch(mesh, {name: array[None] for name, array in batch.items()})


def main(argv: list[str]) -> None:
    """Time both and print a table."""
    del argv
    keep_freed_memory()
    runs = {rate: list(prepare(rate)) for rate in (0.1, 0.0)}
    seconds: dict[float, list[float]] = {rate: [] for rate in runs}
    for turn in range(STEPS.value + 1):
        for rate, run in runs.items():
            began = time.perf_counter()
            run[1], metrics = run[0](run[1], run[2])
            jax.block_until_ready(metrics)
            if turn:  # the first one compiles
                seconds[rate].append(time.perf_counter() - began)
    pairs = f"{SIZES[SIZE.value][2]} pairs of {LENGTH} + {LENGTH} tokens"
    print(f"{SIZE.value}, {DTYPE.value}, {pairs}, jax {jax.__version__}")
    for rate, times in seconds.items():
        print(f"  dropout {rate}: median {statistics.median(times):.3f} s, min {min(times):.3f}, max {max(times):.3f}")
    print(f"  ratio of medians {statistics.median(seconds[0.1]) / statistics.median(seconds[0.0]):.3f}")


if __name__ == "__main__":
    app.run(main)
