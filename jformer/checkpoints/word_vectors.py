"""Read pretrained word vectors (word2vec, GloVe, fastText's .vec) for the tokens of a vocabulary.

The format is detected from the content. A first line of two integers, "count size", is word2vec's; the bytes after the
first token distinguish its text and binary forms. Any other first line is GloVe's: a token and its numbers. Files may
hold millions of vectors: they are streamed, and only the wanted ones are parsed and kept.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from jformer.data.text import open_bytes
from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.errors import UserError

WORD_START = "▁"  # sentencepiece's sign for a space

_CHUNK = 1 << 20  # bytes, more than any entry has
_FETCH_AGAIN = "the file is damaged or cut short, fetch it again"


class Vectors(NamedTuple):
    """The vectors of the wanted tokens in a file."""

    found: dict[str, np.ndarray]  # token → f32 [size]
    format: str  # GloVe text | word2vec text | word2vec binary
    rows: int  # vectors in the file
    duplicates: int  # later vectors of a token already found; they are ignored


class Matched(NamedTuple):
    """Vectors for some ids of a vocabulary."""

    ids: np.ndarray  # i32 [n], ascending
    vectors: np.ndarray  # f32 [n size]
    coverage: str  # a line: how many tokens have a vector, and from which file


def match(tokens: Sequence[str], path: Path, size: int) -> Matched:
    """Find the vectors of a vocabulary's tokens in a file.

    A token is looked up as it is, then lower-cased. The symbols, ids 0 to 3, never match. If any token begins with ▁,
    the vocabulary is sentencepiece's: only pieces that begin a word match, without their ▁, because a piece from within
    a word is not the word with the same letters.

    Args:
        tokens: the surface form of every id.
        path: the file of vectors.
        size: dimensions of a vector, which the model needs.

    Raises:
        UserError: the file cannot be used (see `read_vectors`), or has no vector for any token.
    """
    words = _words(tokens)
    file = read_vectors(path, {*words.values(), *(word.lower() for word in words.values())}, size)
    keys = {i: word if word in file.found else word.lower() for i, word in words.items()}
    ids = [i for i, key in keys.items() if key in file.found]
    if not ids:
        raise UserError(
            f"{path}: none of its {file.rows} vectors is for one of the {len(words)} words of the vocabulary; "
            "use vectors of its language, and data.tokenizer=word, bpe or unigram"
        )
    lowered = sum(keys[i] != words[i] for i in ids)
    coverage = (
        f"{len(ids)} of {len(words)} words ({len(ids) / len(words):.1%}) have vectors in {path}: "
        f"{len(ids) - lowered} as they are, {lowered} lower-cased; "
        f"{file.format}, {file.rows} vectors, {file.duplicates} duplicates left out"
    )
    return Matched(np.array(ids, np.int32), np.stack([file.found[keys[i]] for i in ids]), coverage)


def _words(tokens: Sequence[str]) -> dict[int, str]:
    """Return id → word to look up, for the ids that can match."""
    words = dict(enumerate(tokens[NUM_SYMBOLS:], start=NUM_SYMBOLS))
    if any(word.startswith(WORD_START) for word in words.values()):
        words = {i: word.removeprefix(WORD_START) for i, word in words.items() if word.startswith(WORD_START)}
    return {i: word for i, word in words.items() if word}


def read_vectors(path: Path, wanted: Collection[str], size: int) -> Vectors:
    """Stream a file of word vectors, gunzipped if its name ends in .gz, and keep those of the wanted tokens.

    The first vector of a token counts. For unwanted tokens, only the number of fields is checked.

    Raises:
        UserError: the file holds no vectors or vectors of another size, is cut short, or a wanted vector has a number
            that cannot be read or is not finite as a float32; with file:line, or file and entry if it is binary.
    """
    keys = {token.encode(): token for token in wanted}
    found: dict[str, np.ndarray] = {}
    number = duplicates = 0
    with open_bytes(path) as stream:
        layout = _recognise(stream, path, size)
        read, parse = (_binary_rows, _parse_binary) if layout.binary else (_text_rows, _parse_text)
        for number, (key, values) in enumerate(read(stream, layout), start=1):
            token = keys.get(key)
            if token is None:
                continue
            if token in found:
                duplicates += 1
                continue
            try:
                found[token] = parse(values)
            except ValueError as error:
                raise UserError(f"{layout.place(number)}: {error}; {_FETCH_AGAIN}") from error
    if layout.count not in (None, number):
        raise UserError(f"{path}: {number} vectors, but its first line says {layout.count}; {_FETCH_AGAIN}")
    return Vectors(found, layout.format, number, duplicates)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The format of a file."""

    path: Path
    size: int
    count: int | None  # from the header; None for GloVe's files, which have none
    binary: bool

    @property
    def format(self) -> str:
        return "GloVe text" if self.count is None else f"word2vec {'binary' if self.binary else 'text'}"

    def place(self, number: int) -> str:
        """Return the place of an entry, counted from 1, for errors."""
        if self.binary:
            return f"{self.path}, entry {number}"
        return f"{self.path}:{number + (self.count is not None)}"


