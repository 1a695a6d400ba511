"""Answers that are words of their context: the most probable spans of a window, and the best ones of all windows.

A hypothesis is two tokens of a window, the first and the last of a span. The first hypothesis of a window is that there
is no answer in it, which is to point at the first position of all twice.

Letters in shapes: b windows, s positions, n hypotheses of a window.
"""

from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.data.corpus import ExampleEncoder
from jformer.data.sources.split import Pair
from jformer.data.spans import MAY_START, START, SpanEncoder, Windows, fault_of, is_blank
from jformer.data.tokenizers import Tokenizer
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.search import Decoded
from jformer.decoding.top_k import top_k
from jformer.errors import UserError
from jformer.inference.answers import CUT, EMPTY, UNKNOWN, Hypotheses, Output, Piece, Request
from jformer.models.batch import Batch
from jformer.tasks.losses import span_log_probs


def likeliest_spans(logits: Float[Array, "b s 2"], batch: Batch, options: DecodeConfig) -> Decoded:
    """Return, for every window, that there is no answer, and then the n most probable spans, with log-probabilities.

    That of a span is the sum of those of its ends. A slot for which there are too few spans has length 0 and -inf.
    """
    marks = batch["target_out"]
    log_probs = span_log_probs(logits, marks)
    start, end = log_probs[..., 0], log_probs[..., 1]
    both = jnp.where(_in_order(marks, options.max_answer_length), start[:, :, None] + end[:, None, :], -jnp.inf)
    b, s = marks.shape
    scores, cells = top_k(both.reshape(b, s * s), min(options.n_best, s * s))
    spans = jnp.stack([cells // s, cells % s], axis=-1)  # [b n] → [b n 2]
    tokens = jnp.concatenate([jnp.zeros((b, 1, 2), spans.dtype), spans], axis=1)
    scores = jnp.concatenate([(start + end)[:, :1], scores], axis=1)
    return Decoded(tokens, scores, jnp.where(jnp.isneginf(scores), 0, 2), jnp.ones(b, bool))


def _in_order(marks: Int[Array, "b s"], longest: int) -> Bool[Array, "b s s"]:
    """Tell which first and last positions make a span of 1 to so many words, none of them the first position of all."""
    words = jnp.cumsum((marks & MAY_START) > 0, axis=1)  # of every position, the number of its word
    length = words[:, None, :] - words[:, :, None] + 1
    positions = jnp.arange(marks.shape[1])
    later = positions[None, :] >= positions[:, None]  # [s s]
    return later & (positions[:, None] > 0) & (length <= longest)


def pieces_of_windows(encoder: ExampleEncoder, requests: Sequence[Request], counts: Counter[str]) -> list[list[Piece]]:
    """Return a piece for each window of every request, none where it lacks its question or its context.

    Raises UserError for a text without the one TAB between them.
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

    An answer whose place is not given is where the context has it first. Raises UserError for a text that is no
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


def read_spans(hypotheses: Hypotheses, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return what the hypotheses of a window say, in their order, as characters of the context."""
    window = piece.window
    assert window is not None
    outputs = []
    for ends, log_prob in hypotheses:
        if not ends:
            continue
        span = (window.places[ends[0]][0], window.places[ends[1]][1]) if ends[0] else None
        text = window.context[slice(*span)] if span else ""
        outputs.append(Output(text, log_prob=log_prob, span=span))
    return outputs


def best_of_windows(answers: Sequence[Sequence[Output]], options: DecodeConfig) -> list[Output]:
    """Return the outputs for a question of what was read in each of its windows, best first.

    A span counts as where it is most probable. That there is no answer counts as where it is least probable, as all
    windows but those of the answer say so, and with decode.no_answer_threshold (Devlin et al. 2019, section 4.3).
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
