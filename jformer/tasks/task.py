"""A task as a value with a few functions, and the code that tasks share.

Letters in shapes: b rows of a batch, t positions, d d_model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Unpack

import jax
from jaxtyping import Array, Float, Key, PyTree

from jformer import plugins
from jformer.data.data_config import DataConfig
from jformer.data.encoders import ExampleEncoder, Side
from jformer.data.pipeline import Features
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.tasks.losses import Project, chunked_cross_entropy, divergence
from jformer.tasks.metrics import Scores, TextOptions, exact_match, reference_notes, reference_texts, text_scores
from jformer.tasks.sums import LossFn, Sum, Sums, summarize

TaskLoss = Callable[[Array, Project, Batch], Sums]
"""(hidden states [b t d], projection to logits, batch) → sums; that of `loss` is differentiated."""

Score = Callable[[Sequence[str], Sequence[Pair], Sums], Scores]
"""(outputs, examples, sums of the split's losses) → scores."""

CLASSES = ("label", "labels", "number", "tags")  # answers of a classifier: one label, several, a number, one per word
SPAN = "span"  # an answer that is some words of its context
VECTOR = "vector"  # an answer that is not a text
MASKS = "masks"  # an answer that is the text itself, with tokens in place of its masks

KEPT = 16  # losses in the cache

ADAPTER = "adapter"  # the name of an adapter's own parameters beside those of the model
NOTHING = Side(None, max_length=1)  # a side without texts
NO_TEXTS = ("images", "captions", "labelled", "conll", "squad")  # data.source without texts to model


class MakeEncoder(Protocol):
    """Makes an encoder of examples from both sides' tokenizers; with `evaluating`, it splits texts if it can."""

    def __call__(self, source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> ExampleEncoder:
        """Return the encoder."""


class Task(NamedTuple):
    """The data, loss and scores of a kind of learning problem."""

    vocabularies: Mapping[str, VocabularySpec]  # file name → the kind and text of its tokenizer
    encoder: MakeEncoder
    features: Callable[[Tokenizer, Tokenizer], Features]
    # The kind of answer to a text: another "text" | its "continuation" | SPAN | VECTOR | MASKS | "" for none | one of
    # CLASSES.
    answer: str
    loss: TaskLoss
    score: Score
    symbols: int = 0  # ids past the vocabulary that the noise uses

    @property
    def labels(self) -> bool:
        """Whether targets are labels or parts of the source instead of texts of their own."""
        return self.answer in (*CLASSES, SPAN)

    @property
    def restores(self) -> bool:
        """Whether the task learns to restore the parts of a text that noise hides."""
        return self.answer in ("", MASKS)


def make_loss(model: Model, task_loss: TaskLoss, r_drop: float = 0.0) -> LossFn:
    """Join a model and a task's loss, which sees hidden states and the projection, never a model.

    `r_drop` is alpha of R-Drop (Liang et al. 2021, equation 4), in training: the mean loss of two passes with
    independent dropout, plus alpha/2 times the mean of their divergences KL(p‖q) and KL(q‖p). That is half of the
    paper's loss, so that alpha 0 has the gradient of one pass. Losses are cached by model, task loss and alpha, so that
    a later run reuses compiled programs; an unhashable task loss is not cached.
    """
    return _joined(model, task_loss, r_drop)


@plugins.cached(KEPT)
def _joined(model: Model, task_loss: TaskLoss, r_drop: float) -> LossFn:
    def loss(params: PyTree, batch: Batch, key: Key[Array, ""] | None) -> Sums:
        def project(hidden: Array) -> Array:
            return model.apply({"params": params}, hidden, method="logits")

        def hidden(key: Key[Array, ""] | None) -> Array:
            rngs = {} if key is None else {"dropout": key}
            return model.apply({"params": params}, batch, key is not None, rngs=rngs, method="hidden")

        def sums_of(states: Array) -> Sums:
            sums = task_loss(states, project, batch)
            if "loss" not in sums:
                raise UserError("a loss of your own: its sums lack 'loss', a jformer.tasks.sums.Sum to minimize")
            return sums

        if key is None or not r_drop:
            return sums_of(hidden(key))
        first, second = map(hidden, jax.random.split(key))
        sums = jax.tree.map(lambda a, b: (a + b) / 2, sums_of(first), sums_of(second))
        apart = divergence(first, second, project, batch["weights"])
        return {**sums, "loss": Sum(sums["loss"].total + r_drop / 4 * apart, sums["loss"].count)}

    return loss


class Adapter(Protocol):
    """Parameters that modify those of a model, such as low-rank updates; hashable, as a cache key."""

    def apply(self, base: PyTree, adapter: PyTree) -> PyTree:
        """Return the parameters that the model computes with, of the names and shapes of `base`."""


def adapted_params(adapter: Adapter, params: PyTree) -> PyTree:
    """Merge {**base, "adapter": …} into the model's parameters."""
    return adapter.apply({name: tree for name, tree in params.items() if name != ADAPTER}, params[ADAPTER])


@plugins.cached(KEPT)
def adapted_loss(loss: LossFn, adapter: Adapter) -> LossFn:
    """Return the loss as a function of parameters {**base, "adapter": …}.

    Update, optimizer and checkpoints take the whole tree; freeze the base to train only the adapter.
    """
    return lambda params, batch, key: loss(adapted_params(adapter, params), batch, key)


def sized(
    model_config: ModelConfig, task: Task, source_vocab: int, target_vocab: int, own_noise: bool = False
) -> ModelConfig:
    """Return the model config with the vocabulary sizes and classes of the tokenizers and the task.

    Args:
        model_config: the given config; sizes that are 0 are filled in.
        task: determines the kind of answers and the number of noise ids.
        source_vocab, target_vocab: ids of the tokenizers; the target's may be those of labels.
        own_noise: whether the vocabulary has noise symbols of its own, so that the task adds no ids.

    Raises:
        UserError: the config has fewer rows than there are ids, or another number of classes.
    """
    if task.answer == VECTOR:
        return model_config.with_vocabulary(source_vocab, source_vocab).with_vectors()
    if task.answer == SPAN:
        return model_config.with_vocabulary(source_vocab, source_vocab).with_classes(2, each=True)
    if task.answer in CLASSES:
        model_config = model_config.with_vocabulary(source_vocab, source_vocab)
        count = 1 if task.answer == "number" else target_vocab - NUM_SYMBOLS
        return model_config.with_classes(count, each=task.answer == "tags")
    if model_config.vision.source:  # the source has no embedding
        return model_config.with_vocabulary(target_vocab, target_vocab)
    symbols = 0 if own_noise else task.symbols
    return model_config.with_vocabulary(source_vocab + symbols, target_vocab + symbols)


@plugins.cached(KEPT)
def token_loss(label_smoothing: float) -> TaskLoss:
    """Return label-smoothed cross-entropy over the tokens of `target_out` that have weight."""

    def loss(hidden: Float[Array, "b t d"], project: Project, batch: Batch) -> Sums:
        return chunked_cross_entropy(hidden, project, batch["target_out"], batch["weights"], label_smoothing)

    return loss


@plugins.cached(KEPT)
def own_loss(name: str, task_loss: TaskLoss) -> TaskLoss:
    """Return the loss that optim.loss names; sums that it leaves out, such as `nll` and `correct`, are the task's.

    Its module is imported when the loss is first computed, so inference does not need it. Then UserError is raised if
    its sums lack `loss`, which is differentiated.
    """

    def loss(hidden: Array, project: Project, batch: Batch) -> Sums:
        sums: Sums = plugins.find("optim.loss", name, {})(hidden, project, batch)
        if "loss" not in sums:
            raise UserError(f"optim.loss={name!r}: its sums lack 'loss', a Sum to minimize")
        return {**task_loss(hidden, project, batch), **sums}

    return loss


def token_scores(sums: Sums, accuracy: str = "token_accuracy") -> Scores:
    """Return perplexity, and the accuracy of the most probable token given the true context."""
    means = summarize(sums)
    return {"perplexity": {"score": means["perplexity"]}, accuracy: {"score": means["accuracy"]}}


def score_texts(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums, **options: Unpack[TextOptions]) -> Scores:
    """Return the scores of generated texts: sacreBLEU's metrics, exact match, and those of tokens.

    An output matches if it equals any reference. A blank reference counts as missing if there are others.
    """
    answers, groups = list(outputs), [pair.group for pair in examples]
    found = text_scores(answers, reference_texts(examples), **options)
    matched = [
        answer if answer in pair.references else pair.references[0]
        for answer, pair in zip(answers, examples, strict=True)
    ]
    found["exact_match"] = exact_match(answers, matched, groups=groups if any(groups) else None)
    if notes := reference_notes(examples):
        for entry in found.values():
            entry["notes"] = [*entry.get("notes", ()), *notes]
    return found | token_scores(sums)


def refuse(task: str, data: DataConfig, only: str = "", **options: str | tuple[str, ...]) -> None:
    """Raise UserError for the first option with one of the given values, which the task does not support.

    The source is checked for every corpus of a mixture; if the task learns `only` one, it must be that or user-defined.
    """
    for part in (data, *data.mixture):
        if only and part.source != only and not plugins.is_own(part.source):
            raise UserError(f"data.source={part.source!r} is not for task={task!r}: use {only!r}")
    for key, values in options.items():
        for part in (data, *data.mixture) if key == "source" else (data,):
            value = getattr(part, key)
            if value in ((values,) if isinstance(values, str) else values):
                raise UserError(f"data.{key}={value!r} is not for task={task!r}: choose another, or another task")
