"""Captions: an image in, a text out."""

from collections.abc import Sequence

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.pipeline import Arrays, Features, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import ImageTokenizer, Symbols, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.tasks.cider import SIGNATURE, cider_d
from jformer.tasks.features import OURS, images_of, target_arrays, without_noise
from jformer.tasks.metrics import Scores, check_scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import Task, refuse, score_texts, token_loss


def caption(
    data: DataConfig, *, label_smoothing: float, scores: Sequence[str], tokenize: str, lowercase: bool, **_: object
) -> Task:
    """Return the task: label-smoothed cross-entropy of the caption, given the image.

    It is scored as a translation is, and by CIDEr-D; any reference may be matched exactly.

    Args:
        data: the images and captions, the tokenizer of captions and their maximum length.
        label_smoothing, scores, tokenize, lowercase: see `translate`.

    Raises:
        UserError: for scores or a tokenization that sacreBLEU lacks, and for options that need a source text.
    """
    refuse("caption", data, only="captions", overlong="split", batching="packed", tokenizer="image")
    check_scores(scores, tokenize, lowercase)

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        return PairEncoder(
            Side(source, _image(source).length, bare=True), Side(target, data.max_target_length), data.overlong
        )

    def make_features(source: Tokenizer, target: Tokenizer) -> Features:
        return captioned_images(*_image(source).shape, target.symbols)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        found = score_texts(outputs, examples, sums, tokenize=tokenize, lowercase=lowercase, names=scores)
        values = cider_d(outputs, [pair.references for pair in examples])
        return found | {"cider": {"score": sum(values) / len(values), "signature": SIGNATURE}}

    return Task(
        vocabularies={
            "source": VocabularySpec("image", ("source",)),
            "target": VocabularySpec(data.tokenizer, ("target",)),
        },
        encoder=encoder,
        features=make_features,
        answer="text",
        loss=token_loss(label_smoothing),
        score=score,
    )


def _image(tokenizer: Tokenizer) -> ImageTokenizer:
    assert isinstance(tokenizer, ImageTokenizer)  # as `vocabularies` specifies
    return tokenizer


def captioned_images(height: int, width: int, channels: int, symbols: Symbols = OURS) -> Features:
    """Return image u8 [b height width channels] and target [b t]; each image and its caption have their own row."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        image = images_of(source, rows, (shape.rows, height, width, channels))
        return {"image": image, **target_arrays(target, rows, shape, symbols.bos)}

    return without_noise(given, lambda source, target: (source // channels, target))
