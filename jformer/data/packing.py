"""Pack several examples into each row so that both sides of the row are full.

Only lengths matter, and a corpus has few distinct ones: 29,000 captions have 600 pairs of a source and a target length,
4.5 million sentences about 10,000. So the packer works on a table counts [s t] of the examples with s source and t
target tokens that are in no row yet, and makes rows until it is empty:

1. A row starts with the longest remaining lengths, which are the hardest to place.
2. Lengths drawn at random, in proportion to their counts, join it until it is nearly full. So every row is a sample of
   the corpus, and easy lengths are not used up first.
3. One or two examples whose lengths exactly fill the rest close the row, or failing that, leave one to three tokens
   unused. If there are none, the largest example that fits joins, and the search for the last two starts again.
4. The row is repeated as often as the counts allow.

Finally each place in the rows is given a random example of its lengths, another one in every epoch.

The trade-off: filling the fewest rows is NP-hard, and this heuristic does not try. Rows are 97 to 99.8 % full, in a
time that grows with the number of distinct lengths, not of examples. In return, repeated rows have the same lengths,
and rows come in the order in which they were made; `jformer.data.plan` shuffles them.
"""

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from jformer.data.draws import ranges
from jformer.data.plan import LIMITS, Shape, chunks, length_kinds, shape_of, side_multiples
from jformer.errors import UserError

Lengths = tuple[int, int]
"""Source and target tokens of an example, or the room left in a row."""

# A row is nearly full when its room is below this many average examples. The 29,000 pairs of Multi30k fill rows of
# 128 to 99.3 % with 2, 99.8 % with 2.5 and 99.7 % with 6, which takes four times as long.
NEARLY_FULL = 2.5
UNUSED = sorted(((s, t) for s in range(4) for t in range(4) if s + t <= 3), key=sum)
"""The room that the closing examples may leave unused, in the order in which it is tried."""
DRAWS_PER_ROW = 32  # lengths drawn for one row, fitting or not; rows are as full with 8 and with 128
DRAWS_AT_ONCE = 512  # from the same counts, which is faster; rows are as full with 64 and with 4,096


