"""Answers from one forward pass, without a search: labels, numbers, tags of words, spans, tokens for masks, vectors.

Each kind of head turns logits into arrays of its own type, a row per input, and reads outputs from one row of them.

Letters in shapes: b inputs, s positions, v classes, n spans of a window, d d_model.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jformer.data.aligned import WORDS_CUT, encode_chunks
from jformer.data.encoders import ExampleEncoder
from jformer.data.sources.split import Pair
from jformer.data.spans import MAY_START, START, SpanEncoder, Windows, fault_of, is_blank
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer, closed, following
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.rules import top_k
from jformer.errors import UserError
from jformer.inference.answers import CUT, EMPTY, SPLIT, UNKNOWN, Output, Piece, Request, TaggedWord
from jformer.models.batch import Batch
from jformer.tasks.crf import Tags, best_tags
from jformer.tasks.losses import normalized, span_log_probs
from jformer.tasks.noise import mask_of
from jformer.tasks.task import MASKS, VECTOR


class ClassScores(NamedTuple):
    """How probable every class of an input is."""

    log_probs: Float[Array, "b v"]


class Estimates(NamedTuple):
    """The number estimated for an input, in the unit of its tokenizer."""

    values: Float[Array, " b"]


class Spans(NamedTuple):
    """The most probable spans of a window, best first, after the hypothesis that it holds no answer.

    A span is its first and its last token; (0, 0) = no answer. Unused slots have log-probability -inf.
    """

    ends: Int[Array, "b n 2"]
    log_probs: Float[Array, "b n"]


class Fillings(NamedTuple):
    """The most probable tokens of every position, best first; those that may not be written have -inf."""

    ids: Int[Array, "b s n"]
    log_probs: Float[Array, "b s n"]


class Vectors(NamedTuple):
    """The embedding of an input."""

    values: Float[Array, "b d"]


class Head(NamedTuple):
    """How one kind of answer is computed and read."""

    respond: Callable[[Array, Batch, DecodeConfig], Any]  # (logits, batch, options) → arrays with a row per input
    read: Callable[[Any, Tokenizer, Piece], list[Output]]  # (row, tokenizer of answers, piece) → outputs, best first
    # (encoder, requests, counts of what happened to them) → pieces of every request; None: as for translations
    cut: Callable[[ExampleEncoder, Sequence[Request], Counter[str]], list[list[Piece]]] | None = None
    # (outputs of each piece, options) → outputs of the request, best first; None: texts are concatenated
    join: Callable[[Sequence[list[Output]], DecodeConfig], list[Output]] | None = None


# Labels of a whole input


def _one_label(logits: Float[Array, "b t v"], batch: Batch, options: DecodeConfig) -> ClassScores:
    return ClassScores(jax.nn.log_softmax(logits[:, 0]))


def _read_label(scores: ClassScores, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    labels = _probabilities(scores, tokenizer)
    best = int(np.argmax(scores.log_probs))
    ids = (best + NUM_SYMBOLS,)
    return [Output(tokenizer.decode(ids), ids, log_prob=float(scores.log_probs[best]), labels=labels)]


def _several_labels(logits: Float[Array, "b t v"], batch: Batch, options: DecodeConfig) -> ClassScores:
    return ClassScores(jax.nn.log_sigmoid(logits[:, 0]))


def _read_labels(scores: ClassScores, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return the labels with probability above 1/2, and the probability of exactly this set."""
    labels = _probabilities(scores, tokenizer)
    ids = tuple(NUM_SYMBOLS + i for i, value in enumerate(scores.log_probs.tolist()) if math.exp(value) > 0.5)
    log_prob = sum(math.log(max(p, 1 - p)) for p in labels.values())
    return [Output(tokenizer.decode(ids), ids, log_prob=log_prob, labels=labels)]


def _probabilities(scores: ClassScores, tokenizer: Tokenizer) -> dict[str, float]:
    """Return label → its probability, the most probable first."""
    order = np.argsort(-scores.log_probs, kind="stable").tolist()
    return {tokenizer.decode([NUM_SYMBOLS + i]): math.exp(scores.log_probs[i]) for i in order}


