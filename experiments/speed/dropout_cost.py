"""What does dropout cost? One training step with it and without it, in turns, medians.

Command:  python -m experiments.speed.dropout_cost [--size=base] [--steps=7] [--dtype=float32] [--smoke]
"""

import dataclasses
import statistics

import jax
from absl import app, flags

from experiments.measure import median_and_range, seconds_in_turns, smoke_sizes
from experiments.speed.steps_jformer import stepper
from experiments.speed.steps_shapes import LENGTH, SIZES, make_batch, model_config
from jformer.training.malloc import keep_freed_memory

SIZE = flags.DEFINE_enum("size", "base", list(SIZES), "Which model.")
STEPS = flags.DEFINE_integer("steps", 7, "Timed steps of each.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of activations.")

WARMUP = 4_000


def main(argv: list[str]) -> None:
    """Time both and print a table."""
    del argv
    smoke_sizes(size="smoke", steps=2)
    keep_freed_memory()
    config = dataclasses.replace(model_config(SIZE.value), dtype=DTYPE.value)
    batch = make_batch("full", SIZES[SIZE.value][2], config.vocab_size)
    sides = {rate: stepper(dataclasses.replace(config, dropout=rate), batch, WARMUP) for rate in (0.1, 0.0)}
    seconds = seconds_in_turns(sides, STEPS.value)
    pairs = f"{SIZES[SIZE.value][2]} pairs of {LENGTH} + {LENGTH} tokens"
    print(f"{SIZE.value}, {DTYPE.value}, {pairs}, jax {jax.__version__}")
    for rate, times in seconds.items():
        print(f"  dropout {rate}: {median_and_range(times)}")
    print(f"  ratio of medians {statistics.median(seconds[0.1]) / statistics.median(seconds[0.0]):.3f}")


if __name__ == "__main__":
    app.run(main)