def packed_shape(
    source: np.ndarray, target: np.ndarray, length: int, tokens: int, row_multiple: int, length_multiple: int = 1
) -> Shape:
    """Return the shape of packed rows, with side lengths in proportion to the tokens of each side.

    Args:
        source, target: tokens of each example [n] on either side.
        length: positions of a row on the side with more tokens; the other side has its share of that, and at least the
            length of its longest sequence.
        tokens: the tokens of a batch on its longer side.
        row_multiple: the number of rows is a multiple of it.
        length_multiple: both lengths are rounded up to multiples of it, except for a side with one position an example.

    Raises:
        UserError: a sequence is longer than `length`, or `tokens` hold too few rows.

    >>> packed_shape(np.array([20, 20, 20]), np.array([10, 10, 10]), length=100, tokens=1000, row_multiple=1)
    Shape(rows=10, source_length=100, target_length=50)
    """
    totals = np.array([source.sum(dtype=np.int64), target.sum(dtype=np.int64)])
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


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows with fixed lengths; each turn fills every place with another random example of the place's lengths.

    Rows come in runs of equal ones. A turn orders the examples by lengths, shuffled among equal ones.
    A place of row i of a run takes example first + i · step of that order, so no array counts rows or places.
    """

    rows: np.ndarray  # [runs] equal rows
    sizes: np.ndarray  # [runs] examples in each of them
    first: np.ndarray  # [places of one row of each run] the example in its first row
    step: np.ndarray  # [the same] examples of the same lengths in a row
    kind: np.ndarray  # [n] the number of each example's lengths
    counts: np.ndarray  # [kinds] examples of each
    generator: np.random.Generator  # of turn 0
    seed: int

    def order(self, turn: int, out: np.ndarray) -> None:
        """Write the examples of a turn, ordered by their lengths, into an array [n]."""
        rng = np.random.default_rng([self.seed, turn]) if turn else copy.deepcopy(self.generator)
        shuffled = np.arange(len(self.kind), dtype=out.dtype)
        rng.shuffle(shuffled)
        begin = np.cumsum(self.counts) - self.counts
        for chunk in chunks(len(shuffled)):
            drawn = shuffled[chunk]
            kinds = self.kind[drawn]
            found = np.bincount(kinds, minlength=len(begin))
            out[np.repeat(begin, found) + ranges(found)] = drawn[np.argsort(kinds, kind="stable")]
            begin += found


def pack(source: np.ndarray, target: np.ndarray, shape: Shape, seed: int) -> PackedRows:
    """Return rows that hold every example once. They depend only on the lengths, the shape and the seed.

    Args:
        source, target: tokens of each example [n] on either side. Each fits a row and has a token on some side.
        shape: its lengths are the room of a row; its number of rows is not used.
        seed: of all draws.

    >>> source, target = np.array([3, 5, 2, 6]), np.array([3, 5, 2, 6])
    >>> packed = pack(source, target, Shape(rows=1, source_length=8, target_length=8), seed=0)
    >>> packed.rows.tolist(), packed.sizes.tolist()  # 6 + 2 tokens fill a row, and so do 5 + 3
    ([1, 1], [2, 2])
    >>> packed.order(turn=0, out=(examples := np.zeros(4, int)))
    >>> examples[packed.first].tolist()
    [3, 2, 1, 0]
    """
    rng = np.random.default_rng(seed)
    kinds, population, kind = length_kinds(source, target)
    counts = np.zeros(kinds.max(axis=0) + 1, np.int64)
    counts[*kinds.T] = population
    if counts[0, 0]:
        raise ValueError(f"{counts[0, 0]} examples have no token on either side")
    numbers = np.zeros(counts.shape, np.int64)
    numbers[*kinds.T] = np.arange(len(kinds))
    lengths, rows = zip(*_make_rows(counts, (shape.source_length, shape.target_length), rng), strict=True)
    sizes = np.array(list(map(len, lengths)))
    places = numbers[*np.array(list(itertools.chain.from_iterable(lengths))).T]
    first, step = _shared_out(places, np.repeat(np.arange(len(rows)), sizes), np.repeat(rows, sizes))
    runs = {"rows": np.array(rows), "sizes": sizes, "first": first, "step": step}
    return PackedRows(**runs, kind=kind, counts=population, generator=rng, seed=seed)


def _shared_out(kind: np.ndarray, run: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which example, ordered by kinds, each place [places] takes in its run's first row, and the step to the
    next row's. Examples of a kind go to its places row after row, and from left to right."""
    by_kind = np.argsort(kind, kind="stable")
    kind, run, rows = kind[by_kind], run[by_kind], rows[by_kind]
    together = np.flatnonzero((np.diff(kind, prepend=-1) != 0) | (np.diff(run, prepend=-1) != 0))
    sizes = np.diff(together, append=len(kind))  # of the places of a kind in a row
    first, step = np.empty((2, len(kind)), np.int64)
    first[by_kind] = np.repeat((np.cumsum(rows) - rows)[together], sizes) + ranges(sizes)
    step[by_kind] = np.repeat(sizes, sizes)
    return first, step


