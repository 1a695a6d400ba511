"""Text files as sources: sentence pairs, and texts with labels; two parallel files, a TSV or a JSONL.

Opening a split finds its files, fingerprints them and checks that both sides have the same number of lines; reading
yields the pairs and raises errors with file:line.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, find, fingerprint
from jformer.data.text import admit, is_jsonl, read_lines, read_objects
from jformer.data.tokenizers.numbers import is_number
from jformer.errors import UserError
from jformer.integrity import parse_json


def open_files(config: SourceConfig, split: str) -> Split:
    """Open sentence pairs: SPLIT.en with SPLIT.de (line n of one translates line n of the other), a TSV or a JSONL.

    Further references may be in SPLIT.de.1, SPLIT.de.2 and so on.
    """
    languages = (config.source_language, config.target_language)
    layouts = [[f"{split}.{language}" for language in languages], [f"{split}.tsv"], [f"{split}.jsonl"]]
    paths = find(config.dir, split, layouts)
    if len(paths) == 2:
        paths += further_references(paths[1])
    digests, lines = zip(*map(digest, paths), strict=True)
    if len(set(lines)) > 1:
        sides = " but ".join(f"{path} has {count} lines" for path, count in zip(paths, lines, strict=True))
        raise UserError(f"{sides}: line n of one must translate line n of the other")
    identity = fingerprint("files 2", digests, languages, config.invalid)
    return Split(split, identity, _reader(paths, languages, config.invalid), size=lines[0])


def _reader(
    paths: tuple[Path, ...], languages: tuple[str, str], invalid: str
) -> Callable[[Counter[str]], Iterator[Pair]]:
    if len(paths) > 1:
        return functools.partial(_read_parallel, paths, invalid)
    if is_jsonl(paths[0]):
        return functools.partial(_read_jsonl, paths[0], languages, invalid)
    return functools.partial(_read_tsv, paths[0], invalid)


def further_references(target: Path) -> tuple[Path, ...]:
    """Return the existing files NAME.1, NAME.2 and so on, plain or gzipped."""
    found: list[Path] = []
    while True:
        name = f"{target.name.removesuffix('.gz')}.{len(found) + 1}"
        here = [path for path in (target.with_name(name), target.with_name(f"{name}.gz")) if path.is_file()]
        if not here:
            return tuple(found)
        found.append(here[0])


def _read_parallel(paths: tuple[Path, ...], invalid: str, counts: Counter[str]) -> Iterator[Pair]:
    sides = (read_lines(path, counts, invalid=invalid) for path in paths)
    for source, target, *others in zip(*sides, strict=True):
        yield Pair(source, target, others=tuple(others))


def _read_tsv(path: Path, invalid: str, counts: Counter[str]) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path, counts, invalid=invalid), start=1):
        texts = line.split("\t")
        if len(texts) != 2:
            raise UserError(f"{path}:{number}: {len(texts) - 1} TABs; a line is source, one TAB, target")
        yield Pair(texts[0], texts[1])


def _read_jsonl(path: Path, languages: tuple[str, str], invalid: str, counts: Counter[str]) -> Iterator[Pair]:
    for _, (source, target) in read_objects(
        path, counts, invalid, lambda line: _json_texts(line, languages, invalid, counts)
    ):
        yield Pair(source, target)


def _json_texts(line: str, languages: tuple[str, str], invalid: str, counts: Counter[str]) -> list[str]:
    """Return both texts of {"en": …, "de": …} or {"translation": {"en": …, "de": …}}. Raise ValueError otherwise."""
    record = parse_json(line)
    record = record.get("translation", record) if isinstance(record, dict) else record
    if not isinstance(record, dict) or not all(isinstance(record.get(language), str) for language in languages):
        raise ValueError(f"not an object with a text under each of {' and '.join(map(repr, languages))}")
    return [admit(record[language], counts, invalid) for language in languages]


def open_labelled(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.tsv or SPLIT.jsonl: one or two texts, then a label."""
    languages = (config.source_language, config.target_language)
    (path,) = find(config.dir, split, [[f"{split}.tsv"], [f"{split}.jsonl"]])
    sha256, lines = digest(path)
    identity = fingerprint("labelled 2", sha256, languages, config.invalid)
    return Split(split, identity, functools.partial(_read_labelled, path, languages, config), size=lines)


def _read_labelled(
    path: Path, languages: tuple[str, str], config: SourceConfig, counts: Counter[str]
) -> Iterator[Pair]:
    as_jsonl = ("\t".join(pair[:2]) for pair in _read_jsonl(path, languages, config.invalid, counts))
    lines = as_jsonl if is_jsonl(path) else read_lines(path, counts, invalid=config.invalid)
    columns = 0
    for number, line in enumerate(lines, start=1):
        *texts, label = line.split("\t")
        columns = columns or len(texts) + 1
        if len(texts) not in (1, 2) or not (label.strip() or config.labels == "several"):
            raise UserError(
                f"{path}:{number}: {line[:80]!r} is not one or two texts and then a label, TABs between them"
            )
        if len(texts) + 1 != columns:
            raise UserError(
                f"{path}:{number}: {len(texts) + 1} columns, where line 1 has {columns}; give all the same number"
            )
        if config.labels == "number" and not is_number(label):
            raise UserError(f"{path}:{number}: label {label[:40]!r}: data.labels='number' needs a finite number")
        yield Pair("\t".join(texts), label)
