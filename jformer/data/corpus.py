"""Tokenized text as flat memory-mapped arrays, cached by a fingerprint of everything they depend on."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from jformer.data.encoders import ExampleEncoder
from jformer.data.file_digests import LARGE, identity
from jformer.data.preparation import PAIRS, Shard, encode_blocks, prepare
from jformer.data.progress import show_progress
from jformer.data.sources.split import SIDES, Split
from jformer.errors import UserError
from jformer.integrity import DIGESTS, damaged, parse_object, with_digest, without_digest
from jformer.storage import open_lock, replace_content

ARRAYS = ("values", "offsets")  # of each side, in this order
TIMES = "times.json"  # of the large files when they were hashed; delete it to hash them again


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One side of a corpus: sequence i is values[offsets[i]:offsets[i + 1]], with the symbols of its `Side`."""

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence."""
        return np.diff(self.offsets)


class Joined:
    """Several memory-mapped arrays as one; indexing reads only the requested items."""

    def __init__(self, parts: Sequence[np.ndarray], ends: np.ndarray, added: Sequence[int]) -> None:
        """Join the parts: `ends` [parts] are cumulative lengths; added[i] is added to the items of part i."""
        self._parts, self._ends, self._added = parts, ends, added

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, items: np.ndarray) -> np.ndarray:
        """Return the items with these numbers."""
        part = np.searchsorted(self._ends[:-1], items, side="right")
        first = np.concatenate([[0], self._ends])
        chosen = np.unique(part) if len(items) else [0]
        found = {i: self._parts[i][items[part == i] - first[i]] + self._added[i] for i in chosen}
        shape = next(iter(found.values())).shape[1:]
        out = np.empty((len(items), *shape), np.result_type(*found.values()))
        for i, each in found.items():
            out[part == i] = each
        return out

    def reshape(self, first: int, *shape: int) -> "Joined":
        """Return the items with each reshaped to `shape`; `first` is -1."""
        parts = [part.reshape(first, *shape) for part in self._parts]
        return Joined(parts, np.cumsum([len(part) for part in parts]), self._added)


def join_tokens(sides: Sequence[Tokens]) -> Tokens:
    """Concatenate the sequences of several corpora."""
    if len(sides) == 1:
        return sides[0]
    ends = np.cumsum([len(side.values) for side in sides])
    offsets = [*(side.offsets[:-1] for side in sides[:-1]), sides[-1].offsets]
    before = [0, *ends[:-1].tolist()]
    values = Joined([side.values for side in sides], ends, [0] * len(sides))
    joined = values, Joined(offsets, np.cumsum([len(each) for each in offsets]), before)
    return Tokens(*cast(tuple[np.ndarray, np.ndarray], joined))  # features only index them


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Both sides of a tokenized corpus, the counts of examples by outcome, and its fingerprint."""

    source: Tokens
    target: Tokens
    counts: dict[str, int]
    fingerprint: str
    pairs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint64))  # hashes, in order

    def __len__(self) -> int:
        return len(self.source.offsets) - 1


def open_corpus(split: Split, encoder: ExampleEncoder, cache_dir: str) -> Corpus:
    """Open the split's token arrays, tokenizing it first if they are not in the cache.

    One process tokenizes while others wait. Damaged arrays are rebuilt. Raises UserError if no usable example is
    left.
    """
    fingerprint, folder = _place(split, encoder, cache_dir)
    with locked(folder, f"waiting for another run that tokenizes {split.name}"):
        if folder.exists():
            shutil.rmtree(folder.with_suffix(".tmp"), ignore_errors=True)
        if folder.exists() and (names := _damaged(folder)):
            print(f"{folder}: {' and '.join(names)} damaged: tokenizing {split.name} again", file=sys.stderr)
            shutil.rmtree(folder)
        if not folder.exists():
            prepare(split, encoder, folder)
            _remember_times(folder, _times(folder))
    counts = json.loads((folder / "counts.json").read_text())
    if not counts["examples used"]:
        raise UserError(
            f"{split.name}: no usable example is left ({_listed(counts)}); check the text and the length limits"
        )
    source, target = (
        Tokens(*(np.load(folder / f"{side}.{part}.npy", mmap_mode="r") for part in ARRAYS)) for side in SIDES
    )
    pairs = np.load(folder / PAIRS, mmap_mode="r")
    return Corpus(source, target, counts=counts, fingerprint=fingerprint, pairs=pairs)


def prepare_shard(split: Split, encoder: ExampleEncoder, cache_dir: str, shard: Shard) -> None:
    """Tokenize one shard of a split's blocks for `open_corpus`; other processes may do other shards meanwhile.

    The only shard of one also joins the blocks.
    """
    if shard == (0, 1):
        open_corpus(split, encoder, cache_dir)
        return
    _, folder = _place(split, encoder, cache_dir)
    with locked(folder, f"waiting for another run that tokenizes {split.name}", fcntl.LOCK_SH):
        if not folder.exists():
            encode_blocks(split, encoder, folder, shard)


def _place(split: Split, encoder: ExampleEncoder, cache_dir: str) -> tuple[str, Path]:
    """Return the fingerprint of a split's token arrays, and their folder."""
    fingerprint = hashlib.sha256(f"{split.fingerprint} {encoder.fingerprint()}".encode()).hexdigest()[:32]
    return fingerprint, Path(cache_dir).expanduser() / fingerprint


def _damaged(folder: Path) -> list[str]:
    """Return the files of a cache that are missing or damaged; an unsealed cache counts as damaged.

    Large files are hashed again only if their size or times have changed.
    """
    if missing := [name for name in (DIGESTS, PAIRS) if not (folder / name).exists()]:
        return missing
    times = _times(folder)
    try:
        hashed = without_digest(parse_object((folder / TIMES).read_bytes()), TIMES)
    except (OSError, ValueError, UserError):
        hashed = {}  # unknown: hash them all
    unchanged = {name for name, each in times.items() if hashed.get(name) == each}
    names = damaged(folder, unchanged)
    if not names and len(unchanged) < len(times):
        _remember_times(folder, times)
    return names


def _times(folder: Path) -> dict[str, list[int]]:
    """Return the identity of each large file."""
    return {path.name: identity(path) for path in folder.iterdir() if path.stat().st_size >= LARGE}


def _remember_times(folder: Path, times: dict[str, list[int]]) -> None:
    """Record the identities of the large files when they were hashed, if the folder is writable."""
    if times:
        with contextlib.suppress(OSError):
            replace_content(folder / TIMES, json.dumps(with_digest(times)).encode())


@contextlib.contextmanager
def locked(folder: Path, waiting: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a file lock, which the operating system releases if its holder dies; report while waiting for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with show_progress(waiting):
        file = open_lock(folder.with_suffix(".lock"), kind)
    with file:
        yield


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())
