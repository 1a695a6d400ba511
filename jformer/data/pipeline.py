"""Make batches of fixed shapes from a plan and token arrays, ahead of time in one thread."""

import dataclasses
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jformer.data.augment import Augment, make_augment
from jformer.data.corpus import Corpus, Tokens
from jformer.data.data_config import DataConfig
from jformer.data.draws import ranges
from jformer.data.features import Arrays, Features, Rows
from jformer.data.packing import pack, packed_shape
from jformer.data.plan import Plan, Shape, bucket_shapes
from jformer.errors import UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a training run or of one evaluation pass, by number."""

    plan: Plan
    source: Tokens
    target: Tokens
    offsets: np.ndarray  # [units + 1] unit u holds the examples members[offsets[u]:offsets[u + 1]]
    members: np.ndarray
    features: Features
    augment: Augment | None = None  # of training images

    def __len__(self) -> int:
        return self.plan.batches_per_epoch

    def __getitem__(self, step: int) -> Arrays:
        """Return batch number `step` as arrays [b ·]; `jformer.data.features` lists those of each task."""
        return self.rows(step, np.arange(self.plan.batch(step).shape.rows))

    def rows(self, step: int, numbers: np.ndarray) -> Arrays:
        """Return only the given rows of batch number `step`, without reading the others."""
        shape, units = self.plan.batch(step)
        units = units[numbers]
        used = np.flatnonzero(units >= 0)
        units = units[used]
        sizes = self.offsets[units + 1] - self.offsets[units]
        within = ranges(sizes)
        examples = self.members[np.repeat(self.offsets[units], sizes) + within]
        rows = np.repeat(used, sizes)
        placed = Rows(examples, rows, within + 1, numbers[rows])
        shape = shape._replace(rows=len(numbers))
        seed = self.plan.seed, step
        arrays = self.features.arrays(placed, self.source, self.target, shape, seed)
        if self.augment:
            arrays["image"] = self.augment(arrays["image"], numbers, seed)
        return {"row": numbers.astype(np.int32), **arrays}


def make_batches(
    corpora: Sequence[Corpus], weights: Sequence[float], config: DataConfig, seed: int, features: Features
) -> Batches:
    """Plan the batches of a mixture of corpora; images are augmented.

    Args:
        corpora: the parts of the mixture, which have the same tokenizers.
        weights: passes of an epoch over each part; of a fraction p/q, every unit is drawn p times in q epochs.
        config: tokens of a batch, and whether rows hold one example or several.
        seed: of all draws, together with the number of the epoch or the batch.
        features: the positions that an example takes on either side, and the arrays of rows of examples.

    Raises:
        UserError: for sizes too small for a batch, or weights that leave no example.
    """
    source = _joined([corpus.source for corpus in corpora])
    target = _joined([corpus.target for corpus in corpora])
    part = np.repeat(np.arange(len(corpora)), [len(corpus) for corpus in corpora])
    lengths = features.lengths(source.lengths, target.lengths)
    units = _packed(lengths, part, config, seed) if config.batching == "packed" else _single(lengths, part, config)
    plan = Plan(shapes=units.shapes, bucket=units.bucket, part=units.part, weights=tuple(weights), seed=seed)
    batches = Batches(
        plan=plan,
        source=source,
        target=target,
        offsets=units.offsets,
        members=units.members,
        features=features,
        augment=make_augment(config.augment),
    )
    if plan.fewest < 1:
        raise UserError(f"data.weight={min(weights)} of {len(part)} examples leaves none for an epoch: raise it")
    return batches


class _Units(NamedTuple):
    """The contents of rows: shapes, bucket and part as in `Plan`, offsets and members as in `Batches`."""

    shapes: tuple[Shape, ...]
    bucket: np.ndarray
    part: np.ndarray
    offsets: np.ndarray
    members: np.ndarray


def _single(lengths: tuple[np.ndarray, np.ndarray], part: np.ndarray, config: DataConfig) -> _Units:
    """Give each example a row of its own."""
    shapes, bucket = bucket_shapes(*lengths, config.num_buckets, *_budget(config))
    members = np.arange(len(part))
    return _Units(shapes=shapes, bucket=bucket, part=part, offsets=np.arange(len(part) + 1), members=members)


def _packed(lengths: tuple[np.ndarray, np.ndarray], part: np.ndarray, config: DataConfig, seed: int) -> _Units:
    """Fill rows of one shape with several examples each."""
    source, target = lengths
    shape = packed_shape(source, target, config.packed_length, *_budget(config))
    members, sizes, row_part = [], [], []
    for index in np.unique(part):  # a row holds one corpus only, so that weights can count rows
        examples = np.flatnonzero(part == index)
        packed, rows = pack(source[examples], target[examples], shape, seed)
        members.append(examples[packed])
        sizes.append(rows)
        row_part.append(np.full(len(rows), index))
    offsets = np.cumsum(np.concatenate([[0], *sizes]))
    return _Units(
        shapes=(shape,),
        bucket=np.zeros(len(offsets) - 1, np.int64),
        part=np.concatenate(row_part),
        offsets=offsets,
        members=np.concatenate(members),
    )


def _budget(config: DataConfig) -> tuple[int, int, int]:
    """Return the tokens of a batch, and the multiples of its rows and its lengths."""
    return config.tokens_per_update, config.rows_divide_by(), config.lengths_divide_by()


def _joined(sides: Sequence[Tokens]) -> Tokens:
    if len(sides) == 1:
        return sides[0]
    lengths = np.concatenate([side.lengths for side in sides])
    return Tokens(np.concatenate([side.values for side in sides]), np.concatenate([[0], np.cumsum(lengths)]))


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
