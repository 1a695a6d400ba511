"""Turn the texts of examples into sequences of token ids, with symbols around them and within length limits."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Protocol

from jformer.data.sources.split import SIDES, Pair
from jformer.data.text import UNKNOWN
from jformer.data.tokenizers import Symbols, Tokenizer

FORMAT = 3  # increase it when the same options give different arrays; then older runs cannot be resumed
Example = tuple[Sequence[int], Sequence[int]]


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
