"""Text files as sources: sentence pairs, and texts with labels; two parallel files, a TSV or a JSONL.

Opening a split finds its files, fingerprints them and checks that both sides have the same number of lines; reading
yields the pairs and raises errors with file:line.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, find_shards, fingerprint, of_shards
from jformer.data.text import admit, is_jsonl, packed_forms, read_lines, read_objects, seekable, unpacked_name
from jformer.data.tokenizers.numbers import is_number
from jformer.errors import UserError
from jformer.integrity import parse_json

TABLES: list[tuple[str, ...]] = [(".tsv",), (".jsonl",)]


class Shard(NamedTuple):
    """The files of a shard of a split, all with the same number of lines."""

    paths: tuple[Path, ...]
    lines: int
    starts: tuple[tuple[int, ...], ...]  # of each file, for `read_lines`


Read = Callable[[Shard, Counter[str], int], Iterator[Pair]]
"""(a shard, counts, the number of a line, from 0) → the pairs from that line on."""


def open_files(config: SourceConfig, split: str) -> Split:
    """Open sentence pairs: SPLIT.en with SPLIT.de (line n of one translates line n of the other), a TSV or a JSONL.

    Further references may be in SPLIT.de.1, SPLIT.de.2 and so on. A split may have shards (see `find_shards`).
    """
    languages = (config.source_language, config.target_language)
    paths = find_shards(config.dir, split, [(f".{languages[0]}", f".{languages[1]}"), *TABLES])
    paths = [(*files, *further_references(files[1])) if len(files) == 2 else files for files in paths]
    shards, digests = _checked(paths)
    identity = fingerprint("files 2", digests, languages, config.invalid)
    return split_of(split, identity, shards, functools.partial(_read_pairs, languages, config.invalid))


def _checked(paths: Sequence[tuple[Path, ...]]) -> tuple[list[Shard], list[str]]:
    """Return the shards and their files' digests. Raise UserError if a shard's sides differ in number of lines."""
    shards, digests = list[Shard](), list[str]()
    for number, files in enumerate(paths, start=1):
        found = list(map(digest, files))
        if len({each.lines for each in found}) > 1:
            sides = " but ".join(f"{path} has {each.lines} lines" for path, each in zip(files, found, strict=True))
            where = of_shards(number, paths)
            raise UserError(f"{sides}: line n of one must translate line n of the other{where}")
        shards.append(Shard(files, found[0].lines, tuple(each.starts for each in found)))
        digests += [each.sha256 for each in found]
    return shards, digests


def split_of(name: str, identity: str, shards: Sequence[Shard], read: Read) -> Split:
    """Return the split of the pairs of all shards."""
    size = sum(each.lines for each in shards)
    skips = all(seekable(starts, each.lines) for each in shards for starts in each.starts)
    whole = functools.partial(_read_shards, shards, read)
    return Split(name=name, fingerprint=identity, read=whole, size=size, seekable=skips)


def _read_shards(shards: Sequence[Shard], read: Read, counts: Counter[str], first: int = 0) -> Iterator[Pair]:
    for shard in shards:
        if first < shard.lines:
            yield from read(shard, counts, first)
        first = max(first - shard.lines, 0)


def further_references(target: Path) -> tuple[Path, ...]:
    """Return the existing files NAME.1, NAME.2 and so on, plain or compressed."""
    found: list[Path] = []
    while True:
        name = f"{unpacked_name(target.name)}.{len(found) + 1}"
        here = [path for path in packed_forms(target.with_name(name)) if path.is_file()]
        if not here:
            return tuple(found)
        found.append(here[0])


def _read_pairs(
    languages: tuple[str, str], invalid: str, shard: Shard, counts: Counter[str], first: int
) -> Iterator[Pair]:
    if len(shard.paths) == 1:
        yield from (_read_jsonl if is_jsonl(shard.paths[0]) else _read_tsv)(shard, languages, invalid, counts, first)
        return
    sides = (
        read_lines(path, counts, first, invalid=invalid, starts=starts)
        for path, starts in zip(shard.paths, shard.starts, strict=True)
    )
    for source, target, *others in zip(*sides, strict=True):
        yield Pair(source, target, others=tuple(others))


def _read_tsv(shard: Shard, _: object, invalid: str, counts: Counter[str], first: int) -> Iterator[Pair]:
    (path,), (starts,) = shard.paths, shard.starts
    for number, line in enumerate(read_lines(path, counts, first, invalid=invalid, starts=starts), start=first + 1):
        texts = line.split("\t")
        if len(texts) != 2:
            raise UserError(f"{path}:{number}: {len(texts) - 1} TABs; a line is source, one TAB, target")
        yield Pair(texts[0], texts[1])


def _read_jsonl(
    shard: Shard, languages: tuple[str, str], invalid: str, counts: Counter[str], first: int
) -> Iterator[Pair]:
    texts = functools.partial(_json_texts, languages=languages, invalid=invalid, counts=counts)
    (path,), (starts,) = shard.paths, shard.starts
    for source, target in read_objects(path, counts, invalid, texts, first, starts):
        yield Pair(source, target)


def _json_texts(line: str, languages: tuple[str, str], invalid: str, counts: Counter[str]) -> list[str]:
    """Return both texts of {"en": …, "de": …} or {"translation": {"en": …, "de": …}}. Raise ValueError otherwise."""
    record = parse_json(line)
    if isinstance(record, dict) and isinstance(record.get("translation"), dict):
        record = record["translation"]
    if not isinstance(record, dict) or not all(isinstance(record.get(language), str) for language in languages):
        raise ValueError(f"not an object with a text under each of {' and '.join(map(repr, languages))}")
    return [admit(record[language], counts, invalid) for language in languages]


def open_labelled(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.tsv or SPLIT.jsonl, or several shards: one or two texts, then a label."""
    languages = (config.source_language, config.target_language)
    shards, digests = _checked(find_shards(config.dir, split, TABLES))
    identity = fingerprint("labelled 2", *digests, languages, config.invalid)
    read = functools.partial(_read_labelled, languages, config, shards)  # each line is compared with the very first
    return Split(split, identity, read, size=sum(each.lines for each in shards))


def _read_labelled(
    languages: tuple[str, str], config: SourceConfig, shards: Sequence[Shard], counts: Counter[str]
) -> Iterator[Pair]:
    columns, first = 0, ""
    for shard in shards:
        (path,) = shard.paths
        as_jsonl = ("\t".join(pair[:2]) for pair in _read_jsonl(shard, languages, config.invalid, counts, 0))
        lines = as_jsonl if is_jsonl(path) else read_lines(path, counts, invalid=config.invalid)
        for number, line in enumerate(lines, start=1):
            *texts, label = line.split("\t")
            if not columns:
                columns, first = len(texts) + 1, f"line 1{f' of {path.name}' if len(shards) > 1 else ''}"
            if len(texts) not in (1, 2) or not (label.strip() or config.labels == "several"):
                raise UserError(
                    f"{path}:{number}: {line[:80]!r} is not one or two texts and then a label, TABs between them"
                )
            if len(texts) + 1 != columns:
                raise UserError(
                    f"{path}:{number}: {len(texts) + 1} columns, where {first} has {columns}; give all the same number"
                )
            if config.labels == "number" and not is_number(label):
                raise UserError(f"{path}:{number}: label {label[:40]!r}: data.labels='number' needs a finite number")
            yield Pair("\t".join(texts), label)
