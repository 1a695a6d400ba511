"""Types of requests to a trained run and of its answers. Imports neither JAX nor NumPy.

Letters in shapes: l layers, h heads, t positions that attend, s positions attended to.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jformer.data.sources.split import Pair
from jformer.data.text import join_pieces, not_text
from jformer.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from jformer.config.options import Config
    from jformer.data.spans import Window

CUT, SPLIT, EMPTY, UNKNOWN, TRUNCATED = (
    "inputs cut to the model's limit",
    "inputs split at the model's limit",
    "empty inputs",
    "inputs with unknown tokens",
    "outputs cut at their limit",
)


AnyPair = TypeVar("AnyPair", bound=tuple[str, str | None] | Pair)
T = TypeVar("T")


class Request(NamedTuple):
    """One input."""

    text: str
    prefix: str = ""  # the beginning of the output
    constraints: Sequence[str] = ()  # phrases that the output contains
    line: int = -1  # its number, counted from 0, on which samples depend; -1 = its index among requests made together
    languages: tuple[str, str] = ("", "")  # for a multilingual run: source and target; "" = those of the options


class Piece(NamedTuple):
    """A sequence that is answered on its own: an input, or a part of one that is split."""

    ids: Sequence[int]
    line: int  # the number of its input
    prefix: Sequence[int] = ()
    constraints: Sequence[Sequence[Sequence[int]]] = ()  # phrases, each in its spellings
    words: Sequence[str] = ()  # the words that `ids` encode, if each is answered
    starts: Sequence[int] = ()  # index in `ids` of the first token of each word
    window: "Window | None" = None  # the part of a question and its context that it covers
    languages: tuple[str, str] = ("", "")  # of the request
    text: str = ""  # the text that `ids` encode, for inputs that are searched for
    part: int = 0  # its number among the pieces of such an input


class EncodedPair(NamedTuple):
    """The tokens of a source and of a target."""

    source: Sequence[int]
    target: Sequence[int]
    cut: bool = False  # whether one of them was over the model's limit


class TaggedWord(NamedTuple):
    """A word of an input and the tag it got."""

    word: str
    tag: str
    probability: float
    follows: float  # given the tag before; equals `probability` without a CRF (`tasks.crf`)


class Alignment(NamedTuple):
    """Which source token each token of an output attends to most."""

    pairs: tuple[tuple[int, int], ...]  # (source token, target token), both counted from 0
    source: tuple[str, ...]  # tokens as the vocabulary writes them, without the end symbol
    target: tuple[str, ...]


class Output(NamedTuple):
    """One answer to an input, with the numbers that its search computes; larger is better."""

    text: str
    ids: tuple[int, ...] = ()  # tokens, with the end symbol unless it was cut at its limit
    score: float | None = None  # beam: log-probability / length penalty, of 2 or more beams with the coverage penalty
    log_prob: float | None = None  # sample, mbr, labels, spans, masks: natural logarithm of its probability
    utility: float | None = None  # mbr: its expected utility; decode.rerank: its score
    labels: Mapping[str, float] | None = None  # every label's probability, the most probable first
    alignment: Alignment | None = None  # if requested
    tags: tuple[TaggedWord, ...] | None = None  # of all words, if each is answered
    filled: tuple[str, ...] | None = None  # the token in place of each mask
    span: tuple[int, int] | None = None  # characters of an answer in its context, the end exclusive
    vector: "np.ndarray | None" = None  # f32 [d]: the embedding of the input, which is the whole answer

    @property
    def rank(self) -> float | None:
        """The number by which outputs of one input are ranked."""
        return next((value for value in (self.utility, self.score, self.log_prob) if value is not None), None)


class Scored(NamedTuple):
    """The log-probability of a target."""

    log_prob: float  # natural, summed over the tokens
    token_log_probs: tuple[float, ...]
    tokens: tuple[str, ...]  # as the vocabulary writes them, the end symbol included
    cut: bool = False  # source or target exceeded the model's limit and was truncated


class SearchTree(NamedTuple):
    """A beam search as a tree, step by step; node 0 is the beginning, every other one appends a token to its parent.

    Log-probabilities are natural. Beams of a group share common prefixes; groups do not.
    """

    tokens: tuple[str, ...]  # as the vocabulary writes them; "" at node 0
    parents: "np.ndarray"  # i32 [nodes]: smaller than the node itself, -1 at node 0
    log_probs: "np.ndarray"  # f32 [nodes], of the token given its prefix, as used by the search
    scores: "np.ndarray"  # f32 [nodes]: the sum so far; the ranking score where a hypothesis ended or was cut
    states: tuple[str, ...]  # one of NODE_STATES
    ranks: "np.ndarray"  # i32 [nodes]: 1 at the answer, 2 at the next best output; 0 where no output ends

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first token to this one."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]


NODE_STATES = {
    "kept": "continued",
    "ended": "ended with the end symbol",
    "cut": "ended at the limit",
    "left": "live when the search stopped, as no better output was possible",
    "dropped": "considered, and not among the best",
}


class Part(enum.Enum):
    """A part of a model that attends."""

    ENCODER_SELF = "encoder self-attention"
    DECODER_SELF = "decoder self-attention"
    CROSS = "cross-attention"


class AttentionWeights(NamedTuple):
    """Attention weights between the positions of a text; rows sum to 1."""

    part: Part
    weights: "np.ndarray"  # f32 [l h t s]
    mask: "np.ndarray"  # bool [t s]: True = may attend; otherwise the weight is 0
    rows: tuple[str, ...]  # the token at each t, as the vocabulary writes it; for cross-attention, the predicted one
    columns: tuple[str, ...]  # the token at each s, with the end symbol; for an image its patches

    def entropy(self) -> "np.ndarray":
        """Return the mean entropy of each head's rows in nats, f32 [l h]; 0 if each row attends to one token."""
        import numpy as np

        logs = np.log(np.maximum(self.weights, 1e-12))
        return np.asarray(-(self.weights * logs).sum(axis=-1).mean(axis=-1))

    def rollout(self) -> "np.ndarray | None":
        """Return the attention rollout through all layers, f32 [t s] (Abnar and Zuidema 2020).

        Heads are averaged, and the residual counts for half of each layer. None for cross-attention.
        """
        import numpy as np

        if self.part is Part.CROSS:
            return None
        whole = np.eye(self.weights.shape[-1], dtype=np.float32)
        for layer in self.weights.mean(axis=1):
            whole = (layer + np.eye(len(layer), dtype=np.float32)) / 2 @ whole
        return whole


