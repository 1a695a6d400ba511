"""What is asked of a trained run and what it answers, as types. Imports neither JAX nor NumPy.

Letters in shapes: l layers, h heads, t positions that attend, s positions attended to.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jformer.data.text import not_text
from jformer.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from jformer.data.spans import Window

CUT, SPLIT, EMPTY, UNKNOWN, TRUNCATED = (
    "inputs cut to the model's limit",
    "inputs split at the model's limit",
    "empty inputs",
    "inputs with unknown tokens",
    "outputs cut at their limit",
)


AnyPair = TypeVar("AnyPair", bound=tuple[str, str | None])
T = TypeVar("T")


class Request(NamedTuple):
    """One input."""

    text: str
    prefix: str = ""  # what the output begins with
    constraints: Sequence[str] = ()  # phrases that the output contains
    line: int = 0  # its number, counted from 0; samples depend on it


class Piece(NamedTuple):
    """A sequence that is answered on its own: an input, or a part of one that is split."""

    ids: Sequence[int]
    line: int  # the number of its input
    prefix: Sequence[int] = ()
    constraints: Sequence[Sequence[int]] = ()
    words: Sequence[str] = ()  # that `ids` were made of, where each is answered
    starts: Sequence[int] = ()  # where the first token of each word stands in `ids`
    window: "Window | None" = None  # what its tokens are of a question and its context


class EncodedPair(NamedTuple):
    """The tokens of a source and of a target."""

    source: Sequence[int]
    target: Sequence[int]
    cut: bool = False  # one of them was over the model's limit


class TaggedWord(NamedTuple):
    """A word of an input and the tag it got."""

    word: str
    tag: str
    probability: float
    follows: float  # its probability given the tag before: the same, but in a chain of tags (`tasks.crf`)


class Alignment(NamedTuple):
    """Which source token each token of an output attends to most."""

    pairs: tuple[tuple[int, int], ...]  # (source token, target token), both counted from 0
    source: tuple[str, ...]  # tokens as the vocabulary writes them, without the end symbol
    target: tuple[str, ...]


class Output(NamedTuple):
    """One answer to an input. Of the three numbers it has those that its search gives; larger is better."""

    text: str
    ids: tuple[int, ...] = ()  # its tokens, the end symbol included unless it was cut at its limit
    score: float | None = None  # beam: log-probability / length penalty, of 2 or more beams with the coverage penalty
    log_prob: float | None = None  # sample, mbr, labels and spans: natural logarithm of its probability
    utility: float | None = None  # mbr: its expected utility
    labels: Mapping[str, float] | None = None  # every label's probability, the most probable first
    alignment: Alignment | None = None  # if it was asked for
    tags: tuple[TaggedWord, ...] | None = None  # of all words, where each is answered
    span: tuple[int, int] | None = None  # of an answer in its context: its first character, and the one after its last

    @property
    def rank(self) -> float | None:
        """The number by which outputs of one input are ranked."""
        return next((value for value in (self.utility, self.score, self.log_prob) if value is not None), None)


class Scored(NamedTuple):
    """How probable a model finds a target."""

    log_prob: float  # natural, summed over the tokens
    token_log_probs: tuple[float, ...]
    tokens: tuple[str, ...]  # as the vocabulary writes them, the end symbol included
    cut: bool = False  # source or target were over the model's limit, and what is beyond it was left out


class SearchTree(NamedTuple):
    """A beam search as a tree, step by step; node 0 is the beginning, every other one appends a token to its parent.

    Log-probabilities are natural. Beams of one group share what they have in common; groups do not.
    """

    tokens: tuple[str, ...]  # as the vocabulary writes them; "" at node 0
    parents: "np.ndarray"  # i32 [nodes]: before the node itself, -1 at node 0
    log_probs: "np.ndarray"  # f32 [nodes], of the token given all before it, as the search counted it
    scores: "np.ndarray"  # f32 [nodes]: the sum so far; where a hypothesis ended or was cut, what it is ranked by
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
    "kept": "went on",
    "ended": "ended with the end symbol",
    "cut": "ended at the limit",
    "left": "was live when the search stopped, as no better output could come",
    "dropped": "was weighed, and not among the best",
}


class Part(enum.Enum):
    """A part of a model that attends."""

    ENCODER_SELF = "encoder self-attention"
    DECODER_SELF = "decoder self-attention"
    CROSS = "cross-attention"

    @property
    def title(self) -> str:
        """What it is called on a page."""
        return self.value


class AttentionWeights(NamedTuple):
    """How much each position of a text attends to each other one; a row adds up to 1."""

    part: Part
    weights: "np.ndarray"  # f32 [l h t s]
    mask: "np.ndarray"  # bool [t s]: True = may attend; where it may not, the weight is 0
    rows: tuple[str, ...]  # the token at each t, as the vocabulary writes it; of cross-attention the one written there
    columns: tuple[str, ...]  # the token at each s, the end symbol included; of an image its patches

    def entropy(self) -> "np.ndarray":
        """Return the entropy of every head in nats, the mean of its rows, f32 [l h]: 0 where it sees one token."""
        import numpy as np

        logs = np.log(np.maximum(self.weights, 1e-12))
        return np.asarray(-(self.weights * logs).sum(axis=-1).mean(axis=-1))

    def rollout(self) -> "np.ndarray | None":
        """Return what each position takes from each input through all layers, f32 [t s] (Abnar and Zuidema 2020).

        Heads are averaged, and half of every layer is its residual. None for cross-attention, which is no chain.
        """
        import numpy as np

        if self.part is Part.CROSS:
            return None
        whole = np.eye(self.weights.shape[-1], dtype=np.float32)
        for layer in self.weights.mean(axis=1):
            whole = (layer + np.eye(len(layer), dtype=np.float32)) / 2 @ whole
        return whole


class Choice(NamedTuple):
    """One token of a target, and the tokens that the model found most probable in its place."""

    token: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]
    read: str = ""  # what the model read in its place, where the tokens to predict are hidden


class Attended(NamedTuple):
    """What a model attends to in one source and its target; a part that it lacks is None."""

    source: str
    target: str
    encoder: AttentionWeights | None = None  # of the source to itself
    decoder: AttentionWeights | None = None  # of what was written to itself
    cross: AttentionWeights | None = None  # of what is written to the source
    choices: tuple[Choice, ...] = ()
    image: "np.ndarray | None" = None  # u8 [height width channels], where the source is one: square patches, row by row

    @property
    def parts(self) -> tuple[AttentionWeights, ...]:
        """Return the parts that the model has."""
        return tuple(part for part in (self.encoder, self.decoder, self.cross) if part)


def check_requests(requests: Iterable[Request | str], usage: str, one_line: bool) -> list[Request]:
    """Return texts as requests, numbered in order; raise UserError as `check_texts` does, also for their phrases."""
    if isinstance(requests, str) or not isinstance(requests, Iterable):
        check_texts(requests, usage, one_line=False)
    asked = [each if isinstance(each, Request) else Request(each, line=i) for i, each in enumerate(requests)]
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
        if not isinstance(texts, tuple | list) or len(texts) != 2:
            raise UserError(f"{texts!r:.60} is no pair of source and target: {usage}")
        check_texts([text for text in texts if not answered or text is not None], usage, one_line)
    return checked


def check_texts(texts: Iterable[Any], usage: str, one_line: bool) -> list[str]:
    """Return texts, which an iterator gives only once, as a list.

    Raises UserError for a single text, for anything but texts, for a NUL or half of a surrogate pair in one and, with
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
                f"text {number} of {len(checked)} has a line break, which training texts have not: give each line as a "
                f"text of its own, or replace it by a space: {text!r:.60}"
            )
    return checked


