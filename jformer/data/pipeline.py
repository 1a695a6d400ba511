"""From a plan and token arrays to batches of fixed shapes, made ahead by one thread."""

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from jformer.data.augment import Augment, make_augment
from jformer.data.config import DataConfig
from jformer.data.corpus import Corpus, Tokens
from jformer.data.draws import ranges
from jformer.data.features import Arrays, Features, Rows
from jformer.data.packing import pack, packed_shape
from jformer.data.plan import Plan, bucket_shapes
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
    augment: Augment | None = None  # what happens to images, in training

    def __len__(self) -> int:
        return self.plan.batches_per_epoch

    def __getitem__(self, step: int) -> Arrays:
        """Return batch number `step` as arrays [b ·]; see `jformer.data.features` for what each task gets."""
        return self.rows(step, np.arange(self.plan.batch(step).shape.rows))

    def rows(self, step: int, numbers: np.ndarray) -> Arrays:
        """Return some rows of batch number `step`, by their numbers; the others are not even read."""
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
    """Plan the batches of a mixture of corpora, each passed over `weight` times an epoch; images are augmented.

    Raise UserError for sizes that hold no batch, or weights that leave none.
    """
    source = _joined([corpus.source for corpus in corpora])
    target = _joined([corpus.target for corpus in corpora])
    part = np.repeat(np.arange(len(corpora)), [len(corpus) for corpus in corpora])
    source_lengths, target_lengths = features.lengths(source.lengths, target.lengths)
    budget = config.tokens_per_update, config.rows_divide_by(), config.length_multiple
    augment = make_augment(config.augment)
    if config.batching == "packed":
        shape = packed_shape(source_lengths, target_lengths, config.packed_length, *budget)
        members, sizes, row_part = [], [], []
        for index in range(len(corpora)):  # a row holds one corpus only, so that weights can count rows
            examples = np.flatnonzero(part == index)
            packed, rows = pack(source_lengths[examples], target_lengths[examples], shape, seed)
            members.append(examples[packed])
            sizes.append(rows)
            row_part.append(np.full(len(rows), index))
        offsets = np.cumsum(np.concatenate([[0], *sizes]))
        plan = Plan(
            shapes=(shape,),
            bucket=np.zeros(len(offsets) - 1, np.int64),
            part=np.concatenate(row_part),
            weights=tuple(weights),
            seed=seed,
        )
        batches = Batches(
            plan=plan,
            source=source,
            target=target,
            offsets=offsets,
            members=np.concatenate(members),
            features=features,
            augment=augment,
        )
    else:
        shapes, bucket = bucket_shapes(source_lengths, target_lengths, config.num_buckets, *budget)
        plan = Plan(shapes=shapes, bucket=bucket, part=part, weights=tuple(weights), seed=seed)
        batches = Batches(
            plan=plan,
            source=source,
            target=target,
            offsets=np.arange(len(part) + 1),
            members=np.arange(len(part)),
            features=features,
            augment=augment,
        )
    if not len(batches):
        raise UserError(f"data.weight={min(weights)} of {len(part)} examples leaves none for an epoch: raise it")
    return batches


def _joined(sides: Sequence[Tokens]) -> Tokens:
    if len(sides) == 1:
        return sides[0]
    lengths = np.concatenate([side.lengths for side in sides])
    return Tokens(np.concatenate([side.values for side in sides]), np.concatenate([[0], np.cumsum(lengths)]))


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Make items ahead in one thread; an error in it is raised here, and leaving early ends it."""
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
