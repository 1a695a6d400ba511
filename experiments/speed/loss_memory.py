"""What does the loss take, in chunks and plain? Its memory and time with the gradients of hidden states and table.

Command:  python -m experiments.speed.loss_memory [--tokens=16384] [--vocabulary=32000] [--d_model=512]
          [--dtype=float32] [--smoke]
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.measure import median_and_range, seconds_in_turns, smoke_sizes
from jformer.models.layers.matmul import matmul
from jformer.tasks.losses import chunked_cross_entropy, cross_entropy
from jformer.tasks.sums import Sums
from jformer.training.malloc import keep_freed_memory

TOKENS = flags.DEFINE_integer("tokens", 16_384, "In rows of 64.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 32_000, "Rows of the table.")
WIDTH = flags.DEFINE_integer("d_model", 512, "Of hidden states.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of hidden states and logits.")
STEPS = flags.DEFINE_integer("steps", 5, "Timed, in turns.")

LENGTH, SMOOTHING = 64, 0.1


def main(argv: list[str]) -> None:
    """Print a row for each."""
    del argv
    smoke_sizes(tokens=128, vocabulary=50, d_model=8, steps=1)
    keep_freed_memory()
    rows = TOKENS.value // LENGTH
    hidden = jax.random.normal(jax.random.key(0), (rows, LENGTH, WIDTH.value), DTYPE.value)
    table = jax.random.normal(jax.random.key(1), (WIDTH.value, VOCABULARY.value)) * WIDTH.value**-0.5
    targets = jax.random.randint(jax.random.key(2), (rows, LENGTH), 0, VOCABULARY.value)
    weights = jnp.ones((rows, LENGTH))

    def plain(h: jax.Array, w: jax.Array) -> Sums:
        return cross_entropy(matmul(h, w), targets, weights, SMOOTHING)

    def chunked(h: jax.Array, w: jax.Array) -> Sums:
        return chunked_cross_entropy(h, lambda x: matmul(x, w), targets, weights, SMOOTHING)

    programs = {name: compile_loss(loss, hidden, table) for name, loss in (("plain", plain), ("chunked", chunked))}
    sides = {name: functools.partial(program, hidden, table) for name, program in programs.items()}
    seconds = seconds_in_turns(sides, STEPS.value)
    sizes = f"{TOKENS.value:,} tokens, vocabulary {VOCABULARY.value:,}, d_model {WIDTH.value}, {DTYPE.value}"
    print(f"{sizes}, jax {jax.__version__}")
    for name, program in programs.items():
        size = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:<8} temporaries {size:>8,.0f} MiB, {median_and_range(seconds[name])}")


def compile_loss(loss: Callable[..., Sums], *args: jax.Array) -> Any:
    """Compile the value and its gradients."""
    step = jax.value_and_grad(lambda *a: loss(*a)["loss"].total, argnums=(0, 1))
    return jax.jit(step).lower(*args).compile()


if __name__ == "__main__":
    app.run(main)
