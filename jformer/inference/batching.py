"""Run a compiled answer program on any number of pieces, sorted by length, in batches of few shapes, two at a time."""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jformer.decoding.search import Decoded
from jformer.errors import BrokenRunError
from jformer.inference.answers import Piece
from jformer.inference.generation import in_compute_dtype
from jformer.inference.inputs import LONG_INPUT, Attempt, Inputs
from jformer.inference.one_pass import ClassScores, Estimates, Fillings, Spans, Vectors
from jformer.models.model import Model
from jformer.models.parts import in_stack
from jformer.parallel.backend import is_one_cpu
from jformer.parallel.sharding import round_up_rows
from jformer.tasks.crf import Tags

CONCURRENT_BATCHES = 2  # a step of decoding is too small to keep several cores busy: two at once took 2/3 of the time
SMALL_BATCH = 8
# Rows of a batch for few pieces, so that an interactive user does not wait for a whole batch. On CPUs, XLA multiplies a
# single row more slowly than two, so one row is used only with several hypotheses.
FEW = (1, 2, SMALL_BATCH)
MOSTLY = 1 / 4  # if more than this share of outputs does not fit, short attempts pause
EVIDENCE = 64  # the fewest pieces in short attempts that this share is judged by
WHILE = 4_096  # pieces without short attempts; then they are tried again, because the text may have changed


class NBest(NamedTuple):
    """The outputs of a search for one piece, best first."""

    tokens: list[list[int]]
    scores: list[float]


Found = NBest | ClassScores | Estimates | Tags | Spans | Vectors | Fillings
"""The result for one piece; for a head, one row of its arrays."""


class CompileClock:
    """Seconds spent on the first batch of every shape, for which a program is compiled."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._known: set[Hashable] = set()

    @contextlib.contextmanager
    def batch(self, shapes: Hashable) -> Iterator[bool]:
        """Time the block if it handles the first batch of these shapes; yield whether it does."""
        first, began = shapes not in self._known, time.monotonic()
        yield first
        if first:
            self._known.add(shapes)
            self.seconds += time.monotonic() - began


class PreparedParams:
    """Parameters in the fastest form for answers, cached between calls.

    Kernels are rounded to the compute dtype once, not in every call. On a CPU, layers are also unstacked: a stack holds
    one array for all its layers, and XLA would copy each layer's slice before every product. Together these took half
    of the time of a short sentence at d_model 512. Programs restack layers by `stack_layers`, which is free inside jit.
    """

    def __init__(self, models: Sequence[Model], mesh: Mesh | None, rounded: bool, enabled: bool = True) -> None:
        """Parameters are copied on first use if `enabled`, else used as they are. Heads keep unrounded kernels."""
        self._enabled = enabled
        self._prepare = [
            _make_prepare(
                dtype=model.config.dtype if rounded else "float32",
                unstack=is_one_cpu(mesh) and not model.config.execution.unroll,  # a loop over layers reads whole arrays
            )
            for model in models
        ]
        self._given: Sequence[PyTree] = ()
        self._prepared: Sequence[PyTree] = ()

    def __call__(self, params: Sequence[PyTree]) -> Sequence[PyTree]:
        """Return the prepared parameters of every model."""
        if not self._enabled:
            return params
        if [*map(id, params)] != [*map(id, self._given)]:
            self._given = self._prepared = ()  # free memory before allocating more
            self._prepared = [prepare(tree) for prepare, tree in zip(self._prepare, params, strict=True)]
            self._given = params  # holding them keeps their ids from being reused
        return self._prepared


@functools.cache
def _make_prepare(dtype: str, unstack: bool) -> Callable[[PyTree], PyTree]:
    def prepare(params: PyTree) -> PyTree:
        params = in_compute_dtype(params, dtype)
        return jax.tree_util.tree_map_with_path(_unstacked, params) if unstack else params

    return jax.jit(prepare)


def _unstacked(path: Any, leaf: Array) -> Array | tuple[Array, ...]:
    return tuple(jnp.unstack(leaf)) if in_stack(path) else leaf


Program = Callable[[Sequence[PyTree], Mapping[str, np.ndarray], int], Any]
"""(parameters of every model, batch, maximum output tokens) → `Decoded`, or the arrays of a head."""


class BatchedSearch:
    """A compiled search or head for any number of pieces; it learns whether a short first attempt pays off."""

    def __init__(self, search: Program, inputs: Inputs, mesh: Mesh | None) -> None:
        """Take a program of `make_answer`; the devices of a mesh share the rows of a batch."""
        self.inputs = inputs
        self._search, self._mesh = search, mesh
        self._concurrent = concurrent_batches(mesh)
        self.clock = CompileClock()
        self.forget()

    def forget(self) -> None:
        """Forget whether outputs are short."""
        self._tried = self._unfinished = 0  # pieces in short attempts, and how many did not fit
        self._left = 0  # pieces to answer before the next short attempt

    @property
    def outputs_are_short(self) -> bool:
        """Whether short attempts are expected to pay off."""
        return not self.inputs.continues and not self._left

    def _learn(self, short: bool, tried: int, unfinished: int) -> None:
        """Record how an attempt went."""
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
    ) -> Iterator[dict[int, Found]]:
        """Yield number of a piece → its result, batch by batch, while the next batches are computed.

        `on_answered` is given the number of pieces of each batch that is done.

        The first attempt has room for outputs of usual length only. The few that need more would delay all others in
        their batches, so they are searched again in small batches. Raises BrokenRunError for NaN scores.
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
    ) -> Iterator[dict[int, Found]]:
        """Yield index → result, batch by batch, for the pieces that had enough room; the next batches are computed."""
        running: deque[tuple[Sequence[int], Future[Any]]] = deque()
        with ThreadPoolExecutor(self._concurrent) as pool:
            for order in sorted_batches([len(pieces[i].ids) for i in indices], rows):
                batch: Sequence[int] = [indices[i] for i in order]
                if attempt.short:
                    batch = self.inputs.without_few_long(pieces, batch, SMALL_BATCH)
                arrays, longest = self.inputs.arrays([pieces[i] for i in batch], rows, attempt)
                with self.clock.batch((longest, *shapes_of(arrays))) as first:
                    future = pool.submit(self._compute, params, arrays, longest)
                    if first:  # wait: the next batch would compile the same program again
                        future.exception()
                running.append((batch, future))
                if len(running) > self._concurrent:
                    yield _finished(*running.popleft())
            for each in running:
                yield _finished(*each)

    def _compute(self, params: Sequence[PyTree], arrays: Mapping[str, np.ndarray], longest: int) -> Any:
        return jax.device_get(self._search(params, arrays, longest))


