"""Which attention is quicker here: our own, or jax.nn.dot_product_attention? Forward and gradient, in turns.

Command:  python -m experiments.attention_kernels [--length=32] [--rows=64] [--dtype=float32]
"""

import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import flags

from jformer.models.attention import attend

HEADS, SIZE, TURNS = 8, 64, 9


def main() -> None:
    """Print the medians and spreads of both."""
    options = flags.FlagValues()
    flags.DEFINE_integer("length", 32, "Tokens of a row.", flag_values=options)
    flags.DEFINE_integer("rows", 64, "Rows.", flag_values=options)
    flags.DEFINE_string("dtype", "float32", "Of the activations.", flag_values=options)
    options(sys.argv)
    b, t = options.rows, options.length
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (b, t, HEADS, SIZE)).astype(options.dtype) for key in keys)
    mask = jnp.tril(jnp.ones((t, t), bool))[None, None]

    def own(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, {"k": k, "v": v}, jnp.broadcast_to(mask, (b, 1, t, t)), scale=SIZE**-0.5)[0]

    def library(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    kernels: dict[str, Callable] = {"own": own, "jax": library}
    steps = {name: jax.jit(jax.grad(loss_of(f), argnums=(0, 1, 2))) for name, f in kernels.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(10):
                jax.block_until_ready(step(q, k, v))
            if turn:  # the first one compiles
                seconds[name].append((time.perf_counter() - began) / 10)
    print(f"{b} rows of {t} tokens, {HEADS} heads of {SIZE}, {options.dtype}, {jax.devices()[0].device_kind}")
    for name, times in seconds.items():
        low, high = min(times) * 1e3, max(times) * 1e3
        print(f"{name:<6}{statistics.median(times) * 1e3:>9.2f} ms   ({low:.2f} to {high:.2f})")


def loss_of(kernel: Callable) -> Callable:
    """Return a scalar to differentiate."""
    return lambda q, k, v: kernel(q, k, v).astype(jnp.float32).sum()


if __name__ == "__main__":
    main()
