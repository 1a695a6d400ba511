"""Tokenizers: text to token ids and back, learned from a corpus, saved with the run. No padding and no batches.

Every vocabulary begins with the same four symbols. `encode` adds none of them but UNK, for what the training text did
not hold; `decode` leaves the first three out and shows UNK as ⁇.
"""

import functools
import hashlib
import io
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from jformer.data import words
from jformer.errors import UserError

PAD, BOS, EOS, UNK = range(4)
NUM_SYMBOLS = 4
UNKNOWN = "⁇"

NORMALIZATIONS: dict[str, Callable[[str], str]] = {
    "identity": str,
    "nfkc": functools.partial(unicodedata.normalize, "NFKC"),
}
RULES: dict[str, tuple[Callable[[str], list[str]], Callable[[Iterable[str]], str]]] = {
    "word": (words.split, words.join),
    "char": (list, "".join),
}


class Tokenizer(Protocol):
    """A vocabulary and the rule that cuts text into its tokens."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, the four symbols included."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the saved bytes."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids."""

    def save(self, directory: Path, name: str) -> None:
        """Write the tokenizer into a directory under a name, for `load`."""


class _OneFile:
    """A tokenizer is one file, and that file identifies it."""

    def __init__(self, suffix: str, content: bytes) -> None:
        self._suffix, self._content = suffix, content

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._content).hexdigest()

    def save(self, directory: Path, name: str) -> None:
        (directory / f"{name}{self._suffix}").write_bytes(self._content)


class ListTokenizer(_OneFile):
    """Words or characters, numbered as listed. Words lose what spacing `words.join` cannot know; characters nothing."""

    def __init__(self, kind: str, normalization: str, tokens: Sequence[str]) -> None:
        super().__init__(".json", _to_json(kind=kind, normalization=normalization, tokens=tokens))
        self._split, self._join = RULES[kind]
        self._normalize = NORMALIZATIONS[normalization]
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens, start=NUM_SYMBOLS)}

    @property
    def vocab_size(self) -> int:
        """The symbols and the list."""
        return NUM_SYMBOLS + len(self._tokens)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Look up each word or character."""
        return [[self._ids.get(token, UNK) for token in self._split(self._normalize(line))] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Join the listed words or characters."""
        return self._join(UNKNOWN if i == UNK else self._tokens[i - NUM_SYMBOLS] for i in _texts_only(ids))


class ByteTokenizer(_OneFile):
    """The 256 bytes of UTF-8. Nothing is unknown; bytes that do not form a character are decoded as U+FFFD."""

    vocab_size = NUM_SYMBOLS + 256

    def __init__(self, normalization: str) -> None:
        super().__init__(".json", _to_json(kind="byte", normalization=normalization))
        self._normalize = NORMALIZATIONS[normalization]

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Number the bytes after the symbols."""
        return [[byte + NUM_SYMBOLS for byte in self._normalize(line).encode()] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Read the bytes as UTF-8."""
        pieces = (UNKNOWN.encode() if i == UNK else bytes([i - NUM_SYMBOLS]) for i in _texts_only(ids))
        return b"".join(pieces).decode(errors="replace")


