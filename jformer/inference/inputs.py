"""Converts texts into pieces, and pieces into the arrays of a batch for a model and its search. No model here.

Letters in shapes: b rows of a batch, v entries of the vocabulary.
"""

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig, Languages
from jformer.data.encoders import ExampleEncoder, Side
from jformer.data.pipeline import Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.text import BREAKS
from jformer.data.tokenizers import (
    NUM_SYMBOLS,
    ImageTokenizer,
    Symbols,
    Tokenizer,
    beginning,
    closed,
    spellings,
    unprefixed,
)
from jformer.data.vocabularies import directed
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import CUT, EMPTY, SPLIT, UNKNOWN, EncodedPair, Piece, Request
from jformer.inference.one_pass import HEADS, tagged_pair
from jformer.models import ModelConfig
from jformer.tasks.batch_arrays import id_limits, refuse_foreign_ids
from jformer.tasks.task import VECTOR, Task

PADDED_LENGTHS = (16, 24, 32, 48, *(1 << i for i in range(6, 31)))  # of sequences: few shapes to compile
LONG_INPUT = 64  # tokens; from here on, the first attempt has room for the longest output
UNFINISHED_SHARE = 32  # a short attempt ends when all but one piece in 32 have ended
NO_LANGUAGES = DataConfig()
T = TypeVar("T")
PHRASE_MULTIPLE = 8  # prefixes and constraints are padded to multiples of this


class Attempt(NamedTuple):
    """The room of a search."""

    short: bool = False  # room for outputs of usual length; longer ones are left unfinished
    min_length: int = 0  # minimum padded length of inputs, in tokens


WHOLE = Attempt()


class Direction(NamedTuple):
    """How the texts of a pair of languages are encoded."""

    encoder: ExampleEncoder
    symbols: Symbols  # of outputs
    prefixed: tuple[int, ...]  # what precedes a prefix, if no search begins with it


