"""The tokenizers of a run: learned once from the training text and saved with the run.

A task has either one, "shared" by both sides or for the only side with text, or "source" and "target".
"""

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from etils.epath import Path

from jformer.data.data_config import DataConfig, Languages
from jformer.data.draws import shares_of
from jformer.data.progress import show_progress
from jformer.data.sources.split import SIDES, Pair, Split
from jformer.data.tokenizers import NUM_SYMBOLS, LabelTokenizer, NumberTokenizer, Tokenizer, learn, load
from jformer.data.tokenizers.subwords import KINDS, read_subwords
from jformer.data.tokenizers.symbols import OneFile
from jformer.errors import UserError
from jformer.integrity import damaged, seal

SAMPLED = ("word", "bpe", "unigram")  # kinds for which a sample of a large text is enough
SAMPLE, RUN = 2**19, 2**10  # most pairs of a corpus to learn those from; consecutive pairs in the sample
# How vocabularies write a language: ours and M2M-100; Marian; MADLAD and Johnson et al. 2017. NLLB and mBART write
# just eng_Latn and en_XX.
LANGUAGE_FORMS = "__{name}__ >>{name}<< <2{name}>"
OWN = ("label", "labels", "number", "tag", "image")  # kinds that are never copied: they describe a run's own examples
WHOLE = (*OWN, "char", "byte")  # kinds that hold everything in the text, however rare


class VocabularySpec(NamedTuple):
    """The kind of a tokenizer and the text to learn it from."""

    kind: str  # a key of tokenizers.TOKENIZERS
    sides: tuple[str, ...]  # "source", "target" or both
    parts: bool = False  # TABs separate texts
    cut: Callable[[str], list[str]] | None = None  # splits a text into words that are encoded one by one


def learn_tokenizers(
    directory: Path, config: DataConfig, training: Sequence[Split], vocabularies: Mapping[str, VocabularySpec]
) -> tuple[Tokenizer, Tokenizer]:
    """Learn the tokenizers from the training text, save them in a new directory and return those of both sides."""
    _empty(directory)
    for name, vocabulary in vocabularies.items():
        _learn(config, training, vocabulary).save(directory, name)
    seal(directory)
    return load_tokenizers(directory)


def copy_tokenizers(
    parent: Path,
    directory: Path,
    config: DataConfig,
    training: Sequence[Split],
    vocabularies: Mapping[str, VocabularySpec],
) -> tuple[Tokenizer, Tokenizer]:
    """Copy another run's tokenizers, which its parameters require.

    A shared tokenizer also serves a single side; two that segment texts differently into one vocabulary (Marian, NLLB)
    also serve as the shared one. Tokenizers of labels and tags are learned from this run's text; if the parent has the
    same labels, they keep its order, which its head has. Those of images are learned too, unless the parent's has its
    own preparation steps and data.image_size is 0.

    Args:
        parent: the directory of the other run's tokenizers.
        directory: where to save them; its content is removed.
        config: options of the tokenizers to learn.
        training: the text to learn them from.
        vocabularies: file name → the tokenizer that the task needs there.

    Raises:
        UserError: there is no such run, its files are damaged, or it has two vocabularies where one is needed.
    """
    if not parent.is_dir():
        raise UserError(f"{parent}: no such directory; train.init_from must name the workdir of a run")
    for name in damaged(parent):
        raise UserError(f"{parent / name} is damaged: restore it, or start from another run")
    _empty(directory)
    for name, vocabulary in vocabularies.items():
        if vocabulary.kind == "image" and not config.image_size and (parent / "source.json").exists():
            images = load(parent, "source")  # a published model has preparation steps of its own
            found = {name: images if getattr(images, "steps", {}) else _learn(config, training, vocabulary)}
        elif vocabulary.kind in OWN:
            found = {name: _numbered_as(parent, name, _learn(config, training, vocabulary))}
        else:
            found = _taken_over(parent, name, vocabulary.sides)
        for file, tokenizer in found.items():
            tokenizer.save(directory, file)
    seal(directory)
    return load_tokenizers(directory)


