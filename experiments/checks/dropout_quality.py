"""Are the dropout masks as good as random? Our counter hash beside threefry (jax.random.bernoulli), tested alike.

Every figure is a z-score: how many standard deviations a count lies from what independent bits would give. The verdict
is on the largest of them all, against the bound that truly random masks exceed in one of a thousand such tables
(Bonferroni: the bound grows with the number of tests).

    bits       each of the 32 bits of a hashed word is set half of the time
    rate       the share of dropped elements, at several nominal rates
    neighbour  masks of neighbouring features (the two halves of a word among them), positions, rows, layers, sites,
               steps and seeds are uncorrelated
    patterns   all patterns of 2 x 2 and of 2 x 2 x 2 elements along features, positions, rows and layers, and of four
               neighbours in a line, are as frequent as they should be; of 2 x 2 x 2 x 2, how many are dropped

Command:  python -m experiments.checks.dropout_quality [--rows=64] [--length=64] [--features=512] [--seeds=8]
          [--smoke]
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.measure import smoke_sizes
from jformer.models.layers.dropout import DropoutKey, Site, dropout, mix

ROWS = flags.DEFINE_integer("rows", 64, "Rows of a mask.")
LENGTH = flags.DEFINE_integer("length", 64, "Positions of a mask.")
FEATURES = flags.DEFINE_integer("features", 512, "Features of a mask.")
SEEDS = flags.DEFINE_integer("seeds", 8, "Masks of each kind.")

RATES = (0.1, 0.3, 0.5)
LEVEL = 0.001  # how often random masks would fail
Axes = tuple[int, int, int]
Draw = Callable[[float, int, int, int, int, Axes], np.ndarray]
"""(rate, seed, step, layer, site, shape [b t f]) → bool [b t f], True where dropped."""


class Test(NamedTuple):
    """One figure of the table."""

    group: str
    name: str
    z: float


def ours(rate: float, seed: int, step: int, layer: int, site: int, shape: Axes) -> np.ndarray:
    """Draw a mask as a model does in training: from the step's key, the layer, and the rows of an update."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    dropout_key = DropoutKey(jax.random.bits(key, dtype=jnp.uint32), jnp.arange(shape[0])).at_layer(jnp.int32(layer))
    return np.asarray(_dropped(rate, dropout_key, site, shape))


def threefry(rate: float, seed: int, step: int, layer: int, site: int, shape: Axes) -> np.ndarray:
    """Draw the control's mask."""
    key = jax.random.key(seed)
    for each in (step, layer, site):
        key = jax.random.fold_in(key, each)
    return np.asarray(jax.random.bernoulli(key, rate, shape))


def tests(draw: Draw, shape: Axes, seeds: int, rates: Sequence[float] = RATES) -> Iterator[Test]:
    """Yield every figure."""
    for rate in rates:
        masks = np.stack([draw(rate, seed, 0, 0, Site.SELF_ATTN, shape) for seed in range(seeds)])
        nominal = round(rate * 65_536) / 65_536
        yield Test("rate", f"{rate}", z_of_share(masks.mean(), nominal, masks.size))
        yield from neighbours(draw, rate, masks)
        yield from patterns(draw, rate, shape, seeds)


def neighbours(draw: Draw, rate: float, masks: np.ndarray) -> Iterator[Test]:
    """Yield the correlations of masks with their neighbours, in every direction."""
    seeds, *_, features = masks.shape
    half = (features + 1) // 2
    for name, axis in (("row", 1), ("position", 2), ("feature", 3)):
        for shift in (1, 2, 16):
            ahead, behind = (np.take(masks, places, axis) for places in shifted(masks.shape[axis], shift))
            yield Test("neighbour", f"{name} +{shift} at {rate}", z_of_correlation(ahead, behind, rate))
    halves = masks[..., : features - half], masks[..., half:]
    yield Test("neighbour", f"halves of a word at {rate}", z_of_correlation(*halves, rate))
    shape: Axes = (masks.shape[1], masks.shape[2], features)
    for name, place in (("step", 1), ("layer", 2), ("site", 3)):
        for shift in (1, 2):
            step, layer, site = (shift * (place == each) for each in (1, 2, 3))
            other = np.stack([draw(rate, seed, step, layer, Site.SELF_ATTN + site, shape) for seed in range(seeds)])
            yield Test("neighbour", f"{name} +{shift} at {rate}", z_of_correlation(masks, other, rate))
    yield Test("neighbour", f"seed +1 at {rate}", z_of_correlation(masks[1:], masks[:-1], rate))


