"""What does shard_map cost where there is nothing to share? The update on a mesh of one device, and without shard_map.

Command:  python -m experiments.speed.mesh_overhead [--size=tiny] [--steps=15] [--smoke]
"""

import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from absl import app, flags

from experiments.measure import median_and_range, seconds_in_turns, smoke_sizes
from experiments.speed.steps_jformer import stepper
from experiments.speed.steps_shapes import SIZES, make_batch, model_config
from jformer.training.malloc import keep_freed_memory

SIZE = flags.DEFINE_enum("size", "tiny", list(SIZES), "Which model.")
STEPS = flags.DEFINE_integer("steps", 15, "Timed steps of each.")
WARMUP = 4_000


def main(argv: list[str]) -> None:
    """Time both in turn and print their medians."""
    del argv
    smoke_sizes(size="smoke", steps=2)
    keep_freed_memory()
    config = model_config(SIZE.value)
    batch = make_batch("full", SIZES[SIZE.value][2], config.vocab_size)
    sides: dict[str, Callable[[], Any]] = {"shard_map": stepper(config, batch, WARMUP)}
    sides["shard_map"]()  # compiled while it is there
    with mock.patch.object(jax, "shard_map", lambda function, **_: function):
        sides["without"] = stepper(config, batch, WARMUP)
        sides["without"]()
    seconds = seconds_in_turns(sides, STEPS.value)
    for side, times in seconds.items():
        print(f"{side:10} {median_and_range(times)}")
    ratio = statistics.median(seconds["shard_map"]) / statistics.median(seconds["without"])
    print(f"{SIZE.value}: with shard_map {ratio:.3f} times as long")


if __name__ == "__main__":
    app.run(main)
