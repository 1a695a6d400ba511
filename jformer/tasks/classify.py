"""Classification of a text, a pair of texts (separated by a TAB) or an image.

The answer is one label of the training set, several of them, or a number, as `data.labels` says.

Letters in shapes: b rows of a batch, t positions (one: a text has one answer), d d_model, v entries of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.pipeline import Arrays, Features, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, ImageTokenizer, LabelTokenizer, Symbols, Tokenizer
from jformer.data.tokenizers.lists import NORMALIZATIONS, label_set
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.models.batch import Batch
from jformer.plugins import is_own
from jformer.tasks import features
from jformer.tasks.features import OURS
from jformer.tasks.losses import Project, binary_cross_entropy, squared_error
from jformer.tasks.metrics import Scores, agreement, exact_match, f1_scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import Task, TaskLoss, refuse, token_loss, token_scores

MOST_LABELS = 1_000  # of an example
Labels = Callable[[Rows, Tokens, Shape], Arrays]
"""(the place of each example, labels as ids, the shape) → target_out and weights."""


class LabelKind(NamedTuple):
    """The encoding, loss and scores of one kind of label."""

    answer: str
    vocabulary: str  # the kind of tokenizer
    length: int  # the most label ids of an example
    arrays: Callable[[Tokenizer, DataConfig], Labels]
    loss: Callable[[float], TaskLoss]  # of the label smoothing
    score: Callable[[Sequence[str], Sequence[Pair], Sums], Scores]  # (outputs, normalized examples, sums)


def classify(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task (Devlin et al. 2019, section 4.1; Dosovitskiy et al. 2021)."""
    refuse("classify", data, overlong="split", batching="packed", source="captions")
    images = data.tokenizer == "image"
    kind = KINDS[data.labels]
    for part in (data, *data.mixture):
        if (part.source == "images") != images and not is_own(part.source):
            raise UserError(f"data.tokenizer={data.tokenizer!r} does not fit source={part.source!r}: images need both")

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        label = Side(target, kind.length, bare=True, optional=data.labels == "several")
        if isinstance(source, ImageTokenizer):
            return PairEncoder(Side(source, source.length, bare=True), label, data.overlong)
        return PairEncoder(Side(source, data.max_source_length, begin=True, parts=True), label, data.overlong)

    def make_features(source: Tokenizer, target: Tokenizer) -> Features:
        labels = kind.arrays(target, data)
        if isinstance(source, ImageTokenizer):
            return labelled_images(*source.shape, labels)
        return labelled_texts(labels, source.symbols)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        normalize = NORMALIZATIONS[data.normalization]  # answers are labels, which their tokenizer normalized
        return kind.score(outputs, [pair._replace(target=normalize(pair.target)) for pair in examples], sums)

    return Task(
        vocabularies={
            "source": VocabularySpec(data.tokenizer, ("source",), parts=not images),
            "target": VocabularySpec(kind.vocabulary, ("target",)),
        },
        encoder=encoder,
        features=make_features,
        answer=kind.answer,
        loss=kind.loss(label_smoothing),
        score=score,
    )