def patterns(draw: Draw, rate: float, shape: Axes, seeds: int) -> Iterator[Test]:
    """Yield the chi-square of the patterns in small blocks that do not overlap, as a z-score."""
    layers = np.stack(
        [[draw(rate, seed, 0, layer, Site.SELF_ATTN, shape) for layer in range(2)] for seed in range(seeds)]
    )
    names = {1: "layers", 2: "rows", 3: "positions", 4: "features"}
    blocks = [*itertools.combinations(names, 2), *itertools.combinations(names, 3), tuple(names)]
    for axes in blocks:
        sizes = [2 if axis in axes else 1 for axis in range(5)]
        name = f"2 each of {', '.join(names[axis] for axis in axes)} at {rate}"
        yield Test("patterns", name, z_of_patterns(layers, sizes, rate))
    for axis in (2, 3, 4):
        sizes = [4 if each == axis else 1 for each in range(5)]
        yield Test("patterns", f"4 {names[axis]} in a line at {rate}", z_of_patterns(layers, sizes, rate))


def hashed_bits(count: int, seeds: int) -> Iterator[Test]:
    """Yield, for each of the 32 bits of `mix`, how often it is set over counters that follow each other."""
    words = np.stack([np.asarray(mix(jnp.arange(count, dtype=jnp.uint32) + jnp.uint32(s << 24))) for s in range(seeds)])
    for bit in range(32):
        yield Test("bits", f"bit {bit}", z_of_share(float((words >> bit & 1).mean()), 0.5, words.size))


def z_of_share(share: float, nominal: float, count: int) -> float:
    """Return how far a share of `count` draws is from its probability."""
    return float((share - nominal) / math.sqrt(nominal * (1 - nominal) / count))


def z_of_correlation(first: np.ndarray, second: np.ndarray, rate: float) -> float:
    """Return the correlation of two masks times the root of their size: standard normal if they are independent."""
    nominal = round(rate * 65_536) / 65_536
    both = (first & second).mean() - nominal * (first.mean() + second.mean()) + nominal**2
    return float(both / (nominal * (1 - nominal)) * math.sqrt(first.size))


def z_of_patterns(masks: np.ndarray, sizes: Sequence[int], rate: float) -> float:
    """Return the chi-square of the patterns of blocks, made normal (Wilson and Hilferty 1931).

    Patterns that random masks have less than five times count as one; in blocks of 16, all with as many dropped do.
    """
    nominal, cells = round(rate * 65_536) / 65_536, math.prod(sizes)
    numbers = np.zeros([length // size for length, size in zip(masks.shape, sizes, strict=True)], np.int64)
    for place in itertools.product(*map(range, sizes)):
        ends = [length // size * size for length, size in zip(masks.shape, sizes, strict=True)]
        numbers = numbers * 2 + masks[tuple(map(slice, place, ends, sizes))]
    found: np.ndarray = np.bincount(numbers.ravel(), minlength=2**cells)
    ones = np.array([number.bit_count() for number in range(2**cells)])
    expected = numbers.size * nominal**ones * (1 - nominal) ** (cells - ones)
    if cells > 8:
        found, expected = (np.bincount(ones, each) for each in (found, expected))
    order = np.argsort(expected)
    found, expected, rare = found[order], expected[order], np.count_nonzero(expected < 5)
    if rare:
        found, expected = (np.append(each[rare:], each[:rare].sum()) for each in (found, expected))
    freedom = len(expected) - 1
    chi = ((found - expected) ** 2 / expected).sum() / freedom
    return float((chi ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def shifted(length: int, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of all pairs that lie `by` apart: the first ones, and the second ones."""
    return np.arange(length - by), np.arange(by, length)


def bound(count: int) -> float:
    """Return the z-score that the largest of `count` normal figures exceeds with probability LEVEL."""
    return NormalDist().inv_cdf(1 - LEVEL / 2 / count)


def _drop_ones(rate: float, dropout_key: DropoutKey, site: int, shape: Axes) -> jax.Array:
    return dropout(jnp.ones(shape), rate, dropout_key, Site(site)) == 0


_dropped = jax.jit(_drop_ones, static_argnums=(0, 2, 3))


def main(argv: Sequence[str]) -> None:
    """Print both tables side by side, the largest figure of each line of tests."""
    del argv
    words = 2**12 if smoke_sizes(rows=8, length=16, features=64, seeds=2) else 2**22
    shape, seeds = (ROWS.value, LENGTH.value, FEATURES.value), SEEDS.value
    mine = [*hashed_bits(words, seeds), *tests(ours, shape, seeds)]
    control = {test.name: test.z for test in tests(threefry, shape, seeds)}
    print(f"masks {shape[0]} x {shape[1]} x {shape[2]}, {seeds} seeds; z-scores; {'jformer':>10}{'threefry':>10}")
    for test in mine:
        other = f"{control[test.name]:>10.2f}" if test.name in control else f"{'-':>10}"
        print(f"{test.group:<10}{test.name:<48}{test.z:>10.2f}{other}")
    for name, zs in (("jformer", [test.z for test in mine]), ("threefry", [*control.values()])):
        worst, limit = max(map(abs, zs)), bound(len(zs))
        verdict = "as good as random" if worst < limit else "NOT random"
        print(f"{name}: {len(zs)} tests, the largest |z| {worst:.2f}, bound {limit:.2f}: {verdict}")


if __name__ == "__main__":
    app.run(main)
