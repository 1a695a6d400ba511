"""The run's tokenizers: learned once from the training text, saved with the run, and read back ever after.

A task says which there are: "shared" for both sides or for the only one that holds text, or "source" and "target".
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from etils.epath import Path

from jformer.data.data_config import DataConfig
from jformer.data.progress import show_progress
from jformer.data.sources.split import Split
from jformer.data.tokenizers import Tokenizer, learn, load
from jformer.errors import UserError
from jformer.integrity import damaged, seal

OWN = ("label", "labels", "number", "tag", "image")  # kinds that a run learns anew: they describe its own examples


class VocabularySpec(NamedTuple):
    """What a tokenizer is learned from."""

    kind: str  # a key of tokenizers.TOKENIZERS
    sides: tuple[str, ...]  # "source", "target" or both
    parts: bool = False  # TABs separate texts
    cut: Callable[[str], list[str]] | None = None  # into words that are encoded one by one: it learns them with spaces


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
    """Take over another run's tokenizers: its parameters mean nothing under another vocabulary.

    Where it has but a shared one, that serves for a single side too; where it has two that cut texts in two ways into
    one vocabulary (Marian, NLLB), they are the shared one. Labels, tags and images are learned anew.

    Args:
        parent: the directory of the other run's tokenizers.
        directory: where they are saved; what was there is removed.
        config: the options of what is learned anew.
        training: the text that it is learned from.
        vocabularies: file name → which tokenizer the task wants there.

    Raises:
        UserError: there is no such run, its files are damaged, or it has two vocabularies where one table is wanted.
    """
    if not parent.is_dir():
        raise UserError(f"{parent}: no such directory; train.init_from must name the workdir of a run")
    for name in damaged(parent):
        raise UserError(f"{parent / name} is damaged: restore it, or begin with another run")
    _empty(directory)
    for name, vocabulary in vocabularies.items():
        if vocabulary.kind in OWN:
            found = {name: _learn(config, training, vocabulary)}
        else:
            found = _taken_over(parent, name, vocabulary.sides)
        for file, tokenizer in found.items():
            tokenizer.save(directory, file)
    seal(directory)
    return load_tokenizers(directory)


def load_tokenizers(directory: Path) -> tuple[Tokenizer, Tokenizer]:
    """Read the saved tokenizers of a run, source and target; they are one if they are shared.

    Raises UserError for a file that is missing, or damaged since the run began.
    """
    for name in damaged(directory):
        state = "damaged: it is not what the run began with" if (directory / name).exists() else "missing"
        raise UserError(f"{directory / name} is {state}; restore it or train anew")
    if _has_shared(directory):
        tokenizer = load(directory, "shared")
        return tokenizer, tokenizer
    return load(directory, "source"), load(directory, "target")


def _taken_over(parent: Path, name: str, sides: tuple[str, ...]) -> dict[str, Tokenizer]:
    """Return the tokenizers that take the place of one, file → tokenizer."""
    if _has_shared(parent):
        return {name: load(parent, "shared")}
    if name != "shared":
        return {name: load(parent, name)}
    if len(sides) == 1:  # which a parent with labels calls its source
        return {name: load(parent, "source")}
    both = {side: load(parent, side) for side in sides}
    if both["source"].tokens != both["target"].tokens:
        raise UserError(f"{parent}: has two vocabularies, which one table cannot hold: set data.vocab_shared=False")
    return both


def _empty(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():  # whose it is, we do not know: rmtree would remove it
        raise UserError(f"{directory} is a file, where a run keeps its tokenizers in a folder: move it away")
    Path(directory).rmtree(missing_ok=True)
    directory.mkdir(parents=True)


def _has_shared(directory: Path) -> bool:
    return any(directory.glob("shared.*"))


def _learn(config: DataConfig, splits: Sequence[Split], vocabulary: VocabularySpec) -> Tokenizer:
    size = config.image_size if vocabulary.kind == "image" else config.vocab_size
    options = (size, config.normalization, config.split_digits)
    with show_progress(f"learning the {vocabulary.kind} tokenizer"):
        return learn(vocabulary.kind, _texts(splits, vocabulary), *options)


def _texts(splits: Sequence[Split], vocabulary: VocabularySpec) -> Iterator[str]:
    for split in splits:
        for pair in split.read(Counter()):
            for side in vocabulary.sides:
                text = getattr(pair, side)
                parts = text.split("\t") if vocabulary.parts else [text]
                yield from (" ".join(vocabulary.cut(part)) for part in parts) if vocabulary.cut else parts
