"""Several examples a row: which of them share one, so that both of its sides come out full.

Only lengths matter here, and a corpus has few different ones: 29,000 captions have 600 pairs of a source and a target
length, 4.5 million sentences some 10,000. So the packer works on counts of lengths: it fills one row, repeats it as
often as the counts allow, and deals the examples into the rows last. Its time grows with the different lengths alone.
A cell is a pair of lengths, and a place in the table of counts [s t].
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from jformer.data.plan import LIMITS, Shape, shape_of, side_multiples
from jformer.errors import UserError

Cell = tuple[int, int]
"""A source and a target length; also what is left of a row."""

NO_EXAMPLE: Cell = (0, 0)  # no example has these lengths, so they stand for none

# A row with no more room than so many average examples is closed by two that fill it exactly. The 29,000 pairs of
# Multi30k fill rows of 128 to 99.3 % with 2, 99.8 % with 2.5 and 99.7 % with 6, which takes four times as long.
ROOM_TO_CLOSE = 2.5
GAPS = sorted(itertools.product(range(4), range(4)), key=sum)[:10]  # tokens those two may leave on each side, at most 3
DRAWS_PER_ROW = 32  # lengths drawn for one row, fitting or not; rows are as full with 8 and with 128
DRAWS_AT_ONCE = 512  # from the same counts, which is faster; rows are as full with 64 and with 4,096


def packed_shape(
    source: np.ndarray, target: np.ndarray, length: int, tokens: int, row_multiple: int, length_multiple: int = 1
) -> Shape:
    """Return the one shape of packed rows: `length` for the side with more tokens, its share for the other one.

    Both sides must hold their longest sequence, and divide by `length_multiple`.
    """
    totals = np.array([source.sum(), target.sum()])
    share = np.ceil(totals / totals.max() * length).astype(np.int64)
    room = np.maximum(share, [source.max(), target.max()])
    if room.max() > length:
        raise UserError(
            f"data.packed_length={length} is shorter than the longest sequence ({room.max()} tokens): raise it or "
            f"lower {LIMITS}"
        )
    units = np.array(side_multiples(source, target, length_multiple))
    room = -(-room // units) * units
    return shape_of(int(room[0]), int(room[1]), tokens, row_multiple, "data.packed_length")


def pack(source: np.ndarray, target: np.ndarray, shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples, row after row, and how many each row holds; every example has a token on some side.

    Which examples of the same lengths lie where is drawn by the seed.
    """
    rng = np.random.default_rng(seed)
    width = int(target.max()) + 1
    lengths = source * width + target
    counts = np.bincount(lengths, minlength=(int(source.max()) + 1) * width).reshape(-1, width)
    rows = list(_rows(counts, (shape.source_length, shape.target_length), rng))
    sizes = np.repeat([len(row) for row, _ in rows], [times for _, times in rows])
    places = np.concatenate([np.tile([s * width + t for s, t in row], times) for row, times in rows])
    shuffled = rng.permutation(len(lengths))
    examples = np.empty_like(shuffled)
    examples[np.argsort(places, kind="stable")] = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    return examples, sizes


def _rows(counts: np.ndarray, room: Cell, rng: np.random.Generator) -> Iterator[tuple[list[Cell], int]]:
    """Yield what lies in a row and how many rows are like it, until the counts are used up.

    A row begins with the longest that is left, for which company will only become harder to find.
    """
    cells = np.argwhere(counts)
    stock = _Stock(counts, cells, rng)
    for i in np.argsort(-(cells / np.maximum(room, 1)).max(axis=1), kind="stable"):
        first = (int(cells[i, 0]), int(cells[i, 1]))
        while counts[first]:
            row = stock.row(first, room)
            needed = Counter(row)
            further = min(int(counts[cell]) // number for cell, number in needed.items())
            for cell, number in needed.items():
                counts[cell] -= further * number
            yield row, 1 + further


class _Stock:
    """The examples that are left, by their lengths, and how to take a row of them."""

    def __init__(self, counts: np.ndarray, cells: np.ndarray, rng: np.random.Generator) -> None:
        self._counts, self._cells, self._rng = counts, cells, rng
        self._longest = (counts.shape[0] - 1, counts.shape[1] - 1)
        self._room_to_close = NO_EXAMPLE  # on both sides
        self._draws = self._draw_cells()
        counts[NO_EXAMPLE] = np.iinfo(counts.dtype).max

    def row(self, first: Cell, room: Cell) -> list[Cell]:
        """Take the first, others as they come, so that the mixture stays what it was, and the two that fit best."""
        row: list[Cell] = []
        left = self._take([first], row, room)
        for cell in itertools.islice(self._draws, DRAWS_PER_ROW):
            if _fits(left, self._room_to_close):
                break
            if _fits(cell, left) and self._counts[cell]:
                left = self._take([cell], row, left)
        while not (pair := self._closing_pair(left)) and (largest := self._largest(left)) != NO_EXAMPLE:
            left = self._take([largest], row, left)
        self._take(pair, row, left)
        return row

    def _take(self, cells: list[Cell], row: list[Cell], left: Cell) -> Cell:
        """Move examples into the row and return the room that remains."""
        for cell in cells:
            self._counts[cell] -= 1
            row.append(cell)
            left = (left[0] - cell[0], left[1] - cell[1])
        return left

    def _draw_cells(self) -> Iterator[Cell]:
        """Yield lengths at random, each as often as it is left, or was a few rows ago."""
        while (left := self._counts[*self._cells.T]).any():
            share = left / left.sum()
            source, target = (ROOM_TO_CLOSE * share @ self._cells).astype(int)
            self._room_to_close = (int(source), int(target))
            yield from map(tuple, self._rng.choice(self._cells, DRAWS_AT_ONCE, p=share).tolist())

    def _closing_pair(self, left: Cell) -> list[Cell]:
        """Return two cells, or one, that fill what is left of a row best; none if all of them would leave too much."""
        for gap in GAPS:
            if not _fits(gap, left):
                continue
            full = (left[0] - gap[0], left[1] - gap[1])
            low = [max(0, x - longest) for x, longest in zip(full, self._longest, strict=True)]
            # Opposite cells of this window add up to `full`; the one in the middle needs two examples.
            window = self._counts[low[0] : full[0] - low[0] + 1, low[1] : full[1] - low[1] + 1]
            pairs = np.minimum(window, window[::-1, ::-1])
            if pairs.size % 2:
                pairs.flat[pairs.size // 2] //= 2
            if pairs.any():
                s, t = divmod(int(pairs.argmax()), pairs.shape[1])
                one = (low[0] + s, low[1] + t)
                return [cell for cell in (one, (full[0] - one[0], full[1] - one[1])) if cell != NO_EXAMPLE]
        return []

    def _largest(self, left: Cell) -> Cell:
        """Return the most tokens that still fit."""
        cells = np.argwhere(self._counts[: left[0] + 1, : left[1] + 1])
        source, target = cells[np.argmax(cells.sum(axis=1))]
        return int(source), int(target)


def _fits(cell: Cell, room: Cell) -> bool:
    return cell[0] <= room[0] and cell[1] <= room[1]
