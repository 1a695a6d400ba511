"""What is asked and what is answered, and how a text becomes arrays for a model and its search. No model here."""

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jformer.data.corpus import Side, Tokens
from jformer.data.features import Rows
from jformer.data.plan import Shape
from jformer.data.tokenizers import BOS, EOS, PAD, UNK, ImageTokenizer, Tokenizer
from jformer.decoding.config import DecodeConfig
from jformer.errors import UserError
from jformer.generation import prompts
from jformer.tasks import Task

LENGTHS = (16, 24, 32, 48, *(1 << i for i in range(6, 31)))  # that sequences are padded to: few shapes to compile
SPARE = 32  # one row in so many may hold up the others no longer
LONG = 64  # from here on, inputs are always answered at the first attempt
WIDTH = 8  # prefixes and constraints to multiples of this
CUT, SPLIT, EMPTY, UNKNOWN, RUNAWAY = (
    "inputs cut to the model's limit",
    "inputs split at the model's limit",
    "empty inputs",
    "inputs with unknown tokens",
    "outputs cut at their limit",
)


class Request(NamedTuple):
    """One input."""

    text: str
    prefix: str = ""  # what the output begins with
    constraints: Sequence[str] = ()  # phrases that the output holds
    line: int = 0  # its number, counted from 0, which its samples depend on


class Output(NamedTuple):
    """One answer to an input."""

    text: str
    ids: tuple[int, ...] = ()  # its tokens, the end symbol included unless it was cut at its limit
    score: float = 0.0  # of the search; mbr: the expected utility
    alignment: tuple[tuple[int, int], ...] = ()  # (source token, target token) pairs, if they were asked for


class Scored(NamedTuple):
    """What a model thinks of a target."""

    log_prob: float  # natural, summed over the tokens
    token_log_probs: tuple[float, ...]
    tokens: tuple[str, ...]  # as the vocabulary writes them, the end symbol included


class Piece(NamedTuple):
    """A sequence that is answered on its own: an input, or a part of one that is split."""

    ids: Sequence[int]
    line: int
    prefix: Sequence[int] = ()
    constraints: Sequence[Sequence[int]] = ()


