"""Answers as they grow: the searches of `generation`, advanced a few steps at a time, and the stable prefix after each.

No HTTP here, and no threads. A search that is advanced takes the same steps as the whole, so its answers are the same.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jformer.data.tokenizers import Tokenizer
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.search import Decoded
from jformer.errors import UserError
from jformer.inference.answers import Output, Piece
from jformer.inference.batching import Hypotheses, batch_rows, refuse_nan
from jformer.inference.compiled_searches import make_key, make_stream
from jformer.inference.head_answers import HEADS
from jformer.inference.predict import Predictor

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the bytes of a character so far


class Update(NamedTuple):
    """What is new of a request."""

    request: int
    text: str  # how its best output begins
    outputs: list[Output] | None = None  # when it is answered


def refuse_streaming(answer: str, options: DecodeConfig) -> None:
    """Raise UserError for answers that have no beginning before their end."""
    if not answer or answer in HEADS:
        raise UserError("this run's answers are no texts that grow: ask without `stream`")
    if options.search == "mbr":
        raise UserError(
            "decode.search='mbr' chooses among whole samples, so nothing can be sent before: leave `stream`"
        )


class Streamer:
    """A model's search as two compiled programs: one that makes the first state, one that goes on from a state."""

    def __init__(self, predictor: Predictor) -> None:
        """Hold what it takes, and compile nothing yet. Raises UserError as `refuse_streaming`."""
        refuse_streaming(predictor.task.answer, predictor.config.decode)
        self.predictor, inputs = predictor, predictor.inputs

        key = make_key(predictor.models, inputs.options, predictor.vocabulary, inputs.symbols)
        self.begin, self.advance = make_stream(key)

    @property
    def params(self) -> Sequence[PyTree]:
        """The parameters as they compute, which is made of them once and not at each look."""
        return self.predictor.laid_out(self.predictor.all_params)

    def start(self, groups: Sequence[Sequence[Piece]]) -> "Streaming":
        """Begin to answer requests, each given as its pieces."""
        return Streaming(self, groups)


class Streaming:
    """Some requests while they are answered together."""

    def __init__(self, streamer: Streamer, groups: Sequence[Sequence[Piece]]) -> None:
        """Begin. The pieces of all requests are the rows of one batch."""
        self._streamer, self._predictor, self._groups = streamer, streamer.predictor, groups
        self._owners = [i for i, group in enumerate(groups) for _ in group]  # of every row that is a piece
        self._open = set(range(len(groups)))
        self._texts = [""] * len(groups)  # that were told
        self._stable: list[Sequence[int]] = [()] * len(self._owners)
        self._found: dict[int, Hypotheses] = {}  # by row
        pieces = [piece for group in groups for piece in group]
        if pieces:
            inputs, options = self._predictor.inputs, self._predictor.inputs.options
            rows = batch_rows(len(pieces), options.batch_size, self._predictor.mesh, options.hypotheses)
            self._left = np.zeros(rows * math.ceil(len(pieces) / rows), bool)
            arrays, self._room = inputs.arrays(pieces, len(self._left))
            self._batch = jax.device_put(arrays)
            self._state = streamer.begin(streamer.params, self._batch, self._room)

    @property
    def running(self) -> bool:
        """Whether some request is neither answered nor left."""
        return bool(self._open)

    def leave(self, request: int) -> None:
        """Give a request up: from the next step on nothing is computed for it."""
        self._open.discard(request)
        for row, owner in enumerate(self._owners):
            self._left[row] |= owner == request

    def advance(self) -> list[Update]:
        """Go on for some tokens; return what is new. Raises UserError for scores that are no numbers."""
        if self._owners and self.running:
            arguments = self._streamer.params, self._batch, self._room, self._state, self._left
            self._state, *found = self._streamer.advance(*arguments)
            (tokens, lengths), decoded = jax.device_get(found)
            self._read(tokens, lengths, decoded)
        return [update for i in sorted(self._open) if (update := self._update(i))]

    def _read(self, tokens: np.ndarray, lengths: np.ndarray, decoded: Decoded) -> None:
        """Take note of the stable prefixes [b t], so many tokens [b] of them, and of what is done."""
        for row, owner in enumerate(self._owners):
            if owner not in self._open or row in self._found:
                continue
            self._stable[row] = tokens[row, : lengths[row]].tolist()
            if decoded.done[row]:
                each = zip(decoded.tokens[row], decoded.lengths[row], strict=True)
                hypotheses = [ids[:length].tolist() for ids, length in each]
                self._found[row] = Hypotheses(hypotheses, refuse_nan(decoded.scores[row].tolist()))

    def _update(self, request: int) -> Update | None:
        rows = [row for row, owner in enumerate(self._owners) if owner == request]
        if all(row in self._found for row in rows):
            self._open.discard(request)
            (outputs,) = self._predictor.answers([self._groups[request]], [self._found[row] for row in rows])
            return Update(request, outputs[0].text, outputs)
        text = self._beginning(rows, self._groups[request])
        if len(text) <= len(self._texts[request]) or not text.startswith(self._texts[request]):
            return None
        self._texts[request] = text
        return Update(request, text)

    def _beginning(self, rows: Sequence[int], pieces: Sequence[Piece]) -> str:
        """Return the texts of the pieces up to the first one that is not answered, of that one what is stable."""
        texts, tokenizer = list[str](), self._predictor.tokenizers[1]
        for row, piece in zip(rows, pieces, strict=True):
            prompt = piece.ids if self._predictor.inputs.continues else ()
            if row not in self._found:
                return " ".join([*texts, stable_text(tokenizer, [*prompt, *self._stable[row]])])
            texts.append(tokenizer.decode([*prompt, *self._found[row].tokens[0]]))
        return " ".join(texts)


def stable_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return that part of the text of some tokens which stays as it is, whatever tokens follow."""
    text = tokenizer.decode(ids)
    if tokenizer.mends_spaces:  # before a mark that follows
        return "".join(text.rpartition(" ")[:1])
    return text.rstrip(BROKEN)