def load_tokenizers(directory: Path) -> tuple[Tokenizer, Tokenizer]:
    """Load the saved tokenizers of a run, source and target, which are the same object if shared.

    Raises UserError for a file that is missing or damaged.
    """
    for name in damaged(directory):
        state = "damaged: it has changed since the run began" if (directory / name).exists() else "missing"
        raise UserError(f"{directory / name} is {state}; restore it or train again")
    if _holds(directory, "shared"):
        tokenizer = load(directory, "shared")
        return tokenizer, tokenizer
    return load(directory, "source"), load(directory, "target")


def directed(
    tokenizers: tuple[Tokenizer, Tokenizer], data: DataConfig, languages: Languages = ("", "")
) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizers of both sides with the symbols of a pair of languages around their texts.

    An imported vocabulary determines their places: in mBART and NLLB each language is next to its own text. Others
    follow data.language_symbols. Without either, tokenizers are returned unchanged.

    Args:
        tokenizers: of the run.
        data: its options; a language left empty is that of its first corpus.
        languages: to translate from and into.

    Raises:
        UserError: for a language without a symbol, and for any language in a run without language symbols.
    """
    place, (source, target) = data.language_symbols, tokenizers
    if not place and not any(languages):
        return tokenizers
    if not isinstance(source, OneFile) or not isinstance(target, OneFile):
        raise UserError("data.language_symbols: your own tokenizer has no language symbols; leave it out")
    before, after = source.symbols.before, source.symbols.after
    own = "after" if after else "before" if before and before[0] != source.symbols.bos else ""
    if place:
        languages = languages[0] or data.source_language, languages[1] or data.target_language
    elif not own:
        given = languages[1] or languages[0]
        raise UserError(f"this run translates into one language, so leave out {given!r}: see data.language_symbols")
    if own and place == "source":
        raise UserError("data.language_symbols='source': this vocabulary marks both texts' languages; use 'target'")
    if place == "source":
        return source.with_symbols(before=(_language(source, languages[1]),)), target
    if languages[0]:
        source = source.with_symbols(**{own or "before": (_language(source, languages[0]),)})
    if languages[1]:
        first = _language(target, languages[1])
        target = target.with_symbols(
            **({"bos": first} if own == "after" and not target.symbols.before else {"before": (first,)})
        )
    return source, target


def _language(tokenizer: Tokenizer, name: str) -> int:
    """Return the id of a language, written in any of the forms that vocabularies use."""
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    forms = [*LANGUAGE_FORMS.format(name=name).split(), *[name] * ("_" in name)]  # "en" alone may be any piece of text
    found = [form for form in forms if form in ids]
    if not found:
        raise UserError(
            f"the vocabulary has no symbol for the language {name!r}: train with it, or spell it as the vocabulary does"
        )
    return ids[found[0]]


def _taken_over(parent: Path, name: str, sides: tuple[str, ...]) -> dict[str, Tokenizer]:
    """Return the parent's tokenizers to save in place of tokenizer `name`, file → tokenizer."""
    if _holds(parent, "shared"):
        return {name: load(parent, "shared")}
    if name != "shared":
        return {name: load(parent, name)}
    both = {side: load(parent, side) for side in SIDES}
    if sides == ("source",) or isinstance(both["target"], (LabelTokenizer, NumberTokenizer)):
        return {name: both["source"]}
    if both["source"].tokens != both["target"].tokens:
        raise UserError(
            f"{parent}: has two vocabularies, and this run needs one: start from a run with data.vocab_shared=True, or "
            "without train.init_from; task='translate' can set data.vocab_shared=False instead"
        )
    return both


def _numbered_as(parent: Path, name: str, learned: Tokenizer) -> Tokenizer:
    """Return labels in the order of the parent's if these are the same, others as learned."""
    if isinstance(learned, LabelTokenizer) and _holds(parent, name):
        labels = load(parent, name).tokens[NUM_SYMBOLS:]
        if sorted(labels) == sorted(learned.tokens[NUM_SYMBOLS:]):
            return learned.numbered_as(labels)
    return learned


def _empty(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or os.path.islink(directory)):  # noqa: PTH114 - of epath; not ours
        raise UserError(
            f"{directory} is a file or a link, but a run needs a folder of that name for its tokenizers: move it away"
        )
    Path(directory).rmtree(missing_ok=True)
    directory.mkdir(parents=True)