class Inputs:
    """How texts become pieces and pieces arrays, for one task, its tokenizers and the options of decoding."""

    def __init__(
        self, options: DecodeConfig, task: Task, tokenizers: tuple[Tokenizer, Tokenizer], places: int | None
    ) -> None:
        """Hold what it takes; `places` is the number of positions that the models can place, if that is limited."""
        self.options, self.task, self.tokenizers, self.places = options, task, tokenizers, places
        if options.overlong == "split" and task.answer not in ("", "text"):
            raise UserError(f"decode.overlong='split' joins translations, not what is a {task.answer}: use 'cut'")
        self.counts: Counter[str] = Counter()
        self.continues = task.answer == "continuation"
        self.encoder = task.encoder(*tokenizers, evaluating=True)
        self.features = task.features(*tokenizers)
        self.side = self.encoder.target if self.continues else self.encoder.source

    def pieces(self, requests: Sequence[Request]) -> list[list[Piece]]:
        """Return what is to be answered for every request: nothing for an empty one, unless it is to be continued.

        What is longer than the model's limit is cut, at its end or, where it is to be continued, at its beginning; or
        it is split. Raises UserError for phrases that cannot be written.
        """
        found = []
        for request, ids in zip(requests, self._encode([request.text for request in requests]), strict=True):
            empty = not request.text.strip() and not self.continues
            self.counts[EMPTY] += empty
            self.counts[UNKNOWN] += not isinstance(self.tokenizers[0], ImageTokenizer) and UNK in ids
            parts = [] if empty else self._fit(ids)
            pieces = [Piece(part, request.line) for part in parts]
            if pieces and (request.prefix or request.constraints):
                pieces[0] = self._guided(pieces, request)
            found.append(pieces)
        return found

    def _encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [*self.tokenizers[1].encode(texts)] if self.continues else self.side.encode(texts)

    def _fit(self, ids: Sequence[int]) -> list[Sequence[int]]:
        limit = self.side.max_length
        if self.continues:  # BOS comes first
            self.counts[CUT] += len(ids) >= limit
            return [ids[max(0, len(ids) - limit + 1) :]]
        if len(ids) <= limit or self.options.overlong == "cut":
            self.counts[CUT] += len(ids) > limit
            return [self.side.cut(ids)]
        self.counts[SPLIT] += 1
        return [[*ids[start : min(start + limit, len(ids)) - 1], EOS] for start in range(0, len(ids) - 1, limit - 1)]

    def _guided(self, pieces: Sequence[Piece], request: Request) -> Piece:
        options, where = self.options, f"input line {request.line + 1}"
        if self.task.answer == "label":
            raise UserError(f"{where}: a label has no prefix and no constraints; leave them out")
        if request.constraints and (options.search != "beam" or options.beam_size < 2 or options.beam_groups > 1):
            raise UserError(
                f"{where}: constraints need decode.search='beam' with decode.beam_size of 2 or more and "
                "decode.beam_groups=1"
            )
        if request.constraints and len(pieces) > 1:
            raise UserError(f"{where}: is over the model's limit, and constraints cannot be split: shorten it")
        phrases = [request.prefix, *request.constraints]
        encoded = self.tokenizers[1].encode(phrases)
        for phrase, ids in zip(phrases, encoded, strict=True):
            if UNK in ids:
                raise UserError(f"{where}: {phrase!r} holds what the vocabulary cannot write; choose other words")
        return pieces[0]._replace(prefix=encoded[0], constraints=[ids for ids in encoded[1:] if ids])

    def arrays(
        self, pieces: Sequence[Piece], rows: int, short: bool = False, least: int = 0
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return arrays of one of few shapes for models and search, and the most tokens that any row may get.

        With `short` there is room for outputs of sources below LONG that are half as long again, as nearly all are; the
        others are left undone, and so are the last few of all. Inputs are padded to `least` tokens or more.
        """
        options, sequences = self.options, [piece.ids for piece in pieces]
        sizes = np.array([len(ids) for ids in sequences] + [0] * (rows - len(pieces)))
        length = min(_padded(max(least, sizes.max() + self.continues)), self.side.max_length)
        if self.continues:
            batch, room = prompts(sequences, rows, length), options.max_extra_length
            limit = np.full(rows, room)
        else:
            batch = self.lay(sequences, [[]] * len(pieces), Shape(rows, length, 1)) | prompts([], rows, 1)
            extra = options.max_extra_length
            room = length + (min(length // 2, extra) if short and length < LONG else extra)
            limit = sizes + options.max_extra_length
        if options.max_length:
            room, limit = min(room, options.max_length), np.minimum(limit, options.max_length)
        if self.places is not None:
            room = min(room, self.places)
            limit = np.minimum(limit, self.places + 1 - batch["prompt_length"])
        batch["limit"] = np.where(np.arange(rows) < len(pieces), limit, 0).astype(np.int32)
        batch["spare"] = np.array(rows // SPARE if short and length < LONG else 0, np.int32)
        batch["line"] = _filled([piece.line for piece in pieces], (rows,))
        return {**batch, **_guides(pieces, rows)}, room

    def part(self, pieces: Sequence[Piece], places: Sequence[int], few: int) -> tuple[Sequence[int], Sequence[int]]:
        """Part the places of a batch, shortest piece first, from the few whose length is all that pads the others."""
        padded = [_padded(len(pieces[i].ids)) for i in places]
        shorter = padded.index(padded[-1])
        rest = len(places) - shorter
        return (places[:shorter], places[shorter:]) if rest <= few < shorter and padded[-1] <= LONG else (places, [])

    def sides(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return both sides of every pair as training has them; what is over its limits is cut and counted."""
        found = []
        sides = self.encoder.source, self.encoder.target
        encoded = [side.encode([pair[i] for pair in pairs]) for i, side in enumerate(sides)]
        for pair, whole in zip(pairs, zip(*encoded, strict=True), strict=True):
            source, target = (side.cut(ids) for side, ids in zip(sides, whole, strict=True))
            self.counts[CUT] += any(len(ids) > side.max_length for side, ids in zip(sides, whole, strict=True))
            self.counts[EMPTY] += any(map(Side.is_empty, sides, pair))
            self.counts[UNKNOWN] += UNK in source or UNK in target
            found.append((source, target))
        return found

    def pairs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int) -> dict[str, np.ndarray]:
        """Return arrays of one of few shapes that hold both sides, as training has them."""
        longest = _padded(max(len(ids) for pair in pairs for ids in pair))
        target = longest if self.places is None else min(longest, self.places)
        sources, targets = zip(*pairs, strict=True)
        return self.lay(sources, targets, Shape(rows, min(longest, self.encoder.source.max_length), target))

    def lay(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], shape: Shape
    ) -> dict[str, np.ndarray]:
        """Return the arrays of a batch, an example a row."""
        order = np.arange(len(sources))
        placed = Rows(order, order, np.ones_like(order), order)
        return self.features.arrays(placed, _tokens(sources), _tokens(targets), shape, (0, 0))


