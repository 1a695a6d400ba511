"""The floor of steps.py: the matrix products of a step, each by itself in its quickest form, added up."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from experiments.measure import mean_seconds
from experiments.speed.steps_worker import Step, Told

SECONDS = 0.01  # that a product is timed for, at least


def load(told: Told) -> tuple[Step, Told]:
    """Choose a form for every product."""
    timers = [(count, quickest_form(shape, told["model"]["dtype"])) for shape, count in told["products"]]

    def run() -> tuple[float, float]:
        return sum(count * timer() for count, timer in timers), 0.0

    return run, {"versions": {"jax": jax.__version__}}


def quickest_form(shape: Sequence[int], dtype: str) -> Callable[[], float]:
    """Return the timer of the fastest form of b products [m k] · [k n]; factors and result may be transposed."""
    found = []
    for form in (f"b{x},b{y}->b{z}" for x in ("mk", "km") for y in ("kn", "nk") for z in ("mn", "nm")):
        timer = make_timer(form if shape[0] > 1 else form.replace("b", ""), shape, dtype)
        found.append((min(timer(), timer(), timer()), form, timer))
    return min(found)[2]


def make_timer(form: str, shape: Sequence[int], dtype: str) -> Callable[[], float]:
    """Compile a product and return a function that measures its mean seconds."""
    sizes = dict(zip("bmkn", shape, strict=True))
    shapes = [[sizes[letter] for letter in factor] for factor in form.partition("->")[0].split(",")]
    factors = [jnp.full(each, 0.01, dtype) for each in shapes]
    product = jax.jit(lambda x, y: jnp.einsum(form, x, y)).lower(*factors).compile()
    return functools.partial(mean_seconds, product, *factors, least=SECONDS)
