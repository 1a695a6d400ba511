"""What is asked of a trained run, and what it answers. Imports neither JAX nor NumPy."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