class SubwordTokenizer(_OneFile):
    """A sentencepiece model, BPE or unigram, with its normalization inside.

    With identity normalization decoding gives the text back, runs of spaces too. The exception is sentencepiece's own
    sign for a space, ▁ (U+2581): it comes back as a space.
    """

    def __init__(self, model: bytes) -> None:
        super().__init__(".model", model)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def vocab_size(self) -> int:
        """The pieces of the model, the symbols among them."""
        return self._processor.get_piece_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Cut the texts into pieces, on all cores."""
        return self._processor.encode(list(lines))

    def decode(self, ids: Sequence[int]) -> str:
        """Join the pieces."""
        return self._processor.decode([int(i) for i in _texts_only(ids)])


def learn(kind: str, lines: Iterable[str], vocab_size: int, normalization: str, split_digits: bool) -> Tokenizer:
    """Learn a tokenizer from text; the same text gives the same bytes.

    Args:
        kind: a key of TOKENIZERS.
        lines: the training text, read once.
        vocab_size: the most ids a word or subword vocabulary may have; it is smaller where the text holds fewer.
        normalization: "identity" or "nfkc", applied to each text before it is cut.
        split_digits: subwords never join digits.

    Raises:
        UserError: no such kind, no text, or `vocab_size` below what the symbols and the characters need.
    """
    if kind not in TOKENIZERS:
        raise UserError(f"data.tokenizer={kind!r}; choose one of: {', '.join(TOKENIZERS)}")
    if vocab_size <= NUM_SYMBOLS:
        raise UserError(f"data.vocab_size={vocab_size} must be above {NUM_SYMBOLS}, the number of special symbols")
    lines = iter(lines)
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise UserError("the training split holds no text to learn a tokenizer from; look at data.dir and data.train")
    return TOKENIZERS[kind](itertools.chain([first], lines), vocab_size, normalization, split_digits)


def load(directory: Path, name: str) -> Tokenizer:
    """Read a saved tokenizer. Raise UserError if there is none or its file is damaged."""
    model, table = directory / f"{name}.model", directory / f"{name}.json"
    path = model if model.exists() else table
    try:
        if path == model:
            return SubwordTokenizer(model.read_bytes())
        stored = json.loads(table.read_bytes())
        return ByteTokenizer(stored["normalization"]) if stored["kind"] == "byte" else ListTokenizer(**stored)
    except FileNotFoundError as error:
        raise UserError(f"{directory} holds no tokenizer {name!r} (.model or .json)") from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a tokenizer of ours, or is damaged; restore it or train anew") from error


def _learn_list(kind: str, lines: Iterable[str], normalization: str, limit: int | None) -> ListTokenizer:
    split, normalize = RULES[kind][0], NORMALIZATIONS[normalization]
    counts = Counter(token for line in lines for token in split(normalize(line)))
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    return ListTokenizer(kind, normalization, by_frequency[:limit])


def _learn_subwords(
    model_type: str, lines: Iterable[str], vocab_size: int, normalization: str, split_digits: bool
) -> SubwordTokenizer:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_learnable(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # a small text may not hold that many pieces
            character_coverage=1.0,
            max_sentence_length=4 * _MAX_CHARACTERS,  # in bytes; longer lines would be skipped
            normalization_rule_name=normalization,
            remove_extra_whitespaces=False,
            split_digits=split_digits,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            unk_surface=UNKNOWN,
            num_threads=1,  # a unigram model depends on the number of threads
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if not needed:
            raise
        raise UserError(f"data.vocab_size={vocab_size}: the characters of the text alone need {needed[1]}") from error
    return SubwordTokenizer(model.getvalue())


_MAX_CHARACTERS = 4096


def _learnable(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text so that sentencepiece learns from all of it.

    It skips lines that hold ▅ (U+2585), its sign for the unknown, which so remains unknown. And unigram learning takes
    minutes over one line of a million letters, so long lines come in parts.
    """
    for line in lines:
        line = line.replace("▅", " ")
        yield from (line[start : start + _MAX_CHARACTERS] for start in range(0, len(line), _MAX_CHARACTERS))


def _texts_only(ids: Sequence[int]) -> Iterator[int]:
    return (i for i in ids if i not in (PAD, BOS, EOS))


def _to_json(**content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=0).encode()


TOKENIZERS: dict[str, Callable[[Iterable[str], int, str, bool], Tokenizer]] = {
    "word": lambda lines, size, norm, _: _learn_list("word", lines, norm, size - NUM_SYMBOLS),
    "char": lambda lines, _size, norm, _: _learn_list("char", lines, norm, None),
    "byte": lambda _lines, _size, norm, _: ByteTokenizer(norm),
    "bpe": functools.partial(_learn_subwords, "bpe"),
    "unigram": functools.partial(_learn_subwords, "unigram"),
}
