"""What models answer by one pass, without a search: classes of a text or of its positions, and how they are read.

A pass gives hypotheses as a search does, so that both are batched alike; what they mean is the table's to say.

Letters in shapes: b inputs, v classes, n hypotheses of an input.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from jformer.data.corpus import ExampleEncoder
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.search import Decoded
from jformer.inference import answer_spans as spans
from jformer.inference.answers import Hypotheses, Output, Piece, Request
from jformer.inference.tagging import likeliest_tags, pieces_of_words, read_tags
from jformer.inference.unstacked_params import joined
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.tasks.task import SPAN

Cut = Callable[[ExampleEncoder, Sequence[Request], Counter[str]], list[list[Piece]]]
"""(encoder of examples, requests, counts of what became of them) → the pieces of every request."""

Join = Callable[[Sequence[list[Output]], DecodeConfig], list[Output]]
"""(the outputs for each piece of a request, options) → the outputs for the request, best first."""


class Head(NamedTuple):
    """How one kind of answer is computed, and what its hypotheses say."""

    # (logits [b t v], with a CRF [b t v+1 v+1], batch, options) → the hypotheses of every row
    respond: Callable[[Array, Batch, DecodeConfig], Decoded]
    # (hypotheses of a piece, tokenizer of answers, the piece) → outputs, best first
    read: Callable[[Hypotheses, Tokenizer, Piece], list[Output]]
    cut: Cut | None = None  # how requests become pieces, where not every text is one, or cut as translations are
    join: Join | None = None  # what becomes of several pieces, where their texts are not put one after the other


def one_pass(
    model: Model, head: Head, options: DecodeConfig, params: Sequence[PyTree], batch: Batch, room: int
) -> Decoded:
    """Return the hypotheses of a batch.

    Args:
        model: whose logits are read.
        head: what makes hypotheses of them.
        options: of decoding; where answers are spans, how many are asked for and how long they may be.
        params: of an ensemble, whose first model alone answers.
        batch: what the model reads.
        room: that of a search, which has the same parameters; it means nothing here.
    """
    return head.respond(model.apply({"params": joined(params[0])}, batch).astype(jnp.float32), batch, options)


def _every_class(log_probs: Float[Array, "b v"]) -> Decoded:
    """Return every class of every row as a hypothesis of one token, the most probable first."""
    scores, classes = lax.top_k(log_probs, log_probs.shape[-1])
    ids = classes + NUM_SYMBOLS
    return Decoded(ids[..., None], scores, jnp.ones_like(ids), jnp.ones(len(ids), bool))


def _one_of(logits: Array, batch: Batch, options: DecodeConfig) -> Decoded:
    return _every_class(jax.nn.log_softmax(logits[:, 0]))


def _several_of(logits: Array, batch: Batch, options: DecodeConfig) -> Decoded:
    return _every_class(jax.nn.log_sigmoid(logits[:, 0]))


def _estimate(logits: Array, batch: Batch, options: DecodeConfig) -> Decoded:
    """Return the one number of every row as the score of a hypothesis that is its bits, as its tokenizer reads them."""
    number = logits[:, 0]
    ids = lax.bitcast_convert_type(number, jnp.int32)
    return Decoded(ids[..., None], number, jnp.ones_like(ids), jnp.ones(len(ids), bool))


def _read_label(hypotheses: Hypotheses, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    labels = _probabilities(hypotheses, tokenizer)
    ids, log_prob = hypotheses[0]
    return [Output(tokenizer.decode(ids), tuple(ids), log_prob=log_prob, labels=labels)]


def _read_labels(hypotheses: Hypotheses, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return those that are more probable than not, and the probability that they are right and the others wrong."""
    labels = _probabilities(hypotheses, tokenizer)
    chosen = sorted(ids[0] for ids, log_prob in hypotheses if math.exp(log_prob) > 0.5)
    log_prob = sum(math.log(max(p, 1 - p)) for p in labels.values())
    return [Output(tokenizer.decode(chosen), tuple(chosen), log_prob=log_prob, labels=labels)]


def _read_number(hypotheses: Hypotheses, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    ((ids, _),) = hypotheses
    return [Output(tokenizer.decode(np.array(ids, np.int32).view(np.uint32).tolist()))]


def _probabilities(hypotheses: Hypotheses, tokenizer: Tokenizer) -> dict[str, float]:
    return {tokenizer.decode(ids): math.exp(log_prob) for ids, log_prob in hypotheses}


HEADS = {  # a task's answer → how it is made; the other answers are searched for
    "label": Head(_one_of, _read_label),
    "labels": Head(_several_of, _read_labels),
    "number": Head(_estimate, _read_number),
    "tags": Head(likeliest_tags, read_tags, pieces_of_words),
    SPAN: Head(spans.likeliest_spans, spans.read_spans, spans.pieces_of_windows, spans.best_of_windows),
}
