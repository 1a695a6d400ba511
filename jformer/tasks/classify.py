"""Classification: one label for a text, for a pair of texts (a TAB between them), or for an image."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jformer.data import features
from jformer.data.config import DataConfig
from jformer.data.corpus import Encoder, Side
from jformer.data.features import Features
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import ImageTokenizer, Tokenizer
from jformer.data.tokenizers.lists import NORMALIZATIONS
from jformer.data.vocabularies import Vocabulary
from jformer.errors import UserError
from jformer.tasks.metrics import exact_match
from jformer.tasks.sums import Sums
from jformer.tasks.task import Scores, Task, refuse, token_loss, token_scores


def classify(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the label (Devlin et al. 2019, section 4.1; Dosovitskiy et al. 2021)."""
    refuse("classify", data, overlong="split", batching="packed")
    images = data.tokenizer == "image"
    for part in (data, *data.mixture):
        if (part.source == "images") != images:
            raise UserError(f"data.tokenizer={data.tokenizer!r} does not fit source={part.source!r}: images take both")

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> Encoder:
        label = Side(target, 1, end=False)
        if isinstance(source, ImageTokenizer):
            height, width, channels = source.shape
            return Encoder(Side(source, height * width * channels, end=False), label, data.overlong)
        return Encoder(Side(source, data.max_source_length, begin=True, parts=True), label, data.overlong)

    def make_features(source: Tokenizer, target: Tokenizer) -> Features:
        if isinstance(source, ImageTokenizer):
            return features.labelled_images(*source.shape)
        return features.labelled_texts(source.symbols)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        normalize = NORMALIZATIONS[data.normalization]  # the tokenizer of labels, and so the answers, are normalized
        labels, groups = [normalize(pair.target) for pair in examples], [pair.group for pair in examples]
        accuracy: dict[str, Any] = exact_match(outputs, labels, groups if any(groups) else None)
        scores = {"accuracy": accuracy, "macro_f1": {"score": macro_f1(outputs, labels)}}
        return scores | {"perplexity": token_scores(sums)["perplexity"]}

    return Task(
        vocabularies={
            "source": Vocabulary(data.tokenizer, ("source",), parts=not images),
            "target": Vocabulary("label", ("target",)),
        },
        encoder=encoder,
        features=make_features,
        symbols=0,
        answer="label",
        loss=token_loss(label_smoothing),
        score=score,
    )


def macro_f1(outputs: Sequence[str], labels: Sequence[str]) -> float:
    """Return the mean over all labels met, on either side, of the harmonic mean of precision and recall."""
    right = Counter(label for output, label in zip(outputs, labels, strict=True) if output == label)
    met = Counter(outputs) + Counter(labels)
    return sum(2 * right[label] / count for label, count in met.items()) / len(met)
