"""What every source returns, a split: pairs of texts, to be read any number of times, and what identifies them.

How the files of a split are found, and what is said where they are not, is the same for all sources that have files.
"""

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jformer.errors import UserError


class Pair(NamedTuple):
    """A source text and its target, and the group it is scored with, such as its template family.

    Plain text is a target without a source; a label is the target of its text, or of an image, which is written by its
    place. The first and second of two texts that share a label are joined by a TAB. So are a question and its context:
    their target is the answer, which may be none, and the characters of the context from `start` on are it.
    """

    source: str
    target: str
    group: str = ""
    others: tuple[str, ...] = ()  # further references; as many for each pair of a split, but for answers to questions
    start: int | None = None  # of an answer in its context, from 0; None for any other target, and where there is none


@dataclass(frozen=True)
class Split:
    """One named part of a corpus, ready to be read any number of times.

    `fingerprint` is a SHA-256 over all that the pairs depend on. `read` starts anew at each call, yields every pair in
    order, and counts by reason what it altered or met; it raises UserError at the first text that cannot be used.
    `size` is how many pairs it will be, 0 where that is not known before they are read.
    """

    name: str
    fingerprint: str
    read: Callable[[Counter[str]], Iterator[Pair]]
    size: int = 0


def fingerprint(*parts: object) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
