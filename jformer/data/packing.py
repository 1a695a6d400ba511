"""Several examples a row: which of them share one, so that both of its sides come out full.

Only lengths matter here, and a corpus has few different ones: 29,000 captions have 600 pairs of a source and a target
length, 4.5 million sentences some 10,000. So the packer does not look at examples. It keeps a table counts [s t], how
many examples with s source and t target tokens are in no row yet, and makes one row after another until it is empty:

1. The row begins with the longest lengths that are left, for which company will only become harder to find.
2. Lengths drawn at random join it, each as often as examples have them, until it is nearly full. So every row is a
   sample of the corpus, and easy lengths are not used up first.
3. Two examples (or one) whose lengths add up to exactly what is left close the row. Where there are none, two may
   leave a token unused, or two or three; where there are none still, the largest example that fits joins, and the two
   are looked for again.
4. The row is repeated as often as the counts allow.

Last, the examples are dealt into the rows, to each place one of the lengths that the place is for.

The trade-off: to fill the fewest rows is NP-hard, and this does not try. Rows are 97 to 99.8 % full, in a time that
grows with the different lengths and not with the examples. In return rows that were repeated are alike in their
lengths, and rows lie in the order in which they were made: whoever reads them shuffles them (`jformer.data.plan`).
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np

from jformer.data.plan import LIMITS, Shape, shape_of, side_multiples
from jformer.errors import UserError

Lengths = tuple[int, int]
"""Source and target tokens: of one example, or those that a row has room for."""

# A row is nearly full when its room is less than so many average examples. The 29,000 pairs of Multi30k fill rows of
# 128 to 99.3 % with 2, 99.8 % with 2.5 and 99.7 % with 6, which takes four times as long.
NEARLY_FULL = 2.5
UNUSED = sorted(((s, t) for s in range(4) for t in range(4) if s + t <= 3), key=sum)
"""What the examples that close a row may leave of its room, in the order in which it is tried."""
DRAWS_PER_ROW = 32  # lengths drawn for one row, fitting or not; rows are as full with 8 and with 128
DRAWS_AT_ONCE = 512  # from the same counts, which is faster; rows are as full with 64 and with 4,096


def packed_shape(
    source: np.ndarray, target: np.ndarray, length: int, tokens: int, row_multiple: int, length_multiple: int = 1
) -> Shape:
    """Return the one shape of packed rows, both of whose sides fill up at once.

    Args:
        source, target: tokens of each example [n] on either side.
        length: positions of a row on the side with more tokens; the other side has its share of that, or as many as
            its longest sequence.
        tokens: of a batch; it has as many rows as they hold of its longer side.
        row_multiple: rows of a batch divide by it.
        length_multiple: both lengths are raised to multiples of it, but for a side with one position an example.

    Raises:
        UserError: a sequence is longer than `length`, or `tokens` hold too few rows.

    >>> packed_shape(np.array([20, 20, 20]), np.array([10, 10, 10]), length=100, tokens=1000, row_multiple=1)
    Shape(rows=10, source_length=100, target_length=50)
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
    """Return the numbers of the examples [n], row after row, and how many of them each row holds [rows].

    The same lengths, shape and seed give the same rows.

    Args:
        source, target: tokens of each example [n] on either side. Each fits a row, and has a token on some side.
        shape: its lengths are the room of a row; how many rows a batch has does not matter here.
        seed: of all that is drawn.

    >>> source, target = np.array([3, 5, 2, 6]), np.array([3, 5, 2, 6])
    >>> examples, sizes = pack(source, target, Shape(rows=1, source_length=8, target_length=8), seed=0)
    >>> examples.tolist(), sizes.tolist()  # 6 + 2 tokens fill a row, and so do 5 + 3
    ([3, 2, 1, 0], [2, 2])
    """
    rng = np.random.default_rng(seed)
    table = (int(source.max()) + 1, int(target.max()) + 1)
    lengths = np.ravel_multi_index((source, target), table)  # [n] places in the table
    counts = np.bincount(lengths, minlength=table[0] * table[1]).reshape(table)
    if counts[0, 0]:
        raise ValueError(f"{counts[0, 0]} examples have no token on either side")
    rows = list(_make_rows(counts, (shape.source_length, shape.target_length), rng))
    sizes = np.repeat([len(row) for row, _ in rows], [times for _, times in rows])
    places = [np.tile(np.ravel_multi_index(np.transpose(row), table), times) for row, times in rows]
    return _deal(lengths, np.concatenate(places), rng), sizes


