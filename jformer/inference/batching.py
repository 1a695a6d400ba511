"""Any number of pieces answered in batches of few shapes, fast: sorted by length, two at a time, long outputs last."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.decoding.search import Decoded
from jformer.errors import UserError
from jformer.inference.answers import Piece
from jformer.inference.inputs import LONG_INPUT, Attempt, Inputs
from jformer.parallel.backend import is_one_cpu
from jformer.parallel.sharding import round_up_rows

CONCURRENT_BATCHES = 2  # a step of decoding is too small to keep several cores busy: two at once took 2/3 of the time
SMALL_BATCH = 8
# Rows for few pieces, as when somebody types them: they do not wait for a whole batch. One with one hypothesis would be
# multiplied as vectors are, which XLA does slower on CPUs than two rows of a matrix.
FEW = (1, 2, SMALL_BATCH)
MOSTLY = 1 / 4  # where more outputs than this share had no room in short attempts, there are none for a while:
EVIDENCE = 64  # pieces, at least, that short attempts were made at before they are judged
WHILE = 4_096  # pieces; then their likes may have changed, and it is learned anew

Search = Callable[[Sequence[PyTree], Mapping[str, np.ndarray], int], Decoded]
"""(parameters of every model, batch, most tokens of an output) → the outputs of every row."""


class Hypotheses(NamedTuple):
    """What a search returns for one piece, best first."""

    tokens: list[list[int]]
    scores: list[float]


class CompileClock:
    """Knows which shapes of batches came before, and how long the first ones took, which are compiled."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._known: set[Hashable] = set()

    @contextlib.contextmanager
    def batch(self, shapes: Hashable) -> Iterator[bool]:
        """Time what is done inside if a batch of these shapes is the first one, and tell whether it is."""
        first, began = shapes not in self._known, time.monotonic()
        yield first
        if first:
            self._known.add(shapes)
            self.seconds += time.monotonic() - began


