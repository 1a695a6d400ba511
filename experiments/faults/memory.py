"""Does the memory that is predicted before compiling agree with what the compiler says of its program?

Predicted: parameters, optimizer, gradients, activations and batch of `jformer.training.memory`. Compiled: arguments,
outputs and temporaries of the update, less the arguments that its outputs reuse. Nothing is run.

Command:  python -m experiments.faults.memory [--sizes=tiny,base] [--dtypes=float32,bfloat16] [--tokens=1024,4096,16384]
          [--length=32] [--vocabulary=8000] [--remat=none,full] [--smoke]
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from experiments.measure import smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.plan import Shape
from jformer.models import ModelConfig, build_model
from jformer.parallel.mesh import make_mesh
from jformer.tasks.batch_arrays import abstract_batch
from jformer.tasks.build import build_task
from jformer.training.memory import Memory, update_memory
from jformer.training.step import abstract_update

SIZES = flags.DEFINE_list("sizes", ["tiny", "base"], "Presets transformer_SIZE.")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Of activations.")
TOKENS = flags.DEFINE_list("tokens", ["1024", "4096", "16384"], "Of either side of an update.")
LENGTH = flags.DEFINE_integer("length", 32, "Of a row, on both sides.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 8_000, "Rows of the shared table.")
REMAT = flags.DEFINE_list("remat", ["none"], "Values of model.execution.remat.")


def compare(config: Config, model: ModelConfig, shape: Shape) -> tuple[Memory, int]:
    """Return the predicted memory of one update and the bytes that the compiler needs."""
    mesh = make_mesh(1)
    step: Any
    task = build_task(config)
    step, state = abstract_update(config, task, build_model(model), mesh)
    batch = abstract_batch(model, task.answer, shape, mesh)
    found: Any = step.trace(state, batch).lower().compile().memory_analysis()
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
    return update_memory(step, state, batch), sum(sizes) - found.alias_size_in_bytes


def main(argv: Sequence[str]) -> None:
    """Print a row for each update."""
    del argv
    smoke_sizes(sizes=["tiny"], dtypes=["float32"], tokens=["64"])
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, rows of {LENGTH.value} + {LENGTH.value} tokens")
    print(f"{'model':<30}{'rows':>6}{'predicted':>14}{'compiled':>14}{'ratio':>8}")
    cases = itertools.product(SIZES.value, DTYPES.value, REMAT.value, map(int, TOKENS.value))
    for size, dtype, remat, tokens in cases:
        settings = default_config(f"transformer_{size}")
        settings.model.dtype, settings.model.execution.remat = dtype, remat
        config = resolve(settings)
        model = config.model.with_vocabulary(VOCABULARY.value, VOCABULARY.value)
        shape = Shape(tokens // LENGTH.value, LENGTH.value, LENGTH.value)
        memory, compiled = compare(config, model, shape)
        cells = "".join(f"{f'{each / 2**20:,.1f} MiB':>14}" for each in (sum(memory), compiled))
        print(f"{size + ' ' + dtype + ' ' + remat:<30}{shape.rows:>6}{cells}{sum(memory) / compiled:>8.3f}", flush=True)


if __name__ == "__main__":
    app.run(main)
