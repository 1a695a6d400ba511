"""Open and tokenize the texts of a run: the training texts and the validation texts."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from etils.epath import Path

from jformer import plugins
from jformer.config import load_config, resolve
from jformer.config.options import Config, TrainConfig
from jformer.config.resume import differences
from jformer.data.cleaning import cleaned, write_examples
from jformer.data.corpus import Corpus, locked, open_corpus, prepare_shard
from jformer.data.data_config import OF_VOCABULARY, READ_TARGETS, DataConfig, SourceConfig
from jformer.data.draws import shares_of
from jformer.data.encoders import ExampleEncoder
from jformer.data.pipeline import Batches, make_batches
from jformer.data.preparation import Shard
from jformer.data.progress import show_progress
from jformer.data.repeats import duplicate_warnings, hashes
from jformer.data.sources import open_split
from jformer.data.sources.split import SIDES, Split
from jformer.data.tokenizers import SubwordTokenizer, Tokenizer
from jformer.data.tokenizers.bpe_dropout import BpeDropout
from jformer.data.vocabularies import copy_tokenizers, directed, learn_tokenizers, load_tokenizers
from jformer.errors import UserError
from jformer.integrity import DIGESTS, damaged, digest_of
from jformer.storage import run_path
from jformer.tasks.build import build_task
from jformer.tasks.split_loss import evaluation_batches
from jformer.tasks.task import Task

LEARNED = "tokenizers 2"  # in the key of learned tokenizers; changed when the same options give others


@dataclasses.dataclass(frozen=True)
class Data:
    """The text of a run, ready to train on."""

    tokenizers: tuple[Tokenizer, Tokenizer]
    corpora: list[Corpus]  # to train on
    batches: Batches
    valid: dict[str, Batches]  # of each corpus with a validation set; none without validations
    texts: dict[str, Corpus]  # by role: the training texts and the validation texts
    repeats: list[str]  # warnings about repeated pairs


def fingerprints(data: Data) -> dict[str, str]:
    """Return fingerprints of the texts and tokenizers, which must be the same in all processes."""
    sides = {f"the {side} tokenizer": each.fingerprint for side, each in zip(SIDES, data.tokenizers, strict=True)}
    return sides | {name: corpus.fingerprint for name, corpus in data.texts.items()}


def open_data(data: DataConfig, train: TrainConfig, seed: int, task: Task, workdir: Path, learned: bool) -> Data:
    """Open every split first, to find missing files early; then the tokenizers and the token arrays.

    Args:
        data: the text, and how it is batched.
        train: whether there are validations, in how many microbatches, and whose tokenizers a child run copies.
        seed: of the batches.
        task: how examples become tokens and arrays.
        workdir: of the run, whose tokenizers are in its folder `tokenizer`.
        learned: whether they exist; otherwise they are learned or copied now.
    """
    parts = data.trained()
    with show_progress("reading the text"):
        training = list(_open_training(parts, task, data.cache_dir, workdir if not learned else None))
        tests = _open_tests(data)
        validation = data.validation_sets() if train.eval_every else {}
        valid = {name: open_split(part, part.valid) for name, part in validation.items()}
    tokenizers = _open_tokenizers(workdir / "tokenizer", data, train, training, task, learned)
    refuse_several_beginnings([directed(tokenizers, data, data.languages(part))[1] for part in data.parts()])
    towards = [directed(tokenizers, data, data.languages(part)) for part in parts]
    cuts = [
        [open_corpus(split, encoder, data.cache_dir) for encoder in _encoders(task, pair, data)]
        for split, pair in zip(training, towards, strict=True)
    ]
    corpora = [first for first, *_ in cuts]
    with show_progress("planning the batches"):
        shares = shares_of([len(corpus) for corpus in corpora], data.mixture_temperature)
        weights = [
            part.weight * share / len(each) for part, share, each in zip(parts, shares, cuts, strict=True) for _ in each
        ]
        features = task.features(*towards[0])
        batches = make_batches([corpus for each in cuts for corpus in each], weights, data, seed, features)
    numbers = [f" {i + 1}" if len(parts) > 1 else "" for i in range(len(parts))]  # names in a mixture may repeat
    names = [f"training text{number} {split.name}" for number, split in zip(numbers, training, strict=True)]
    texts, scored, valid_batches = dict(zip(names, corpora, strict=True)), dict[str, np.ndarray](), dict[str, Batches]()
    trained_on = {name: corpus.pairs for name, corpus in texts.items()}
    for key, split in valid.items():
        name = f"validation text {split.name}" + (f" {key}" if len(valid) > 1 else "")
        pair = directed(tokenizers, data, data.languages(validation[key]))
        valid_batches[key], texts[name] = evaluation_batches(data, task, pair, split, train.accumulation)
        scored[name] = texts[name].pairs
    with show_progress("reading the test sets"):
        scored |= {f"test set {key}": hashes(split.read(Counter())) for key, split in tests.items()}
    return Data(
        tokenizers=tokenizers,
        corpora=corpora,
        batches=batches,
        valid=valid_batches,
        texts=texts,
        repeats=duplicate_warnings(trained_on, scored),
    )


def prepare_data(config: Config, shard: Shard) -> None:
    """Tokenize the training text, or a share of it, which `open_data` then finds in `data.cache_dir`.

    Shards may be prepared at the same time, on several machines. One of them learns the tokenizers.
    """
    config, _ = with_vocabulary_of_parent(config)
    data, task, parts = config.data, build_task(config), config.data.trained()
    with show_progress("reading the text"):
        training = list(_open_training(parts, task, data.cache_dir, None))
    options = [LEARNED, [split.fingerprint for split in training], repr(data), config.train.init_from, *_given(config)]
    directory = run_path(data.cache_dir) / f"{digest_of(options)}.tokenizer"
    with locked(directory, "waiting for another shard that learns the tokenizers"):
        learned = (directory / DIGESTS).exists() and not damaged(directory)
        tokenizers = _open_tokenizers(directory, data, config.train, training, task, learned)
    for part, split in zip(parts, training, strict=True):
        for encoder in _encoders(task, directed(tokenizers, data, data.languages(part)), data):
            prepare_shard(split, encoder, data.cache_dir, shard)


def _given(config: Config) -> Iterator[str]:
    """Yield digests of what tokenizers are made of besides the text: a given or inherited vocabulary, your own code."""
    files = [Path(config.data.vocabulary).expanduser()] * bool(config.data.vocabulary)
    files += [run_path(config.train.init_from) / "tokenizer" / DIGESTS] * bool(config.train.init_from)
    yield from (hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file())
    if plugins.is_own(config.data.tokenizer):
        plugins.find("data.tokenizer", config.data.tokenizer, {})
        yield from plugins.digests([config.data.tokenizer]).values()


def with_vocabulary_of_parent(config: Config) -> tuple[Config, list[str]]:
    """Return a new run's config with the options of the vocabulary that it inherits from its parent; and a note.

    Raises UserError for a vocabulary or symbols that the parent lacks.
    """
    data, parent = config.data, run_path(config.train.init_from)
    if not config.train.init_from or not (parent / "config.json").exists():
        return config, []
    old = load_config(parent / "config.json").data
    if "image" in (data.tokenizer, old.tokenizer):
        return config, []
    taken = f"train.init_from={str(parent)!r} brings its vocabulary"
    if data.vocabulary not in ("", old.vocabulary):
        raise UserError(f"data.vocabulary={data.vocabulary!r} cannot be used, as {taken}: leave one of them out")
    tokenizers = load_tokenizers(parent / "tokenizer") if data.symbols else ()
    lacking = set(data.symbols).difference(*(each.tokens for each in tokenizers))
    if lacking:
        raise UserError(
            f"data.symbols: {taken}, which lacks {min(lacking)!r}: train that run with it, or if it was imported, add "
            "it by `python -m jformer.hf extend`"
        )
    symbols = tuple(dict.fromkeys((*old.symbols, *data.symbols)))
    new = dataclasses.replace(data, **{key: getattr(old, key) for key in OF_VOCABULARY} | {"symbols": symbols})
    child = resolve(dataclasses.replace(config, data=new))
    changed = [f"{key}={after!r}, not {before!r}" for key, (before, after) in differences(config, child).items()]
    return child, [f"{taken}: {'; '.join(changed)}"] * bool(changed)


def _open_tokenizers(
    directory: Path, data: DataConfig, train: TrainConfig, training: Sequence[Split], task: Task, learned: bool
) -> tuple[Tokenizer, Tokenizer]:
    """Open the tokenizers in a directory, learning or copying them first unless they are there (`learned`)."""
    if learned:
        return load_tokenizers(directory)
    if train.init_from:
        parent = run_path(train.init_from) / "tokenizer"
        return copy_tokenizers(parent, directory, data, training, task.vocabularies)
    return learn_tokenizers(directory, data, training, task.vocabularies)


def _encoders(task: Task, pair: tuple[Tokenizer, Tokenizer], data: DataConfig) -> Iterator[ExampleEncoder]:
    """Yield an encoder for each segmentation, with its own tokenizers: draws of BPE-dropout depend on the order."""
    return (task.encoder(*each) for each in segmentations(pair, data))


def _open_training(parts: Sequence[SourceConfig], task: Task, cache_dir: str, workdir: Path | None) -> Iterator[Split]:
    """Yield the training splits, cleaned; with a workdir, examples of dropped pairs are written there.

    Raises UserError for a rule that reads targets that are not texts of their own.
    """
    for number, part in enumerate(parts, start=1):
        for rule in part.clean:
            if task.labels and rule.startswith(READ_TARGETS):
                raise UserError(
                    f"data.clean: {rule!r} reads a target text, and the targets of this task are none: leave it out"
                )
        split = open_split(part, part.train)
        kept = cleaned(split, part.clean, cache_dir, task.labels, part.several_lines())
        if workdir:
            write_examples(split, kept, workdir / f"cleaned{number if len(parts) > 1 else ''}.jsonl")
        yield kept


def segmentations(tokenizers: tuple[Tokenizer, Tokenizer], data: DataConfig) -> Iterator[tuple[Tokenizer, Tokenizer]]:
    """Yield the tokenizers of the training text: the run's, or with BPE-dropout several, each for the whole text.

    Raises UserError for tokenizers not learned here, which BPE-dropout cannot segment.
    """
    if not data.bpe_dropout:
        yield tokenizers
        return

    def dropping(number: int, side: int) -> Tokenizer:
        tokenizer = tokenizers[side]
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.kind == "bpe" and tokenizer.starts_words:
            return BpeDropout(tokenizer, data.bpe_dropout, f"{number} {side}")
        raise UserError(
            "data.bpe_dropout needs a BPE model of sentencepiece whose pieces have spaces at their start only, which "
            f"that of {'data.vocabulary' if data.vocabulary else 'train.init_from'} is not: set it to 0"
        )

    for number in range(data.segmentations):
        yield dropping(number, 0), dropping(number, 1)


def refuse_several_beginnings(targets: Sequence[Tokenizer]) -> None:
    """Raise UserError for targets that begin with different tokens in place of BOS, as languages of the first mBART."""
    if len({target.symbols.bos for target in targets}) > 1:
        raise UserError(
            "data.mixture: this vocabulary has the target language in place of BOS, which all rows of a batch share: "
            "give all corpora one target language, those that are only scored too, or start from mBART-50"
        )


def _open_tests(data: DataConfig) -> dict[str, Split]:
    """Open the test sets. Raise UserError for one without any example, before training rather than when scoring."""
    found: dict[str, Split] = {}
    for key, (part, name) in data.test_sets().items():
        found[key] = open_split(part, name)
        if next(found[key].read(Counter()), None) is None:
            raise UserError(f"data.test: the set {key!r} ({name}) holds no example; give it some or leave it out")
    return found
