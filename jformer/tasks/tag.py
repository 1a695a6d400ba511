"""Tagging: a tag for every word of a sentence, such as where names begin and end, or parts of speech."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from jformer.data.aligned import TagEncoder
from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.encoders import Side
from jformer.data.pipeline import Arrays, Features, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.tasks.crf import chain_loss
from jformer.tasks.features import fill_rows, source_arrays, without_noise
from jformer.tasks.metrics import Scores, exact_match, f1_scores
from jformer.tasks.span_scores import mark_spans, span_scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import Task, refuse, token_loss, token_scores


def tag(data: DataConfig, *, label_smoothing: float, crf: bool = False, **_: object) -> Task:
    """Return the task: cross-entropy of each word's tag at its first token (Devlin et al. 2019, section 5.3).

    With `crf`, it is that of all tags of a sentence jointly. In evaluation, long sentences are always split between
    words, so the scores cover every word.
    """
    refuse("tag", data, only="conll", tokenizer="image")
    if crf and label_smoothing:
        raise UserError(f"optim.label_smoothing={label_smoothing} smooths single tags, but model.head.crf=True scores "
                        "whole sentences: set it to 0.0")  # fmt: skip

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> TagEncoder:
        words = Side(source, data.max_source_length, begin=True)
        tags = Side(target, data.max_source_length, bare=True)
        return TagEncoder(words, tags, "split" if evaluating else data.overlong)

    return Task(
        vocabularies={
            "source": VocabularySpec(data.tokenizer, ("source",)),
            "target": VocabularySpec("tag", ("target",)),
        },
        encoder=encoder,
        features=lambda source, target: tagged_texts(),
        answer="tags",
        loss=chain_loss if crf else token_loss(label_smoothing),
        score=score,
    )


def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
    """Return scores of tags, and of spans if the tags mark any.

    Raises ValueError for an output without a tag for each word.
    """
    found, wanted = [output.split() for output in outputs], [pair.target.split() for pair in examples]
    flat = [list(chain.from_iterable(each)) for each in (found, wanted)]
    right = Counter(one == other for one, other in zip(*flat, strict=True))
    scores: Scores = span_scores(found, wanted) if mark_spans({*flat[0], *flat[1]}) else {}
    scores["accuracy"] = {"score": right[True] / max(right.total(), 1)}
    scores["macro_f1"] = {"score": f1_scores(*([{tag} for tag in tags] for tags in flat))["macro_f1"]}
    scores["exact_match"] = exact_match(outputs, [pair.target for pair in examples])
    return scores | {"perplexity": token_scores(sums)["perplexity"]}


def refuse_scores_of_spans(names: Sequence[str], tags: Tokenizer) -> None:
    """Raise UserError for span scores in evaluate.during if a run's tags do not mark spans."""
    for name in names:
        if name.startswith("span_") and not mark_spans(tags.tokens[NUM_SYMBOLS:]):
            raise UserError(f"evaluate.during: {name} needs tags such as O, B-X and I-X, which this text lacks: "
                            "choose macro_f1 or exact_match")  # fmt: skip


def tagged_texts() -> Features:
    """Return source [b s], source_types of one text, and the class of each word at its first token: target_out [b s].

    The two sequences of an example have equal length; positions whose target is PAD have no weight.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        words = source_arrays(source, rows, shape)
        tags = fill_rows(target, rows, shape, shape.source_length)["tokens"]
        real = tags > 0
        return {
            **words,
            "source_types": np.zeros_like(words["source"]),
            "target_out": np.where(real, tags - NUM_SYMBOLS, 0),
            "weights": real.astype(np.float32),
        }

    return without_noise(given)
