"""Questions about paragraphs as a source: files of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018), read as published.

The target of a pair is the first answer, with its start; the other answers are further references. Opening a split
reads and checks all of it, so that errors are found before training.
"""

import codecs
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, find, fingerprint
from jformer.data.text import BOMS_REMOVED, admit, decode, open_bytes
from jformer.errors import UserError
from jformer.integrity import parse_json

ANSWERABLE, UNANSWERABLE = "answerable", "unanswerable"
TABS_REPLACED = "texts with TABs, made spaces"
KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number"}


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.json. Raise UserError naming the file and the question for an answer that is not in its context."""
    (path,) = find(config.dir, split, [[f"{split}.json"]])
    read = functools.partial(_read, path, config.invalid)
    for _ in read(Counter()):
        pass
    return Split(split, fingerprint("squad 1", digest(path)[0], config.invalid), read)


def _read(path: Path, invalid: str, counts: Counter[str]) -> Iterator[Pair]:
    with open_bytes(path) as stream:
        content = stream.read()
    if content.startswith(codecs.BOM_UTF8):
        content = content.removeprefix(codecs.BOM_UTF8)
        counts[BOMS_REMOVED] += 1
    try:
        articles = _value(parse_json(decode(content, invalid)), "data", list, "the file")
        for i, article in enumerate(articles):
            for j, paragraph in enumerate(_value(article, "paragraphs", list, f"data[{i}]")):
                yield from _of_paragraph(paragraph, f"data[{i}].paragraphs[{j}]", invalid, counts)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _of_paragraph(paragraph: Any, where: str, invalid: str, counts: Counter[str]) -> Iterator[Pair]:
    context = _text(_value(paragraph, "context", str, where), invalid, counts, where)
    for number, asked in enumerate(_value(paragraph, "qas", list, where)):
        name = asked.get("id") if isinstance(asked, dict) else None
        at = f"question {name!r}" if isinstance(name, str) else f"{where}.qas[{number}]"
        _value(asked, "id", str, at)
        question = _text(_value(asked, "question", str, at), invalid, counts, at)
        answers = [] if asked.get("is_impossible", False) else _value(asked, "answers", list, at)
        found = [_answer(each, context, at, invalid, counts) for each in answers]
        target, *others = [text for text, _ in found] or [""]
        start, group = (found[0][1], ANSWERABLE) if found else (None, UNANSWERABLE)
        source = f"{question}\t{context}"
        yield Pair(source=source, target=target, group=group, others=tuple(others), start=start)


def _answer(answer: Any, context: str, at: str, invalid: str, counts: Counter[str]) -> tuple[str, int]:
    """Return an answer and its start in the context. Raise ValueError if it is not there."""
    text = _text(_value(answer, "text", str, at), invalid, counts, at)
    start = _value(answer, "answer_start", int, at)
    if not text.strip():
        raise ValueError(f"{at}: the answer is blank; write its text, or 'is_impossible': true")
    if start < 0 or not context.startswith(text, start):
        there = context[max(start, 0) :][: len(text)]
        raise ValueError(
            f"{at}: the context has {there!r:.60} at answer_start={start}, not {text!r:.60}: fix the start or the text"
        )
    return text, start


def _text(text: str, invalid: str, counts: Counter[str], at: str) -> str:
    """Return a text of one line without TABs; offsets of characters do not change."""
    try:
        admitted = admit(text, counts, invalid)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error
    if "\t" in admitted:
        counts[TABS_REPLACED] += 1
    return admitted.replace("\t", " ")


def _value(record: Any, key: str, kind: type, where: str) -> Any:
    """Return the value under a key. Raise ValueError naming the place if it is missing or of another type."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: needs {KINDS[kind]} under {key!r}, as in SQuAD")
    return value