def whole_groups(sizes: Sequence[int], found: Iterable[Mapping[int, T]]) -> Iterator[dict[int, list[T]]]:
    """Yield number of a group → what was found for its members, in order, once it is complete; empty groups first.

    `found` arrives in parts, by the number of a member, counted one group after the other.
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


def join_outputs(answers: Sequence[list[Output]], eos: int) -> list[Output]:
    """Return the outputs of an input from those of its pieces: an empty one for none, the best of each put together."""
    if len(answers) < 2:
        return answers[0] if answers else [Output("")]
    best = [outputs[0] for outputs in answers]
    ids = [i for output in best[:-1] for i in output.ids if i != eos]
    numbers: dict[str, Any] = {
        name: _sum(getattr(output, name) for output in best) for name in ("score", "log_prob", "utility")
    }
    text, alignments = " ".join(output.text for output in best), [output.alignment for output in best]
    whole = Output(text, (*ids, *best[-1].ids), alignment=_join_alignments(alignments), **numbers)
    tags = [word for output in best for word in output.tags or ()]
    return [whole._replace(tags=tuple(tags) if tags else None)]


def _join_alignments(alignments: Sequence[Alignment | None]) -> Alignment | None:
    """Return the alignments of several pieces as one, each moved by the tokens of those before it."""
    whole = Alignment((), (), ())
    for each in alignments:
        if each is None:
            return None
        moved = tuple((s + len(whole.source), t + len(whole.target)) for s, t in each.pairs)
        whole = Alignment(whole.pairs + moved, whole.source + each.source, whole.target + each.target)
    return whole


def _sum(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None
