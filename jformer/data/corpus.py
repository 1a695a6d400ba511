"""Tokenized text as flat memory-mapped arrays, cached by a fingerprint of everything they depend on."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from jformer.data.file_digests import LARGE, identity
from jformer.data.preparation import PAIRS, Shard, encode_blocks, prepare
from jformer.data.progress import show_progress
from jformer.data.sources.split import SIDES, Pair, Split
from jformer.data.text import UNKNOWN
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.errors import UserError
from jformer.integrity import DIGESTS, damaged, parse_object, with_digest, without_digest
from jformer.storage import open_lock, replace_content

FORMAT = 3  # increase it when the same options give different arrays; older runs can then not be resumed
ARRAYS = ("values", "offsets")  # of each side, in this order
TIMES = "times.json"  # of the large files when they were hashed; delete it to hash them again
Example = tuple[Sequence[int], Sequence[int]]


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


@dataclasses.dataclass(frozen=True)
class Side:
    """How the text of one side becomes a sequence of token ids, with the tokenizer's symbols around it."""

    tokenizer: Tokenizer | None  # None: this side is always empty
    max_length: int  # tokens of a sequence, symbols included
    begin: bool = False  # BOS comes first
    bare: bool = False  # no symbols around the text
    parts: bool = False  # TABs separate texts; each ends with EOS
    optional: bool = False  # this side may be empty

    @property
    def symbols(self) -> Symbols:
        """The symbols of this side's vocabulary."""
        return self.tokenizer.symbols if self.tokenizer else Symbols()

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """The symbols before and after a text."""
        if self.bare:
            return [], []
        symbols = self.symbols
        return [*[symbols.bos] * self.begin, *symbols.before], [symbols.eos, *symbols.after]

    def fingerprint(self) -> list[object]:
        """Return everything that the sequences depend on besides the text."""
        tokenizer = self.tokenizer and self.tokenizer.fingerprint
        return [tokenizer, self.max_length, self.begin, not self.bare, self.parts]

    def is_empty(self, text: str) -> bool:
        """Return whether the text is blank although this side must not be empty."""
        return self.tokenizer is not None and not self.optional and not text.strip()

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the sequence of each text, without a length limit."""
        if self.tokenizer is None:
            return [[] for _ in texts]
        parts = [text.split("\t") for text in texts] if self.parts else []
        sequences = self.tokenizer.encode([part for some in parts for part in some] if self.parts else texts)
        if self.parts:
            encoded = iter(sequences)
            sequences = [self._joined([next(encoded) for _ in some]) for some in parts]
        if not self.bare:
            before, after = self.around
            sequences = [[*before, *sequence, *after] for sequence in sequences]
        return list(sequences)

    def count_unknown(self, texts: Sequence[str], sequences: Sequence[Sequence[int]], counts: Counter[str]) -> None:
        """Count each unknown character or word of texts separately."""
        if not (find := getattr(self.tokenizer, "unknown", None)):
            return
        for text, ids in zip(texts, sequences, strict=True):
            if self.symbols.unk in ids:
                parts = text.split("\t") if self.parts else [text]
                counts.update(f"{UNKNOWN}{each!r}" for part in parts for each in find(part))

    def _joined(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        first, *others = sequences
        return [*first, *(token for other in others for token in (self.symbols.eos, *self.symbols.between, *other))]

    def cut(self, sequence: Sequence[int]) -> Sequence[int]:
        """Cut a sequence to the limit, of `parts` the longest first; the end symbol and those after it are kept."""
        if len(sequence) <= self.max_length:
            return sequence
        before, after = self.around
        if self.parts:
            sequence = [*before, *self._shortened(sequence[len(before) : len(sequence) - len(after)])]
        return [*sequence[: self.max_length - len(after)], *after]

    def _shortened(self, texts: Sequence[int]) -> list[int]:
        """Return joined texts cut to the limit, the longest first, so that each of a pair keeps at least its share."""
        joint = [self.symbols.eos, *self.symbols.between]
        ends = [i for i in range(len(texts)) if [*texts[i : i + len(joint)]] == joint]
        starts = [0, *(end + len(joint) for end in ends)]
        parts = [texts[start:end] for start, end in zip(starts, [*ends, len(texts)], strict=True)]
        room = self.max_length - sum(map(len, self.around)) - len(joint) * (len(parts) - 1)
        kept = list(parts)
        for rank, i in enumerate(sorted(range(len(parts)), key=lambda i: len(parts[i]))):
            kept[i] = parts[i][: max(0, room // (len(parts) - rank))]
            room -= len(kept[i])
        return self._joined(kept)

    def pieces(self, sequence: Sequence[int]) -> list[Sequence[int]]:
        """Return consecutive pieces within the limit, with the side's symbols around each of them."""
        before, after = self.around
        text = sequence[len(before) : len(sequence) - len(after)]
        room = self.max_length - len(before) - len(after)
        return [[*before, *text[start : start + room], *after] for start in range(0, len(text), room)]

    def split(self, sequence: Sequence[int]) -> list[Sequence[int]]:
        """Return consecutive pieces within the limit; only the last one has the end symbol."""
        return [sequence[i : i + self.max_length] for i in range(0, len(sequence), self.max_length)]


