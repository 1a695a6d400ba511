"""BPE-dropout: segment a word differently each time, as regularization.

Provilkov et al. 2020 (BPE-Dropout: Simple and Effective Subword Regularization), algorithm 1. sentencepiece can also
drop merges, but its draws differ between processes, and a run must be repeatable.
"""

import functools
import hashlib
import itertools
import random
import re
from collections.abc import Sequence

from jformer.data.tokenizers.subwords import SubwordTokenizer
from jformer.data.tokenizers.symbols import NUM_SYMBOLS, UNK

DRAWS = 8  # segmentations of a frequent word, used in turn
REMEMBERED = 32  # characters of the longest word whose segmentations are cached: longer ones are rare
LONGEST = 200  # characters segmented at once, as time grows with their square: texts without spaces are one word
WORDS = re.compile(f"▁[^▁]{{0,{LONGEST - 1}}}|[^▁]{{1,{LONGEST}}}")  # pieces have a space only at their start


class BpeDropout(SubwordTokenizer):
    """A BPE model that drops each merge with some probability at each step. Decoding is unchanged."""

    in_order = True  # the draws depend on the preceding texts

    def __init__(self, tokenizer: SubwordTokenizer, share: float, key: str) -> None:
        """Wrap a model.

        Args:
            tokenizer: the BPE model.
            share: the share of the possible merges that is dropped at a step; 0 segments as the model does.
            key: seed of the draws, which also depend on the order of the texts.
        """
        vars(self).update(vars(tokenizer))  # the model, and the languages around its texts
        self._share, self._key, self._random = share, key, random.Random(f"{share} {key}")
        self._cuts: dict[str, list[list[int]]] = {}
        self._turns: dict[str, int] = {}

    @functools.cached_property
    def _rank(self) -> dict[str, int]:
        """Piece → id, in the order in which merges were learned; not needed if the run's arrays are cached."""
        is_control = self._processor.is_control
        return {piece: i for i, piece in enumerate(self.tokens) if i >= NUM_SYMBOLS and not is_control(i)}

    @functools.cached_property
    def _symbols(self) -> re.Pattern[str]:
        """The pattern of the symbols that are never cut, as a group."""
        return re.compile(f"({'|'.join(sorted(map(re.escape, self.uncut), key=len, reverse=True)) or '(?!)'})")

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the model and of the options of dropout, which identifies cached arrays."""
        return hashlib.sha256(f"{super().fingerprint} {self._share} {self._key} {DRAWS}".encode()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Segment the texts, the same word in several ways."""
        return [self._encode(text) for text in self._processor.normalize(list(lines))]

    def _encode(self, text: str) -> list[int]:
        parts = enumerate(self._symbols.split(text))  # every other one is a symbol
        words = itertools.chain.from_iterable([part] if i % 2 else WORDS.findall(part) for i, part in parts)
        ids = itertools.chain.from_iterable(map(self._next_cut, words))
        # As in sentencepiece, adjacent unknown characters are one token.
        return [i for is_unknown, group in itertools.groupby(ids, UNK.__eq__) for i in ([UNK] if is_unknown else group)]

    def _next_cut(self, word: str) -> list[int]:
        if len(word) > REMEMBERED:
            return self._draw(word)
        cuts, turn = self._cuts.setdefault(word, []), self._turns.get(word, 0)
        self._turns[word] = turn + 1
        if turn < DRAWS:
            cuts.append(self._draw(word))
        return cuts[turn % DRAWS]

    def _draw(self, word: str) -> list[int]:
        """Merge characters until no possible merge is left or all are dropped."""
        pieces, chance = [word] if word in self.uncut else list(word), self._random.random
        while True:
            merges = ((self._rank.get(left + right), i) for i, (left, right) in enumerate(itertools.pairwise(pieces)))
            kept = [(rank, i) for rank, i in merges if rank is not None and chance() >= self._share]
            if not kept:
                return [i for piece in pieces for i in self._ids(piece)]
            _, i = min(kept)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]

    def _ids(self, piece: str) -> list[int]:
        """Return the id of a piece or, for an unknown character, its bytes or UNK."""
        if piece in self._rank or not self.byte_fallback:
            return [self._rank.get(piece, UNK)]
        return [self._rank[f"<0x{byte:02X}>"] for byte in piece.encode()]
