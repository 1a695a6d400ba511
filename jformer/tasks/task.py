"""What makes a task: a value with a few functions, no class tree. And what the tasks have in common.

Letters in shapes: b rows of a batch, t positions, d d_model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Key

from jformer.data.config import DataConfig
from jformer.data.corpus import Encoder, Side
from jformer.data.features import Features
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.data.vocabularies import Vocabulary
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.batch import Batch
from jformer.tasks.losses import Project, chunked_cross_entropy
from jformer.tasks.sums import Sums, summarize

TaskLoss = Callable[[Array, Project, Batch], Sums]
"""(hidden states [b t d], projection to logits, batch) → sums; that of `loss` is differentiated."""

LossFn = Callable[[Any, Batch, Key[Array, ""] | None], Sums]
"""(parameters, batch of rows, dropout key or None) → sums: a task's loss joined with a model."""

Scores = dict[str, dict[str, Any]]
"""Name of a score → its entry in results.json, `score` among its keys."""

Score = Callable[[Sequence[str], Sequence[Pair], Sums], Scores]
"""(outputs, examples, sums of the split's losses) → scores."""

NOTHING = Side(None, max_length=1)  # a side without text


class MakeEncoder(Protocol):
    """Tokenizers of both sides → how examples become tokens; `evaluating` where no text may be lost."""

    def __call__(self, source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> Encoder:
        """Return the encoder."""


class Task(NamedTuple):
    """How a model learns something and how well it did."""

    vocabularies: Mapping[str, Vocabulary]  # file name → what its tokenizer is learned from
    encoder: MakeEncoder
    features: Callable[[Tokenizer, Tokenizer], Features]
    symbols: int  # ids past the vocabulary that the noise uses
    answer: str  # what it gives for a text: another "text" | its "continuation" | a "label" | "" for nothing
    loss: TaskLoss
    score: Score


def make_loss(model: Any, task: Task) -> LossFn:
    """Join a model and a task's loss; the task sees hidden states and the projection, never a model."""

    def loss(params: Any, batch: Batch, key: Key[Array, ""] | None) -> Sums:
        rngs = {} if key is None else {"dropout": key}
        hidden = model.apply({"params": params}, batch, key is not None, rngs=rngs, method="hidden")
        return task.loss(hidden, lambda h: model.apply({"params": params}, h, method="logits"), batch)

    return loss


def sized(
    model_config: ModelConfig, task: Task, source_vocab: int, target_vocab: int, own_noise: bool = False
) -> ModelConfig:
    """Return the model config with the sizes that the tokenizers and the task give it.

    `own_noise`: the vocabulary itself has the symbols of the task's noise.
    """
    if task.answer == "label":
        model_config = model_config.with_vocabulary(source_vocab, source_vocab)
        return model_config.with_classes(target_vocab - NUM_SYMBOLS)
    symbols = 0 if own_noise else task.symbols
    return model_config.with_vocabulary(source_vocab + symbols, target_vocab + symbols)


def token_loss(label_smoothing: float) -> TaskLoss:
    """Return label-smoothed cross-entropy over the tokens of `target_out` that have weight."""

    def loss(hidden: Float[Array, "b t d"], project: Project, batch: Batch) -> Sums:
        return chunked_cross_entropy(hidden, project, batch["target_out"], batch["weights"], label_smoothing)

    return loss


def token_scores(sums: Sums, accuracy: str = "token_accuracy") -> Scores:
    """Return perplexity, and the share of tokens that were the most probable ones, given all before or around them."""
    means = summarize(sums)
    return {"perplexity": {"score": means["perplexity"]}, accuracy: {"score": means["accuracy"]}}


def refuse(task: str, data: DataConfig, **options: str) -> None:
    """Raise UserError for the first option that has the value given here, which this task cannot work with."""
    for key, value in options.items():
        if getattr(data, key) == value:
            raise UserError(f"data.{key}={value!r} is not for task={task!r}: choose another, or another task")
