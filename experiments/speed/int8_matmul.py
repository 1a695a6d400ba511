"""Are 8-bit weights quicker to multiply with on CPU? The products of a decoding step, each alone and all of a step.

Command:  taskset -c 0 python -m experiments.speed.int8_matmul [--sizes=tiny,base] [--rows=1,8,64,320] [--seconds=0.1]
          [--smoke]

float32     x · w as it is
bfloat16    both rounded
weights     int8 weights, a scale for each column, made float32 inside the product
both        activations rounded to int8 too, a scale for each row; sums in int32

"all of a step" multiplies by the weights of every layer and by the output table, one after another in a compiled loop,
as a decoder does, without attention, norms and the search. Each weight is read once in a step there; a product that is
timed alone finds its weights in a cache. Rows: 1 and 8 are short requests, 64 a batch, 320 a batch with 5 beams.
Seconds are the processor's, which other work on the core does not lengthen much, so one core is to be used.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax

from experiments.measure import mean_seconds, processor_name, smoke_sizes

SIZES = flags.DEFINE_list("sizes", ["tiny", "base"], "Keys of WIDTHS.")
ROWS = flags.DEFINE_list("rows", ["1", "8", "64", "320"], "Rows of the activations.")
SECONDS = flags.DEFINE_float("seconds", 0.1, "For each of five turns of each product.")

WIDTHS = {"tiny": (128, 256, 4), "base": (512, 2_048, 6)}  # d_model, d_ff, layers of the decoder
VOCABULARY, STEPS = 10_000, 4  # entries of the output table; steps of a loop
PROJECTIONS = 6  # of d_model x d_model in a layer: queries, keys, values and outputs, and two of the cross-attention
TURNS = 5
Product = Callable[[jax.Array, Any], jax.Array]


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Round to int8 with the largest value along an axis as 127; return the scales too."""
    scale = jnp.abs(x).max(axis, keepdims=True) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply in the dtype of the weights."""
    return x.astype(w.dtype) @ w


def weights_only(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Multiply by int8 weights."""
    small, scale = w
    return (x @ small.astype(x.dtype)) * scale


def both(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Multiply int8 by int8."""
    small, scale = w
    rounded, size = quantize(x, axis=1)
    product = lax.dot_general(rounded, small, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return product.astype(jnp.float32) * size * scale


SIDES: dict[str, tuple[Product, Callable[[jax.Array], Any]]] = {  # how to multiply, and what becomes of a weight before
    "float32": (plain, lambda w: w),
    "bfloat16": (plain, lambda w: w.astype(jnp.bfloat16)),
    "weights": (weights_only, lambda w: quantize(w, axis=0)),
    "both": (both, lambda w: quantize(w, axis=0)),
}


def random_weight(key: int, d: int, f: int) -> jax.Array:
    """Return a weight that keeps the variance of what it multiplies."""
    return jax.random.normal(jax.random.key(key), (d, f)) * d**-0.5


def steps(product: Product) -> Callable[[jax.Array, list[list[Any]], Any], jax.Array]:
    """Return a compiled loop of STEPS times all products of a step."""

    def step(_: int, carry: tuple[jax.Array, list[list[Any]], Any]) -> tuple[jax.Array, list[list[Any]], Any]:
        x, layers, table = carry
        hidden = x
        for *projections, wide, narrow in layers:
            for w in projections:
                hidden = product(hidden, w)
            hidden = product(jax.nn.relu(product(hidden, wide)), narrow)
        best = jnp.argmax(product(hidden, table), axis=1, keepdims=True)  # the next step waits for it, as in a search
        return x + 1e-6 * best.astype(x.dtype), layers, table

    return jax.jit(lambda x, layers, table: lax.fori_loop(0, STEPS, step, (x, layers, table))[0])


def medians(calls: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, float]:
    """Return the median seconds of each side, in turns; a turn before them compiles."""
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, (function, arguments) in calls.items():
            seconds = mean_seconds(function, *arguments, least=SECONDS.value, calls=2, clock=time.process_time)
            turns[name] += [seconds] if turn else []
    return {name: statistics.median(each) for name, each in turns.items()}


def show(size: str, rows: int, name: str, seconds: dict[str, float], note: str) -> None:
    """Print a row of the table."""
    cells = "".join(f"{1e3 * each:10.3f}" for each in seconds.values())
    print(f"{size:<5}{rows:>5}  {name:<14}{cells}{seconds['bfloat16'] / seconds['both']:>10.2f}   {note}", flush=True)


def time_alone(size: str, rows: int, d: int, f: int) -> None:
    """Time one product on all sides; its note is the mean error of the last two, of the mean output."""
    x, w = jax.random.normal(jax.random.key(0), (rows, d)), random_weight(1, d, f)
    calls = {name: (jax.jit(product), (x, made(w))) for name, (product, made) in SIDES.items()}
    exact = x @ w
    off = [jnp.abs(calls[name][0](*calls[name][1]) - exact).mean() / jnp.abs(exact).mean() for name in list(calls)[2:]]
    show(size, rows, f"{d} x {f}", medians(calls), " ".join(f"{each:.4f}" for each in off))


def time_step(size: str, rows: int) -> None:
    """Time all products of a step on all sides."""
    d, wide, layers = WIDTHS[size]
    shapes = [(d, d)] * PROJECTIONS + [(d, wide), (wide, d)]
    weights = [[random_weight(8 * i + j, *shape) for j, shape in enumerate(shapes)] for i in range(layers)]
    x, table = jax.random.normal(jax.random.key(0), (rows, d)), random_weight(-1, d, VOCABULARY)
    calls = {
        name: (steps(product), (x, [[made(w) for w in layer] for layer in weights], made(table)))
        for name, (product, made) in SIDES.items()
    }
    show(size, rows, "all of a step", {name: each / STEPS for name, each in medians(calls).items()}, "")


def main(argv: list[str]) -> None:
    """Time all and print a table in milliseconds."""
    del argv
    smoke_sizes(sizes=["tiny"], rows=["1"], seconds=0.0)
    print(f"jax {jax.__version__}, {processor_name()}; milliseconds of the processor, medians of {TURNS} turns")
    heads = "".join(f"{name:>10}" for name in SIDES)
    print(f"{'size':<5}{'rows':>5}  {'product':<14}{heads}{'bf16/both':>10}   errors of weights, both")
    for size in SIZES.value:
        d, wide, _ = WIDTHS[size]
        for rows in map(int, ROWS.value):
            for shape in ((d, d), (d, wide), (wide, d), (d, VOCABULARY)):
                time_alone(size, rows, *shape)
            time_step(size, rows)


if __name__ == "__main__":
    app.run(main)
