"""Make batches of fixed shapes from a plan and token arrays, ahead of time in one thread."""

import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jformer.data.augment import Augment, make_augment
from jformer.data.corpus import Corpus, Tokens, join_tokens
from jformer.data.data_config import DataConfig
from jformer.data.draws import ranges
from jformer.data.packing import PackedRows, pack, packed_shape
from jformer.data.plan import Plan, Shape, bucket_shapes, chunks, share_of
from jformer.errors import UserError

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
Lengths = tuple[np.ndarray, np.ndarray]


class Rows(NamedTuple):
    """The placement of examples in rows. Those that share a row are consecutive, with the segments 1, 2, …"""

    examples: np.ndarray  # [n] indices of the examples
    rows: np.ndarray  # [n] the row of each example in the resulting arrays, in any order
    segments: np.ndarray  # [n] its position among the examples of its row: 1, 2, …
    numbers: np.ndarray  # [n] the index of that row in the whole batch, of which the arrays may be a part


class Features(NamedTuple):
    """The lengths and arrays of a batch, in training and for a given source and target.

    Only `arrays` draws noise, from its seed. Inference and the scoring of given targets use `given`, which draws
    nothing; None = the task supports neither.
    """

    lengths: Callable[[np.ndarray, np.ndarray], Lengths]  # source and target lengths [n] → the lengths to plan for
    arrays: Callable[[Rows, Tokens, Tokens, Shape, tuple[int, int]], Arrays]
    given: Callable[[Rows, Tokens, Tokens, Shape], Arrays] | None = None
    # source → its tokens that precede the target in the arrays of targets
    prompt: Callable[[Sequence[int]], Sequence[int]] = lambda source: ()


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a training run or of one evaluation pass, by number."""

    plan: Plan
    source: Tokens
    target: Tokens
    packed: "PackedParts | None"  # what units hold; None: unit u is example u
    features: Features
    augment: Augment | None = None  # of training images

    def __len__(self) -> int:
        return self.plan.batches_per_epoch

    def __getitem__(self, step: int) -> Arrays:
        """Return batch number `step` as arrays [b ·]; the features of each task list them."""
        return self.rows(step, np.arange(self.plan.batch(step).shape.rows))

    def rows(self, step: int, numbers: np.ndarray) -> Arrays:
        """Return only the given rows of batch number `step`, without reading the others."""
        shape, units = self.plan.batch(step)
        units = units[numbers]
        used = np.flatnonzero(units >= 0)
        units = units[used]
        examples, sizes = units, np.ones(len(units), np.int64)
        if self.packed:
            examples, sizes = self.packed.examples(units, step // self.plan.batches_per_epoch)
        within = ranges(sizes)
        rows = np.repeat(used, sizes)
        placed = Rows(examples, rows, within + 1, numbers[rows])
        shape = shape._replace(rows=len(numbers))
        seed = self.plan.seed, step
        arrays = self.features.arrays(placed, self.source, self.target, shape, seed)
        if self.augment:
            arrays["image"] = self.augment(arrays["image"], numbers, seed)
        return {"row": numbers.astype(np.int32), **arrays}

    def first_row(self, shape: Shape) -> Arrays:
        """Return the arrays [1 ·] of a row that holds the first example, of the lengths of a shape."""
        place = np.zeros(1, np.int64)
        rows, seed = Rows(place, place, place + 1, place), (self.plan.seed, 0)
        return self.features.arrays(rows, self.source, self.target, shape._replace(rows=1), seed)


def make_batches(
    corpora: Sequence[Corpus], weights: Sequence[float], config: DataConfig, seed: int, features: Features
) -> Batches:
    """Plan the batches of a mixture of corpora; images are augmented.

    Args:
        corpora: the parts of the mixture, which have the same tokenizers.
        weights: passes over each part per epoch; with a fraction p/q, every unit is drawn p times in q epochs.
        config: tokens of a batch, and whether rows hold one example or several.
        seed: of all draws, together with the number of the epoch or the batch.
        features: the positions that an example takes on either side, and the arrays of rows of examples.

    Raises:
        UserError: for sizes too small for a batch, or weights that leave no example.
    """
    source = join_tokens([corpus.source for corpus in corpora])
    target = join_tokens([corpus.target for corpus in corpora])
    numbers = np.arange(len(corpora), dtype=np.min_scalar_type(len(corpora)))
    sizes = list(map(len, corpora))
    lengths = _lengths(corpora, features)
    shapes: tuple[Shape, ...]
    packed = None
    if config.batching == "packed":
        shape = packed_shape(*lengths, config.packed_length, *_budget(config))
        sides = (np.split(side, np.cumsum(sizes)[:-1]) for side in lengths)
        parts = [pack(first, second, shape, seed) for first, second in zip(*sides, strict=True)]
        packed = PackedParts(parts, weights)
        shapes, part = (shape,), np.repeat(numbers, [each.rows.sum() for each in parts])
        bucket = np.zeros(len(part), np.uint8)
    else:
        shapes, bucket = bucket_shapes(*lengths, config.num_buckets, *_budget(config))
        part = np.repeat(numbers, sizes)
    plan = Plan(shapes=shapes, bucket=bucket, part=part, weights=tuple(weights), seed=seed)
    if plan.fewest < 1:
        raise UserError(f"data.weight={min(weights)} of {len(part)} examples leaves none for an epoch: raise it")
    augment = make_augment(config.augment)
    return Batches(plan=plan, source=source, target=target, packed=packed, features=features, augment=augment)


def _lengths(corpora: Sequence[Corpus], features: Features) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions [n] that the examples take on either side, as u16 if all fit."""
    found = np.empty((2, sum(map(len, corpora))), np.uint16)
    end = 0
    for corpus in corpora:
        for chunk in chunks(len(corpus)):
            edges = slice(chunk.start, chunk.stop + 1)
            offsets = [_mapped_anew(side.offsets)[edges] for side in (corpus.source, corpus.target)]
            lengths = features.lengths(*map(np.diff, offsets))
            start, end = end, end + len(lengths[0])
            if max(map(np.max, lengths)) > np.iinfo(found.dtype).max:
                found = found.astype(np.uint32)
            found[:, start:end] = lengths
    return found[0], found[1]


