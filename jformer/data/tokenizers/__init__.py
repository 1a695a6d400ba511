"""Tokenizers: text to token ids and back, learned from a corpus and saved with the run.

Every vocabulary of text begins with the same four symbols. `encode` adds only UNK, for tokens that are not in the
vocabulary; `decode` omits the first three and shows UNK as ⁇.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from etils.epath import Path

from jformer import plugins
from jformer.data.tokenizers.image_tokenizer import ImageTokenizer, learn_images
from jformer.data.tokenizers.lists import ByteTokenizer, LabelTokenizer, ListTokenizer, learn_labels, learn_list
from jformer.data.tokenizers.numbers import NumberTokenizer, learn_numbers
from jformer.data.tokenizers.pretrained import FastTokenizer, PiecesTokenizer
from jformer.data.tokenizers.subwords import KINDS, SubwordTokenizer, learn_subwords
from jformer.data.tokenizers.symbols import BOS, EOS, NUM_SYMBOLS, PAD, SYMBOLS, UNK, Symbols, check_stored
from jformer.errors import UserError
from jformer.integrity import parse_object
from jformer.plugins import is_own

BEFORE = ("a", "x", "0", "(", "的")  # what may precede a phrase, within a word and outside

__all__ = [
    "BOS",
    "EOS",
    "NUM_SYMBOLS",
    "PAD",
    "SYMBOLS",
    "TOKENIZERS",
    "UNK",
    "ByteTokenizer",
    "FastTokenizer",
    "ImageTokenizer",
    "LabelTokenizer",
    "ListTokenizer",
    "NumberTokenizer",
    "PiecesTokenizer",
    "SubwordTokenizer",
    "Symbols",
    "Tokenizer",
    "beginning",
    "closed",
    "following",
    "learn",
    "load",
    "spellings",
    "unprefixed",
]


class Tokenizer(Protocol):
    """A vocabulary and the rule that cuts text into its tokens."""

    symbols: Symbols
    mends_spaces: bool  # whether decoding removes the space before punctuation

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


class OwnTokenizer(Protocol):
    """The class of a user-defined tokenizer, which data.tokenizer names as `package.module:Class`.

    It saves a JSON object whose key "kind" is that name and whose other keys are arguments of the class; use `OneFile`
    and `to_json` of `jformer.data.tokenizers.symbols`.
    """

    def learn(self, lines: Iterable[str], size: int, normalization: str, split_digits: bool) -> Tokenizer:
        """Learn a tokenizer, as the function `learn` does; a class method."""

    def __call__(self, **stored: Any) -> Tokenizer:
        """Return the tokenizer that was saved."""


def spellings(tokenizer: Tokenizer, phrase: str) -> list[list[int]]:
    """Return the token sequences that a phrase can have in a text: at its start, after a space, and within a word.

    Those that contain another one are left out; trailing white space is dropped where `closed` drops it.
    """
    if not phrase:
        return []
    cut, phrase = unprefixed(tokenizer), closed(tokenizer, phrase)
    before = [("", ""), *((head, space) for head in BEFORE for space in (" ", ""))]
    whole, heads = cut([f"{head}{space}{phrase}" for head, space in before]), cut([head for head, _ in before])
    found = [ids[len(head) :] for ids, head in zip(whole, heads, strict=True) if ids[: len(head)] == head]
    shortest: list[list[int]] = []
    for ids in sorted(filter(None, found), key=len):
        if not any(one == ids[i : i + len(one)] for one in shortest for i in range(len(ids))):
            shortest.append(ids)
    return shortest


def beginning(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of the beginning of an output, without trailing white space where `closed` drops it."""
    (ids,) = unprefixed(tokenizer)([closed(tokenizer, text)])
    return ids