def _estimate(logits: Float[Array, "b t 1"], batch: Batch, options: DecodeConfig) -> Estimates:
    return Estimates(logits[:, 0, 0])


def _read_number(estimate: Estimates, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    bits = int(np.float32(estimate.values).view(np.uint32))  # as its tokenizer writes a number
    return [Output(tokenizer.decode([bits]))]


# A tag for every word


def pieces_of_words(encoder: ExampleEncoder, requests: Sequence[Request], counts: Counter[str]) -> list[list[Piece]]:
    """Return the pieces of every request, none for one without words.

    An input over the model's limit is split between words, regardless of decode.overlong: a truncated word would get no
    tag. A word that alone exceeds the limit is cut.
    """
    groups, side = list[list[Piece]](), encoder.source
    texts = [request.text.split() for request in requests]
    for request, words, chunks in zip(requests, texts, encode_chunks(side, texts), strict=True):
        counts[EMPTY] += not chunks
        counts[SPLIT] += len(chunks) > 1
        counts[UNKNOWN] += any(side.symbols.unk in chunk.ids for chunk in chunks)
        counts[WORDS_CUT] += sum(chunk.cut for chunk in chunks)
        remaining, pieces = iter(words), list[Piece]()
        for ids, starts, _ in chunks:
            pieces.append(Piece(ids, request.line, words=[next(remaining) for _ in starts], starts=starts))
        groups.append(pieces)
    return groups


def tagged_pair(encoder: ExampleEncoder, text: str, tags: str) -> tuple[Sequence[int], Sequence[int], bool]:
    """Return the sequences of a text and of its tags as in training, and whether they are cut at the limit."""
    parts = encoder.encode([Pair(text, tags)], Counter())
    return (*parts[0], len(parts) > 1) if parts else (encoder.source.encode([""])[0], [], False)


def _likeliest_tags(logits: Float[Array, "b s *v"], batch: Batch, options: DecodeConfig) -> Tags:
    """Return the tags of every row: with a CRF, whose logits are of pairs [v+1 v+1], the likeliest together."""
    if logits.ndim == 4:
        return best_tags(logits, batch)
    log_probs = jax.nn.log_softmax(logits)
    best = log_probs.max(axis=-1)  # [b s]
    return Tags(log_probs.argmax(axis=-1), best, best, (best * batch["weights"]).sum(axis=1))


def _read_tags(found: Tags, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return the tags of a piece's words."""
    starts = np.array(piece.starts, int)
    ids = (found.tags[starts] + NUM_SYMBOLS).tolist()
    shares, follows = (np.exp(values[starts]).tolist() for values in (found.shares, found.follows))
    words = zip(piece.words, ids, shares, follows, strict=True)
    tags = tuple(TaggedWord(word, tokenizer.decode([i]), *probabilities) for word, i, *probabilities in words)
    return [Output(" ".join(word.tag for word in tags), tuple(ids), log_prob=float(found.log_probs), tags=tags)]


# Spans of a context


def pieces_of_windows(encoder: ExampleEncoder, requests: Sequence[Request], counts: Counter[str]) -> list[list[Piece]]:
    """Return a piece for each window of every request; none if it lacks its question or its context.

    Raises UserError for a text without exactly one TAB between them.
    """
    assert isinstance(encoder, SpanEncoder)
    for request in requests:
        if fault := fault_of(request.text):
            raise UserError(f"input line {request.line + 1}: {fault}")
    found = encoder.windows([request.text for request in requests if not is_blank(request.text)])
    groups = []
    for request in requests:
        windows, cut = Windows([], False) if is_blank(request.text) else next(found)
        counts[EMPTY] += not windows
        counts[CUT] += cut
        counts[UNKNOWN] += any(encoder.source.symbols.unk in window.ids for window in windows)
        groups.append([Piece(window.ids, request.line, window=window) for window in windows])
    return groups


def marked_pair(encoder: ExampleEncoder, pair: Pair) -> tuple[Sequence[int], Sequence[int], bool]:
    """Return the tokens and marks of the window with a pair's answer, or of the first, and whether there are others.

    An answer without a place is taken at its first occurrence in the context. Raises UserError for a text that is not a
    question with its context, and for an answer that is not in the context.
    """
    context = pair.source.partition("\t")[2]
    if fault := fault_of(pair.source) or ("no question or no context" if is_blank(pair.source) else ""):
        raise UserError(f"{pair.source!r:.60}: {fault}")
    if pair.target and pair.start is None:
        pair = pair._replace(start=context.find(pair.target))
        if pair.start == -1:
            raise UserError(f"{pair.target!r:.60} is not in the context {context!r:.60}: an answer is some words of it")
    windows = encoder.encode([pair], Counter())
    ids, marks = next((each for each in windows if not each[1][0] & START), windows[0])
    return ids, marks, len(windows) > 1


def likeliest_spans(logits: Float[Array, "b s 2"], batch: Batch, options: DecodeConfig) -> Spans:
    """Return, for every window, the hypothesis of no answer, then the n most probable spans.

    The log-probability of a span is the sum of those of its ends.
    """
    log_probs = span_log_probs(logits, batch["target_out"])
    start, end = log_probs[..., 0], log_probs[..., 1]
    allowed = _in_order(batch["target_out"], options.max_answer_length)
    both = jnp.where(allowed, start[:, :, None] + end[:, None, :], -jnp.inf)
    b, s = start.shape
    scores, cells = top_k(both.reshape(b, s * s), min(options.n_best, s * s))
    ends = jnp.stack([cells // s, cells % s], axis=-1)  # [b n] → [b n 2]
    ends = jnp.concatenate([jnp.zeros((b, 1, 2), ends.dtype), ends], axis=1)
    return Spans(ends, jnp.concatenate([(start + end)[:, :1], scores], axis=1))


def _in_order(marks: Int[Array, "b s"], longest: int) -> Bool[Array, "b s s"]:
    """Mark which first and last positions make a span of 1 to `longest` words, the first position of all excluded."""
    words = jnp.cumsum((marks & MAY_START) > 0, axis=1)  # of every position, the number of its word
    length = words[:, None, :] - words[:, :, None] + 1
    positions = jnp.arange(marks.shape[1])
    later = positions[None, :] >= positions[:, None]  # [s s]
    return later & (positions[:, None] > 0) & (length <= longest)


def read_spans(spans: Spans, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return the spans of a window, in their order, as characters of the context."""
    window, outputs = piece.window, []
    assert window is not None
    for (first, last), log_prob in zip(spans.ends.tolist(), spans.log_probs.tolist(), strict=True):
        if log_prob == -math.inf:
            continue
        place = (window.places[first][0], window.places[last][1]) if first else None
        outputs.append(Output(window.context[slice(*place)] if place else "", log_prob=log_prob, span=place))
    return outputs


def best_of_windows(answers: Sequence[Sequence[Output]], options: DecodeConfig) -> list[Output]:
    """Return the outputs for a question from the spans of all its windows, best first.

    A span gets its highest log-probability over the windows. "No answer" gets its lowest, since all windows but those
    with the answer have none, plus decode.no_answer_threshold (Devlin et al. 2019, section 4.3).
    """
    if not answers:
        return [Output("", log_prob=0.0)]
    found: dict[tuple[int, int] | None, Output] = {}
    for output in (output for outputs in answers for output in outputs):
        known = found.setdefault(output.span, output)
        if ((output.log_prob or 0.0) > (known.log_prob or 0.0)) == (output.span is not None):
            found[output.span] = output

    def rank(output: Output) -> tuple[float, bool]:
        bonus = options.no_answer_threshold if output.span is None else 0.0
        return (output.log_prob or 0.0) + bonus, output.span is None

    return sorted(found.values(), key=rank, reverse=True)[: options.n_best]


# Tokens in place of masks


def pieces_with_masks(encoder: ExampleEncoder, requests: Sequence[Request], counts: Counter[str]) -> list[list[Piece]]:
    """Return the piece of every request, none for an empty one, cut at the limit, and where its masks are.

    A mask that is not a token of the vocabulary splits the text; it also hides the white space before it if a token may
    begin with that.

    Raises UserError for a text without a mask, or with none before the limit.
    """
    side, groups = encoder.source, list[list[Piece]]()
    assert side.tokenizer
    mask, spelled = mask_of(side.tokenizer)
    known = bool(side.symbols.noise) and not getattr(side.tokenizer, "split_specials", False)
    parts = [[request.text] if known else request.text.split(spelled) for request in requests]
    parts = [[*(closed(side.tokenizer, part) for part in some[:-1]), some[-1]] for some in parts]
    end = len(side.around[1])
    encoded = iter(side.encode([first for first, *_ in parts]))
    for request, (_, *others) in zip(requests, parts, strict=True):
        ids = next(encoded)
        for other in others:
            until = len(ids) - end
            ids = [*ids[:until], mask, *following(side.tokenizer, other), *ids[until:]]
        if not request.text.strip():
            counts[EMPTY] += 1
            groups.append([])
            continue
        cut = side.cut(ids)
        if mask not in cut:
            within = f" within the model's limit of {side.max_length} tokens" if mask in ids else ""
            raise UserError(f"input line {request.line + 1}: has no {spelled} to fill in{within}")
        counts[CUT] += len(ids) > side.max_length
        counts[UNKNOWN] += side.symbols.unk in ids
        groups.append([Piece(cut, request.line, starts=[i for i, each in enumerate(cut) if each == mask])])
    return groups


def _likeliest_tokens(log_probs: Float[Array, "b s v"], batch: Batch, options: DecodeConfig) -> Fillings:
    b, s, v = log_probs.shape
    values, ids = top_k(log_probs.reshape(b * s, v), min(options.n_best, v))
    return Fillings(ids.reshape(b, s, -1), values.reshape(b, s, -1))


def _read_fillings(found: Fillings, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return the most probable ways to fill all masks, each independently of the others, as in training."""
    most, ways = found.ids.shape[-1], [(0.0, tuple[int, ...]())]
    for place in piece.starts:
        each = [*zip(found.log_probs[place].tolist(), found.ids[place].tolist(), strict=True)]
        longer = [(total + value, (*ids, i)) for total, ids in ways for value, i in each if value > -math.inf]
        ways = sorted(longer, key=lambda way: -way[0])[:most]
    outputs = []
    for total, ids in ways:
        written = dict(zip(piece.starts, ids, strict=True))
        text = tokenizer.decode([written.get(place, i) for place, i in enumerate(piece.ids)])
        outputs.append(Output(text, ids, log_prob=total, filled=tuple(tokenizer.decode([i]) for i in ids)))
    return outputs or [Output("", log_prob=-math.inf)]


# A vector


def _vector(vectors: Float[Array, "b t d"], batch: Batch, options: DecodeConfig) -> Vectors:
    """Return the vector of the first text of a row, the only one of an input."""
    return Vectors(normalized(vectors[:, 0]) if options.normalize else vectors[:, 0])


def _read_vector(vector: Vectors, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    return [Output("", vector=np.asarray(vector.values))]


HEADS = {  # a task's answer → how it is made; all others are searched for
    "label": Head(_one_label, _read_label),
    "labels": Head(_several_labels, _read_labels),
    "number": Head(_estimate, _read_number),
    "tags": Head(_likeliest_tags, _read_tags, pieces_of_words),
    "span": Head(likeliest_spans, read_spans, pieces_of_windows, best_of_windows),
    MASKS: Head(_likeliest_tokens, _read_fillings, pieces_with_masks),
    VECTOR: Head(_vector, _read_vector),
}