class Inputs:
    """Converts texts into pieces and pieces into arrays, for one task, its tokenizers and decoding options."""

    def __init__(
        self,
        options: DecodeConfig,
        task: Task,
        tokenizers: tuple[Tokenizer, Tokenizer],
        models: Sequence[ModelConfig],
        data: DataConfig = NO_LANGUAGES,
    ) -> None:
        """Find the longest sequence and the ids that all models support.

        Args:
            options: of decoding.
            task: how examples become tokens and arrays.
            tokenizers: of source and target.
            models: those that answer.
            data: of the run, for the languages of a text that names none.

        Raises:
            UserError: for decode.overlong='split' where answers cannot be joined, options that others leave without
                effect, and an unknown language.
        """
        options.refuse_unread()
        self.options, self.task, self.tokenizers, self._data = options, task, tokenizers, data
        placed = [model.max_length for model in models if model.positions == "learned"]
        self.max_positions = min(placed, default=None)
        limits = [*map(id_limits, models)]
        self._id_limits = {name: min(each[name] for each in limits) for name in limits[0]}
        if options.overlong == "split" and task.answer not in ("", "text", "tags"):
            raise UserError(f"decode.overlong='split' joins translations, not a {task.answer}: use 'cut'")
        self.counts: Counter[str] = Counter()
        self.of_images = isinstance(tokenizers[0], ImageTokenizer)  # their shape is fixed
        self.continues = task.answer == "continuation"
        self.reads_blanks = task.answer in ("continuation", VECTOR)  # an answer to an empty text has a meaning
        own = directed(tokenizers, data, (options.source_language, options.target_language))
        self.features = task.features(*own)
        self.encoder, self.symbols, _ = first = self._direction(own)
        self._directions: dict[Languages, Direction] = {("", ""): first}
        sides = self.encoder.source, self.encoder.target
        self.side = sides[self.continues]
        if task.answer == VECTOR:  # either text of a pair may be embedded
            self.side = max(sides, key=lambda side: side.max_length)

    def _direction(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> Direction:
        encoder, symbols = self.task.encoder(*tokenizers, evaluating=True), tokenizers[1].symbols
        if self.options.forced_start:
            return Direction(encoder, symbols, ())
        return Direction(encoder, symbols._replace(before=()), symbols.before)

    def towards(self, languages: Languages) -> Direction:
        """Return the encoder for a pair of languages; an empty one is that of the options, or of the run.

        Raises UserError for a language without a symbol, and for one that all rows of a batch would have to share.
        """
        if languages not in self._directions:
            own = self.options.source_language, self.options.target_language
            asked = languages[0] or own[0], languages[1] or own[1]
            found = self._direction(directed(self.tokenizers, self._data, asked))
            if found.symbols.bos != self.symbols.bos:
                raise UserError(
                    f"this vocabulary has the target language in place of BOS, so lines cannot choose it: set "
                    f"decode.target_language={languages[1]!r} for all of them"
                )
            self._directions[languages] = found
        return self._directions[languages]

    def pieces(self, requests: Sequence[Request]) -> list[list[Piece]]:
        """Return the pieces of every request: none for an empty one, unless it is to be continued.

        A text over the model's limit is split at ends of sentences, else at spaces, else between tokens, or cut at its
        end; one to be continued is cut at its beginning. A question is asked of every window of its context.

        Raises UserError for phrases that cannot be written, and for a question without a context.
        """
        groups = []
        requests = [each if each.line >= 0 else each._replace(line=i) for i, each in enumerate(requests)]
        cut = HEADS[self.task.answer].cut if self.task.answer in HEADS else None
        named = next((request for request in requests if any(request.languages)), None)
        if named and (cut or self.continues):
            raise UserError(f"input line {named.line + 1}: this task has no target language; leave it out")
        found = cut(self.encoder, requests, self.counts) if cut else self._whole(requests)
        for request, pieces in zip(requests, found, strict=True):
            if pieces and (request.prefix or request.constraints):
                pieces[0] = self._guided(pieces, request)
            groups.append(pieces)
        return groups

    def _whole(self, requests: Sequence[Request]) -> Iterator[list[Piece]]:
        """Yield the pieces of every request, without its phrases."""
        encoded = iter(self._encode([each for each in requests if each.text.strip() or self.reads_blanks]))
        for request in requests:
            if not request.text.strip() and not self.reads_blanks:
                self.counts[EMPTY] += 1
                yield []
                continue
            ids = next(encoded)
            self.counts[UNKNOWN] += self.side.symbols.unk in ids
            parts = self._fit(ids, request)
            prefix = getattr(self.tokenizers[0], "prefix", "")  # an unsplit request's text has none either
            split = (self.tokenizers[0].decode(part).removeprefix(prefix) for part in parts)
            texts = [request.text] if len(parts) == 1 else split
            both = enumerate(zip(parts, texts, strict=True))
            line, languages = request.line, request.languages
            yield [Piece(part, line, languages=languages, text=text, part=i) for i, (part, text) in both]

    def _encode(self, requests: Sequence[Request]) -> list[Sequence[int]]:
        """Return the sequences of texts, each with the symbols of its languages."""
        if self.continues:
            return [*self.tokenizers[1].encode([closed(self.tokenizers[1], request.text) for request in requests])]
        found: dict[int, Sequence[int]] = {}
        for languages, some in places(request.languages for request in requests).items():
            sequences = self.towards(languages).encoder.source.encode([requests[i].text for i in some])
            found |= dict(zip(some, sequences, strict=True))
        return [found[i] for i in range(len(requests))]

    def _fit(self, ids: Sequence[int], request: Request) -> list[Sequence[int]]:
        limit = self.side.max_length
        if self.continues:  # BOS comes first
            if len(ids) < limit:
                return [ids]
            self.counts[CUT] += 1
            most = limit - 1
            if self.max_positions:  # some of them are left for the output
                most = min(most, self.max_positions - min(int(self._limit(0)), self.max_positions // 2))
            return [ids[len(ids) - most :]]
        if len(ids) <= limit or self.options.overlong == "cut":
            self.counts[CUT] += len(ids) > limit
            return [self.side.cut(ids)]
        self.counts[SPLIT] += 1
        return self._split(request.text, self.towards(request.languages).encoder.source)

    def _split(self, text: str, side: Side, breaks: Sequence[re.Pattern[str]] = BREAKS) -> list[Sequence[int]]:
        """Split a text into pieces at the first of `breaks` that works, or else between tokens."""
        assert side.tokenizer
        (ids,), (around,) = side.encode([text]), side.encode([""])
        if len(ids) <= side.max_length:
            return [ids]
        if not breaks:
            return side.pieces(ids)
        ends = [0, *(found.end() for found in breaks[0].finditer(text)), len(text)]
        parts = [text[a:b] for a, b in pairwise(ends) if text[a:b].strip()]
        groups, size = [""], len(around)
        for part, tokens in zip(parts, map(len, unprefixed(side.tokenizer)(parts)), strict=True):
            if groups[-1] and size + tokens > side.max_length:
                groups, size = [*groups, ""], len(around)
            groups[-1], size = groups[-1] + part, size + tokens
        return [piece for group in groups for piece in self._split(group.strip(), side, breaks[1:])]

    def _guided(self, pieces: Sequence[Piece], request: Request) -> Piece:
        options, where = self.options, f"input line {request.line + 1}"
        if self.task.answer in HEADS:
            kinds = f"{self.task.answer.removesuffix('s')}s"
            raise UserError(f"{where}: {kinds} have no prefix and no constraints; leave them out")
        if request.constraints and (options.search != "beam" or options.beam_size < 2 or options.beam_groups > 1):
            raise UserError(
                f"{where}: constraints need decode.search='beam' with decode.beam_size of 2 or more and "
                "decode.beam_groups=1"
            )
        if request.constraints and len(pieces) > 1:
            raise UserError(f"{where}: is over the model's limit, and constraints cannot be split: shorten it")
        prefix = beginning(self.tokenizers[1], request.prefix)
        prefix = [*self.towards(pieces[0].languages).prefixed, *prefix] if prefix else []
        every = [[prefix], *(spellings(self.tokenizers[1], phrase) for phrase in request.constraints)]
        barred = [{self.symbols.unk}, *[self._barred] * len(request.constraints)]  # a prefix overrules decode.forbid
        fitting = [[ids for ids in found if ban.isdisjoint(ids)] for found, ban in zip(every, barred, strict=True)]
        for phrase, found, left in zip([request.prefix, *request.constraints], every, fitting, strict=True):
            if found and not left:
                barring = "cannot write, or decode.forbid or decode.only excludes"
                raise UserError(f"{where}: {phrase!r} contains what the vocabulary {barring}; choose other words")
        constraints = [found for found in fitting[1:] if found]
        wanted = len(prefix) + sum(len(found[0]) for found in constraints)  # the shortest comes first
        most, option = self._most(pieces[0])
        if wanted >= most:  # the end comes last; a search's memory grows with the square of the longest constraint
            given = " and ".join(name for name in ("prefix", "constraints") if getattr(request, name))
            raise UserError(
                f"{where}: {given} of {wanted} tokens and the end symbol do not fit in an output of {most}: shorten "
                f"{'them' if request.constraints else 'it'}, or raise {option}"
            )
        return pieces[0]._replace(prefix=prefix, constraints=constraints)

    @functools.cached_property
    def _barred(self) -> set[int]:
        """The tokens that no constraint can have."""
        return {self.symbols.unk, *np.flatnonzero(~writable(self.tokenizers[1], self.options)).tolist()}

    def _most(self, piece: Piece) -> tuple[int, str]:
        """Return the maximum number of tokens in the output for an input, and the option that limits it."""
        options, ids, most = self.options, piece.ids, int(self._limit(self.length(piece.ids)))
        option = "max_length" if most == options.max_length else "max_extra_length"
        found = most, f"decode.{option}={getattr(options, option)}"
        before = len(ids) if self.continues else self.begin(ids) + len(self.begun(piece))
        return found if self.max_positions is None else min(found, (self.max_positions - before, "model.max_length"))

    def _limit(self, sizes: np.ndarray | int) -> np.ndarray:
        """Return the maximum number of tokens in outputs, from the sizes of their inputs and the options."""
        limit = self.options.max_extra_length + (np.zeros_like(sizes) if self.continues else np.asarray(sizes))
        return np.minimum(limit, self.options.max_length or limit)

    def arrays(self, pieces: Sequence[Piece], rows: int, attempt: Attempt = WHOLE) -> tuple[dict[str, np.ndarray], int]:
        """Return the batch of some pieces, in one of few shapes, and the most tokens that any output may have.

        In a short attempt, sources below LONG_INPUT get room for outputs half as long again, enough for nearly all.
        Captions always have the same room.
        """
        options, sequences = self.options, [piece.ids for piece in pieces]
        sizes = np.array([self.length(ids) for ids in sequences] + [0] * (rows - len(pieces)))
        length = min(_padded(max(attempt.min_length, sizes.max() + self.continues)), self.side.max_length)
        short = attempt.short and length < LONG_INPUT
        if self.continues:
            batch, room = prompts(sequences, rows, length, self.symbols), options.max_extra_length
        else:
            before = self.symbols.before
            batch = self._features(sequences, [*map(_marks, pieces)], Shape(rows, *self._lengths(length, 0)))
            begun = [[*self.features.prompt(piece.ids), *self.begun(piece)] for piece in pieces]
            width = 1 + len(self.features.prompt(range(length))) + len(before)
            batch |= prompts(begun + [before] * (rows - len(begun)), rows, width, self.symbols)
            extra = options.max_extra_length
            room = extra if self.of_images else length + (min(length // 2, extra) if short else extra)
        room, limit = min(room, options.max_length or room), self._limit(sizes)
        if self.max_positions is not None:
            room = min(room, self.max_positions)
            limit = np.minimum(limit, self.max_positions + 1 - batch["prompt_length"])
        batch["limit"] = np.where(np.arange(rows) < len(pieces), limit, 0).astype(np.int32)
        batch["max_unfinished"] = np.array(len(pieces) // UNFINISHED_SHARE if short else 0, np.int32)
        batch["line"] = _filled([piece.line for piece in pieces], (rows,), 0)
        if options.overlong == "split" and options.search in ("sample", "mbr"):
            batch["part"] = _filled([piece.part for piece in pieces], (rows,), 0)
        refuse_foreign_ids(batch, self._id_limits, "the text to answer")
        return {**batch, **_phrases(pieces, rows, self.symbols.pad)}, room

    def without_few_long(self, pieces: Sequence[Piece], indices: Sequence[int], few: int) -> Sequence[int]:
        """Return the indices of a batch, shortest piece first, without the last `few` if these alone make it longer.

        With few=1 and pieces of 3, 3, 3 and 20 tokens, the first three remain, padded to 16 tokens instead of 24.
        """
        padded = [_padded(self.length(pieces[i].ids)) for i in indices]
        shorter = padded.index(padded[-1])
        longest = len(indices) - shorter
        return indices[:shorter] if longest <= few < shorter and padded[-1] <= LONG_INPUT else indices

    def begun(self, piece: Piece) -> tuple[int, ...]:
        """Return the symbols that the output for a piece begins with, such as its language."""
        return self.towards(piece.languages).symbols.before

    def encode_pairs(self, pairs: Sequence[tuple[str, str] | Pair]) -> list[EncodedPair]:
        """Return both sides of every pair as in training; a side over its limit is cut and counted.

        Raises UserError if a text and its target have different numbers of words and tags.
        """
        if self.task.answer == "tags":
            found = [EncodedPair(*tagged_pair(self.encoder, *pair[:2])) for pair in pairs]
            self.counts[CUT] += sum(pair.cut for pair in found)
            return found
        encoded, texts = dict[int, EncodedPair](), [(source, target) for source, target, *_ in pairs]
        for languages, some in places(pair.languages if isinstance(pair, Pair) else ("", "") for pair in pairs).items():
            encoder = self.towards(languages).encoder
            sides = encoder.source, encoder.target
            whole = [side.encode([texts[i][which] for i in some]) for which, side in enumerate(sides)]
            for i, ids in zip(some, zip(*whole, strict=True), strict=True):
                source, target = (side.cut(each) for side, each in zip(sides, ids, strict=True))
                cut = any(len(each) > side.max_length for side, each in zip(sides, ids, strict=True))
                self.counts[CUT] += cut
                self.counts[EMPTY] += any(map(Side.is_empty, sides, texts[i]))
                self.counts[UNKNOWN] += encoder.source.symbols.unk in source or self.symbols.unk in target
                encoded[i] = EncodedPair(source, target, cut)
        return [encoded[i] for i in range(len(pairs))]

    def pair_arrays(self, pairs: Sequence[EncodedPair], rows: int) -> dict[str, np.ndarray]:
        """Return the batch of some encoded pairs, in one of few shapes, with both sides as in training."""
        longest = _padded(max(map(self.pair_length, pairs)))
        target = longest if self.max_positions is None else min(longest, self.max_positions)
        sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
        shape = Shape(rows, min(longest, self.encoder.source.max_length), target)
        arrays = self._features(sources, targets, shape)
        if self.continues:  # each target is a text of its own, whatever data.piece_start says about pieces
            arrays["target_in"][:, 0] = self.symbols.bos
        refuse_foreign_ids(arrays, self._id_limits, "the text to score")
        return arrays

    def encode_whole(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the tokens of texts, parts of which the task's noise will hide."""
        return [pair.source or pair.target for pair in self.encode_pairs([(text, text) for text in texts])]

    def noised_arrays(self, sequences: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Return the batch of some texts, with parts hidden by the task's noise, with a fixed seed."""
        needed = max(max(self._lengths(len(ids), len(ids))) for ids in sequences)
        most = max(self.encoder.source.max_length, self.encoder.target.max_length)
        length = max(needed, min(_padded(needed), most))  # there may be no positions past it
        rows, tokens, shape = _rows(len(sequences)), _tokens(sequences), Shape(len(sequences), length, length)
        arrays = self.features.arrays(rows, tokens, tokens, shape, (0, 0))
        refuse_foreign_ids(arrays, self._id_limits, "the text to look into")
        return arrays

    def length(self, source: Sequence[int]) -> int:
        """Return how many source tokens a batch needs room for; none for an image."""
        return 0 if self.of_images else len(source)

    def pair_length(self, pair: EncodedPair) -> int:
        """Return how many positions the longer side of a pair takes."""
        return max(self._lengths(self.length(pair.source), len(pair.target)))

    def begin(self, source: Sequence[int]) -> int:
        """Return where the target of a source begins in the arrays of targets: after its prompt."""
        return len(self.features.prompt(source))

    def _lengths(self, source: int, target: int) -> tuple[int, int]:
        """Return the positions of either side of an example, at least 1."""
        sides = self.features.lengths(np.array([source]), np.array([target]))
        return max(1, int(sides[0][0])), max(1, int(sides[1][0]))

    def _features(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], shape: Shape
    ) -> dict[str, np.ndarray]:
        """Return the arrays of given sources and targets, an example a row; no noise is drawn."""
        assert self.features.given
        return self.features.given(_rows(len(sources)), _tokens(sources), _tokens(targets), shape)


def places(values: Iterable[T]) -> dict[T, list[int]]:
    """Return each value and its indices, in ascending order."""
    found: dict[T, list[int]] = {}
    for i, value in enumerate(values):
        found.setdefault(value, []).append(i)
    return found


def writable(tokenizer: Tokenizer, options: DecodeConfig, searched: bool = True) -> Bool[np.ndarray, " v"]:
    """Return, for every entry of the vocabulary, whether a search may write it or fill a mask with it.

    Raises UserError for words of decode.forbid and decode.only that are not entries, and if too few remain.
    """
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    for key in ("forbid", "only"):
        for word in getattr(options, key):
            if word not in ids:
                close = difflib.get_close_matches(word, ids, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "name entries as the vocabulary writes them"
                raise UserError(f"decode.{key}: {word!r} is not in the vocabulary; {hint}")
    mask = np.full(tokenizer.vocab_size, not options.only)
    mask[[ids[word] for word in options.only]] = True
    symbols = tokenizer.symbols
    mask[[symbol for symbol in (symbols.pad, symbols.bos) if symbol < len(mask)]] = False
    mask[symbols.eos] = searched
    mask[[*symbols.noise]] &= searched
    mask[[ids[word] for word in options.forbid]] = False
    if searched and options.search == "beam" and options.beam_size > mask.sum():
        raise UserError(
            f"decode.beam_size={options.beam_size} is more than the {mask.sum()} entries that may be written: lower it"
        )
    return mask


def _padded(length: int) -> int:
    return next(size for size in PADDED_LENGTHS if size >= length)


def _rows(count: int) -> Rows:
    order = np.arange(count)
    return Rows(order, order, np.ones_like(order), order)


def _tokens(sequences: Sequence[Sequence[int]]) -> Tokens:
    values = [np.asarray(ids).astype(np.int32) for ids in sequences]  # the bits of a number may wrap
    return Tokens(np.concatenate(values), np.cumsum([0, *map(len, values)]))


def _marks(piece: Piece) -> list[int]:
    """Return a placeholder for a piece's target: any class where a word begins, the marks of a window, or nothing."""
    if piece.window:
        return list(piece.window.marks)
    marked = [0] * len(piece.ids) if piece.starts else []
    for start in piece.starts:
        marked[start] = NUM_SYMBOLS
    return marked


def _phrases(pieces: Sequence[Piece], rows: int, pad: int) -> dict[str, np.ndarray]:
    """Return the arrays of prefixes and of constraints, each only if a piece has one."""
    arrays = {}
    if any(piece.prefix for piece in pieces):
        sizes = [len(piece.prefix) for piece in pieces]
        arrays["prefix"] = _filled([piece.prefix for piece in pieces], (rows, _multiple(max(sizes))), pad)
        arrays["prefix_length"] = _filled(sizes, (rows,), 0)
    if any(piece.constraints for piece in pieces):
        most = _multiple(max(len(piece.constraints) for piece in pieces))
        every = [spelt for piece in pieces for spelt in piece.constraints]
        length = _multiple(max(len(ids) for spelt in every for ids in spelt))
        constraints = np.full((rows, most, max(map(len, every)), length), pad, np.int32)
        for row, piece in enumerate(pieces):
            for phrase, spelt in enumerate(piece.constraints):
                constraints[row, phrase] = _filled(spelt, constraints.shape[2:], pad)
        arrays["constraints"] = constraints
    return arrays


def _multiple(size: int) -> int:
    return -(-size // PHRASE_MULTIPLE) * PHRASE_MULTIPLE


def _filled(values: Sequence[Any], shape: tuple[int, ...], fill: int) -> np.ndarray:
    """Return an i32 array of a shape, with one row of values each, filled up with `fill`."""
    out = np.full(shape, fill, np.int32)
    for row, value in enumerate(values):
        out[(row, slice(len(value))) if len(shape) == 2 else row] = value
    return out


def prompts(sequences: Sequence[Sequence[int]], rows: int, width: int, symbols: Symbols) -> dict[str, np.ndarray]:
    """Return `prompt` and `prompt_length` of `rows` rows: BOS, then the given ids, and BOS up to `width`.

    A model also looks up what fills a row, and the padding symbol may be past its table.
    """
    ids = [[symbols.bos, *sequence] for sequence in sequences] + [[symbols.bos]] * (rows - len(sequences))
    return {"prompt": _filled(ids, (rows, width), symbols.bos), "prompt_length": np.array([*map(len, ids)], np.int32)}