class BatchedSearch:
    """A compiled search over any number of pieces.

    It remembers which shapes were compiled, and whether a first attempt with little room pays.
    """

    def __init__(self, search: Search, inputs: Inputs, mesh: Mesh | None) -> None:
        """Hold the search; the devices of a mesh share the rows of a batch."""
        self.inputs = inputs
        self._search, self._mesh = search, mesh
        self._concurrent = concurrent_batches(mesh)
        self.clock = CompileClock()
        self.forget()

    def forget(self) -> None:
        """Begin anew to learn whether outputs are short."""
        self._tried = self._unfinished = 0  # pieces that a short attempt was made at, and those it had no room for
        self._left = 0  # pieces that are answered without one, before it is learned anew

    @property
    def outputs_are_short(self) -> bool:
        """Whether short attempts pay, as far as is known."""
        return not self.inputs.continues and not self._left

    def _learn(self, short: bool, tried: int, unfinished: int) -> None:
        """Note how an attempt went."""
        if not short:
            self._left = max(0, self._left - tried)
            return
        self._tried += tried
        self._unfinished += unfinished
        if self._tried >= EVIDENCE:
            self._left = WHILE if self._unfinished > self._tried * MOSTLY else 0
            self._tried = self._unfinished = 0

    def __call__(
        self, params: Sequence[PyTree], pieces: Sequence[Piece], on_answered: Callable[[int], None]
    ) -> Iterator[dict[int, Hypotheses]]:
        """Yield number of a piece → its hypotheses, batch by batch, while the next batches are being computed.

        `on_answered` is told how many more are done.

        A first attempt has room for outputs of usual length only. The few that need more would hold up all others in
        their batches, so they are searched again, in small batches of their own. Raises UserError for scores that are
        no numbers.
        """
        options = self.inputs.options
        rows = batch_rows(len(pieces), options.batch_size, self._mesh, options.hypotheses)
        first = Attempt(short=self.outputs_are_short and rows > SMALL_BATCH)
        missing = dict.fromkeys(range(len(pieces)))
        for some in self._attempt(params, pieces, range(len(pieces)), rows, first):
            for i in some:
                del missing[i]
            on_answered(len(some))
            yield some
        unfinished = [*missing]
        self._learn(first.short, len(pieces), len(unfinished))
        if unfinished:
            rows = batch_rows(SMALL_BATCH, options.batch_size, self._mesh)
            for some in self._attempt(params, pieces, unfinished, rows, Attempt(min_length=LONG_INPUT)):
                on_answered(len(some))
                yield some

    def _attempt(
        self, params: Sequence[PyTree], pieces: Sequence[Piece], indices: Sequence[int], rows: int, attempt: Attempt
    ) -> Iterator[dict[int, Hypotheses]]:
        """Yield index → hypotheses, batch by batch, of those pieces that had enough room."""
        for batch, decoded in self._decode_all(params, pieces, indices, rows, attempt):
            done: dict[int, Hypotheses] = {}
            for i, tokens, scores, lengths, finished in zip(batch, *decoded, strict=False):
                if finished:
                    each = [ids[:length].tolist() for ids, length in zip(tokens, lengths, strict=True)]
                    done[i] = Hypotheses(each, refuse_nan(scores.tolist()))
            yield done

    def _decode_all(
        self,
        params: Sequence[PyTree],
        pieces: Sequence[Piece],
        indices: Sequence[int],
        rows: int,
        attempt: Attempt,
    ) -> Iterator[tuple[Sequence[int], Decoded]]:
        """Yield the indices of each batch and what was decoded, while the next batches are being computed."""
        running: deque[tuple[Sequence[int], Future[Decoded]]] = deque()
        with ThreadPoolExecutor(self._concurrent) as pool:
            for order in sorted_batches([len(pieces[i].ids) for i in indices], rows):
                batch: Sequence[int] = [indices[i] for i in order]
                if attempt.short:
                    batch = self.inputs.without_few_long(pieces, batch, SMALL_BATCH)
                arrays, longest = self.inputs.arrays([pieces[i] for i in batch], rows, attempt)
                with self.clock.batch((longest, *shapes_of(arrays))) as first:
                    future = pool.submit(self._decode, params, arrays, longest)
                    if first:  # wait, else the next batch would compile the same once more
                        future.exception()
                running.append((batch, future))
                if len(running) > self._concurrent:
                    indices_done, finished = running.popleft()
                    yield indices_done, finished.result()
            for indices_done, finished in running:
                yield indices_done, finished.result()

    def _decode(self, params: Sequence[PyTree], arrays: Mapping[str, np.ndarray], longest: int) -> Decoded:
        return jax.device_get(self._search(params, arrays, longest))


def shapes_of(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return what a program for a batch is compiled for."""
    return tuple((name, array.shape) for name, array in arrays.items())


def concurrent_batches(mesh: Mesh | None) -> int:
    """Return how many batches are computed at a time.

    It is one on several devices, which exchange things in one order, and on an accelerator, whose memory would hold two
    searches.
    """
    return CONCURRENT_BATCHES if is_one_cpu(mesh) else 1


def batch_rows(count: int, batch_size: int, mesh: Mesh | None, hypotheses: int = 1) -> int:
    """Return the rows of the batches for so many pieces: few for few pieces, and what the mesh divides evenly."""
    rows = min(batch_size, next((rows for rows in FEW if count <= rows and rows * hypotheses > 1), batch_size))
    return round_up_rows(rows, mesh) if mesh else rows


def sorted_batches(lengths: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
    """Yield the indices of sequences, the shortest first, batch by batch."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), rows):
        yield order[start : start + rows]


def ignore(count: int) -> None:
    """Do not count answers: what is told of them where nobody asks."""


def refuse_nan(scores: list[float]) -> list[float]:
    """Return the scores; raise UserError if one of them is no number."""
    if any(np.isnan(scores)):
        raise UserError(
            "the model's scores are no numbers, so its weights are broken: try another evaluate.weights, or train "
            "again from before the rows of metrics.jsonl that are null"
        )
    return scores
