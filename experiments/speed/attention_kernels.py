"""Which attention is quicker here: our own, or jax.nn.dot_product_attention? Forward and gradient, in turns.

Command:  python -m experiments.speed.attention_kernels [--length=32] [--rows=64] [--dtype=float32] [--smoke]
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.measure import median_and_range, seconds_in_turns, smoke_sizes
from jformer.models.layers.dot_product import attend

LENGTH = flags.DEFINE_integer("length", 32, "Tokens of a row.")
ROWS = flags.DEFINE_integer("rows", 64, "Rows.")
DTYPE = flags.DEFINE_string("dtype", "float32", "Of the activations.")

HEADS, SIZE, TURNS = 8, 64, 9


def main(argv: list[str]) -> None:
    """Print the medians and ranges of both."""
    del argv
    smoke_sizes(length=4, rows=2)
    b, t = ROWS.value, LENGTH.value
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (b, t, HEADS, SIZE)).astype(DTYPE.value) for key in keys)
    mask = jnp.tril(jnp.ones((t, t), bool))[None, None]

    def own(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, {"k": k, "v": v}, jnp.broadcast_to(mask, (b, 1, t, t)), scale=SIZE**-0.5)[0]

    def library(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    kernels: dict[str, Callable[..., Any]] = {"own": own, "jax": library}
    steps = {
        name: functools.partial(jax.jit(jax.grad(loss_of(kernel), argnums=(0, 1, 2))), q, k, v)
        for name, kernel in kernels.items()
    }
    print(f"{b} rows of {t} tokens, {HEADS} heads of {SIZE}, {DTYPE.value}, {jax.devices()[0].device_kind}")
    for name, seconds in seconds_in_turns(steps, TURNS, calls=10).items():
        print(f"{name:<6}{median_and_range(seconds)}")


def loss_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scalar to differentiate."""
    return lambda q, k, v: kernel(q, k, v).astype(jnp.float32).sum()


if __name__ == "__main__":
    app.run(main)
