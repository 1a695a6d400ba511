"""Which examples make batch number s: a pure function of (seed, s). Nothing here touches text or tokens.

A unit is what fills one row: one example (buckets) or several (packed). An example has a length on each side, 0 where
that side holds nothing. Each epoch deals every unit anew, yet the number of batches and their shapes never change, so
resuming needs the step alone.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from jformer.errors import UserError

LIMITS = "data.max_source_length and data.max_target_length"


class Shape(NamedTuple):
    """The compiled shape of a batch."""

    rows: int
    source_length: int
    target_length: int


class Batch(NamedTuple):
    """One batch: units[i] fills row i, and -1 leaves it empty."""

    shape: Shape
    units: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The batches of every epoch."""

    shapes: tuple[Shape, ...]  # short to long: whatever fits one fits the next
    bucket: np.ndarray  # [units] the first shape that fits
    part: np.ndarray  # [units] the corpus of a mixture
    weights: tuple[float, ...]  # [parts] passes an epoch
    seed: int

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch, the same in each."""
        return len(self.epoch(0))

    def batch(self, step: int) -> Batch:
        """Return batch number `step`, counted over all epochs."""
        epoch, index = divmod(step, self.batches_per_epoch)
        return self.epoch(epoch)[index]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a plan lives as long as its run
    def epoch(self, epoch: int) -> list[Batch]:
        """Return one epoch's batches in their order.

        What does not fill a batch of its shape joins the next longer one; only the longest shape ends in a batch
        with empty rows.
        """
        rng = np.random.default_rng([self.seed, epoch])
        batches, rest = [], np.zeros(0, np.int64)
        for index, shape in enumerate(self.shapes):
            units = np.concatenate([rest, rng.permutation(self._drawn(index, rng))])
            full = len(units) // shape.rows * shape.rows
            batches += [Batch(shape, rows) for rows in units[:full].reshape(-1, shape.rows)]
            rest = units[full:]
        if len(rest):
            empty = np.full(self.shapes[-1].rows - len(rest), -1)
            batches.append(Batch(self.shapes[-1], np.concatenate([rest, empty])))
        return [batches[i] for i in rng.permutation(len(batches))]

    def _drawn(self, bucket: int, rng: np.random.Generator) -> np.ndarray:
        """Return a bucket's units of this epoch: whole passes, then a random share whose size is always the same."""
        drawn = []
        for part, weight in enumerate(self.weights):
            units = np.flatnonzero((self.bucket == bucket) & (self.part == part))
            passes, share = divmod(weight, 1)
            drawn += [units] * int(passes) + [rng.permutation(units)[: round(share * len(units))]]
        return np.concatenate(drawn)


def bucket_shapes(
    source: np.ndarray, target: np.ndarray, num_buckets: int, tokens: int, row_multiple: int
) -> tuple[tuple[Shape, ...], np.ndarray]:
    """Return at most `num_buckets` shapes that waste the least padding, and the first that fits each example.

    Examples are ordered by their longer side; a dynamic program cuts that order where the sum over both sides of
    padded lengths is smallest. A batch has as many rows as its `tokens` hold of its longer side.
    """
    longer = np.maximum(source, target)
    sizes, index, count = np.unique(longer, return_inverse=True, return_counts=True)
    top = np.zeros((2, len(sizes)), np.int64)  # the longest source and target among examples of each size
    np.maximum.at(top[0], index, source)
    np.maximum.at(top[1], index, target)
    top = np.maximum.accumulate(top, axis=1)
    ends = _cheapest_cuts(top.sum(axis=0), count, num_buckets)
    # The longest comes first, so that an error asks for the tokens that all of them need.
    shapes = [_shape(int(top[0, e]), int(top[1, e]), tokens, row_multiple, LIMITS) for e in ends[::-1]]
    return tuple(shapes[::-1]), np.searchsorted(sizes[ends], longer)


def _cheapest_cuts(cost: np.ndarray, count: np.ndarray, parts: int) -> np.ndarray:
    """Cut 0..n into at most `parts` runs with the least sum of cost[last of run] · count[run]; return the lasts."""
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


def _shape(source_length: int, target_length: int, tokens: int, row_multiple: int, lower: str) -> Shape:
    longer = max(source_length, target_length)
    rows = tokens // longer // row_multiple * row_multiple
    if not rows:
        raise UserError(
            f"data.tokens_per_update={tokens} cannot hold data.row_multiple={row_multiple} rows of {longer} tokens: "
            f"make it {longer * row_multiple} or lower {lower}"
        )
    return Shape(rows, source_length, target_length)


def packed_shape(source: np.ndarray, target: np.ndarray, length: int, tokens: int, row_multiple: int) -> Shape:
    """Return the one shape of packed rows: `length` for the side with more tokens, its share for the other one.

    Both sides must hold their longest sequence.
    """
    totals = np.array([source.sum(), target.sum()])
    share = np.ceil(totals / totals.max() * length).astype(np.int64)
    room = np.maximum(share, [source.max(), target.max()])
    if room.max() > length:
        raise UserError(
            f"data.packed_length={length} is shorter than the longest sequence ({room.max()} tokens): raise it or "
            f"lower {LIMITS}"
        )
    return _shape(int(room[0]), int(room[1]), tokens, row_multiple, "data.packed_length")


def pack(source: np.ndarray, target: np.ndarray, shape: Shape, seed: int) -> list[np.ndarray]:
    """Return the examples that share each row; both sides of an example lie in the same row.

    Chunks of a shuffled corpus are packed longest example first, each into the fullest row that still takes it (best
    fit decreasing), so time stays linear in the corpus.
    """
    order = np.random.default_rng(seed).permutation(len(source))
    chunks = np.array_split(order, max(1, len(order) // 16_384))
    lengths, room = np.stack([source, target], axis=1), np.array(shape[1:])
    return [row for chunk in chunks for row in _best_fit(lengths, chunk, room)]


def _best_fit(lengths: np.ndarray, examples: np.ndarray, room: np.ndarray) -> list[np.ndarray]:
    examples = examples[np.argsort(-(lengths[examples] / np.maximum(room, 1)).max(axis=1), kind="stable")]
    free = np.empty((len(examples), 2), np.int64)
    members: list[list[int]] = []
    for example in examples:
        left = free[: len(members)] - lengths[example]
        slack = np.where((left >= 0).all(axis=1), left.sum(axis=1), np.iinfo(np.int64).max)
        row = int(np.argmin(slack)) if len(members) else 0
        if not members or slack[row] == np.iinfo(np.int64).max:
            row = len(members)
            members.append([])
            free[row] = room
        members[row].append(int(example))
        free[row] -= lengths[example]
    return [np.array(row) for row in members]