class Choice(NamedTuple):
    """One token of a target, and the model's most probable tokens in its place."""

    token: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]
    read: str = ""  # the input at its place, for tasks that hide tokens


class Attended(NamedTuple):
    """The attention of a model for one source and target; a missing part is None."""

    source: str
    target: str
    encoder: AttentionWeights | None = None  # of the source to itself
    decoder: AttentionWeights | None = None  # of the target to itself
    cross: AttentionWeights | None = None  # of the target to the source
    choices: tuple[Choice, ...] = ()
    image: "np.ndarray | None" = (
        None  # u8 [height width channels] if the source is an image: square patches, row by row
    )

    @property
    def parts(self) -> tuple[AttentionWeights, ...]:
        """Return the parts that the model has."""
        return tuple(part for part in (self.encoder, self.decoder, self.cross) if part)


class Activations(NamedTuple):
    """What a model computes inside for one source and target, without padding; float32, masks bool."""

    source: tuple[str, ...]  # the tokens that are read, or the patches of an image
    target: tuple[str, ...]  # those that the decoder reads; empty without a decoder
    arrays: Mapping[str, "np.ndarray"]  # name, as in `jformer.models.interventions` → an array without an axis of rows


def check_requests(requests: Iterable[Request | str], usage: str, one_line: bool) -> list[Request]:
    """Return texts as requests; raise UserError as `check_texts` does, also for phrases."""
    if isinstance(requests, str) or not isinstance(requests, Iterable):
        check_texts(requests, usage, one_line=False)
    asked = [each if isinstance(each, Request) else Request(each) for each in requests]
    check_texts([request.text for request in asked], usage, one_line)
    for request in asked:
        if isinstance(request.constraints, str) or not isinstance(request.constraints, Iterable):
            kind = "one text, not" if isinstance(request.constraints, str) else "not"
            raise UserError(f"constraints={request.constraints!r} is {kind} a list of texts: {usage}")
        check_texts([request.prefix, *request.constraints], usage, one_line)
    return asked