def _mapped_anew(array: np.ndarray) -> np.ndarray:
    """Map the array again, so that its pages are freed with it rather than with the open corpus."""
    return np.load(array.filename, mmap_mode="r") if isinstance(array, np.memmap) and array.filename else array


class PackedParts:
    """Examples of packed rows, redrawn in each epoch. A row holds one corpus only, so that weights count rows.

    Rows of a corpus with a fraction p/q in its weight are redrawn after q epochs, when all were drawn equally often.
    Temperatures make q so large that such rows hold the same examples in the whole run.
    """

    def __init__(self, parts: Sequence[PackedRows], weights: Sequence[float]) -> None:
        """Join the rows of all parts."""
        self._parts = parts
        self._turns = [share_of(weight).denominator for weight in weights]  # epochs that draw all rows equally often
        self._starts = np.cumsum([0, *(len(part.kind) for part in parts)]).tolist()  # the first example of each part
        self._rows, self._sizes, self._step = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "sizes", "step")
        )
        self._first = np.concatenate([part.first + start for part, start in zip(parts, self._starts, strict=False)])
        self._places, self._before = np.cumsum(self._sizes) - self._sizes, np.cumsum(self._rows) - self._rows

    def examples(self, rows: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the examples of some rows in an epoch, row after row, and how many each row holds."""
        run = np.searchsorted(self._before, rows, side="right") - 1
        sizes = self._sizes[run]
        place = np.repeat(self._places[run], sizes) + ranges(sizes)
        order = self._order(tuple(epoch // turn for turn in self._turns))
        return order[self._first[place] + np.repeat(rows - self._before[run], sizes) * self._step[place]], sizes

    @functools.lru_cache(maxsize=1)  # noqa: B019 - it lives as long as its run
    def _order(self, turns: tuple[int, ...]) -> np.ndarray:
        order = np.empty(self._starts[-1], np.uint32 if self._starts[-1] < 2**32 else np.uint64)
        for part, turn, (start, end) in zip(self._parts, turns, itertools.pairwise(self._starts), strict=True):
            part.order(turn, order[start:end])
            order[start:end] += start
        return order


def _budget(config: DataConfig) -> tuple[int, int, int]:
    """Return the tokens of a batch, and the multiples of its rows and its lengths."""
    return config.tokens_per_update, config.rows_divide_by(), config.lengths_divide_by()


def prefetch(items: Iterator[T], depth: int = 2) -> Generator[T]:
    """Yield items made ahead in one thread; errors are raised here, and closing the generator ends the thread."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def put(entry: tuple[str, object]) -> bool:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(("item", item)):
                    return
            put(("end", None))
        except BaseException as error:
            put(("error", error))

    threading.Thread(target=work, daemon=True, name="prefetch").start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        stop.set()
