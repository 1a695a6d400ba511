"""Tokenizers: text to token ids and back, learned from a corpus, saved with the run. No padding and no batches.

Every vocabulary of text begins with the same four symbols. `encode` adds none of them but UNK, for what the training
text did not hold; `decode` leaves the first three out and shows UNK as ⁇.
"""

import functools
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from etils.epath import Path

from jformer.data import words
from jformer.data.images import ImageTokenizer, learn_images
from jformer.data.subwords import SubwordTokenizer, learn_subwords
from jformer.data.symbols import BOS, EOS, NUM_SYMBOLS, PAD, SYMBOLS, UNK, UNKNOWN, OneFile, texts_only, to_json
from jformer.errors import UserError

__all__ = [
    "BOS",
    "EOS",
    "NUM_SYMBOLS",
    "PAD",
    "SYMBOLS",
    "TOKENIZERS",
    "UNK",
    "ByteTokenizer",
    "ImageTokenizer",
    "LabelTokenizer",
    "ListTokenizer",
    "SubwordTokenizer",
    "Tokenizer",
    "learn",
    "load",
]

NORMALIZATIONS: dict[str, Callable[[str], str]] = {
    "identity": str,
    "nfkc": functools.partial(unicodedata.normalize, "NFKC"),
}
RULES: dict[str, tuple[Callable[[str], list[str]], Callable[[Iterable[str]], str]]] = {
    "word": (words.split, words.join),
    "char": (list, "".join),
    "label": (lambda text: [text], " ".join),
}


class Tokenizer(Protocol):
    """A vocabulary and the rule that cuts text into its tokens."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, the four symbols included."""

    @property
    def tokens(self) -> list[str]:
        """The written form of every id."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the saved bytes."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; of an image they are an array u8 [h·w·c]."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids."""

    def save(self, directory: Path, name: str) -> None:
        """Write the tokenizer into a directory under a name, for `load`."""


class ListTokenizer(OneFile):
    """Words or characters, numbered as listed. Words lose what spacing `words.join` cannot know; characters nothing."""

    def __init__(self, kind: str, normalization: str, tokens: Sequence[str]) -> None:
        super().__init__(".json", to_json(kind=kind, normalization=normalization, tokens=tokens))
        self._split, self._join = RULES[kind]
        self._normalize = NORMALIZATIONS[normalization]
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens, start=NUM_SYMBOLS)}

    @property
    def vocab_size(self) -> int:
        """The symbols and the list."""
        return NUM_SYMBOLS + len(self._tokens)

    @property
    def tokens(self) -> list[str]:
        """The symbols, then the words or characters."""
        return [*SYMBOLS, *self._tokens]

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Look up each word or character."""
        return [[self._ids.get(token, UNK) for token in self._split(self._normalize(line))] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Join the listed words or characters."""
        return self._join(UNKNOWN if i == UNK else self._tokens[i - NUM_SYMBOLS] for i in texts_only(ids))


class ByteTokenizer(OneFile):
    """The 256 bytes of UTF-8. Nothing is unknown; bytes that do not form a character are decoded as U+FFFD."""

    vocab_size = NUM_SYMBOLS + 256
    tokens = [*SYMBOLS, *(f"<0x{byte:02X}>" for byte in range(256))]  # noqa: RUF012

    def __init__(self, normalization: str) -> None:
        super().__init__(".json", to_json(kind="byte", normalization=normalization))
        self._normalize = NORMALIZATIONS[normalization]

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Number the bytes after the symbols."""
        return [[byte + NUM_SYMBOLS for byte in self._normalize(line).encode()] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Read the bytes as UTF-8."""
        pieces = (UNKNOWN.encode() if i == UNK else bytes([i - NUM_SYMBOLS]) for i in texts_only(ids))
        return b"".join(pieces).decode(errors="replace")


class LabelTokenizer(ListTokenizer):
    """Labels, each a whole text, numbered as listed. What is not listed is refused, for no label stands for it."""

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Look up each label. Raise UserError for the first that training did not hold."""
        ids = super().encode(lines)
        if [UNK] in ids:
            known = ", ".join(map(repr, self.tokens[NUM_SYMBOLS:][:_MAX_LABELS_SHOWN]))
            more = self.vocab_size - NUM_SYMBOLS - _MAX_LABELS_SHOWN
            raise UserError(
                f"label {lines[ids.index([UNK])]!r} is none of those trained on: {known}"
                f"{f' and {more} more' if more > 0 else ''}; mend the data, or train with it"
            )
        return ids


_MAX_LABELS_SHOWN = 20


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
        return _from_json(**json.loads(table.read_bytes()))
    except FileNotFoundError as error:
        raise UserError(f"{directory} holds no tokenizer {name!r} (.model or .json)") from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a tokenizer of ours, or is damaged; restore it or train anew") from error


def _from_json(kind: str, **stored: Any) -> Tokenizer:
    match kind:
        case "byte":
            return ByteTokenizer(**stored)
        case "image":
            return ImageTokenizer(**stored)
        case "label":
            return LabelTokenizer(kind, **stored)
    return ListTokenizer(kind, **stored)


def _learn_labels(lines: Iterable[str], normalization: str) -> LabelTokenizer:
    labels = {NORMALIZATIONS[normalization](line) for line in lines if line.strip()}
    return LabelTokenizer("label", normalization, sorted(labels))


def _learn_list(kind: str, lines: Iterable[str], normalization: str, limit: int | None) -> ListTokenizer:
    split, normalize = RULES[kind][0], NORMALIZATIONS[normalization]
    counts = Counter(token for line in lines for token in split(normalize(line)))
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    return ListTokenizer(kind, normalization, by_frequency[:limit])


TOKENIZERS: dict[str, Callable[[Iterable[str], int, str, bool], Tokenizer]] = {
    "word": lambda lines, size, norm, _: _learn_list("word", lines, norm, size - NUM_SYMBOLS),
    "char": lambda lines, _size, norm, _: _learn_list("char", lines, norm, None),
    "byte": lambda _lines, _size, norm, _: ByteTokenizer(norm),
    "bpe": functools.partial(learn_subwords, "bpe"),
    "unigram": functools.partial(learn_subwords, "unigram"),
    "label": lambda lines, _size, norm, _: _learn_labels(lines, norm),
    "image": lambda lines, _size, _norm, _: learn_images(lines),
}
