"""What a model attends to in a text and its target, and what else it might have written: types. Imports no JAX.

Letters in shapes: l layers, h heads, t positions that attend, s positions attended to.
"""

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Labels = tuple[str, ...]


class Part(enum.Enum):
    """A part of a model that attends, and what it is called."""

    ENCODER_SELF = "encoder self-attention"
    DECODER_SELF = "decoder self-attention"
    CROSS = "cross-attention"

    @property
    def title(self) -> str:
        """What it is called on a page."""
        return self.value


class Attention(NamedTuple):
    """How much each position of a text takes from each position that it attends to; a row adds up to 1."""

    part: Part
    weights: "np.ndarray"  # f32 [l h t s]
    mask: "np.ndarray"  # bool [t s]: True = may attend; where it may not, the weight is 0
    rows: Labels  # the token at each t, as the vocabulary writes it; of cross-attention the token that is written there
    columns: Labels  # the token at each s, the end symbol included; of an image its patches, by row and column from 1

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
    """One token of a target, and the tokens that the model found likeliest in its place."""

    token: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]
    read: str = ""  # what the model read in its place, where some tokens of a text are hidden


class Attended(NamedTuple):
    """What a model does with one source and its target; a part that it lacks is None."""

    source: str
    target: str
    encoder: Attention | None = None  # of the source to itself
    decoder: Attention | None = None  # of what was written to itself
    cross: Attention | None = None  # of what is written to the source
    choices: tuple[Choice, ...] = ()
    image: "np.ndarray | None" = None  # u8 [height width channels], where the source is one: square patches, row by row

    @property
    def parts(self) -> tuple[Attention, ...]:
        """Return the parts that the model has."""
        return tuple(part for part in (self.encoder, self.decoder, self.cross) if part)