def following(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that continues another one, perhaps in the middle of a word."""
    cut = unprefixed(tokenizer)
    alone, *whole = cut([text, *(head + text for head in BEFORE)])
    both = zip(cut(BEFORE), whole, strict=True)
    return next((ids[len(head) :] for head, ids in both if ids[: len(head)] == head), alone)


def closed(tokenizer: Tokenizer, text: str) -> str:
    """Return the beginning of a text without trailing white space, if the next token may begin with that space.

    Subwords may; characters and bytes have a token for the space, which stays.
    """
    if text == text.rstrip():
        return text
    (ids,) = unprefixed(tokenizer)([text])
    space = tokenizer.tokens[ids[-1]] if ids else ""
    return text.rstrip() if any(token.startswith(space) and token != space for token in tokenizer.tokens) else text


def unprefixed(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    """Return a function that encodes texts without the prefix that imported tokenizers may prepend."""
    return getattr(tokenizer, "cut", tokenizer.encode)


def learn(
    kind: str, lines: Iterable[str], size: int, normalization: str, split_digits: bool, **subwords: Any
) -> Tokenizer:
    """Learn a tokenizer from text; the same text gives the same bytes.

    Args:
        kind: a key of TOKENIZERS, or `package.module:Class` (see OwnTokenizer).
        lines: the training text, read once.
        size: most ids of a word or subword vocabulary, which is smaller if the text has fewer. For images, the size
            in pixels that all sides are resized to; 0 = all images have one size.
        normalization: "identity" or "nfkc", applied to each text before it is cut.
        split_digits: subwords never join digits.

    Further keyword arguments are those of `learn_subwords`, which other kinds ignore.

    Raises:
        UserError: unknown kind, no text, or a size too small for the symbols and the characters.
    """
    if kind != "image" and size <= NUM_SYMBOLS:
        raise UserError(f"data.vocab_size={size} must be above {NUM_SYMBOLS}, the number of special symbols")
    lines = iter(lines)
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise UserError("the training split holds no text to learn a tokenizer from; check data.dir and data.train")
    lines = itertools.chain([first], lines)
    found = plugins.find("data.tokenizer", kind, TOKENIZERS)
    options = subwords if kind in KINDS else {}
    return (found.learn if is_own(kind) else found)(lines, size, normalization, split_digits, **options)


def load(directory: Path, name: str) -> Tokenizer:
    """Read a saved tokenizer. Raise UserError if there is none or its file is damaged."""
    model, table = directory / f"{name}.model", directory / f"{name}.json"
    path = model if model.exists() else table
    try:
        if path == model:
            return SubwordTokenizer(model.read_bytes())
        stored = parse_object(table.read_bytes())
        check_stored(stored)
        return _from_json(**stored)
    except FileNotFoundError as error:
        raise UserError(f"{directory} holds no tokenizer {name!r} (.model or .json)") from error
    except UserError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f" ({error})" if path == table and type(error) is ValueError else ""
        raise UserError(
            f"{path} is not a jformer tokenizer, or is damaged{reason}; restore it or train again"
        ) from error


def _from_json(kind: str, **stored: Any) -> Tokenizer:
    if is_own(kind):
        return plugins.find("data.tokenizer", kind, {})(**stored)
    return (STORED[kind] if kind in STORED else functools.partial(ListTokenizer, kind))(**stored)


STORED: dict[str, Callable[..., Tokenizer]] = {  # called with the other fields of a JSON file; further kinds are lists
    "byte": ByteTokenizer,
    "fast": FastTokenizer,
    "image": ImageTokenizer,
    "number": NumberTokenizer,
    "pieces": PiecesTokenizer,
    **{kind: functools.partial(LabelTokenizer, kind) for kind in ("label", "labels", "tag")},
}
TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {  # called with the arguments of `learn` after the kind
    "word": lambda lines, size, norm, _: learn_list("word", lines, norm, size - NUM_SYMBOLS),
    "char": lambda lines, _size, norm, _: learn_list("char", lines, norm, None),
    "byte": lambda _lines, _size, norm, _: ByteTokenizer(norm),
    "bpe": functools.partial(learn_subwords, "bpe"),
    "unigram": functools.partial(learn_subwords, "unigram"),
    "label": lambda lines, _size, norm, _: learn_labels("label", lines, norm),
    "labels": lambda lines, _size, norm, _: learn_labels("labels", lines, norm),
    "number": lambda lines, _size, _norm, _: learn_numbers(lines),
    "tag": lambda lines, _size, _norm, _: learn_labels("tag", lines, "identity"),
    "image": lambda lines, size, _norm, _: learn_images(lines, size),
}