def check_pairs(pairs: Iterable[AnyPair], usage: str, one_line: bool, answered: bool = False) -> list[AnyPair]:
    """Return pairs of texts as a list; with `answered`, a target may be None. Raise UserError as `check_texts` does."""
    if not isinstance(pairs, Iterable):
        raise UserError(f"{pairs!r:.60} is not a list of pairs: {usage}")
    checked = list(pairs)
    for texts in checked:
        if not isinstance(texts, Pair) and (not isinstance(texts, tuple | list) or len(texts) != 2):
            raise UserError(f"{texts!r:.60} is not a pair of source and target: {usage}")
        check_texts([text for text in texts[:2] if not answered or text is not None], usage, one_line)
    return checked


def check_texts(texts: Iterable[Any], usage: str, one_line: bool) -> list[str]:
    """Return texts as a list.

    Raises UserError for a single text, for other types, for a text with a NUL or a lone surrogate and, with
    `one_line`, for a line break.
    """
    if isinstance(texts, str):
        raise UserError(f"{texts[:40]!r} is one text, not a list of texts: {usage}")
    if not isinstance(texts, Iterable):
        raise UserError(f"{texts!r:.40} is not a list of texts: {usage}")
    checked = list(texts)
    for number, text in enumerate(checked, start=1):
        if not isinstance(text, str):
            raise UserError(f"text {number} of {len(checked)} is {text!r:.40}, not a text: {usage}")
        if fault := not_text(text):
            raise UserError(f"text {number} of {len(checked)}: {fault}; remove it")
        if one_line and "\n" in text:
            raise UserError(
                f"text {number} of {len(checked)} has a line break, which training texts never have: pass each line as "
                f"a separate text, or replace it by a space: {text!r:.60}"
            )
    return checked


def whole_groups(sizes: Sequence[int], found: Iterable[Mapping[int, T]]) -> Iterator[dict[int, list[T]]]:
    """Yield number of a group → results of its members, in order, once it is complete; empty groups first.

    `found` yields parts of the results by the number of a member, counted through all groups.
    """
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    members = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    yield {number: [] for number, size in enumerate(sizes) if not size}
    there: dict[int, T] = {}
    for some in found:
        there |= some
        touched = dict.fromkeys(owners[member] for member in some)
        ready = [number for number in touched if all(member in there for member in members[number])]
        yield {number: [there.pop(member) for member in members[number]] for number in ready}


def written_language(config: "Config", pieces: Sequence[Piece]) -> str:
    """Return the language that the outputs for an input's pieces are in."""
    asked = pieces[0].languages[1] if pieces else ""
    return asked or config.decode.target_language or config.data.target_language


def join_outputs(answers: Sequence[list[Output]], eos: int, language: str = "") -> list[Output]:
    """Return the outputs of an input from those of its pieces: the best ones, joined; without pieces, an empty one.

    Their texts are joined as their language is written, if it is known; tags are joined by spaces.
    """
    if len(answers) < 2:
        return answers[0] if answers else [Output("")]
    best = [outputs[0] for outputs in answers]
    ids = [i for output in best[:-1] for i in output.ids if i != eos]
    numbers: dict[str, Any] = {
        name: _sum(getattr(output, name) for output in best) for name in ("score", "log_prob", "utility")
    }
    tags = [word for output in best for word in output.tags or ()]
    texts = [output.text for output in best]
    text, alignment = " ".join(texts) if tags else join_pieces(texts, language), _join_alignments(best)
    return [Output(text, (*ids, *best[-1].ids), alignment=alignment, tags=tuple(tags) if tags else None, **numbers)]


def _join_alignments(pieces: Sequence[Output]) -> Alignment | None:
    """Return the alignments of several pieces as one, with shifted token indices."""
    whole = Alignment((), (), ())
    for each in [output.alignment for output in pieces]:
        if each is None:
            return None
        moved = tuple((s + len(whole.source), t + len(whole.target)) for s, t in each.pairs)
        whole = Alignment(whole.pairs + moved, whole.source + each.source, whole.target + each.target)
    return whole


def _sum(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None
