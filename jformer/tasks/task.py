"""What makes a task: a value with a few functions, no class tree. And what the tasks have in common.

Letters in shapes: b rows of a batch, t positions, d d_model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Unpack

import jax
from jaxtyping import Array, Float, Key, PyTree

from jformer.data.corpus import ExampleEncoder, Side
from jformer.data.data_config import DataConfig
from jformer.data.features import Features
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.tasks.losses import Project, chunked_cross_entropy, divergence
from jformer.tasks.metrics import Scores, TextOptions, exact_match, reference_texts, text_scores
from jformer.tasks.sums import LossFn, Sum, Sums, summarize

TaskLoss = Callable[[Array, Project, Batch], Sums]
"""(hidden states [b t d], projection to logits, batch) → sums; that of `loss` is differentiated."""

Score = Callable[[Sequence[str], Sequence[Pair], Sums], Scores]
"""(outputs, examples, sums of the split's losses) → scores."""

CLASSES = ("label", "labels", "number", "tags")  # of a classifier: one label, several, a number, one for each word
SPAN = "span"  # the answer that is some words of its context

KEPT = 16  # losses in the cache

ADAPTER = "adapter"  # the name of an adapter's own parameters beside those of the model
NOTHING = Side(None, max_length=1)  # a side without text


class MakeEncoder(Protocol):
    """Tokenizers of both sides → how examples become tokens; `evaluating` where no text may be lost."""

    def __call__(self, source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> ExampleEncoder:
        """Return the encoder."""


class Task(NamedTuple):
    """How a model learns something and how well it did."""

    vocabularies: Mapping[str, VocabularySpec]  # file name → what its tokenizer is learned from
    encoder: MakeEncoder
    features: Callable[[Tokenizer, Tokenizer], Features]
    symbols: int  # ids past the vocabulary that the noise uses
    # What it gives for a text: another "text" | its "continuation" | SPAN | "" for nothing | one of CLASSES.
    answer: str
    loss: TaskLoss
    score: Score


@functools.lru_cache(KEPT)
def make_loss(model: Model, task_loss: TaskLoss, r_drop: float = 0.0) -> LossFn:
    """Join a model and a task's loss, which sees hidden states and the projection, never a model.

    `r_drop` is alpha of R-Drop (Liang et al. 2021, equation 4), in training: two passes with dropout of their own,
    whose losses are averaged, plus alpha/2 times the mean of their divergences KL(p‖q) and KL(q‖p). That is half of the
    paper's loss, so that the gradient of alpha 0 is that of one pass. Losses are cached by model, task loss and alpha,
    so that what is compiled for one serves the next run, too.
    """

    def loss(params: PyTree, batch: Batch, key: Key[Array, ""] | None) -> Sums:
        def project(hidden: Array) -> Array:
            return model.apply({"params": params}, hidden, method="logits")

        def hidden(key: Key[Array, ""] | None) -> Array:
            rngs = {} if key is None else {"dropout": key}
            return model.apply({"params": params}, batch, key is not None, rngs=rngs, method="hidden")

        if key is None or not r_drop:
            return task_loss(hidden(key), project, batch)
        first, second = map(hidden, jax.random.split(key))
        losses = (task_loss(each, project, batch) for each in (first, second))
        sums = jax.tree.map(lambda a, b: (a + b) / 2, *losses)
        apart = divergence(first, second, project, batch["weights"])
        return {**sums, "loss": Sum(sums["loss"].total + r_drop / 4 * apart, sums["loss"].count)}

    return loss


class Adapter(Protocol):
    """Parameters that change those of a model, such as low-rank differences; hashable, as programs are cached by it."""

    def apply(self, base: PyTree, adapter: PyTree) -> PyTree:
        """Return the parameters that the model computes with, of the names and shapes of `base`."""


def adapted_params(adapter: Adapter, params: PyTree) -> PyTree:
    """Return a model's parameters from {**base, "adapter": …}; applied once, they need no adapter any more."""
    return adapter.apply({name: tree for name, tree in params.items() if name != ADAPTER}, params[ADAPTER])


@functools.lru_cache(KEPT)
def adapted_loss(loss: LossFn, adapter: Adapter) -> LossFn:
    """Return the loss of parameters {**base, "adapter": …}, from that of a model's.

    Update, optimizer and checkpoints take the whole tree; mark the base as `frozen` to train the adapter alone.
    """
    return lambda params, batch, key: loss(adapted_params(adapter, params), batch, key)


def sized(
    model_config: ModelConfig, task: Task, source_vocab: int, target_vocab: int, own_noise: bool = False
) -> ModelConfig:
    """Return the model config with the sizes that the tokenizers and the task give it.

    Args:
        model_config: as it was asked for; what it leaves at 0 is filled in.
        task: which answers it has, and how many ids its noise needs.
        source_vocab, target_vocab: ids of the tokenizers; the target's may be those of labels.
        own_noise: the vocabulary itself has the symbols of the task's noise, so that it needs no further ids.

    Raises:
        UserError: it asks for fewer rows than there are ids, or for another number of classes.
    """
    if task.answer == SPAN:
        return model_config.with_vocabulary(source_vocab, source_vocab).with_classes(2, each=True)
    if task.answer in CLASSES:
        model_config = model_config.with_vocabulary(source_vocab, source_vocab)
        count = 1 if task.answer == "number" else target_vocab - NUM_SYMBOLS
        return model_config.with_classes(count, each=task.answer == "tags")
    if model_config.vision.source:  # which has no rows
        return model_config.with_vocabulary(target_vocab, target_vocab)
    symbols = 0 if own_noise else task.symbols
    return model_config.with_vocabulary(source_vocab + symbols, target_vocab + symbols)


@functools.lru_cache(KEPT)
def token_loss(label_smoothing: float) -> TaskLoss:
    """Return label-smoothed cross-entropy over the tokens of `target_out` that have weight."""

    def loss(hidden: Float[Array, "b t d"], project: Project, batch: Batch) -> Sums:
        return chunked_cross_entropy(hidden, project, batch["target_out"], batch["weights"], label_smoothing)

    return loss


def token_scores(sums: Sums, accuracy: str = "token_accuracy") -> Scores:
    """Return perplexity, and the share of tokens that were the most probable ones, given all before or around them."""
    means = summarize(sums)
    return {"perplexity": {"score": means["perplexity"]}, accuracy: {"score": means["accuracy"]}}


def score_texts(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums, **options: Unpack[TextOptions]) -> Scores:
    """Return what generated texts are scored with: sacreBLEU's metrics, exact matches, and the scores of tokens.

    An output is matched by whichever reference it equals.
    """
    answers, groups = list(outputs), [pair.group for pair in examples]
    found = text_scores(answers, reference_texts(examples), **options)
    matched = [answer if answer in pair.others else pair.target for answer, pair in zip(answers, examples, strict=True)]
    found["exact_match"] = exact_match(answers, matched, groups=groups if any(groups) else None)
    return found | token_scores(sums)


def refuse(task: str, data: DataConfig, **options: str | tuple[str, ...]) -> None:
    """Raise UserError for the first option that has a value given here, which this task cannot work with.

    The source is that of every corpus of a mixture.
    """
    for key, values in options.items():
        for part in (data, *data.mixture) if key == "source" else (data,):
            value = getattr(part, key)
            if value in ((values,) if isinstance(values, str) else values):
                raise UserError(f"data.{key}={value!r} is not for task={task!r}: choose another, or another task")
