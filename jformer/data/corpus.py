"""Tokenized text as flat memory-mapped arrays, made once and found again by a fingerprint of all they depend on."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from jformer.data.sources import Pair, Split
from jformer.data.tokenizers import EOS, Tokenizer
from jformer.errors import UserError

FORMAT = 1  # raise it when the same options give other arrays
SIDES = ("source", "target")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One side of a corpus: sentence i is values[offsets[i]:offsets[i + 1]], its end symbol included."""

    values: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sentence."""
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Both sides of a tokenized corpus, what became of the pairs it was read from, and what identifies it."""

    source: Tokens
    target: Tokens
    counts: dict[str, int]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.source.lengths)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How a pair of texts becomes two token sequences, and what to do with those over the limits."""

    source: Tokenizer
    target: Tokenizer
    max_source_length: int
    max_target_length: int
    overlong: str

    def fingerprint(self) -> str:
        """Identify everything that the token arrays depend on, besides the text."""
        limits = [self.max_source_length, self.max_target_length, self.overlong, FORMAT]
        return hashlib.sha256(repr([self.source.fingerprint, self.target.fingerprint, *limits]).encode()).hexdigest()

    def encode(self, pairs: Sequence[Pair], counts: Counter[str]) -> list[tuple[list[int], list[int]]]:
        """Return the pairs that training can use, each side ending with EOS; count the others by reason."""
        texts = [p for p in pairs if p.source.strip() and p.target.strip()]
        counts["pairs read"] += len(pairs)
        counts["empty pairs dropped"] += len(pairs) - len(texts)
        sources = self.source.encode([p.source for p in texts])
        targets = self.target.encode([p.target for p in texts])
        usable = []
        for source, target in zip(sources, targets, strict=True):
            if len(source) >= self.max_source_length or len(target) >= self.max_target_length:
                counts["overlong pairs " + ("cut" if self.overlong == "cut" else "dropped")] += 1
                if self.overlong == "drop":
                    continue
            source, target = source[: self.max_source_length - 1], target[: self.max_target_length - 1]
            usable.append(([*source, EOS], [*target, EOS]))
        counts["pairs used"] += len(usable)
        return usable


def open_corpus(split: Split, encoder: Encoder, cache_dir: str) -> Corpus:
    """Open the split's token arrays, tokenizing it first if no run has done so before.

    One process builds, others wait for it. Raise UserError where no usable pair is left.
    """
    fingerprint = hashlib.sha256(f"{split.fingerprint} {encoder.fingerprint()}".encode()).hexdigest()[:32]
    folder = Path(cache_dir).expanduser() / fingerprint
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():
            _build(split, encoder, folder)
    counts = json.loads((folder / "counts.json").read_text())
    if not counts["pairs used"]:
        raise UserError(f"{split.name}: no usable pair is left ({_listed(counts)}); look at the text and the limits")
    source, target = (
        Tokens(*(np.load(folder / f"{side}.{part}.npy", mmap_mode="r") for part in ("values", "offsets")))
        for side in SIDES
    )
    return Corpus(source, target, counts, fingerprint)


def _build(split: Split, encoder: Encoder, folder: Path) -> None:
    """Tokenize into a folder beside the final one and rename it, so a half-written cache is never found."""
    counts: Counter[str] = Counter()
    half_made = folder.with_suffix(".tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.mkdir(parents=True)
    chunks: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    lengths: dict[str, list[int]] = {side: [] for side in SIDES}
    for pairs in _in_chunks(split.read(counts), 8192):
        for side, sentences in zip(SIDES, zip(*encoder.encode(pairs, counts), strict=True), strict=False):
            lengths[side] += map(len, sentences)
            chunks[side].append(np.array([token for sentence in sentences for token in sentence], np.int32))
    for side, tokenizer in zip(SIDES, (encoder.source, encoder.target), strict=True):
        dtype = np.uint16 if tokenizer.vocab_size <= 65_536 else np.int32
        values = np.concatenate([np.zeros(0, np.int32), *chunks[side]]).astype(dtype)
        np.save(half_made / f"{side}.values.npy", values)
        np.save(half_made / f"{side}.offsets.npy", np.cumsum([0, *lengths[side]]))
    (half_made / "counts.json").write_text(json.dumps({"pairs used": 0, **counts}))
    half_made.rename(folder)


def _in_chunks(pairs: Iterator[Pair], size: int) -> Iterator[list[Pair]]:
    while chunk := list(islice(pairs, size)):
        yield chunk


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the operating system frees when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())
