"""Does the memory that is predicted before compiling agree with what the compiler says of its program?

Predicted: parameters, optimizer, gradients, activations and batch of `jformer.memory`. Compiled: arguments, outputs and
temporaries of the update, less the arguments that its outputs reuse. Nothing is run.

Command:  python -m experiments.memory [--sizes=tiny,base] [--dtypes=float32,bfloat16] [--tokens=1024,4096,16384]
          [--length=32] [--vocabulary=8000] [--remat=none,full]
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from jformer.config import Config, default_config, resolve
from jformer.data.plan import Shape
from jformer.memory import Memory, abstract_batch, update_memory
from jformer.models import ModelConfig, build_model, init_params
from jformer.restore import build_task
from jformer.run import build_optimizer
from jformer.sharding import make_mesh
from jformer.step import create_state, make_loss, make_train_step

SIZES = flags.DEFINE_list("sizes", ["tiny", "base"], "Presets transformer_SIZE.")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Of activations.")
TOKENS = flags.DEFINE_list("tokens", ["1024", "4096", "16384"], "Of either side of an update.")
LENGTH = flags.DEFINE_integer("length", 32, "Of a row, on both sides.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 8_000, "Rows of the shared table.")
REMAT = flags.DEFINE_list("remat", ["none"], "Values of model.execution.remat.")


def compare(config: Config, model: ModelConfig, shape: Shape) -> tuple[Memory, int]:
    """Return the predicted memory of one update and the bytes that the compiler needs."""
    module, mesh = build_model(model), make_mesh(1)
    _, tx = build_optimizer(config, module)
    create = functools.partial(create_state, tx=tx, ema=False)
    state: Any = jax.eval_shape(lambda key: create(init_params(module, key)), jax.random.key(0))
    step: Any = make_train_step(make_loss(module, build_task(config)), tx, mesh, seed=0)
    batch = abstract_batch(model, shape, mesh)
    found: Any = step.trace(state, batch).lower().compile().memory_analysis()
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
    return update_memory(step, state, batch), sum(sizes) - found.alias_size_in_bytes


def main(argv: Sequence[str]) -> None:
    """Print a row for each update."""
    del argv
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, rows of {LENGTH.value} + {LENGTH.value} tokens")
    print(f"{'model':<30}{'rows':>6}{'predicted':>14}{'compiled':>14}{'ratio':>8}")
    for size in SIZES.value:
        for dtype in DTYPES.value:
            for remat in REMAT.value:
                config = default_config(f"transformer_{size}")
                config.model.update(dtype=dtype)
                config.model.execution.remat = remat
                resolved = resolve(config)
                model = resolved.model.with_vocabulary(VOCABULARY.value, VOCABULARY.value)
                for tokens in map(int, TOKENS.value):
                    shape = Shape(tokens // LENGTH.value, LENGTH.value, LENGTH.value)
                    memory, compiled = compare(resolved, model, shape)
                    cells = [f"{each / 2**20:,.1f} MiB" for each in (sum(memory), compiled)]
                    name = " ".join((size, dtype, remat))
                    print(
                        f"{name:<30}{shape.rows:>6}{cells[0]:>14}{cells[1]:>14}{sum(memory) / compiled:>8.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    app.run(main)
