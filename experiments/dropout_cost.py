"""What does dropout cost? One training step with it and without it, in turns, medians.

Command:  python -m experiments.dropout_cost [--size=base|tiny] [--steps=7] [--dtype=float32]
"""

import dataclasses
import statistics
import time

import jax
from absl import app, flags

from experiments.speed_jformer import build_step
from experiments.speed_shapes import LENGTH, SIZES, make_batch, model_config
from jformer.heap import keep_freed_memory

SIZE = flags.DEFINE_enum("size", "base", ["base", "tiny"], "Which model.")
STEPS = flags.DEFINE_integer("steps", 7, "Timed steps of each.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of activations.")

WARMUP = 4_000


def main(argv: list[str]) -> None:
    """Time both and print a table."""
    del argv
    keep_freed_memory()
    config = dataclasses.replace(model_config(SIZE.value), dtype=DTYPE.value)
    batch = make_batch("full", SIZES[SIZE.value][2], config.vocab_size)
    runs = {rate: list(build_step(dataclasses.replace(config, dropout=rate), batch, WARMUP)) for rate in (0.1, 0.0)}
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