def _recognise(stream: IO[bytes], path: Path, size: int) -> _Layout:
    """Return the layout of a file and leave the stream at its first entry. Raise UserError for another size."""
    first = stream.readline(_CHUNK)
    header = re.fullmatch(rb"(\d+) (\d+)\s*", first)
    if header:
        count, stored = map(int, header.groups())
        _check_size(f"{path}:1", stored, size)
        entry = stream.read(_CHUNK)
        layout = _Layout(path, size, count, binary=not _is_text(entry, size))
    else:
        entry = first
        layout = _Layout(path, size, None, binary=False)
    stream.seek(len(first) if header else 0)
    if not layout.binary:
        _check_first(layout.place(1), entry.partition(b"\n")[0], size)
    return layout


def _is_text(entry: bytes, size: int) -> bool:
    """Return whether a word2vec file that begins with this entry is text.

    In both forms, the 2·size - 1 bytes after the first space belong to the vector: `size` numbers take at least as many
    as text, and more as float32. For float32 values, not all of these bytes are printable.
    """
    values = entry.partition(b" ")[2][: 2 * size - 1]
    return re.fullmatch(rb"[ -~\t\r\n]*", values) is not None


def _check_first(place: str, line: bytes, size: int) -> None:
    """Raise UserError unless a line is a token and `size` fields, or a token of several words and `size` numbers.

    Later lines are split by the size alone, so longer vectors would pass as tokens with spaces.
    """
    fields = line.rstrip().split(b" ")[1:]
    numbers = sum(1 for _ in itertools.takewhile(_is_number, reversed(fields)))
    if not numbers:
        raise UserError(f"{place} is not a word vector: use a file in GloVe, word2vec or fastText's .vec format")
    if len(fields) != size:
        _check_size(place, numbers, size)


def _check_size(place: str, stored: int, size: int) -> None:
    if stored != size:
        raise UserError(
            f"{place} has vectors of {stored} numbers, the model's are of {size}: use a file with vectors of {size}, "
            f"or set model.d_model (of a recurrent model, model.recurrent.embedding_size) to {stored}"
        )


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _text_rows(stream: IO[bytes], layout: _Layout) -> Iterator[tuple[bytes, bytes]]:
    """Yield the token and the text of the vector of every line: its last `size` fields."""
    for number, line in enumerate(stream, start=1):
        line = line.rstrip()  # word2vec and fastText end every line with a space
        spaces = line.count(b" ")
        if spaces < layout.size:
            raise UserError(f"{layout.place(number)}: {spaces} numbers, not {layout.size}; {_FETCH_AGAIN}")
        *token, values = line.split(b" ", spaces - layout.size + 1)
        yield b" ".join(token), values


def _binary_rows(stream: IO[bytes], layout: _Layout) -> Iterator[tuple[bytes, bytes]]:
    """Yield the token and the bytes of the vector of every entry; a line feed may separate entries."""
    width, buffer, start = 4 * layout.size, b"", 0
    for number in itertools.count(1):
        space = buffer.find(b" ", start)
        if space < 0 or space + width >= len(buffer):
            buffer, start = buffer[start:] + stream.read(_CHUNK), 0
            space = buffer.find(b" ")
            if not buffer.strip(b"\n"):
                return
            if space < 0 or space + width >= len(buffer):
                raise UserError(f"{layout.place(number)} ends within its vector; {_FETCH_AGAIN}")
        token, start = buffer[start:space].removeprefix(b"\n"), space + 1 + width
        yield token, buffer[space + 1 : start]


def _parse_text(values: bytes) -> np.ndarray:
    numbers = [float(field) for field in values.decode(errors="replace").split(" ")]
    with np.errstate(over="ignore"):  # overflow gives inf, which is refused
        return _finite(np.array(numbers, np.float32))


def _parse_binary(values: bytes) -> np.ndarray:
    return _finite(np.frombuffer(values, "<f4").astype(np.float32))


def _finite(vector: np.ndarray) -> np.ndarray:
    """Return a vector. Raise ValueError if it has a number that is not finite."""
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        raise ValueError(f"number {bad[0] + 1} of the vector is {vector[bad[0]]}")
    return vector
