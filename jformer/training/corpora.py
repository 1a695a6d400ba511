"""The texts of a run, opened and tokenized: those that are trained on, and the one for validation."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from etils.epath import Path

from jformer.config.options import Config
from jformer.data.corpus import SIDES, Corpus, open_corpus
from jformer.data.data_config import DataConfig
from jformer.data.pipeline import Batches, make_batches
from jformer.data.progress import show_progress
from jformer.data.repeats import hashes, told
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers import SubwordTokenizer, Tokenizer
from jformer.data.tokenizers.bpe_dropout import BpeDropout
from jformer.data.vocabularies import copy_tokenizers, learn_tokenizers, load_tokenizers
from jformer.errors import UserError
from jformer.evaluation.split_loss import evaluation_batches
from jformer.storage import run_path
from jformer.tasks.task import Task

LABELLED = 1_000  # first examples among which those of each label are looked for
PROMPT = 40  # characters of a validation text that a language model is shown going on from


@dataclasses.dataclass(frozen=True)
class Data:
    """The text of a run, ready to train on."""

    tokenizers: tuple[Tokenizer, Tokenizer]
    corpora: list[Corpus]  # that are trained on
    batches: Batches
    valid: Batches | None
    texts: dict[str, Corpus]  # by what it is for: those trained on, and the one for validation
    answered: list[Pair]  # validation examples that are answered at every validation
    repeats: list[str]  # what is to be told of pairs that come more than once


def fingerprints(data: Data) -> dict[str, str]:
    """Return what identifies the text and the tokenizers that all processes must have."""
    sides = {f"the {side} tokenizer": each.fingerprint for side, each in zip(SIDES, data.tokenizers, strict=True)}
    return sides | {name: corpus.fingerprint for name, corpus in data.texts.items()}


def open_data(config: Config, task: Task, workdir: Path, learned: bool) -> Data:
    """Open every split, so that a missing file is known now; then the tokenizers and the token arrays.

    The tokenizers are in the workdir if they are `learned`, else they are learned now.
    """
    data = config.data
    parts = (data, *data.mixture)
    with show_progress("reading the text"):
        training = [open_split(part, part.train) for part in parts]
        refuse_empty_sets(data)
        valid = open_split(data, data.valid) if config.train.eval_every else None
    directory, text = workdir / "tokenizer", (data, training, task.vocabularies)
    if learned:
        tokenizers = load_tokenizers(directory)
    elif config.train.init_from:
        tokenizers = copy_tokenizers(run_path(config.train.init_from) / "tokenizer", directory, *text)
    else:
        tokenizers = learn_tokenizers(directory, *text)
    cuts = [  # by tokenizers of its own, as what BPE-dropout draws depends on the texts before
        [open_corpus(split, task.encoder(*each), data.cache_dir) for each in cutting(tokenizers, data)]
        for split in training
    ]
    corpora = [first for first, *_ in cuts]
    with show_progress("planning the batches"):
        weights = [part.weight / len(each) for part, each in zip(parts, cuts, strict=True) for _ in each]
        features = task.features(*tokenizers)
        batches = make_batches([corpus for each in cuts for corpus in each], weights, data, config.seed, features)
    numbers = [f" {i + 1}" if len(parts) > 1 else "" for i in range(len(parts))]  # of a mixture, names may be the same
    names = [f"training text{number} {split.name}" for number, split in zip(numbers, training, strict=True)]
    trained_on = dict(zip(names, corpora, strict=True))
    texts, scored, valid_batches = dict(trained_on), dict[str, np.ndarray](), None
    if valid is not None:
        name = f"validation text {valid.name}"
        valid_batches, texts[name] = evaluation_batches(config, task, tokenizers, valid)
        scored[name] = texts[name].pairs
    with show_progress("reading the test sets"):
        tests = {f"test set {key}": open_split(data, split) for key, split in data.test_splits().items()}
        scored |= {name: hashes(split.read(Counter())) for name, split in tests.items()}
    return Data(
        tokenizers=tokenizers,
        corpora=corpora,
        batches=batches,
        valid=valid_batches,
        texts=texts,
        answered=[] if valid is None else answered_examples(config, task, valid),
        repeats=told({name: corpus.pairs for name, corpus in trained_on.items()}, scored),
    )


def cutting(tokenizers: tuple[Tokenizer, Tokenizer], data: DataConfig) -> Iterator[tuple[Tokenizer, Tokenizer]]:
    """Yield what cuts the training text: the run's tokenizers, or with BPE-dropout several that each cut all of it.

    Raises UserError for tokenizers that came with other weights and are no BPE.
    """
    if not data.bpe_dropout:
        yield tokenizers
        return

    def dropping(number: int, side: int) -> Tokenizer:
        tokenizer = tokenizers[side]
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.kind == "bpe":
            return BpeDropout(tokenizer, data.bpe_dropout, f"{number} {side}")
        raise UserError("data.bpe_dropout: the tokenizers of train.init_from are no BPE of sentencepiece: set it to 0")

    for number in range(data.segmentations):
        yield dropping(number, 0), dropping(number, 1)


def refuse_empty_sets(data: DataConfig) -> None:
    """Raise UserError for a test set without any example, which would be found out when the run is scored."""
    for key, name in data.test_splits().items():
        if next(open_split(data, name).read(Counter()), None) is None:
            raise UserError(f"data.test: the set {key!r} ({name}) holds no example; give it some or leave it out")


def answered_examples(config: Config, task: Task, valid: Split) -> list[Pair]:
    """Return the first examples of the validation text: as many as are shown, or scored if those are more.

    Labels that are shown and not scored are the first ones of each, as a text may be sorted by them.
    """
    count = max(config.train.samples, config.evaluate.during_examples if config.evaluate.during else 0)
    if not (task.answer and count):
        return []
    read = valid.read(Counter())
    if task.answer in ("label", "labels") and not config.evaluate.during:
        return of_each_label(list(itertools.islice(read, max(count, LABELLED))))[:count]
    examples = list(itertools.islice(read, count))
    return [Pair(prompt(pair.target), "") for pair in examples] if task.answer == "continuation" else examples


def of_each_label(examples: Sequence[Pair]) -> list[Pair]:
    """Return the examples in turns: the first one of each label, then the second ones, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for pair in examples:
        turns.append(seen[pair.target])
        seen[pair.target] += 1
    return [examples[i] for i in sorted(range(len(examples)), key=turns.__getitem__)]


def prompt(text: str) -> str:
    """Return the first PROMPT characters of a text, without a word that they cut.

    >>> prompt("It was the best of times, it was the worst of times")
    'It was the best of times, it was the'
    """
    begin = text[:PROMPT]
    cut = len(text) > PROMPT and not text[PROMPT].isspace()
    return begin.rsplit(maxsplit=1)[0] if cut and len(begin.split()) > 1 else begin
