"""Where examples come from, whatever they are: pairs of texts as they stand, no tokens, nothing dropped.

Files of sentence pairs and of labelled texts are read here; plain text, images, TFDS and generators have files of
their own.
A source opens a split of a corpus by its config. Opening finds and checks the files and fingerprints all that the pairs
depend on; reading streams the pairs in order, empty ones too, and counts what had to be altered.
"""

import difflib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jformer.data.config import SourceConfig
from jformer.data.text import admit, digest, read_lines
from jformer.errors import UserError


class Pair(NamedTuple):
    """A source text and its target, and the group it is scored with, such as its template family.

    Plain text is a target without a source; a label is the target of its text, or of an image, which is written by its
    place. The first and second of two texts that share a label are joined by a TAB.
    """

    source: str
    target: str
    group: str = ""


@dataclass(frozen=True)
class Split:
    """One named part of a corpus, ready to be read any number of times.

    `fingerprint` is a SHA-256 over all that the pairs depend on. `read` starts anew at each call, yields every pair in
    order, and counts by reason what it altered or met; it raises UserError at the first text that cannot be used.
    """

    name: str
    fingerprint: str
    read: Callable[[Counter[str]], Iterator[Pair]]


def open_split(config: SourceConfig, split: str) -> Split:
    """Find a split and check that it is whole. Raise UserError for what is missing, doubtful or misaligned."""
    if config.source not in SOURCES:
        raise UserError(f"data.source={config.source!r}; choose one of: {', '.join(SOURCES)}")
    return SOURCES[config.source](config, split)


def fingerprint(*parts: object) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _open_files(config: SourceConfig, split: str) -> Split:
    languages = (config.source_language, config.target_language)
    layouts = [[f"{split}.{language}" for language in languages], [f"{split}.tsv"], [f"{split}.jsonl"]]
    paths = find(config.dir, split, layouts)
    digests, lines = zip(*map(digest, paths), strict=True)
    if len(set(lines)) > 1:
        sides = " but ".join(f"{path} has {count} lines" for path, count in zip(paths, lines, strict=True))
        raise UserError(f"{sides}: line n of one must translate line n of the other")
    return Split(split, fingerprint("files 1", digests, languages), _reader(paths, languages))


def find(folder: str, split: str, layouts: list[list[str]]) -> tuple[Path, ...]:
    """Return the files of the one layout, plain or gzipped, that a folder holds a split in."""
    root = find_folder(folder)
    found = {
        name: [path for path in (root / name, root / f"{name}.gz") if path.is_file()]
        for names in layouts
        for name in names
    }
    complete = [names for names in layouts if all(found[name] for name in names)]
    if not complete:
        looked_for = ", ".join(" + ".join(names) for names in layouts)
        raise UserError(
            f"data.dir={folder!r} has no split {split!r}: looked for {looked_for} (or .gz){_near(root, layouts)}"
        )
    candidates = [path for names in complete for name in names for path in found[name]]
    if len(candidates) > len(complete[0]):
        several = ", ".join(path.name for path in candidates)
        raise UserError(f"data.dir={folder!r} holds split {split!r} more than once: {several}; keep one form of it")
    return tuple(candidates)


def find_folder(folder: str) -> Path:
    """Return the folder that `data.dir` names."""
    if not folder:
        raise UserError("data.dir='': name the folder that holds the data")
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"data.dir={folder!r} is not a folder; name the one that holds the data")
    return root


def _near(root: Path, layouts: list[list[str]]) -> str:
    present = [path.name for path in root.iterdir()]
    wanted = [name for names in layouts for name in names]
    near = {match: None for name in wanted for match in difflib.get_close_matches(name, present, n=3, cutoff=0.4)}
    return f"; it has {', '.join(near)}" if near else ""


def _reader(paths: tuple[Path, ...], languages: tuple[str, str]) -> Callable[[Counter[str]], Iterator[Pair]]:
    if len(paths) == 2:
        return functools.partial(_read_parallel, *paths)
    if _is_jsonl(paths[0]):
        return functools.partial(_read_jsonl, paths[0], languages)
    return functools.partial(_read_tsv, paths[0])


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def _read_parallel(source: Path, target: Path, counts: Counter[str]) -> Iterator[Pair]:
    sides = zip(read_lines(source, counts), read_lines(target, counts), strict=True)
    return (Pair(*texts) for texts in sides)


def _read_tsv(path: Path, counts: Counter[str]) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path, counts), start=1):
        texts = line.split("\t")
        if len(texts) != 2:
            raise UserError(f"{path}:{number}: {len(texts) - 1} TABs; a line is source, one TAB, target")
        yield Pair(*texts)


def _read_jsonl(path: Path, languages: tuple[str, str], counts: Counter[str]) -> Iterator[Pair]:
    # Only the strings are text: what stands around them in the file is not counted.
    for number, line in enumerate(read_lines(path, Counter()), start=1):
        try:
            yield Pair(*_json_texts(line, languages, counts))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: {error}") from error


def _json_texts(line: str, languages: tuple[str, str], counts: Counter[str]) -> list[str]:
    """Return both texts of {"en": …, "de": …} or {"translation": {"en": …, "de": …}}. Raise ValueError otherwise."""
    record = json.loads(line)
    record = record.get("translation", record) if isinstance(record, dict) else record
    if not isinstance(record, dict) or not all(isinstance(record.get(language), str) for language in languages):
        raise ValueError(f"not an object with a text under each of {' and '.join(map(repr, languages))}")
    for language in languages:
        record[language].encode()  # JSON can spell half a surrogate pair, which is no text
    return [admit(record[language], counts) for language in languages]


def _open_labelled(config: SourceConfig, split: str) -> Split:
    languages = (config.source_language, config.target_language)
    (path,) = find(config.dir, split, [[f"{split}.tsv"], [f"{split}.jsonl"]])
    identity = fingerprint("labelled 1", digest(path)[0], languages)
    return Split(split, identity, functools.partial(_read_labelled, path, languages))


def _read_labelled(path: Path, languages: tuple[str, str], counts: Counter[str]) -> Iterator[Pair]:
    as_jsonl = ("\t".join(pair[:2]) for pair in _read_jsonl(path, languages, counts))
    columns = 0
    for number, line in enumerate(as_jsonl if _is_jsonl(path) else read_lines(path, counts), start=1):
        *texts, label = line.split("\t")
        columns = columns or len(texts) + 1
        if len(texts) not in (1, 2) or not label.strip():
            raise UserError(
                f"{path}:{number}: {line[:80]!r} is not one or two texts and then a label, TABs between them"
            )
        if len(texts) + 1 != columns:
            raise UserError(f"{path}:{number}: {len(texts) + 1} columns, where line 1 has {columns}; give all as many")
        yield Pair("\t".join(texts), label)


def _open_text(config: SourceConfig, split: str) -> Split:
    from jformer.data import documents

    return documents.open_split(config, split)


def _open_images(config: SourceConfig, split: str) -> Split:
    from jformer.data import images

    return images.open_split(config, split)


def _open_tfds(config: SourceConfig, split: str) -> Split:
    from jformer.data import tfds  # takes most of a second: only for those who ask for it

    return tfds.open_split(config, split)


def _open_generated(config: SourceConfig, split: str) -> Split:
    from jformer.data import generated

    return generated.open_split(config, split)


SOURCES: dict[str, Callable[[SourceConfig, str], Split]] = {
    "files": _open_files,
    "labelled": _open_labelled,
    "text": _open_text,
    "images": _open_images,
    "tfds": _open_tfds,
    "generated": _open_generated,
}