class ExampleEncoder(Protocol):
    """Turns each example of a task into two token sequences."""

    @property
    def source(self) -> Side:
        """The side that is read."""

    @property
    def target(self) -> Side:
        """The side that is learned."""

    def fingerprint(self) -> str:
        """Identify everything that the token arrays depend on, besides the text."""

    def encode(self, pairs: Sequence[Pair], counts: Counter[str]) -> list[Example]:
        """Return the sequences of the usable examples; count the others by reason."""


@dataclasses.dataclass(frozen=True)
class PairEncoder:
    """Tokenizes each side of an example on its own; examples over the limits are dropped, cut or split.

    Only one-sided examples can be split: each piece becomes an example of its own, and no token is lost.
    """

    source: Side
    target: Side
    overlong: str
    reads: tuple[str, str] = SIDES  # the text of a pair that each side takes

    def fingerprint(self) -> str:
        """Identify everything that the token arrays depend on, besides the text."""
        overlong = "longest part cut" if self.overlong == "cut" and self.source.parts else self.overlong
        parts = [self.source.fingerprint(), self.target.fingerprint(), overlong, self.reads, FORMAT]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def encode(self, pairs: Sequence[Pair], counts: Counter[str]) -> list[Example]:
        """Return the sequences of the usable examples; count the others by reason."""
        sides = (self.source, self.target)
        texts = map(attrgetter(*self.reads), pairs)
        filled = [pair for pair in texts if not any(map(Side.is_empty, sides, pair))]
        counts["examples read"] += len(pairs)
        counts["empty examples dropped"] += len(pairs) - len(filled)
        sources, targets = (side.encode([pair[i] for pair in filled]) for i, side in enumerate(sides))
        for i, (side, sequences) in enumerate(zip(sides, (sources, targets), strict=True)):
            side.count_unknown([pair[i] for pair in filled], sequences, counts)
        usable: list[Example] = []
        for source, target in zip(sources, targets, strict=True):
            if len(source) <= self.source.max_length and len(target) <= self.target.max_length:
                usable.append((source, target))
            else:
                usable += self._fitted(source, target, counts)
        counts["examples used"] += len(usable)
        return usable

    def _fitted(self, source: Sequence[int], target: Sequence[int], counts: Counter[str]) -> list[Example]:
        if self.overlong == "drop":
            counts["overlong examples dropped"] += 1
            return []
        counts[f"overlong examples {self.overlong}"] += 1
        if self.overlong == "cut":
            return [(self.source.cut(source), self.target.cut(target))]
        return list(zip_longest(self.source.split(source), self.target.split(target), fillvalue=()))


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
