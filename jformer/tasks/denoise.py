"""Denoising: restore the missing spans of a text (T5) or the whole text (BART)."""

from collections.abc import Sequence

import numpy as np

from jformer.data import features
from jformer.data.corpus import PairEncoder, Side
from jformer.data.data_config import DataConfig
from jformer.data.features import Features
from jformer.data.noise import span_counts
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.tasks.metrics import Scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import NOTHING, Task, refuse, token_loss, token_scores

NOISES = {"t5": features.corrupted_spans, "bart": features.infilled}


def denoise(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the target (Raffel et al. 2020, section 3.1; Lewis et al. 2020).

    The text is the target of an example; the model's source and target are made from it for each batch. It is stored
    without EOS, which is added to both after the noise, so `max_target_length` limits both. In evaluation long texts
    are always split, so the scores cover all of the text.
    """
    refuse("denoise", data, tokenizer="image", source=("images", "captions"))
    longest = data.max_target_length - 1

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        return PairEncoder(NOTHING, Side(target, longest, end=False), "split" if evaluating else data.overlong)

    def make_features(source: Tokenizer, target: Tokenizer) -> Features:
        return NOISES[data.noise](data.noise_density, data.mean_span, target.vocab_size, target.symbols)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return token_scores(sums)

    sentinels = int(span_counts(np.array(longest), data.noise_density, data.mean_span)[1])
    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("target",))},
        encoder=encoder,
        features=make_features,
        symbols=sentinels if data.noise == "t5" else 1,
        answer="",
        loss=token_loss(label_smoothing),
        score=score,
    )
