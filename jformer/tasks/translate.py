"""Translation: a source text in, a target text out."""

from collections.abc import Sequence

from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.tasks.features import sequence_to_sequence
from jformer.tasks.metrics import Scores, check_scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import Task, refuse, score_texts, token_loss


def translate(
    data: DataConfig, *, label_smoothing: float, scores: Sequence[str], tokenize: str, lowercase: bool, **_: object
) -> Task:
    """Return the task: label-smoothed cross-entropy (Vaswani et al. 2017, section 5.4), scored by sacreBLEU.

    Args:
        data: the vocabularies to learn, and the maximum lengths of source and target.
        label_smoothing: the share of the probability that is spread over the vocabulary, from 0 to below 1.
        scores: names of `TEXT_SCORES`, without exact matches, which are always counted.
        tokenize: that of BLEU, by sacreBLEU's name.
        lowercase: whether BLEU and chrF ignore case.

    Raises:
        UserError: for scores or a tokenization that sacreBLEU lacks, and for options that need one-sided text.
    """
    refuse("translate", data, overlong="split", tokenizer="image", source=("images", "captions"))
    check_scores(scores, tokenize, lowercase)
    both = VocabularySpec(data.tokenizer, ("source", "target"))
    apart = {side: VocabularySpec(data.tokenizer, (side,)) for side in both.sides}

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        return PairEncoder(Side(source, data.max_source_length), Side(target, data.max_target_length), data.overlong)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return score_texts(outputs, examples, sums, tokenize=tokenize, lowercase=lowercase, names=scores)

    return Task(
        vocabularies={"shared": both} if data.vocab_shared else apart,
        encoder=encoder,
        features=lambda source, target: sequence_to_sequence(target.symbols),
        answer="text",
        loss=token_loss(label_smoothing),
        score=score,
    )
