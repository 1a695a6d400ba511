"""The run's tokenizers: learned once from the training text, saved with the run, and read back ever after."""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from jformer.data.config import DataConfig
from jformer.data.sources import Split
from jformer.data.tokenizers import Tokenizer, learn, load
from jformer.errors import UserError


def learn_tokenizers(directory: Path, config: DataConfig, training: Sequence[Split]) -> tuple[Tokenizer, Tokenizer]:
    """Learn the source and target tokenizers from the training text, save them in a new directory and return them."""
    sides = {"shared": ("source", "target")} if config.vocab_shared else {"source": ("source",), "target": ("target",)}
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, read in sides.items():
        options = (config.vocab_size, config.normalization, config.split_digits)
        learn(config.tokenizer, _lines(training, read), *options).save(directory, name)
    return load_tokenizers(directory, config.vocab_shared)


def copy_tokenizers(parent: Path, directory: Path, shared: bool) -> tuple[Tokenizer, Tokenizer]:
    """Take over another run's tokenizers: its parameters mean nothing under another vocabulary."""
    if not parent.is_dir():
        raise UserError(f"{parent}: no such directory; train.init_from must name the workdir of a run")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(parent, directory)
    return load_tokenizers(directory, shared)


def load_tokenizers(directory: Path, shared: bool) -> tuple[Tokenizer, Tokenizer]:
    """Read the saved tokenizers of a run."""
    if shared:
        tokenizer = load(directory, "shared")
        return tokenizer, tokenizer
    return load(directory, "source"), load(directory, "target")


def _lines(splits: Sequence[Split], sides: Sequence[str]) -> Iterator[str]:
    for split in splits:
        for pair in split.read(Counter()):
            for side in sides:
                yield getattr(pair, side)
