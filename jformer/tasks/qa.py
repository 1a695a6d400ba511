"""Question answering: find the words of a context that answer a question."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from jformer.data import spans
from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.pipeline import Arrays, Features, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.spans import SpanEncoder
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.models.batch import Batch
from jformer.tasks.features import OURS, fill_rows, typed_source, without_noise
from jformer.tasks.losses import Project, span_cross_entropy
from jformer.tasks.metrics import Scores, answer_scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import SPAN, Task, refuse, token_scores

LEAST_LENGTH = 16  # tokens of a window: the symbols, and some tokens of the question and the context


def qa(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: predict the start and the end of the answer (Devlin et al. 2019, sections 4.2 and 4.3).

    Raises UserError for data without questions, and for options that need texts on both sides.
    """
    refuse("qa", data, only="squad", overlong="split", batching="packed", tokenizer="image")
    if data.max_source_length < LEAST_LENGTH:
        raise UserError(
            f"data.max_source_length={data.max_source_length} has no room for a question and its context: task='qa' "
            f"needs at least {LEAST_LENGTH}"
        )

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> SpanEncoder:
        return SpanEncoder(source, data.max_source_length, data.doc_stride, "cut" if evaluating else data.overlong)

    def loss(hidden: Array, project: Project, batch: Batch) -> Sums:
        return span_cross_entropy(project(hidden), batch["target_out"], label_smoothing)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return {**answer_scores(outputs, examples), "perplexity": token_scores(sums)["perplexity"]}

    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("source",), parts=True, cut=spans.words_of)},
        encoder=encoder,
        features=lambda source, target: marked_spans(source.symbols),
        answer=SPAN,
        loss=loss,
        score=score,
    )


def marked_spans(symbols: Symbols = OURS) -> Features:
    """Return source [b s] with source_types, and its marks (`data.spans`) as target_out [b s].

    Weights are 1 where an answer may start or end.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        marks = fill_rows(target, rows, shape, shape.source_length)["tokens"]
        weights = (marks > 0).astype(np.float32)
        return {**typed_source(source, rows, shape, symbols.eos), "target_out": marks, "weights": weights}

    return without_noise(given, lambda source, target: (source, np.zeros_like(target)))
