"""Embedding: map texts to vectors that are close where the texts belong together, learned from pairs of such texts.

Letters in shapes: b rows of a batch, d d_model.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.pipeline import Arrays, Features, Lengths, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.models.batch import Batch
from jformer.plugins import cached
from jformer.tasks import features
from jformer.tasks.features import OURS
from jformer.tasks.losses import Project, contrastive
from jformer.tasks.metrics import Scores, exact_match
from jformer.tasks.sums import Sum, Sums
from jformer.tasks.task import KEPT, VECTOR, Task, TaskLoss, refuse


def embed(
    data: DataConfig,
    *,
    label_smoothing: float,
    family: str = "encoder",
    temperature: float = 0.05,
    symmetric: bool = False,
    **_: object,
) -> Task:
    """Return the task: find the partner of every first text among the second texts of the batch, by cosine similarity.

    The loss is that of van den Oord et al. 2018. Negatives are the other pairs of the batch (Henderson et al. 2017,
    section 4.2); with accumulation, those of the same microbatch.

    Args:
        data: the vocabulary to learn, shared by both texts, and the maximum length of either.
        label_smoothing: the share of the probability that is spread over all second texts of a batch.
        family: of the model. A decoder reads BOS first, an encoder begins with it as its class token.
        temperature: divides the cosines.
        symmetric: also find the first text for every second one; each loss counts half.

    Raises:
        UserError: for options that it does not support.
    """
    refuse("embed", data, overlong="split", batching="packed", tokenizer="image", source=("images", "captions"))
    if not data.vocab_shared:
        raise UserError("data.vocab_shared=False: task='embed' encodes both texts with one vocabulary: use True")

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        lengths = data.max_source_length, data.max_target_length
        first, second = (Side(source, length, begin=family == "encoder") for length in lengths)
        return PairEncoder(first, second, data.overlong)

    def make_features(source: Tokenizer, target: Tokenizer) -> Features:
        return paired_texts("target" if family == "decoder" else "source", source.symbols)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        found = exact_match(outputs, [pair.target for pair in examples])
        return {"retrieval_accuracy": found}

    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("source", "target"))},
        encoder=encoder,
        features=make_features,
        answer=VECTOR,
        loss=pair_loss(temperature, label_smoothing, symmetric),
        score=score,
    )


@cached(KEPT)
def pair_loss(temperature: float, label_smoothing: float, symmetric: bool) -> TaskLoss:
    """Return the contrastive loss of the vectors of each pair, in one direction or as the mean of both."""

    def loss(hidden: Float[Array, "b 2 d"], project: Project, batch: Batch) -> Sums:
        vectors, weights = project(hidden), batch["weights"][:, 0]
        found = contrastive(vectors, weights, temperature, label_smoothing)
        if not symmetric:
            return found
        back = contrastive(vectors[:, ::-1], weights, temperature, label_smoothing)
        sums: dict[str, Sum] = jax.tree.map(lambda a, b: (a + b) / 2, found, back)
        return sums

    return loss


def paired_texts(side: str, symbols: Symbols = OURS) -> Features:
    """Return the arrays of one side alone, "source" or "target", whose rows hold both texts of a pair.

    They have the segments 1 and 2; `weights` [b 1] is 1 where there is a pair.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        texts, inner = features.side_by_side(source, target, rows)
        if side == "source":
            made = features.source_arrays(texts, inner, shape)
        else:
            made = features.target_arrays(texts, inner, shape, symbols.bos)
            del made["target_out"]
        real = made[f"{side}_segments"].max(axis=1, initial=0) > 1
        return {**made, "weights": real[:, None].astype(np.float32)}

    def lengths(source: np.ndarray, target: np.ndarray) -> Lengths:
        both = source + target, np.zeros_like(source)
        return both if side == "source" else both[::-1]

    return features.without_noise(given, lengths)