def writable(tokenizer: Tokenizer, options: DecodeConfig) -> np.ndarray:
    """Return, for every entry of the vocabulary, whether a search may write it: bool [v].

    Raises UserError for words of decode.forbid and decode.only that are no entries, and where too few are left.
    """
    places = {token: place for place, token in enumerate(tokenizer.tokens)}
    for key in ("forbid", "only"):
        for word in getattr(options, key):
            if word not in places:
                close = difflib.get_close_matches(word, places, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "name entries as the vocabulary writes them"
                raise UserError(f"decode.{key}: {word!r} is no entry of the vocabulary; {hint}")
    mask = np.full(tokenizer.vocab_size, not options.only)
    mask[[places[word] for word in options.only]] = True
    mask[EOS] = True
    mask[[PAD, BOS, *(places[word] for word in options.forbid)]] = False
    if options.search == "beam" and options.beam_size > mask.sum():
        raise UserError(
            f"decode.beam_size={options.beam_size} is more than the {mask.sum()} entries of the vocabulary that may "
            "be written: lower it"
        )
    return mask


def _padded(length: int) -> int:
    return next(size for size in LENGTHS if size >= length)


def _tokens(sequences: Sequence[Sequence[int]]) -> Tokens:
    values = [np.asarray(ids, np.int32) for ids in sequences]
    return Tokens(np.concatenate(values), np.cumsum([0, *map(len, values)]))


def _guides(pieces: Sequence[Piece], rows: int) -> dict[str, np.ndarray]:
    """Return the arrays of prefixes and constraints, those that any piece has."""
    found = {}
    if any(piece.prefix for piece in pieces):
        sizes = [len(piece.prefix) for piece in pieces]
        found["prefix"] = _filled([piece.prefix for piece in pieces], (rows, _multiple(max(sizes))))
        found["prefix_length"] = _filled(sizes, (rows,))
    if any(piece.constraints for piece in pieces):
        phrases = _multiple(max(len(piece.constraints) for piece in pieces))
        length = _multiple(max(len(ids) for piece in pieces for ids in piece.constraints))
        each = [_filled(piece.constraints, (phrases, length)) for piece in pieces]
        found["constraints"] = np.array(each + [_filled([], (phrases, length))] * (rows - len(pieces)))
    return found


def _multiple(size: int) -> int:
    return -(-size // WIDTH) * WIDTH


def _filled(values: Sequence, shape: tuple[int, ...]) -> np.ndarray:
    """Return i32 of a shape that begins with the values, a row each, and is PAD elsewhere."""
    out = np.full(shape, PAD, np.int32)
    for place, value in enumerate(values):
        out[(place, slice(len(value))) if len(shape) == 2 else place] = value
    return out
