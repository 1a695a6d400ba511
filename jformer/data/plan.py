"""Choose the examples of batch number s as a pure function of (seed, s), without reading text or tokens.

A unit fills one row: one example (buckets) or several (packed). An example has a length on each side, 0 for an empty
side. Each epoch shuffles all units, but the number and shapes of its batches are the same, so resuming needs only the
step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jformer.errors import UserError

LIMITS = "data.max_source_length and data.max_target_length"
CHUNK = 2**21  # examples whose lengths are counted at a time
Limit = tuple[int, int]
"""The longest source and target that fit a shape."""


class Shape(NamedTuple):
    """The compiled shape of a batch."""

    rows: int
    source_length: int
    target_length: int


class PlannedBatch(NamedTuple):
    """One batch: units[i] fills row i, and -1 leaves it empty."""

    shape: Shape
    units: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The batches of every epoch."""

    shapes: tuple[Shape, ...]  # short to long: an example that fits one fits the next
    bucket: np.ndarray  # [units] the first shape that fits; a small dtype, as for `part`
    part: np.ndarray  # [units] the corpus of a mixture
    weights: tuple[float, ...]  # [parts] passes per epoch; for fractions see `_shares`
    seed: int

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Batches per epoch, equally many in every epoch."""
        return len(self.epoch(0))

    def batch(self, step: int) -> PlannedBatch:
        """Return batch number `step`, counted over all epochs."""
        epoch, index = divmod(step, self.batches_per_epoch)
        return self.epoch(epoch)[index]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a plan lives as long as its run
    def epoch(self, epoch: int) -> list[PlannedBatch]:
        """Return one epoch's batches in order.

        Units left over from one shape join the next longer one; only the longest shape may end in a batch with empty
        rows. Besides these, each distinct fraction among the weights adds at most one empty row; where these fill a
        batch, it gets units of the epoch again.
        """
        rng = np.random.default_rng([self.seed, epoch])
        shares = self._shares(epoch)
        empty = int(self._places.sum() - self._whole.sum()) - len(shares)
        batches, rest, waiting = list[PlannedBatch](), np.full(empty, -1, self._dtype), 0
        for index, shape in enumerate(self.shapes):
            units = np.concatenate([self._passes(index, rng), shares[self.bucket[shares] == index]])
            rng.shuffle(units)
            units = np.concatenate([rest, units])
            waiting += self._places[index]
            full = waiting // shape.rows * shape.rows
            batches += [PlannedBatch(shape, rows) for rows in units[:full].reshape(-1, shape.rows)]
            rest, waiting = units[full:], waiting - full
        if len(rest):
            last = np.concatenate([rest, np.full(self.shapes[-1].rows - len(rest), -1, self._dtype)])
            batches.append(PlannedBatch(self.shapes[-1], last))
        return self._occupied([batches[i] for i in rng.permutation(len(batches))], epoch)

    def _passes(self, bucket: int, rng: np.random.Generator) -> np.ndarray:
        """Return a bucket's units once for each whole pass of their part."""
        drawn = []
        for part, weight in enumerate(self.weights):
            units = np.flatnonzero((self.bucket == bucket) & (self.part == part)).astype(self._dtype)
            drawn += [units] * int(weight)
            rng.shuffle(np.empty(len(units), np.uint8))  # whole weights do not need it: it keeps later draws unchanged
        return np.concatenate([np.zeros(0, self._dtype), *drawn])

    @property
    def _dtype(self) -> type[np.signedinteger]:
        return np.int32 if len(self.bucket) < 2**31 else np.int64

    def _occupied(self, batches: list[PlannedBatch], epoch: int) -> list[PlannedBatch]:
        """Return the batches of an epoch; those with only empty rows, which have no loss, get units that fit."""
        if all(batch.units.max() >= 0 for batch in batches):
            return batches
        rng = np.random.default_rng([self.seed, epoch, 2])
        drawn = np.concatenate([batch.units[batch.units >= 0] for batch in batches])
        for number, (shape, units) in enumerate(batches):
            if units.max() < 0:
                fits = self.bucket <= self.shapes.index(shape)
                fitting = drawn[fits[drawn]] if fits[drawn].any() else np.flatnonzero(fits)
                batches[number] = PlannedBatch(shape, rng.choice(fitting, shape.rows).astype(self._dtype))
        return batches

    @functools.cached_property
    def _fractions(self) -> list[tuple[Fraction, np.ndarray]]:
        """Return each fraction among the weights, and the units of the parts that have it."""
        fractions = list(map(share_of, self.weights))
        return [
            (fraction, np.flatnonzero(np.isin(self.part, [i for i, each in enumerate(fractions) if each == fraction])))
            for fraction in sorted({*fractions} - {0})
        ]

    def _shares(self, epoch: int) -> np.ndarray:
        """Return the units that an epoch draws for the fractions p/q of the weights, p times in each q epochs.

        This is systematic sampling with the remainders carried from epoch to epoch: units form a line, short to
        long and shuffled within a bucket; each epoch takes those where floor(u + n·p/q) rises, n being the epoch
        minus the place. So it takes floor or ceil k·p/q of any k consecutive places. The line is redrawn after q
        epochs.
        """
        drawn = [np.zeros(0, self._dtype)]
        for number, (fraction, units) in enumerate(self._fractions):
            cycle, turn = divmod(epoch, fraction.denominator)
            rng = np.random.default_rng([self.seed, cycle, number, 1])
            line = rng.permutation(units)
            line = line[np.argsort(self.bucket[line], kind="stable")]
            begin = rng.integers(fraction.denominator)
            risen = (begin + (turn + 1 - np.arange(len(line) + 1)) * fraction.numerator) // fraction.denominator
            drawn.append(line[risen[:-1] > risen[1:]].astype(self._dtype))
        return np.concatenate(drawn)

    @functools.cached_property
    def _whole(self) -> np.ndarray:
        """The units [buckets] of an epoch's whole passes."""
        return sum(
            (
                int(weight) * count_units(self.bucket[self.part == part], len(self.shapes))
                for part, weight in enumerate(self.weights)
            ),
            start=np.zeros(len(self.shapes), np.int64),
        )

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """The places [buckets] for units in an epoch: a bucket and all longer ones have as many as it may draw."""
        places = np.cumsum(self._whole[::-1])
        for fraction, units in self._fractions:
            count = np.cumsum(count_units(self.bucket[units], len(self.shapes))[::-1])
            places += -(-count * fraction.numerator // fraction.denominator)
        return np.diff(places, prepend=0)[::-1]

    @property
    def fewest(self) -> int:
        """The least number of units that an epoch may draw."""
        fractions = sum(len(units) * fraction // 1 for fraction, units in self._fractions)
        return int(self._whole.sum()) + fractions


def share_of(weight: float) -> Fraction:
    """Return the fractional part p/q of a weight."""
    return Fraction(weight % 1).limit_denominator(10**9)


def side_multiples(source: np.ndarray, target: np.ndarray, multiple: int) -> tuple[int, int]:
    """Return the number that lengths of each side are multiples of: `multiple`, or 1 for labels (one position)."""
    source_multiple, target_multiple = (multiple if side.max() > 1 else 1 for side in (source, target))
    return source_multiple, target_multiple


def bucket_shapes(
    source: np.ndarray, target: np.ndarray, num_buckets: int, tokens: int, row_multiple: int, length_multiple: int = 1
) -> tuple[tuple[Shape, ...], np.ndarray]:
    """Return at most `num_buckets` shapes with little padding, and the index of the first that fits each example.

    Examples are ordered by their longer side; a dynamic program cuts that order to minimize the padded lengths of both
    sides. Coordinate descent then moves the limits of both sides by a token at a time while that lowers the number of
    positions computed per epoch, including units that join a longer shape and empty rows. The weights of a mixture are
    ignored.

    Args:
        source, target: tokens of each example on either side.
        num_buckets: the maximum number of shapes.
        tokens: the tokens of a batch on its longer side.
        row_multiple: the number of rows is a multiple of it.
        length_multiple: lengths are multiples of it.
    """
    units = side_multiples(source, target, length_multiple)
    kinds, counts, kind = length_kinds(source, target)
    sources, targets = (-(-side // unit) for side, unit in zip(kinds.T, units, strict=True))
    longest = (int(sources.max()), int(targets.max()))

    def shape(limit: Limit) -> Shape:
        return shape_of(limit[0] * units[0], limit[1] * units[1], tokens, row_multiple, LIMITS)

    shape(longest)  # raises if the longest does not fit
    fitting = np.zeros((longest[0] + 1, longest[1] + 1), np.int64)  # [s t] examples no longer than s and t
    np.add.at(fitting, (sources, targets), counts)
    fitting = fitting.cumsum(axis=0).cumsum(axis=1)

    def computed(limits: list[Limit]) -> int:
        shapes = [shape(limit) for limit in limits]
        return _computed(shapes, np.diff([0, *(fitting[limit] for limit in limits)]).tolist())

    limits = _descend(_first_limits(sources, targets, counts, num_buckets), computed)
    source_limits, target_limits = np.transpose(limits)
    first = np.maximum(np.searchsorted(source_limits, sources), np.searchsorted(target_limits, targets))
    used, bucket = np.unique(first, return_inverse=True)
    return tuple(shape(limits[int(i)]) for i in used), bucket.astype(np.uint8)[kind]


def length_kinds(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct lengths [kinds 2], in order, how many examples have each, and the kind of each example [n].

    A corpus has few kinds, so later steps work on kinds; the kind of an example takes two or four bytes.
    """
    width = int(target.max()) + 1
    counts = np.zeros((int(source.max()) + 1) * width, np.int64)
    for chunk in chunks(len(source)):
        counts += np.bincount(source[chunk].astype(np.int64) * width + target[chunk], minlength=len(counts))
    used = np.flatnonzero(counts)
    number = np.zeros(len(counts), np.min_scalar_type(len(used)))
    number[used] = np.arange(len(used))
    kind = np.empty(len(source), number.dtype)
    for chunk in chunks(len(source)):
        kind[chunk] = number[source[chunk].astype(np.int64) * width + target[chunk]]
    return np.stack(np.divmod(used, width), axis=1), counts[used], kind


def chunks(number: int) -> Iterator[slice]:
    """Return slices of a long array that are small enough for temporary arrays."""
    return (slice(start, start + CHUNK) for start in range(0, number, CHUNK))


def count_units(bucket: np.ndarray, buckets: int) -> np.ndarray:
    """Return how many units [buckets] are in each bucket."""
    return np.array([np.count_nonzero(bucket == number) for number in range(buckets)])


def _first_limits(source: np.ndarray, target: np.ndarray, counts: np.ndarray, num_buckets: int) -> list[Limit]:
    """Return the longest source and target below each cut of the examples, ordered by their longer side."""
    sizes, index = np.unique(np.maximum(source, target), return_inverse=True)
    count = np.zeros(len(sizes), np.int64)
    np.add.at(count, index, counts)
    top = np.zeros((2, len(sizes)), np.int64)
    np.maximum.at(top[0], index, source)
    np.maximum.at(top[1], index, target)
    top = np.maximum.accumulate(top, axis=1)
    return [(int(top[0, end]), int(top[1, end])) for end in cheapest_cuts(top.sum(axis=0), count, num_buckets)]


def _computed(shapes: Sequence[Shape], population: Sequence[int]) -> int:
    """Return the positions of an epoch with `population` examples for each shape; see `Plan.epoch`."""
    total = rest = 0
    for shape, number in zip(shapes, population, strict=True):
        batches, rest = divmod(rest + number, shape.rows)
        total += batches * shape.rows * (shape.source_length + shape.target_length)
    return total + bool(rest) * shape.rows * (shape.source_length + shape.target_length)


def _descend(limits: list[Limit], cost: Callable[[list[Limit]], int]) -> list[Limit]:
    """Move limits by a token on one side or both while that lowers the cost, keeping their order and the last one."""
    lowest, before = cost(limits), None
    while before != lowest:
        before = lowest
        for i, move in itertools.product(range(len(limits) - 1), itertools.product((-1, 0, 1), repeat=2)):
            moved = (limits[i][0] + move[0], limits[i][1] + move[1])
            shorter = limits[i - 1] if i else (0, 0)
            if max(moved) and all(a <= b <= c for a, b, c in zip(shorter, moved, limits[i + 1], strict=True)):
                tried = [*limits[:i], moved, *limits[i + 1 :]]
                if (value := cost(tried)) < lowest:
                    limits, lowest = tried, value
    return limits


def cheapest_cuts(cost: np.ndarray, count: np.ndarray, parts: int) -> np.ndarray:
    """Cut 0..n into at most `parts` runs with the least sum of cost[last of run] · count[run]; return the last ones."""
    n = len(count)
    before = np.concatenate([[0], np.cumsum(count)])
    best = np.full((parts + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    choice = np.zeros((parts + 1, n + 1), np.int64)
    for k in range(1, parts + 1):
        for end in range(1, n + 1):
            total = best[k - 1, :end] + cost[end - 1] * (before[end] - before[:end])
            choice[k, end] = np.argmin(total)
            best[k, end] = total[choice[k, end]]
    k = int(np.argmin(best[:, n]))
    ends = [n]
    for level in range(k, 1, -1):
        ends.append(int(choice[level, ends[-1]]))
    return np.array(sorted(ends)) - 1


def shape_of(source_length: int, target_length: int, tokens: int, row_multiple: int, lower: str) -> Shape:
    """Return the shape with the most rows that a batch can have.

    Args:
        source_length, target_length: positions of a row on either side.
        tokens: of a batch, counted on the longer side.
        row_multiple: the number of rows is a multiple of it.
        lower: the options that the error suggests lowering.

    Raises:
        UserError: the tokens do not hold `row_multiple` rows.
    """
    longer = max(source_length, target_length)
    rows = tokens // longer // row_multiple * row_multiple
    if not rows:
        raise UserError(
            f"data.tokens_per_update={tokens} cannot hold data.row_multiple={row_multiple} rows of {longer} tokens: "
            f"make it {longer * row_multiple} or lower {lower}"
        )
    return Shape(rows, source_length, target_length)
