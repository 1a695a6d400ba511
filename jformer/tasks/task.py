"""What makes a task: a value with a few functions, no class tree. And what the tasks have in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float

from jformer.data.config import DataConfig
from jformer.data.corpus import Encoder, Side
from jformer.data.features import Features
from jformer.data.sources import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.data.vocabularies import Vocabulary
from jformer.errors import UserError
from jformer.losses import Sums, chunked_cross_entropy
from jformer.metrics import summarize

Loss = Callable[[Any, Callable, Mapping[str, Any]], Sums]
Totals = Mapping[str, tuple[float, float]]
Scores = dict[str, dict[str, Any]]

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
    loss: Loss  # (hidden states, projection to logits, batch) → sums
    score: Callable[[Sequence[str], Sequence[Pair], Totals], Scores]  # (outputs, examples, sums of the split's losses)


def sized(model_config: Any, task: Task, source_vocab: int, target_vocab: int) -> Any:
    """Return the model config with the sizes that the tokenizers and the task give it."""
    if task.answer == "label":
        model_config = model_config.with_vocabulary(source_vocab, source_vocab)
        return model_config.with_classes(target_vocab - NUM_SYMBOLS)
    return model_config.with_vocabulary(source_vocab + task.symbols, target_vocab + task.symbols)


def token_loss(label_smoothing: float) -> Loss:
    """Return label-smoothed cross-entropy over the tokens of `target_out` that have weight."""

    def loss(hidden: Float[Array, "b t d"], project: Callable, batch: Mapping[str, Any]) -> Sums:
        return chunked_cross_entropy(hidden, project, batch["target_out"], batch["weights"], label_smoothing)

    return loss


def token_scores(totals: Totals, accuracy: str = "token_accuracy") -> Scores:
    """Return perplexity, and the share of tokens that were the most probable ones, given all before or around them."""
    means = summarize(totals)
    return {"perplexity": {"score": means["perplexity"]}, accuracy: {"score": means["accuracy"]}}


def refuse(task: str, data: DataConfig, **options: str) -> None:
    """Raise UserError for the first option that has the value given here, which this task cannot work with."""
    for key, value in options.items():
        if getattr(data, key) == value:
            raise UserError(f"data.{key}={value!r} is not for task={task!r}: choose another, or another task")
