"""What is asked of a trained run, and what it answers. Imports neither JAX nor NumPy."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Request(NamedTuple):
    """One input."""

    text: str
    prefix: str = ""  # what the output begins with
    constraints: Sequence[str] = ()  # phrases that the output contains
    line: int = 0  # its number, counted from 0; samples depend on it


class Alignment(NamedTuple):
    """Which source token each token of an output attends to most."""

    pairs: tuple[tuple[int, int], ...]  # (source token, target token), both counted from 0
    source: tuple[str, ...]  # tokens as the vocabulary writes them, without the end symbol
    target: tuple[str, ...]


class Attention(NamedTuple):
    """What each token of a target attends to in its source, in the decoder's last layer, the mean of its heads."""

    weights: "np.ndarray"  # f32 [t s]; a row adds up to 1
    source: tuple[str, ...]  # tokens as the vocabulary writes them, the end symbol included
    target: tuple[str, ...]


class Output(NamedTuple):
    """One answer to an input. Of the three numbers it has those that its search gives; larger is better."""

    text: str
    ids: tuple[int, ...] = ()  # its tokens, the end symbol included unless it was cut at its limit
    score: float | None = None  # beam: the log-probability divided by the length penalty, with the coverage penalty
    log_prob: float | None = None  # sample, mbr and labels: natural logarithm of its probability
    utility: float | None = None  # mbr: its expected utility
    labels: Mapping[str, float] | None = None  # every label's probability, the most probable first
    alignment: Alignment | None = None  # if it was asked for

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


def joined(answers: Sequence[list[Output]], eos: int) -> list[Output]:
    """Return the outputs for a whole input: none is an empty one, and the best ones of several pieces become one."""
    if len(answers) < 2:
        return answers[0] if answers else [Output("")]
    best = [outputs[0] for outputs in answers]
    ids = [i for output in best[:-1] for i in output.ids if i != eos]
    numbers: dict[str, Any] = {
        name: _sum(getattr(output, name) for output in best) for name in ("score", "log_prob", "utility")
    }
    text, alignments = " ".join(output.text for output in best), [output.alignment for output in best]
    return [Output(text, (*ids, *best[-1].ids), alignment=_joined_alignments(alignments), **numbers)]


def _joined_alignments(alignments: Sequence[Alignment | None]) -> Alignment | None:
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
