"""Masked language modelling: predict some tokens of a text from their context."""

from collections.abc import Sequence

from jformer.data import features
from jformer.data.corpus import PairEncoder, Side
from jformer.data.data_config import DataConfig
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.tasks.metrics import Scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import MASKS, NOTHING, Task, refuse, token_loss, token_scores


def mlm(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the chosen tokens (Devlin et al. 2019, section 3.1, without next sentences).

    The text is the target of an example, as in all tasks of one text; the model reads it on its source side.
    """
    refuse("mlm", data, overlong="split", tokenizer="image", source=("images", "captions"))

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        side = Side(source, data.max_source_length, begin=True)
        return PairEncoder(side, NOTHING, data.overlong, reads=("target", "target"))

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return token_scores(sums, "accuracy")

    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("target",))},
        encoder=encoder,
        features=lambda source, target: features.masked(data.noise_density, source.vocab_size, source.symbols),
        symbols=1,
        answer=MASKS,
        loss=token_loss(label_smoothing),
        score=score,
    )