def _make_rows(counts: np.ndarray, room: Lengths, rng: np.random.Generator) -> Iterator[tuple[list[Lengths], int]]:
    """Yield the lengths in a row and how many rows are like it, until all examples are in one."""
    remaining = counts.copy()
    drawn = _drawn(np.argwhere(counts), remaining, rng)
    for longest in _longest_first(counts, room):
        while remaining[longest]:  # steps 1 to 4 of the module's docstring
            row = _make_row(longest, room, remaining, drawn)
            used = Counter(row)
            repeats = min(int(remaining[lengths]) // number for lengths, number in used.items())
            for lengths, number in used.items():
                remaining[lengths] -= repeats * number
            yield row, 1 + repeats


def _longest_first(counts: np.ndarray, room: Lengths) -> list[Lengths]:
    """Return all distinct lengths, sorted by the larger share of the room that either side takes, largest first."""
    kinds = np.argwhere(counts)
    part = (kinds / np.maximum(room, 1)).max(axis=1)
    return list(map(tuple, kinds[np.argsort(-part, kind="stable")].tolist()))


def _make_row(
    first: Lengths, room: Lengths, remaining: np.ndarray, drawn: Iterator[tuple[Lengths, Lengths]]
) -> list[Lengths]:
    """Take examples from those that remain until a row is full; the first is given."""
    row: list[Lengths] = []

    def take(lengths: Lengths) -> None:
        nonlocal room
        row.append(lengths)
        room = _minus(room, lengths)
        remaining[lengths] -= 1

    take(first)
    for lengths, nearly_full in itertools.islice(drawn, DRAWS_PER_ROW):
        if _fits(room, nearly_full):
            break
        if _fits(lengths, room) and remaining[lengths]:  # those drawn some rows ago may be used up
            take(lengths)
    while not (closing := _closing(remaining, room)) and (largest := _largest(remaining, room)):
        take(largest)
    for lengths in closing:
        take(lengths)
    return row


def _drawn(kinds: np.ndarray, remaining: np.ndarray, rng: np.random.Generator) -> Iterator[tuple[Lengths, Lengths]]:
    """Yield random lengths in proportion to their remaining counts, each with the room at which a row is closed.

    The counts are read once for many draws, so some lengths come too often for a few rows.
    """
    while (count := remaining[*kinds.T]).any():
        share = count / count.sum()
        source, target = NEARLY_FULL * share @ kinds
        for lengths in map(tuple, rng.choice(kinds, DRAWS_AT_ONCE, p=share).tolist()):
            yield lengths, (int(source), int(target))


def _closing(remaining: np.ndarray, room: Lengths) -> list[Lengths]:
    """Return the one or two examples that leave the least room unused; none if all would leave too much."""
    for unused in UNUSED:
        if _fits(unused, room) and (found := _adding_up_to(_minus(room, unused), remaining)):
            return found
    return []


def _adding_up_to(total: Lengths, remaining: np.ndarray) -> list[Lengths]:
    """Return the lengths of one or two examples that add up to the total, or none.

    Of several choices, return the one that can be repeated most often.
    """
    longest = remaining.shape[0] - 1, remaining.shape[1] - 1
    # Of two examples, each has at least the lengths `low`, or the other would exceed the longest, and so at most
    # `high`. In that part of the table, reversing both axes maps lengths to those of their partner.
    low = max(0, total[0] - longest[0]), max(0, total[1] - longest[1])
    high = _minus(total, low)
    ones = remaining[low[0] : high[0] + 1, low[1] : high[1] + 1]
    if not ones.size:
        return []
    pairs = np.minimum(ones, ones[::-1, ::-1])
    if total[0] % 2 == total[1] % 2 == 0:  # half the total is its own partner
        half = total[0] // 2, total[1] // 2
        pairs[_minus(half, low)] = remaining[half] // 2
    best = divmod(int(pairs.argmax()), pairs.shape[1])
    alone = remaining[total] if _fits(total, longest) else 0
    if alone and alone >= pairs[best]:
        return [total]
    if not pairs[best]:
        return []
    first = low[0] + best[0], low[1] + best[1]
    return [first, _minus(total, first)]


def _largest(remaining: np.ndarray, room: Lengths) -> Lengths | None:
    """Return the lengths of an example with the most tokens that fits into the room."""
    fitting = np.argwhere(remaining[: room[0] + 1, : room[1] + 1])
    if not len(fitting):
        return None
    source, target = fitting[np.argmax(fitting.sum(axis=1))].tolist()
    return source, target


def _fits(lengths: Lengths, room: Lengths) -> bool:
    return lengths[0] <= room[0] and lengths[1] <= room[1]


def _minus(room: Lengths, lengths: Lengths) -> Lengths:
    return room[0] - lengths[0], room[1] - lengths[1]
