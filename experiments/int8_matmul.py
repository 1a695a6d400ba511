"""Are 8-bit weights quicker to multiply with on CPU? The products of a decoding step of the base model, in turns.

Command:  python -m experiments.int8_matmul [--seconds=0.1] [--smoke]

float32     x · w as it is
bfloat16    both rounded
weights     int8 weights, a scale for each column, made float32 inside the product
both        activations rounded to int8 too, a scale for each row; sums in int32
"""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax

from experiments.measure import mean_seconds, smoke_sizes

SECONDS = flags.DEFINE_float("seconds", 0.1, "For each of five turns of each product.")

SHAPES = [(512, 512), (512, 2048), (2048, 512), (512, 10_000)]
ROWS = {1: "one sentence, greedy", 64: "64 sentences, greedy", 320: "64 sentences, beam 5"}


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Round to int8 with the largest value along an axis as 127; return the scales too."""
    scale = jnp.abs(x).max(axis, keepdims=True) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def weights_only(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply by int8 weights."""
    return (x @ w.astype(x.dtype)) * scale


def both(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply int8 by int8."""
    rounded, size = quantize(x, axis=1)
    product = lax.dot_general(rounded, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return product.astype(jnp.float32) * size * scale


def main(argv: list[str]) -> None:
    """Time all and print a table: milliseconds, and the mean error of the last two in units of the mean output."""
    del argv
    smoke = smoke_sizes(seconds=0.0)
    product, dequantized, integers = jax.jit(jnp.matmul), jax.jit(weights_only), jax.jit(both)
    print(f"jax {jax.__version__}; milliseconds, medians of 5 turns")
    print(f"{'rows':>5} {'product':>14} {'float32':>8} {'bfloat16':>8} {'weights':>8} {'both':>8}   errors")
    for rows in [1] if smoke else ROWS:
        for d, f in SHAPES[:1] if smoke else SHAPES:
            x = jax.random.normal(jax.random.key(0), (rows, d))
            w = jax.random.normal(jax.random.key(1), (d, f)) * d**-0.5
            small = quantize(w, axis=0)
            sides: list[tuple[Any, Any]] = [
                (product, (x, w)),
                (product, (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))),
            ]
            sides += [(dequantized, (x, *small)), (integers, (x, *small))]
            turns = [
                [mean_seconds(function, *arguments, least=SECONDS.value, calls=2) for function, arguments in sides]
                for _ in range(6)
            ]
            times = zip(*turns[1:], strict=True)  # the first one compiles
            cells = [f"{1e3 * statistics.median(one):8.3f}" for one in times]
            errors = [jnp.abs(side[0](*side[1]) - x @ w).mean() / jnp.abs(x @ w).mean() for side in sides[2:]]
            print(f"{rows:5} {f'{d} x {f}':>14}", *cells, "  ", *(f"{error:.4f}" for error in errors))


if __name__ == "__main__":
    app.run(main)