def _finished(indices: Sequence[int], computed: Future[Any]) -> dict[int, Found]:
    """Wait for a batch; return index → result of the pieces that had enough room."""
    arrays = computed.result()
    found = ((i, read_row(arrays, row)) for row, i in enumerate(indices))
    return {i: one for i, one in found if one is not None}


def read_row(arrays: Any, row: int) -> Found | None:
    """Return the result for one row; None if the search ran out of room. Raise BrokenRunError for NaN scores."""
    if not isinstance(arrays, Decoded):
        found = type(arrays)(*(array[row] for array in arrays))
        refuse_nan(found[-1])
        return found
    if not arrays.done[row]:
        return None
    refuse_nan(arrays.scores[row])
    lengths = zip(arrays.tokens[row], arrays.lengths[row], strict=True)
    return NBest([ids[:length].tolist() for ids, length in lengths], arrays.scores[row].tolist())


def shapes_of(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes that the program for a batch is compiled for."""
    return tuple((name, array.shape) for name, array in arrays.items())


def concurrent_batches(mesh: Mesh | None) -> int:
    """Return how many batches are computed at a time.

    It is one on several devices, whose collectives must run in one order, and on an accelerator, whose memory would
    otherwise hold two searches.
    """
    return CONCURRENT_BATCHES if is_one_cpu(mesh) else 1


def batch_rows(count: int, batch_size: int, mesh: Mesh | None, hypotheses: int = 1) -> int:
    """Return the rows of the batches for `count` pieces: fewer for few pieces, and a multiple of the row shards."""
    rows = min(batch_size, next((rows for rows in FEW if count <= rows and rows * hypotheses > 1), batch_size))
    return round_up_rows(rows, mesh) if mesh else rows


def sorted_batches(lengths: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
    """Yield the indices of sequences, shortest first, batch by batch."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), rows):
        yield order[start : start + rows]


def ignore(count: int) -> None:
    """Do nothing: the default callback for answer counts."""


def refuse_nan(scores: Any) -> None:
    """Raise BrokenRunError if a score is NaN."""
    if np.isnan(scores).any():
        raise BrokenRunError(
            "the model's scores are NaN, so its weights are broken: try another evaluate.weights, or train again from "
            "before the rows of metrics.jsonl that are null"
        )
