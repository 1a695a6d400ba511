"""Train word vectors on your own text: skip-gram with negative sampling (Mikolov et al. 2013, section 2.2), by gensim.

python -m jformer.skipgram --input=TEXT --output=VECTORS [--size=128] [--window=5] [--negatives=5] [--epochs=10]

TEXT is one file of lines of words, or several separated by commas, plain or .gz. VECTORS is written in word2vec's text
format; a run with the same number of model dimensions starts from it with --config.train.source_vectors=VECTORS.
  --size       dimensions of a vector: the d_model of the run (or its model.recurrent.embedding_size)
  --window     a word predicts up to this many words on either side; the reach of each word is drawn at random
  --negatives  noise words drawn for each pair
  --min_count  rarer words get no vector                                          (5)
  --sample     words more frequent than this share are randomly dropped           (1e-3)
  --rate       the learning rate of SGD, which decays linearly to almost 0        (0.025)
  --seed       the same seed gives the same vectors                               (0)
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jformer.data.progress import counted
from jformer.data.text import read_lines
from jformer.data.tokenizers import word_splitting as words
from jformer.errors import DONE, UserError
from jformer.storage import check_writable, os_errors_as_user_errors, refuse_special, replace_content, writing

LONGEST = 10_000  # words of a line that gensim trains on; it silently drops the rest


@dataclasses.dataclass(frozen=True)
class SkipGramOptions:
    """The flags of the same names."""

    size: int = 128
    window: int = 5
    negatives: int = 5
    min_count: int = 5
    epochs: int = 10
    sample: float = 1e-3
    rate: float = 0.025
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for the first invalid option."""
        for key in ("size", "window", "negatives", "min_count", "epochs"):
            if getattr(self, key) < 1:
                raise UserError(f"--{key}={getattr(self, key)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed={self.seed} must be at least 0 and below 2^32")
        for key in ("sample", "rate"):
            if not 0 < getattr(self, key) <= 1:
                raise UserError(f"--{key}={getattr(self, key)} must be above 0 and at most 1")


def main(argv: list[str] | None = None) -> int:
    """Train vectors, write them and return the exit code: 0, or that of a UserError."""
    parser = argparse.ArgumentParser(
        prog="python -m jformer.skipgram", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    for field in dataclasses.fields(SkipGramOptions):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(argv))
    texts, output = [Path(name) for name in given.pop("input").split(",")], given.pop("output")
    try:
        with os_errors_as_user_errors():
            if "://" in output:
                raise UserError(f"--output={output}: vectors are written to a disk: name a file here, and copy it")
            output = Path(output)
            check_output(output, texts)
            vocabulary, vectors = train_vectors(texts, SkipGramOptions(**given), lambda line: print(line, flush=True))
            write_vectors(output, vocabulary, vectors)
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return error.code
    print(
        f"{output}: {counted(len(vocabulary), 'words')} with {vectors.shape[1]} numbers each; to start a run from them:"
    )
    print(f"  --config.train.source_vectors={output} --config.model.d_model={vectors.shape[1]}")
    return DONE


def check_output(output: Path, texts: list[Path]) -> None:
    """Raise UserError for a file that cannot be written, or that is one of the texts."""
    if any(output.resolve() == text.resolve() for text in texts):
        raise UserError(f"--output={output} is --input: name another file")
    if output.is_dir():
        raise UserError(f"--output={output} is a folder: name a file")
    refuse_special(output)
    check_writable("--output", output.resolve().parent)


class Sentences:
    """The lines of some files as lists of words, read anew each time: gensim passes over the text once per epoch."""

    def __init__(self, texts: list[Path]) -> None:
        """Name the files, which are gunzipped if their names end in .gz."""
        self._texts = texts

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the words of each line, no more than gensim takes at once."""
        for path in self._texts:
            for line in read_lines(path, Counter(), invalid="replace"):
                split = words.split(line)
                for start in range(0, len(split), LONGEST):
                    yield split[start : start + LONGEST]


def train_vectors(
    texts: list[Path], options: SkipGramOptions, log: Callable[[str], None]
) -> tuple[list[str], np.ndarray]:
    """Return the words of some texts, the most frequent first, and their vectors f32 [v d].

    Raises UserError for invalid options, without gensim, and for texts with too few frequent words to train on.
    """
    options.check()
    try:
        from gensim.models import Word2Vec
        from gensim.models.callbacks import CallbackAny2Vec
    except ImportError as error:
        raise UserError('word vectors are trained by gensim: pip install "jformer[skipgram]"') from error
    sentences = Sentences(texts)
    met = Counter(word for sentence in sentences for word in sentence)
    frequent = {word: count for word, count in met.items() if count >= options.min_count}
    if len(frequent) < 2:
        raise UserError(
            f"--input: {counted(len(met), 'words')}, of which {len(frequent)} occur --min_count={options.min_count} "
            "times: give more text, or a lower number"
        )
    if not any(sum(word in frequent for word in sentence) > 1 for sentence in sentences):
        raise UserError("--input: no line has two frequent words: there is nothing to learn from")
    log(f"{counted(sum(frequent.values()), 'words')}, {len(frequent):,} of them different")

    class Epochs(CallbackAny2Vec):
        done, began = 0, time.monotonic()

        def on_epoch_end(self, model: Word2Vec) -> None:
            self.done += 1
            left = (time.monotonic() - self.began) / self.done * (options.epochs - self.done)
            log(f"epoch {self.done} of {options.epochs}: {left:.0f} s left")

    sample = options.sample if options.sample < 1 else 0.0  # from 1 on, gensim treats it as a count, not a share
    # One worker: with several, the order of updates and so the vectors depend on how threads are scheduled.
    model = Word2Vec(
        sg=1, hs=0, vector_size=options.size, window=options.window, negative=options.negatives, sample=sample,
        min_count=options.min_count, alpha=options.rate, min_alpha=1e-4 if options.rate > 1e-4 else options.rate / 250,
        seed=options.seed, workers=1,
    )  # fmt: skip
    model.build_vocab_from_freq(frequent)
    model.train(
        sentences, total_words=sum(met.values()), epochs=options.epochs, start_alpha=options.rate, callbacks=[Epochs()]
    )
    return model.wv.index_to_key, model.wv.vectors


def write_vectors(path: Path, vocabulary: list[str], vectors: np.ndarray) -> None:
    """Write word2vec's text format, whole or not at all."""
    lines = [f"{len(vocabulary)} {vectors.shape[1]}"]
    lines += [f"{word} {' '.join(f'{x:.6g}' for x in row)}" for word, row in zip(vocabulary, vectors, strict=True)]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_content(path, ("\n".join(lines) + "\n").encode())