def labelled_texts(labels: Labels, symbols: Symbols = OURS) -> Features:
    """Return source [b s] with source_types (0 first text, 1 second), and what `labels` makes of the other side."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        return {**features.typed_source(source, rows, shape, symbols.eos), **labels(rows, target, shape)}

    return features.without_noise(given, lambda source, target: (source, np.ones_like(target)))


def labelled_images(height: int, width: int, channels: int, labels: Labels) -> Features:
    """Return image u8 [b height width channels] and what `labels` makes of the other side; a pixel is a position."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        image = features.images_of(source, rows, (shape.rows, height, width, channels))
        return {"image": image, **labels(rows, target, shape)}

    return features.without_noise(given, lambda source, target: (source // channels, np.ones_like(target)))


def one_label(weights: np.ndarray | None = None) -> Labels:
    """Return classes 0, 1, … [b 1], one a row, weighted by `weights` [v] (default 1)."""

    def arrays(rows: Rows, labels: Tokens, shape: Shape) -> Arrays:
        filled = features.fill_rows(labels, rows, shape, 1)
        real = filled["segments"] > 0
        classes = np.where(real, filled["tokens"] - NUM_SYMBOLS, 0)
        each = real.astype(np.float32) if weights is None else np.where(real, weights[classes], 0).astype(np.float32)
        return {"target_out": classes, "weights": each}

    return arrays


def several_labels(count: int) -> Labels:
    """Return for each of `count` labels whether a row has it (1) or not (0) [b v]; all have weight 1."""

    def arrays(rows: Rows, labels: Tokens, shape: Shape) -> Arrays:
        found = np.zeros((shape.rows, count), np.int32)
        each = features.chosen(labels, rows)
        found[np.repeat(rows.rows, each.lengths), each.values.astype(int) - NUM_SYMBOLS] = 1
        weights = np.zeros((shape.rows, count), np.float32)
        weights[rows.rows] = 1
        return {"target_out": found, "weights": weights}

    return arrays


def one_number(rows: Rows, labels: Tokens, shape: Shape) -> Arrays:
    """Return the bits of a float32 as i32 [b 1], because target_out holds integers in every batch."""
    filled = features.fill_rows(labels, rows, shape, 1)
    return {"target_out": filled["tokens"], "weights": (filled["segments"] > 0).astype(np.float32)}


def balanced(labels: LabelTokenizer) -> np.ndarray:
    """Return the weight [v] of each label's examples that balances the labels: n / (v · examples of the label).

    Their mean over the training text is 1 (King and Zeng 2001, section 3.2, with every label equally frequent).
    """
    counts = np.array(labels.counts, np.float64)
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)


def several_loss(label_smoothing: float) -> TaskLoss:
    """Return the binary cross-entropy of each label."""

    def loss(hidden: Float[Array, "b 1 d"], project: Project, batch: Batch) -> Sums:
        return binary_cross_entropy(project(hidden)[:, 0], batch["target_out"], batch["weights"], label_smoothing)

    return loss


def number_loss(label_smoothing: float) -> TaskLoss:
    """Return the squared error of a number, in standard deviations of the training numbers; smoothing is ignored."""

    def loss(hidden: Float[Array, "b 1 d"], project: Project, batch: Batch) -> Sums:
        wanted = lax.bitcast_convert_type(batch["target_out"], jnp.float32)
        return squared_error(project(hidden)[..., 0], wanted, batch["weights"])

    return loss


def _score_one(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
    labels, groups = [pair.target for pair in examples], [pair.group for pair in examples]
    accuracy = exact_match(outputs, labels, groups if any(groups) else None)
    found = [{output} - {""} for output in outputs]  # an empty text has no label
    macro = f1_scores(found, [{label} for label in labels])["macro_f1"]
    return {"accuracy": accuracy, "macro_f1": {"score": macro}, "perplexity": token_scores(sums)["perplexity"]}


def _score_several(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
    found, wanted = [set(label_set(text)) for text in outputs], [set(label_set(pair.target)) for pair in examples]
    equal = [a == b for a, b in zip(found, wanted, strict=True)]
    values = {"exact_match": sum(equal) / len(equal), **f1_scores(found, wanted)}
    return {name: {"score": value} for name, value in values.items()}


def _score_number(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
    """Score numbers; an empty text is nan, and so are the scores of a set that holds one."""
    found, wanted = ([float(text or "nan") for text in side] for side in (outputs, [p.target for p in examples]))
    return {name: {"score": value} for name, value in agreement(found, wanted).items()}


def _one_label(target: Tokenizer, data: DataConfig) -> Labels:
    return one_label(balanced(cast(LabelTokenizer, target)) if data.label_weights == "balanced" else None)


KINDS: Mapping[str, LabelKind] = {  # the keys are data.labels
    "one": LabelKind(
        answer="label", vocabulary="label", length=1, arrays=_one_label, loss=token_loss, score=_score_one
    ),
    "several": LabelKind(
        answer="labels",
        vocabulary="labels",
        length=MOST_LABELS,
        arrays=lambda target, _: several_labels(target.vocab_size - NUM_SYMBOLS),
        loss=several_loss,
        score=_score_several,
    ),
    "number": LabelKind(
        answer="number",
        vocabulary="number",
        length=1,
        arrays=lambda _target, _data: one_number,
        loss=number_loss,
        score=_score_number,
    ),
}