def _deal(lengths: np.ndarray, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an example [n] for each place of the rows, at random among those that have the lengths of the place.

    Examples and places [n] have the same lengths equally often. Sorted by them, they stand side by side.
    """
    shuffled = rng.permutation(len(lengths))
    sorted_examples = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    sorted_places = np.argsort(places, kind="stable")
    examples = np.empty_like(shuffled)
    examples[sorted_places] = sorted_examples
    return examples


def _make_rows(counts: np.ndarray, room: Lengths, rng: np.random.Generator) -> Iterator[tuple[list[Lengths], int]]:
    """Yield the lengths in a row and how many rows are like it, until all examples are in one."""
    remaining = counts.copy()
    sampler = _LengthSampler(remaining, rng)
    for longest in _longest_first(counts, room):
        while remaining[longest]:  # steps 1 to 4 of the module's docstring
            row = _make_row(longest, room, remaining, sampler)
            used = Counter(row)
            repeats = min(int(remaining[lengths]) // number for lengths, number in used.items())
            for lengths, number in used.items():
                remaining[lengths] -= repeats * number
            yield row, 1 + repeats


def _longest_first(counts: np.ndarray, room: Lengths) -> list[Lengths]:
    """Return all lengths there are, first those that take the largest part of the room on one of their sides."""
    kinds = np.argwhere(counts)
    part = (kinds / np.maximum(room, 1)).max(axis=1)
    return list(map(tuple, kinds[np.argsort(-part, kind="stable")].tolist()))


def _make_row(first: Lengths, room: Lengths, remaining: np.ndarray, sampler: "_LengthSampler") -> list[Lengths]:
    """Take examples from those that remain until a row is full; the first is given."""
    row = _Row(room, remaining)
    row.take(first)
    for lengths in itertools.islice(sampler, DRAWS_PER_ROW):
        if _fits(row.room, sampler.nearly_full):
            break
        if _fits(lengths, row.room) and remaining[lengths]:  # those drawn some rows ago may be used up
            row.take(lengths)
    while not (closing := _closing(remaining, row.room)):
        largest = _largest(remaining, row.room)
        if largest is None:
            return row.lengths
        row.take(largest)
    for lengths in closing:
        row.take(lengths)
    return row.lengths


class _Row:
    """A row that fills up, and takes what it holds away from the examples that remain."""

    def __init__(self, room: Lengths, remaining: np.ndarray) -> None:
        self.lengths: list[Lengths] = []
        self.room = room
        self._remaining = remaining

    def take(self, lengths: Lengths) -> None:
        self.lengths.append(lengths)
        self.room = _minus(self.room, lengths)
        self._remaining[lengths] -= 1


class _LengthSampler:
    """An iterator of random lengths, each as often as it remains; it ends when nothing does.

    It looks at what remains once for many draws, so that some come too often for a few rows.
    """

    def __init__(self, remaining: np.ndarray, rng: np.random.Generator) -> None:
        self._remaining, self._rng = remaining, rng
        self._kinds = np.argwhere(remaining)  # [kinds 2]
        self._drawn: deque[Lengths] = deque()
        self.nearly_full: Lengths = (0, 0)  # a row with no more room than this is to be closed

    def __iter__(self) -> Iterator[Lengths]:
        return self

    def __next__(self) -> Lengths:
        if not self._drawn:
            self._draw()
        return self._drawn.popleft()

    def _draw(self) -> None:
        count = self._remaining[*self._kinds.T]
        if not count.any():
            raise StopIteration
        share = count / count.sum()
        source, target = NEARLY_FULL * share @ self._kinds
        self.nearly_full = int(source), int(target)
        self._drawn.extend(map(tuple, self._rng.choice(self._kinds, DRAWS_AT_ONCE, p=share).tolist()))


def _closing(remaining: np.ndarray, room: Lengths) -> list[Lengths]:
    """Return the one or two examples that leave least of the room unused; none if all would leave too much."""
    for unused in UNUSED:
        if _fits(unused, room) and (found := _adding_up_to(_minus(room, unused), remaining)):
            return found
    return []


def _adding_up_to(total: Lengths, remaining: np.ndarray) -> list[Lengths]:
    """Return the lengths of one or of two examples that make up the total; none if there are none.

    Of several choices it is the one that can be repeated most often.
    """
    longest = remaining.shape[0] - 1, remaining.shape[1] - 1
    # One of two examples has at least the lengths `low`, or the other would be longer than any there is; and so it has
    # at most `high`. In the part of the table between them, any lengths lie opposite to those that they lack of the
    # total: the table read backwards counts the partners.
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
