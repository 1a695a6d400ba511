"""From a plan and token arrays to batches of fixed shapes, made ahead by one thread."""

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from jformer.data.config import DataConfig
from jformer.data.corpus import Corpus, Tokens
from jformer.data.plan import Plan, bucket_shapes, pack, packed_shape
from jformer.data.tokenizers import BOS
from jformer.errors import UserError

T = TypeVar("T")
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a training run or of one evaluation pass, by number."""

    plan: Plan
    source: Tokens
    target: Tokens
    first: np.ndarray  # [units + 1] unit u holds the pairs members[first[u]:first[u + 1]]
    members: np.ndarray

    def __len__(self) -> int:
        return self.plan.batches_per_epoch

    def __getitem__(self, step: int) -> Arrays:
        """Return batch number `step` as arrays [b ·]; see `jformer.models.encdec.Batch` for what the model reads."""
        shape, units = self.plan.batch(step)
        used = np.flatnonzero(units >= 0)
        units = units[used]
        sizes = self.first[units + 1] - self.first[units]
        segments = _ranges(sizes) + 1
        pairs = self.members[np.repeat(self.first[units], sizes) + segments - 1]
        rows = np.repeat(used, sizes)
        source = _fill(self.source, pairs, rows, segments, (shape.rows, shape.source_length))
        target = _fill(self.target, pairs, rows, segments, (shape.rows, shape.target_length))
        return {
            "row": np.arange(shape.rows, dtype=np.int32),
            "source": source["tokens"],
            "source_segments": source["segments"],
            "source_positions": source["positions"],
            "target_in": _shift_right(target["tokens"], target["positions"]),
            "target_out": target["tokens"],
            "target_segments": target["segments"],
            "target_positions": target["positions"],
            "weights": (target["segments"] > 0).astype(np.float32),
        }


def make_batches(corpora: Sequence[Corpus], weights: Sequence[float], config: DataConfig, seed: int) -> Batches:
    """Plan the batches of a mixture of corpora, each passed over `weight` times an epoch.

    Raise UserError for sizes that hold no batch, or weights that leave none.
    """
    source = _joined([corpus.source for corpus in corpora])
    target = _joined([corpus.target for corpus in corpora])
    part = np.repeat(np.arange(len(corpora)), [len(corpus) for corpus in corpora])
    budget = (config.tokens_per_update, config.row_multiple)
    if config.batching == "packed":
        shape = packed_shape(source.lengths, target.lengths, config.packed_length, *budget)
        rows: list[np.ndarray] = []
        row_part: list[int] = []
        for index in range(len(corpora)):  # a row holds one corpus only, so that weights can count rows
            pairs = np.flatnonzero(part == index)
            packed = pack(source.lengths[pairs], target.lengths[pairs], shape, seed)
            rows += [pairs[row] for row in packed]
            row_part += [index] * len(packed)
        plan = Plan((shape,), np.zeros(len(rows), np.int64), np.array(row_part), tuple(weights), seed)
        batches = Batches(plan, source, target, np.cumsum([0, *map(len, rows)]), np.concatenate(rows))
    else:
        shapes, bucket = bucket_shapes(source.lengths, target.lengths, config.num_buckets, *budget)
        plan = Plan(shapes, bucket, part, tuple(weights), seed)
        batches = Batches(plan, source, target, np.arange(len(part) + 1), np.arange(len(part)))
    if not len(batches):
        raise UserError(f"data.weight={min(weights)} of {len(part)} pairs leaves none for an epoch: raise it")
    return batches


def _joined(sides: Sequence[Tokens]) -> Tokens:
    if len(sides) == 1:
        return sides[0]
    lengths = np.concatenate([side.lengths for side in sides])
    return Tokens(np.concatenate([side.values for side in sides]), np.concatenate([[0], np.cumsum(lengths)]))


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0..n-1 for each n of lengths, joined."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _fill(tokens: Tokens, pairs: np.ndarray, rows: np.ndarray, segments: np.ndarray, shape: tuple[int, int]) -> Arrays:
    """Lay the pairs' tokens side by side into their rows; pairs that share a row are neighbours in `pairs`."""
    lengths = tokens.offsets[pairs + 1] - tokens.offsets[pairs]
    within = _ranges(lengths)
    before = np.cumsum(lengths) - lengths
    start = before - before[np.searchsorted(rows, rows)]  # tokens already in the row
    cell = np.repeat(rows * shape[1] + start, lengths) + within
    out = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    out["tokens"].flat[cell] = tokens.values[np.repeat(tokens.offsets[pairs], lengths) + within]
    out["segments"].flat[cell] = np.repeat(segments, lengths)
    out["positions"].flat[cell] = within
    return out


def _shift_right(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return what the decoder reads: BOS where a sentence begins (and in padding), else the token before."""
    shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return np.where(positions == 0, BOS, shifted).astype(np.int32)


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Make items ahead in one thread; an error in it is raised here, and leaving early ends it."""
    ready: queue.Queue = queue.Queue(depth)
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