def _holds(directory: Path, name: str) -> bool:
    return any((directory / f"{name}.{kind}").exists() for kind in ("model", "json"))


def _learn(config: DataConfig, splits: Sequence[Split], vocabulary: VocabularySpec) -> Tokenizer:
    size = config.image_size if vocabulary.kind == "image" else config.vocab_size
    controls = [LANGUAGE_FORMS.split()[0].format(name=name) for name in config.language_names()]
    if config.vocabulary and vocabulary.kind in KINDS:
        return read_subwords(Path(config.vocabulary).expanduser(), config.symbols, controls)
    unequal = config.mixture_temperature > 1 or len({part.weight for part in config.trained()}) > 1
    if vocabulary.kind == "label" and config.label_weights == "balanced" and unequal and len(splits) > 1:
        return _counted_as_drawn(config, splits, vocabulary)
    with show_progress(f"learning the {vocabulary.kind} tokenizer"):
        return learn(
            vocabulary.kind,
            _texts(splits, vocabulary, 1.0 if vocabulary.kind in WHOLE else config.vocab_temperature),
            size,
            config.normalization,
            config.split_digits,
            coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            symbols=config.symbols,
            controls=controls,
        )


def _counted_as_drawn(config: DataConfig, splits: Sequence[Split], vocabulary: VocabularySpec) -> Tokenizer:
    """Learn labels, each with the number of its examples in an epoch of a mixture, in millionths of an example."""
    plain = dataclasses.replace(config, label_weights="none")
    labels, *each = [cast(LabelTokenizer, _learn(plain, part, vocabulary)) for part in (splits, *([s] for s in splits))]
    shares = shares_of([sum(part.counts) for part in each], config.mixture_temperature)
    passes = [part.weight * share for part, share in zip(config.trained(), shares, strict=True)]
    drawn: Counter[str] = Counter()
    for part, times in zip(each, passes, strict=True):
        counts = zip(part.tokens[NUM_SYMBOLS:], part.counts, strict=True)
        drawn.update({label: max(1, round(count * times * 1e6)) for label, count in counts})
    names = labels.tokens[NUM_SYMBOLS:]
    return LabelTokenizer(labels.kind, labels.normalization, names, [drawn[name] for name in names])


def _texts(splits: Sequence[Split], vocabulary: VocabularySpec, temperature: float = 1.0) -> Iterator[str]:
    """Yield the texts to learn from; with a temperature above 1, those of small corpora several times.

    Where only a sample of one corpus is read, the others are thinned equally: corpora keep their shares.
    """
    strides = [_stride(split) if vocabulary.kind in SAMPLED else 1 for split in splits]
    repeats = [stride / max(strides) for stride in strides]
    if temperature > 1:
        found = [sum(any(pair[:2]) for pair in _sampled(*each)) for each in zip(splits, strides, strict=True)]
        shares = shares_of([stride * size for stride, size in zip(strides, found, strict=True)], temperature)
        repeats = [share * repeat for share, repeat in zip(shares, repeats, strict=True)]
    for split, stride, repeat in zip(splits, strides, repeats, strict=True):
        for number, pair in enumerate(_sampled(split, stride)):
            for side in vocabulary.sides * (math.floor((number + 1) * repeat) - math.floor(number * repeat)):
                text = getattr(pair, side)
                parts = text.split("\t") if vocabulary.parts else [text]
                yield from (" ".join(vocabulary.cut(part)) for part in parts) if vocabulary.cut else parts


def _stride(split: Split) -> int:
    """Return the n for which every n-th pair of a split makes at most SAMPLE."""
    size = split.size or sum(1 for _ in split.read(Counter()))
    return max(1, -(-size // SAMPLE))


def _sampled(split: Split, stride: int) -> Iterator[Pair]:
    """Yield the pairs of a split, or with a stride n above 1, every n-th run of RUN of them."""
    if split.seekable and stride > 1:
        for first in range(0, split.size, stride * RUN):
            yield from itertools.islice(split.read(Counter(), first), RUN)
        return
    for number, pair in enumerate(split.read(Counter())):
        if number // RUN % stride == 0:
            yield pair
