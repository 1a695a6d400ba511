"""A split, as every source returns it: pairs of texts and their fingerprint; and how sources find a split's files."""

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
    """A source text, its target, and the group it is scored with, such as its template family.

    Plain text is a target without a source. A label is the target of its text, or of an image, given by its place. Two
    texts that share a label are joined by a TAB, and so are a question and its context; the target of these is the
    answer, possibly empty, found in the context from character `start` on.
    """

    source: str
    target: str
    group: str = ""
    others: tuple[str, ...] = ()  # further references; blank where a file of references has none for this line
    start: int | None = None  # of an answer in its context, from 0; None without an answer and for any other target

    @property
    def references(self) -> tuple[str, ...]:
        """The texts that an answer is compared with: blank ones are missing, unless nothing else is there."""
        return tuple(text for text in (self.target, *self.others) if text.strip()) or (self.target,)


@dataclass(frozen=True)
class Split:
    """One named part of a corpus, ready to be read any number of times.

    `fingerprint` is a SHA-256 over all that the pairs depend on. Each call of `read` yields every pair in order, counts
    changes and findings by reason, and raises UserError at the first invalid text. `size` is the number of pairs, 0 if
    not known in advance.
    """

    name: str
    fingerprint: str
    read: Callable[[Counter[str]], Iterator[Pair]]
    size: int = 0


def fingerprint(*parts: object) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def find(folder: str, split: str, layouts: list[list[str]]) -> tuple[Path, ...]:
    """Return the files, plain or gzipped, of the one layout in which a folder holds a split."""
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
