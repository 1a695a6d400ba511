"""Streamed answers: searches advanced a few tokens at a time, and the stable prefix after each advance.

No HTTP here, and no threads. The steps are those of the whole search, so the answers are the same.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from jformer.data.text import join_pieces
from jformer.data.tokenizers import Tokenizer
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.search import Decoded
from jformer.errors import UserError
from jformer.inference.answers import Output, Piece, written_language
from jformer.inference.batching import NBest, batch_rows, read_row
from jformer.inference.generation import KEPT, XLA_OPTIONS, SearchBatch, SearchSetup, begin_search
from jformer.inference.one_pass import HEADS
from jformer.inference.predict import Predictor
from jformer.parallel.backend import xla_options
from jformer.parallel.sharding import on_every_part
from jformer.plugins import cached

Programs = tuple[jax.stages.Wrapped, jax.stages.Wrapped]  # of `make_stream`
STEPS = 2  # tokens between updates of a stream: each update costs a fraction of a step of a small model
BROKEN = "\N{REPLACEMENT CHARACTER}"  # an incomplete character, decoded


class StreamUpdate(NamedTuple):
    """An update of a request."""

    request: int
    text: str  # the beginning of its best output
    outputs: list[Output] | None = None  # once it is complete


def refuse_streaming(answer: str, options: DecodeConfig) -> None:
    """Raise UserError for answers that are only known when they are complete."""
    if not answer or answer in HEADS:
        raise UserError("this run's answers are not written token by token: leave out `stream`")
    if options.search == "mbr" or options.rerank:
        key = "decode.rerank" if options.rerank else "decode.search='mbr'"
        raise UserError(f"{key} chooses among whole outputs, which cannot be streamed: leave out `stream`")


@cached(KEPT)
def make_stream(setup: SearchSetup) -> Programs:
    """Return a search as two compiled programs: one makes the first state, one advances a state.

    They are (parameters, batch, room) → state, and (parameters, batch, room, state, cancelled rows [b]) → state after
    STEPS more tokens, (tokens [b t], lengths [b]) that outputs begin with, and `Decoded`. The state passed in is
    donated.
    """

    def begin(params: Sequence[PyTree], batch: SearchBatch, room: int) -> Any:
        def start(params: Sequence[PyTree], batch: SearchBatch) -> Any:
            return begin_search(setup, params, batch, room).init

        return on_every_part(start, setup.mesh)(params, batch)

    def advance(
        params: Sequence[PyTree], batch: SearchBatch, room: int, state: PyTree, cancelled: Bool[Array, " b"]
    ) -> tuple[Any, tuple[Int[Array, "b t"], Int[Array, " b"]], Decoded]:
        def grow(params: Sequence[PyTree], batch: SearchBatch, state: Any, cancelled: Bool[Array, " b"]) -> Any:
            search = begin_search(setup, params, batch, room)
            cancelled = jnp.repeat(cancelled, state.done.shape[0] // cancelled.shape[0])  # [b] → [b], or [rows]
            state = search.advance(state._replace(done=state.done | cancelled), jnp.int32(STEPS))
            return state, search.stable_prefix(state), search.result(state)

        found: tuple[Any, Any, Decoded] = on_every_part(grow, setup.mesh)(params, batch, state, cancelled)
        return found

    compiled = functools.partial(jax.jit, static_argnums=2, compiler_options=xla_options(XLA_OPTIONS))
    return compiled(begin), compiled(advance, donate_argnums=3)


class Streaming:
    """Requests answered together."""

    def __init__(self, predictor: Predictor, programs: Programs, groups: Sequence[Sequence[Piece]]) -> None:
        """Start, with the programs of `make_stream`; the pieces of all requests are the rows of one batch."""
        self._predictor, (begin, self._advance), self._groups = predictor, programs, groups
        self._owners = [i for i, group in enumerate(groups) for _ in group]  # the request of every row that is a piece
        self._open = set(range(len(groups)))
        self._texts = [""] * len(groups)  # sent so far
        self._stable: list[Sequence[int]] = [()] * len(self._owners)
        self._found: dict[int, NBest] = {}  # by row
        pieces = [piece for group in groups for piece in group]
        if pieces:
            inputs, options = self._predictor.inputs, self._predictor.inputs.options
            rows = batch_rows(len(pieces), options.batch_size, self._predictor.mesh, options.hypotheses)
            self._cancelled = np.zeros(rows * math.ceil(len(pieces) / rows), bool)
            arrays, self._room = inputs.arrays(pieces, len(self._cancelled))
            self._batch = jax.device_put(arrays)
            self._state = begin(self._predictor.prepared_params, self._batch, self._room)

    @property
    def running(self) -> bool:
        """Whether some request is neither answered nor cancelled."""
        return bool(self._open)

    def leave(self, request: int) -> None:
        """Cancel a request; it is not computed from the next step on."""
        self._open.discard(request)
        for row, owner in enumerate(self._owners):
            self._cancelled[row] |= owner == request

    def advance(self) -> list[StreamUpdate]:
        """Generate some more tokens; return the updates. Raises UserError for NaN scores."""
        if self._owners and self.running:
            arguments = self._predictor.prepared_params, self._batch, self._room, self._state, self._cancelled
            self._state, *found = self._advance(*arguments)
            (tokens, lengths), decoded = jax.device_get(found)
            for row, owner in enumerate(self._owners):
                if owner in self._open and row not in self._found:
                    self._stable[row] = tokens[row, : lengths[row]].tolist()
                    if (found := read_row(decoded, row)) is not None:
                        assert isinstance(found, NBest)
                        self._found[row] = found
        return [update for i in sorted(self._open) if (update := self._update(i))]

    def _update(self, request: int) -> StreamUpdate | None:
        rows = [row for row, owner in enumerate(self._owners) if owner == request]
        if all(row in self._found for row in rows):
            self._open.discard(request)
            (outputs,) = self._predictor.answers([self._groups[request]], [self._found[row] for row in rows])
            return StreamUpdate(request, outputs[0].text, outputs)
        text = self._beginning(rows, self._groups[request])
        if len(text) <= len(self._texts[request]) or not text.startswith(self._texts[request]):
            return None
        self._texts[request] = text
        return StreamUpdate(request, text)

    def _beginning(self, rows: Sequence[int], pieces: Sequence[Piece]) -> str:
        """Return the texts of the pieces up to the first unanswered one, and the stable beginning of that one."""
        texts, tokenizer = list[str](), self._predictor.tokenizers[1]
        language = written_language(self._predictor.config, pieces)
        for row, piece in zip(rows, pieces, strict=True):
            prompt = piece.ids if self._predictor.inputs.continues else ()
            if row not in self._found:
                return join_pieces([*texts, stable_text(tokenizer, [*prompt, *self._stable[row]])], language)
            texts.append(tokenizer.decode([*prompt, *self._found[row].tokens[0]]))
        return join_pieces(texts, language)


def stable_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the beginning of the text of some tokens that no following tokens can change."""
    text = tokenizer.decode(ids)
    if tokenizer.mends_spaces:  # before punctuation that follows
        return "".join(text.rpartition(" ")[:1])
    return text.rstrip(BROKEN)
