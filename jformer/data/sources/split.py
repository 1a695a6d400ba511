"""A split, as every source returns it: pairs of texts and their fingerprint; and how sources find a split's files."""

import difflib
import fnmatch
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from etils import epath

from jformer.data.text import PACKED, packed_forms, unpacked_name
from jformer.errors import UserError

SIDES = ("source", "target")


class Pair(NamedTuple):
    """A source text, its target, and the group it is scored with, such as its template family.

    Plain text is a target without a source. A label is the target of its text, or of an image, given by its place. Two
    texts that share a label are joined by a TAB, and so are a question and its context; the target of these is the
    answer, possibly empty, found in the context from character `start` on.
    """

    source: str
    target: str
    group: str = ""
    others: tuple[str, ...] = ()  # further references; blank where a file of references has none for this line
    start: int | None = None  # of an answer in its context, from 0; None without an answer and for other targets
    languages: tuple[str, str] = ("", "")  # of source and target, for answering and scoring; see `data.vocabularies`

    @property
    def references(self) -> tuple[str, ...]:
        """The texts that an answer is compared with; blank ones only if there is no other."""
        return tuple(text for text in (self.target, *self.others) if text.strip()) or (self.target,)


@dataclass(frozen=True)
class Split:
    """One named part of a corpus, ready to be read any number of times.

    `fingerprint` is a SHA-256 over everything that the pairs depend on. Each call of `read` yields every pair in order,
    counts changes and findings by reason, and raises UserError at the first invalid text. `size` is the number of
    pairs, 0 if not known in advance.

    Several processes can read parts of a `seekable` split: its size is known, and `read`, which can be pickled, takes
    the number of the pair to begin at, and reads none before it.
    """

    name: str
    fingerprint: str
    read: Callable[..., Iterator[Pair]]  # (counts), or of a seekable split (counts, first=0)
    size: int = 0
    seekable: bool = False


def fingerprint(*parts: object) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def listed(name: str, identity: str, pairs: Sequence[Pair], found: Counter[str]) -> Split:
    """Return a split of pairs in memory; `found` has the findings counted when they were read."""

    def read(counts: Counter[str]) -> Iterator[Pair]:
        counts.update(found)
        return iter(pairs)

    return Split(name, identity, read, size=len(pairs))


def find_shards(folder: str, split: str, suffixes: list[tuple[str, ...]]) -> list[tuple[Path, ...]]:
    """Return the files of each shard of a split: one for each suffix of the one layout that the shard has.

    Args:
        folder: data.dir.
        split: the name of files without their suffixes, a pattern such as "train-*", or several with + between them.
        suffixes: the layouts, as in [(".en", ".de"), (".tsv",)].

    Raises:
        UserError: there is none, or a shard is incomplete, duplicate, or missing from a series NAME-00000-of-00500.
    """
    root, stems = find_folder(folder, remote=True), list[str]()
    for part in split.split("+"):
        matches = []
        if "*" in part or "?" in part:
            names = [unpacked_name(path.name) for path in root.iterdir()]
            ends = {suffix for layout in suffixes for suffix in layout}
            matches = sorted({name.removesuffix(end) for end in ends for name in fnmatch.filter(names, part + end)})
            _refuse_gaps(folder, matches)
        stems += matches or [part]
    if len(set(stems)) < len(stems):
        raise UserError(f"split {split!r} names {Counter(stems).most_common(1)[0][0]!r} twice: name it once")
    found = []
    for number, stem in enumerate(stems, start=1):
        try:
            found.append(find(folder, stem, [[stem + suffix for suffix in layout] for layout in suffixes]))
        except UserError as error:
            raise UserError(f"{error}{of_shards(number, stems)}") from error
    return found


def _refuse_gaps(folder: str, stems: list[str]) -> None:
    """Raise UserError for shards that are missing, judging by the names of those found."""
    sets: dict[tuple[str, int], set[int]] = {}
    for stem in stems:
        if match := re.fullmatch(r"(.*)-(\d+)-of-(\d+)", stem):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), numbers in sets.items():
        if missing := sorted(set(range(count)) - numbers):
            first = ", ".join(f"{number:05}" for number in missing[:10])
            raise UserError(
                f"data.dir={folder!r} has {len(numbers)} of the {count} shards {name}-*: {first} missing; fetch them"
            )


def of_shards(number: int, shards: Sequence[object]) -> str:
    """Return which shard an error is about, or "" if there is only one."""
    return f" (shard {number} of {len(shards)})" if len(shards) > 1 else ""


def find(folder: str, split: str, layouts: list[list[str]], remote: bool = True) -> tuple[Path, ...]:
    """Return the files, plain or compressed, of the one layout in which a folder holds a split."""
    root = find_folder(folder, remote)
    found = {
        name: [path for path in packed_forms(root / name) if path.is_file()] for names in layouts for name in names
    }
    complete = [names for names in layouts if all(found[name] for name in names)]
    if not complete:
        looked_for = ", ".join(" + ".join(names) for names in layouts)
        raise UserError(
            f"data.dir={folder!r} has no split {split!r}: looked for {looked_for} (or {', '.join(PACKED)})"
            f"{_near(root, layouts)}"
        )
    candidates = [path for names in complete for name in names for path in found[name]]
    if len(candidates) > len(complete[0]):
        several = ", ".join(path.name for path in candidates)
        raise UserError(f"data.dir={folder!r} holds split {split!r} more than once: {several}; keep one form of it")
    return tuple(candidates)


def find_folder(folder: str, remote: bool = False) -> Path:
    """Return the folder that `data.dir` names, which may be in a bucket if `remote`."""
    if not folder:
        raise UserError("data.dir='': name the folder that holds the data")
    if "://" in folder and not remote:
        raise UserError(f"data.dir={folder!r}: this data.source reads only local folders; copy the data")
    try:
        root = epath.Path(folder) if "://" in folder else Path(folder).expanduser()
        there = root.is_dir()
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.dir={folder!r} cannot be read ({reason}): install the package for it") from error
    if not there:
        raise UserError(f"data.dir={folder!r} is not a folder; name the one that holds the data")
    return cast(Path, root)


def _near(root: Path, layouts: list[list[str]]) -> str:
    present = [path.name for path in root.iterdir()]
    wanted = [name for names in layouts for name in names]
    near = {match: None for name in wanted for match in difflib.get_close_matches(name, present, n=3, cutoff=0.4)}
    return f"; it has {', '.join(near)}" if near else ""
