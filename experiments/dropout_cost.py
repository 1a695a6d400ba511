"""What does dropout cost? One training step with it and without it, in turns, medians.

Command:  python -m experiments.dropout_cost [--size=base|tiny] [--steps=7] [--dtype=float32]
"""

import statistics
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from jformer import optim
from jformer.data.config import DataConfig
from jformer.models import ModelConfig, build_model, init_params
from jformer.presets import PRESETS
from jformer.sharding import make_mesh, put_batch
from jformer.step import create_state, make_loss, make_train_step
from jformer.tasks import TASKS

SIZE = flags.DEFINE_enum("size", "base", ["base", "tiny"], "Which model.")
STEPS = flags.DEFINE_integer("steps", 7, "Timed steps of each.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of activations.")

ROWS = {"base": 64, "tiny": 128}  # pairs of 32 + 32 tokens
LENGTH, VOCABULARY = 32, 8_000


def random_batch(rows: int) -> dict[str, np.ndarray]:
    """Return full rows of random tokens, as one microbatch."""
    rng = np.random.default_rng(0)
    shape = (1, rows, LENGTH)
    tokens = {
        name: rng.integers(4, VOCABULARY, shape).astype(np.int32) for name in ("source", "target_in", "target_out")
    }
    ones = {name: np.ones(shape, np.int32) for name in ("source_segments", "target_segments")}
    places = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
    positions = {"source_positions": places, "target_positions": places}
    rest = {"weights": np.ones(shape, np.float32), "row": np.arange(rows, dtype=np.int32)[None]}
    return tokens | ones | positions | rest


def prepare(rate: float) -> tuple[Any, Any, Any]:
    """Return a compiled step, its state and its batch."""
    fields = {**PRESETS[f"transformer_{SIZE.value}"], "dropout": rate, "dtype": DTYPE.value}
    model = build_model(ModelConfig(vocab_size=VOCABULARY, **fields))
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    schedule = optim.make_schedule("noam", 1.0, 4_000, 100_000, model.config.d_model)
    tx = optim.make_optimizer("adam", schedule, params, b1=0.9, b2=0.98, epsilon=1e-9, weight_decay=0.0, clip_norm=1.0)
    task = TASKS["translate"](DataConfig(), label_smoothing=0.1, scores=(), tokenize="none", lowercase=False)
    mesh = make_mesh(1)
    step = make_train_step(make_loss(model, task), tx, mesh, seed=0)
    return step, create_state(params, tx, ema=False), put_batch(mesh, random_batch(ROWS[SIZE.value]))


def main(argv: list[str]) -> None:
    """Time both and print a table."""
    del argv
    runs = {rate: list(prepare(rate)) for rate in (0.1, 0.0)}
    seconds: dict[float, list[float]] = {rate: [] for rate in runs}
    for turn in range(STEPS.value + 1):
        for rate, run in runs.items():
            began = time.perf_counter()
            run[1], metrics = run[0](run[1], run[2])
            jax.block_until_ready(metrics)
            if turn:  # the first one compiles
                seconds[rate].append(time.perf_counter() - began)
    print(f"{SIZE.value}, {DTYPE.value}, {ROWS[SIZE.value]} pairs of {LENGTH} + {LENGTH} tokens, jax {jax.__version__}")
    for rate, times in seconds.items():
        print(f"  dropout {rate}: median {statistics.median(times):.3f} s, min {min(times):.3f}, max {max(times):.3f}")
    print(f"  ratio of medians {statistics.median(seconds[0.1]) / statistics.median(seconds[0.0]):.3f}")


if __name__ == "__main__":
    app.run(main)
