"""What a model attends to, and what else it might have written: forced passes over given texts, as arrays to look at.

Letters in shapes: l layers, h heads, t positions that attend, s positions attended to, b rows of a batch.
"""

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.errors import UserError
from jformer.inference.batching import refuse_nan
from jformer.inference.predict import Predictor
from jformer.inference.scoring import showing_weights, watched_pass
from jformer.models.batch import Batch
from jformer.tasks.task import CLASSES, SPAN

LIKELIEST = 5  # tokens that are told for every position
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

    def labels(self, source: Labels, read: Labels, written: Labels) -> tuple[Labels, Labels]:
        """Return the tokens that attend, and those attended to.

        `written` are a target's tokens where they are predicted, `read` those that the decoder reads instead.
        """
        both = {Part.ENCODER_SELF: (source, source), Part.DECODER_SELF: (read, read), Part.CROSS: (written, source)}
        return both[self]


BLOCKS = {  # part → where the weights of a Transformer's layers are
    Part.ENCODER_SELF: ("encoder", "self_attn"),
    Part.DECODER_SELF: ("decoder", "self_attn"),
    Part.CROSS: ("decoder", "cross_attn"),
}


class Weights(NamedTuple):
    """How much each position of a text takes from each position that it attends to; a row sums to one."""

    part: Part
    values: np.ndarray  # float32 [l h t s]
    rows: Labels  # the token at each t; of cross-attention the token that is written there
    columns: Labels  # the token at each s

    def entropy(self) -> np.ndarray:
        """Return the entropy of every head in nats, the mean of its rows, float32 [l h]: 0 where it sees one token."""
        logs = np.log(np.maximum(self.values, 1e-12))
        return -(self.values * logs).sum(axis=-1).mean(axis=-1)

    def rollout(self) -> np.ndarray | None:
        """Return what each position takes from each input through all layers, float32 [t s] (Abnar and Zuidema 2020).

        Heads are averaged, and half of every layer is its residual. None for cross-attention, which is no chain.
        """
        if self.part is Part.CROSS:
            return None
        whole = np.eye(self.values.shape[-1], dtype=np.float32)
        for layer in self.values.mean(axis=1):
            whole = (layer + np.eye(len(layer), dtype=np.float32)) / 2 @ whole
        return whole


class Choice(NamedTuple):
    """One token of a target, and the tokens that the model found likeliest in its place."""

    token: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]


class Attended(NamedTuple):
    """What a model does with one source and its target."""

    source: str
    target: str
    weights: tuple[Weights, ...]
    choices: tuple[Choice, ...]


def attention_maps(predictor: Predictor, pairs: Sequence[tuple[str, str | None]]) -> list[Attended]:
    """Return what a run attends to in each source and target; a target of None is the run's own answer.

    A language model reads a target alone; without one, it goes on from the source. A label is a target.

    Raises UserError for a task without answers, for an ensemble, whose members attend each by itself, and for weights
    that give no numbers.
    """
    if not predictor.task.answer:
        raise UserError(f"task={predictor.config.task!r} has no answers to look into")
    if predictor.task.answer == SPAN:
        raise UserError(
            f"task={predictor.config.task!r} writes no tokens that could be looked into: use --mode=predict"
        )
    if predictor.members:
        raise UserError("decode.ensemble: the members of an ensemble attend each by itself; leave it out")
    asked = [i for i, (_, target) in enumerate(pairs) if target is None]
    answers = dict(zip(asked, predictor.predict([pairs[i][0] for i in asked]), strict=True)) if asked else {}
    whole = [(source, answers.get(i, target) or "") for i, (source, target) in enumerate(pairs)]
    encoded = predictor.inputs.encode_pairs(whole)
    forced = _make_pass(showing_weights(predictor.model), predictor.task.answer)
    found = []
    for texts, pair in zip(whole, encoded, strict=True):
        batch = predictor.inputs.pair_arrays([pair], 1)
        seen, probabilities = jax.device_get(forced(predictor.params, batch))
        refuse_nan(probabilities.max(axis=-1).ravel().tolist())
        weights, choices = _weights(predictor, batch, seen), _choices(predictor, batch, probabilities[0])
        found.append(Attended(*texts, weights, choices))
    return found


