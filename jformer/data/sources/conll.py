"""Sentences with a tag for each word: files with one word per line (CoNLL), or JSONL.

Opening a split reads and checks all of it, so that errors are found before training.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, find, fingerprint
from jformer.data.text import admit, is_jsonl, read_lines, read_objects
from jformer.errors import UserError
from jformer.integrity import parse_json

COMMENTS = "comment lines skipped"
DOCUMENTS = "document marks skipped"
REPAIRED = "tags I-X that begin a span, made B-X"
DOCUMENT = "-DOCSTART-"
CONLL_U = 10  # columns; the first numbers the words of a sentence, the seventh holds the number of a word's head
BEGIN_OR_INSIDE = re.compile(r"O|[BI]-\S+")


Tagged = tuple[Sequence[str], Sequence[str]]
"""The words of a sentence, and a tag for each."""


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.conll or SPLIT.jsonl, in the folder `config.dir`.

    SPLIT.conll has a word a line, with TABs or spaces between columns: the first is the word, the last its tag. An
    empty line ends a sentence. Lines that begin with -DOCSTART- are skipped, and so are comments: lines with "# " and
    without a TAB in front of a sentence. SPLIT.jsonl has a sentence a line, {"words": [...], "tags": [...]}.

    Where all tags are O, B-X or I-X, an I-X that follows no B-X or I-X begins a span and becomes B-X, which also reads
    IOB1 (Ramshaw and Marcus 1995) as IOB2. A pair is the words and the tags, each joined by spaces.

    Raises UserError for a word without a tag, lines of unequal columns, words that contain white space, and CoNLL-U.
    """
    (path,) = find(config.dir, split, [[f"{split}.conll"], [f"{split}.jsonl"]])
    tags = {tag for _, tags in _read(path, config.invalid, Counter()) for tag in tags}
    repair = all(map(BEGIN_OR_INSIDE.fullmatch, tags))
    identity = fingerprint("conll 1", digest(path)[0], is_jsonl(path), config.invalid)
    return Split(split, identity, functools.partial(_pairs, path, config.invalid, repair))


def repaired(tags: Sequence[str]) -> list[str]:
    """Return the tags of a sentence with B-X for every I-X that follows neither B-X nor I-X.

    >>> repaired(["I-x", "I-x", "O", "I-x", "I-y", "B-y"])
    ['B-x', 'I-x', 'O', 'B-x', 'B-y', 'B-y']
    """
    before = ["O", *tags]
    return [
        f"B-{tag[2:]}" if tag.startswith("I-") and last[1:] != tag[1:] else tag
        for last, tag in zip(before, tags, strict=False)
    ]


def _pairs(path: Path, invalid: str, repair: bool, counts: Counter[str]) -> Iterator[Pair]:
    for words, tags in _read(path, invalid, counts):
        good = repaired(tags) if repair else tags
        if changed := sum(new != old for new, old in zip(good, tags, strict=True)):
            counts[REPAIRED] += changed
        yield Pair(" ".join(words), " ".join(good))


def _read(path: Path, invalid: str, counts: Counter[str]) -> Iterator[Tagged]:
    """Return the sentences of a file, each checked when it is read. Raise UserError with file:line."""
    if not is_jsonl(path):
        return _read_columns(path, invalid, counts)
    return read_objects(path, counts, invalid, functools.partial(_of_object, invalid, counts))


def _read_columns(path: Path, invalid: str, counts: Counter[str]) -> Iterator[Tagged]:
    words: list[str] = []
    tags: list[str] = []
    columns = 0
    for number, line in enumerate(read_lines(path, counts, invalid=invalid), start=1):
        if not line.strip():
            if words:
                yield words, tags
            words, tags = [], []
        elif line.startswith(DOCUMENT):
            if words:
                raise UserError(f"{path}:{number}: {DOCUMENT} inside a sentence: put an empty line before it")
            counts[DOCUMENTS] += 1
        elif not words and line.startswith("# ") and "\t" not in line:
            counts[COMMENTS] += 1
        else:
            cells = line.split("\t") if "\t" in line else line.split()
            if fault := _fault_of(line, cells, columns, first=not words):
                raise UserError(f"{path}:{number}: {fault}")
            columns = len(cells)
            words.append(cells[0])
            tags.append(cells[-1])
    if words:
        yield words, tags


def _fault_of(line: str, cells: Sequence[str], columns: int, first: bool) -> str:
    """Return why a line is not a word and its tag, or why its number of columns differs from earlier lines; else "".

    `first`: whether the line begins a sentence, where CoNLL-U is recognized by its number.
    """
    if first and len(cells) == CONLL_U and cells[0] in ("1", "1-2") and re.fullmatch(r"\d+|_", cells[6]):
        what = "looks like CoNLL-U, whose lines begin with a number and end in notes"
        return f"{what}: give a word and its tag, such as its columns 2 and 4"
    if len(cells) < 2 or not all(map(str.strip, (cells[0], cells[-1]))):
        return f"{line[:80]!r} is not a word and its tag, separated by a TAB or spaces"
    if columns and len(cells) != columns:
        return f"{len(cells)} columns, but earlier lines have {columns}; give all the same number"
    spaced = next((cell for cell in (cells[0], cells[-1]) if cell.split() != [cell]), "")
    return f"{spaced[:80]!r} contains white space, but a word or tag has none; fix the line" if spaced else ""


def _of_object(invalid: str, counts: Counter[str], line: str) -> Tagged:
    """Return the sentence of {"words": [...], "tags": [...]}.

    Raises ValueError for another value, lists of different lengths, and words and tags that are empty or contain white
    space.
    """
    record = parse_json(line)
    both: list[Any] = [record.get(key) for key in ("words", "tags")] if isinstance(record, dict) else [None]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in both):
        raise ValueError('not an object with a list of texts under each of "words" and "tags"')
    words, tags = ([admit(text, counts, invalid) for text in each] for each in both)
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} words but {len(tags)} tags: give every word one")
    for text in (*words, *tags):
        if text.split() != [text]:
            raise ValueError(f"{text[:80]!r} is not a word or tag: it is empty or contains white space")
    return words, tags
