"""The special symbols of vocabularies, and the file format that all tokenizers share."""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from etils.epath import Path

from jformer.storage import replace_content

PAD, BOS, EOS, UNK = range(4)
SYMBOLS = ("<pad>", "<s>", "</s>", "<unk>")
NUM_SYMBOLS = len(SYMBOLS)
LISTED = ("before", "after", "between", "noise")  # fields that hold several symbols
UNKNOWN = "⁇"  # how decoded text shows UNK


class Symbols(NamedTuple):
    """The special ids of a vocabulary, some of which may be equal. The defaults are those of jformer's tokenizers.

    An encoder reads (bos, if the task needs it), before, text, eos, after; a decoder reads bos first.
    """

    pad: int = PAD  # padding, never decoded; may be past the vocabulary
    bos: int = BOS
    eos: int = EOS
    unk: int = UNK  # -1: nothing is unknown
    before: tuple[int, ...] = ()  # such as a language; a search begins with it
    after: tuple[int, ...] = ()
    between: tuple[int, ...] = ()  # before every text of an example but the first
    noise: tuple[int, ...] = ()  # masks or sentinels, in order; without any, ids past the vocabulary serve

    @property
    def ids(self) -> set[int]:
        """All of them."""
        return {i for each in self for i in (each if isinstance(each, tuple) else (each,))}


class OneFile:
    """Base of tokenizers that are saved as one file, whose digest is the fingerprint."""

    symbols = Symbols()
    mends_spaces = False
    _replaced = b""  # symbols that replace the file's

    def __init__(self, suffix: str, content: bytes) -> None:
        self._suffix, self._content = suffix, content

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the file, and of the symbols that replace those in it."""
        return hashlib.sha256(self._content + self._replaced).hexdigest()

    def with_symbols(self, **replaced: int | tuple[int, ...]) -> Self:
        """Return the tokenizer with other symbols around its texts, such as another language; its file is the same."""
        other = copy.copy(self)
        other.symbols = self.symbols._replace(**replaced)  # type: ignore[arg-type]
        other._replaced = to_json(symbols=other.symbols) if other.symbols != self.symbols else self._replaced
        return other

    def save(self, directory: Path, name: str) -> None:
        """Write the file into a directory under a name."""
        replace_content(directory / f"{name}{self._suffix}", self._content)


def to_json(**content: object) -> bytes:
    """Return the content of a tokenizer's file."""
    return json.dumps(content, ensure_ascii=False, indent=0).encode()


def check_stored(stored: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of a tokenizer's file with a value of the wrong type."""
    lists = {"tokens": str, "specials": str, "added": str, "counts": int, "shape": int, "kept": int}
    plain = {"kind": str, "normalization": str, "content": str, "prefix": str, "model": str, "mean": float}
    for key, value in stored.items():
        if key in lists and (not isinstance(value, list) or not all(type(each) is lists[key] for each in value)):
            raise ValueError(f"{key} must be a list of {lists[key].__name__}")
        if key in plain and not isinstance(value, plain[key]):
            raise ValueError(f"{key} must not be {type(value).__name__}")
        if key in ("ids", "symbols") and not isinstance(value, dict):
            raise ValueError(f"{key} must be an object")
    roles = {key: value if key in LISTED else [value] for key, value in stored.get("symbols", {}).items()}
    ids = [*stored.get("ids", {"": 0}).values(), *(each for role in roles.values() for each in role)]
    if stored.get("ids") == {} or any(type(each) is not int for each in ids):
        raise ValueError("ids must not be empty, and must be whole numbers")


def texts_only(ids: Sequence[int]) -> Iterator[int]:
    """Drop PAD, BOS and EOS."""
    return (i for i in ids if i not in (PAD, BOS, EOS))