@functools.cache
def _make_pass(model: Any, answer: str) -> Any:
    """Return the compiled (parameters, batch) → (intermediates, probabilities [b t v]).

    Probabilities of a row add up to one, but for those of several labels, each of which is there or not.
    """
    likely = jax.nn.sigmoid if answer == "labels" else jax.nn.softmax

    def forced(params: Any, batch: Batch) -> tuple[Any, jax.Array]:
        hidden, seen = watched_pass(model, params, batch)
        logits = model.apply({"params": params}, hidden, method="logits")
        return seen, likely(logits.astype(jnp.float32))

    return jax.jit(forced)


def _weights(predictor: Predictor, batch: Mapping[str, np.ndarray], seen: Mapping[str, Any]) -> tuple[Weights, ...]:
    """Return the weights of every part that attends, without padding."""
    source = _source_labels(predictor, batch)
    read, written = _labels(predictor, batch, "target_in"), _labels(predictor, batch, "target_out")
    found = []
    for part, values in _arrays(seen).items():
        rows, columns = part.labels(source, read, written)
        found.append(Weights(part, values[:, 0, :, : len(rows), : len(columns)], rows, columns))
    return tuple(found)


def _arrays(seen: Mapping[str, Any]) -> dict[Part, np.ndarray]:
    """Return the weights [l b h t s] of each part that attends."""
    if "cross_weights" in seen:  # of a recurrent model: one layer, one head
        return {Part.CROSS: seen["cross_weights"][0][None, :, None]}
    blocks = {part: seen.get(stack, {}).get("block", {}).get(name, {}) for part, (stack, name) in BLOCKS.items()}
    return {part: found["weights"][0] for part, found in blocks.items() if found}


def _source_labels(predictor: Predictor, batch: Mapping[str, np.ndarray]) -> Labels:
    if "image" not in batch:
        return _labels(predictor, batch, "source")
    model = predictor.model.config
    class_token = ("class",) if model.family == "vit" and model.head.pooling == "first" else ()
    return class_token + model.vision.patch_names


def _labels(predictor: Predictor, batch: Mapping[str, np.ndarray], name: str) -> Labels:
    """Return the tokens of one side of a batch's only row, as the vocabulary writes them."""
    side = 0 if name == "source" else 1
    segments = batch.get(f"{('source', 'target')[side]}_segments")
    if segments is None:
        return ()
    ids = batch[name][0][segments[0] > 0]
    return tuple(_written(predictor.tokenizers[side].tokens, i) for i in ids)


def _written(tokens: Sequence[str], i: int) -> str:
    return tokens[i] if i < len(tokens) else f"<{i}>"  # symbols of the task lie past the vocabulary


def _choices(predictor: Predictor, batch: Mapping[str, np.ndarray], probabilities: np.ndarray) -> tuple[Choice, ...]:
    """Return the choice at every position that predicts something, or of every label; classes are numbered from 0.

    A number was no choice among others.
    """
    answer, tokens = predictor.task.answer, predictor.tokenizers[1].tokens
    if answer == "number":
        return ()
    wanted, weights = batch["target_out"][0], batch["weights"][0]
    places = [(int(t), int(wanted[t])) for t in np.flatnonzero(weights)]
    if answer == "labels":
        places = [(0, int(label)) for label in np.flatnonzero(wanted)]
    first, choices = NUM_SYMBOLS if answer in CLASSES else 0, []
    for t, target in places:
        row = probabilities[t]
        best = np.argsort(-row)[:LIKELIEST]
        likeliest = tuple((_written(tokens, first + int(i)), float(row[i])) for i in best)
        choices.append(Choice(_written(tokens, first + target), float(row[target]), likeliest))
    return tuple(choices)
