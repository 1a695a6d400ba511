"""What does shard_map cost where there is nothing to share? The update on a mesh of one device, and without shard_map.

Command:  python -m experiments.mesh_overhead [--size=tiny|base] [--steps=15]
"""

import statistics
import time
from typing import Any
from unittest import mock

import jax
from absl import app, flags

from experiments.speed_jformer import build_step
from experiments.speed_shapes import SIZES, make_batch, model_config
from jformer.heap import keep_freed_memory

SIZE = flags.DEFINE_enum("size", "tiny", ["base", "tiny"], "Which model.")
STEPS = flags.DEFINE_integer("steps", 15, "Timed steps of each.")
WARMUP = 4_000


def main(argv: list[str]) -> None:
    """Time both in turn and print their medians."""
    del argv
    keep_freed_memory()
    sides = {"shard_map": build()}
    with mock.patch.object(jax, "shard_map", lambda function, **_: function):
        sides["without"] = build()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(STEPS.value):
        for side, run in sides.items():
            step, state, batch = run
            began = time.perf_counter()
            run[1] = jax.block_until_ready(step(state, batch))[0]
            seconds[side].append(time.perf_counter() - began)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    for side, median in medians.items():
        print(f"{side:10} {1e3 * median:9.1f} ms (fastest {1e3 * min(seconds[side]):.1f})")
    print(f"{SIZE.value}: with shard_map {medians['shard_map'] / medians['without']:.3f} times as long")


def build() -> list[Any]:
    """Return a compiled update, its state and its batch."""
    config = model_config(SIZE.value)
    step, state, batch = build_step(config, make_batch("full", SIZES[SIZE.value][2], config.vocab_size), WARMUP)
    return [step.lower(state, batch).compile(), state, batch]


if __name__ == "__main__":
    app.run(main)
