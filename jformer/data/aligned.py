"""Tokenize word by word, so that the label of each word can be placed on its first token."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from jformer.data.encoders import Example, PairEncoder, Side
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import ByteTokenizer, FastTokenizer, ListTokenizer, Tokenizer, unprefixed
from jformer.errors import UserError

WORDS_CUT = "words cut to the limit"


class Chunk(NamedTuple):
    """Consecutive words of a text as one sequence, with the symbols of its side around them."""

    ids: list[int]
    starts: list[int]  # the index in `ids` of each word's first token
    cut: int = 0  # words truncated because each alone exceeds the limit


def encode_words(tokenizer: Tokenizer, texts: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of every text, given as words, without a prefix, and the index of each word's first token.

    A word without tokens, such as a lone control character, becomes the unknown token. If the second word has the
    subwords `un` `like` `ly`, ["very", "unlikely"] becomes ([7, 11, 12, 13], [0, 1]). Characters and bytes do not mark
    words: there every word but the last ends in a space.
    """
    before = " " * (isinstance(tokenizer, FastTokenizer) and tokenizer.marks_spaces)
    after = " " * spells_spaces(tokenizer)
    spaced = [before + word + after * (i < len(words)) for words in texts for i, word in enumerate(words, start=1)]
    encoded = iter(unprefixed(tokenizer)(spaced))
    found = []
    for words in texts:
        pieces = [list(next(encoded)) or [max(tokenizer.symbols.unk, 0)] for _ in words]
        starts = list(accumulate(map(len, pieces), initial=0))[:-1]
        found.append(([i for piece in pieces for i in piece], starts))
    return found


def spells_spaces(tokenizer: Tokenizer | None) -> bool:
    """Return whether the tokens of a text are its characters or bytes, spaces included."""
    return isinstance(tokenizer, ByteTokenizer) or (isinstance(tokenizer, ListTokenizer) and tokenizer.kind == "char")


def encode_chunks(side: Side, texts: Sequence[Sequence[str]]) -> list[list[Chunk]]:
    """Split every text, given as words, at word boundaries into sequences as long as the side's limit allows.

    With a limit of 5, BOS and EOS, words of 2, 1 and 2 tokens become [BOS 7 8 9 EOS] and [BOS 10 11 EOS]. A word is
    truncated only if it alone exceeds the limit. Raises UserError if the limit leaves no room for a token.
    """
    assert side.tokenizer is not None
    before, after = side.around
    room = side.max_length - len(before) - len(after)
    if room < 1:
        symbols = len(before) + len(after)
        raise UserError(f"data.max_source_length={side.max_length} holds {symbols} symbols and no token: raise it")
    space = side.tokenizer.encode([" "])[0] if spells_spaces(side.tokenizer) else []
    found = []
    for ids, starts in encode_words(side.tokenizer, texts):
        spaced = [*ids, *space]  # because the last word has none
        words = [spaced[start:end] for start, end in zip(starts, [*starts[1:], len(spaced)], strict=False)]
        groups = _groups(words, room + len(space))
        for group in groups:  # each is a text of its own, which does not end in a space
            group[-1] = group[-1][: len(group[-1]) - len(space)]
        found.append([_chunk(before, group, after, room) for group in groups])
    return found


def _groups(words: Sequence[list[int]], room: int) -> list[list[list[int]]]:
    """Group consecutive words, at most `room` tokens each; a longer word is a group of its own."""
    groups: list[list[list[int]]] = []
    left = 0
    for word in words:
        if len(word) > left:
            groups.append([])
            left = room
        groups[-1].append(word)
        left -= len(word)
    return groups


def _chunk(before: Sequence[int], words: Sequence[list[int]], after: Sequence[int], room: int) -> Chunk:
    starts = list(accumulate(map(len, words), initial=len(before)))[:-1]
    tokens = [token for word in words for token in word]
    return Chunk([*before, *tokens[:room], *after], starts, int(len(tokens) > room))


@dataclasses.dataclass(frozen=True)
class TagEncoder(PairEncoder):
    """Encode words and their tags as two sequences of one length, with each tag at its word's first token.

    All other positions of the target are PAD. Examples over the limit are split at word boundaries; `cut` keeps only
    the first part, `drop` none.
    """

    def fingerprint(self) -> str:
        """Identify everything that the token arrays depend on, besides the text."""
        words = "words without prefix" if getattr(self.source.tokenizer, "prefix", "") else "words"
        words += " and spaces" * spells_spaces(self.source.tokenizer)
        return hashlib.sha256(f"{words} {super().fingerprint()}".encode()).hexdigest()

    def encode(self, pairs: Sequence[Pair], counts: Counter[str]) -> list[Example]:
        """Return the sequences of the usable examples; count the others by reason.

        Raises UserError if the numbers of words and tags differ.
        """
        assert self.target.tokenizer is not None
        filled = [pair for pair in pairs if pair.source.strip()]
        counts["examples read"] += len(pairs)
        counts["empty examples dropped"] += len(pairs) - len(filled)
        texts = [pair.source.split() for pair in filled]
        tags = self.target.tokenizer.encode([pair.target for pair in filled])
        usable: list[Example] = []
        for words, of_words, chunks in zip(texts, tags, encode_chunks(self.source, texts), strict=True):
            if len(words) != len(of_words):
                raise UserError(f"{len(words)} words but {len(of_words)} tags: give every word one: {words[0]!r} …")
            kept = self._kept(chunks, counts)
            if cut := sum(chunk.cut for chunk in kept):
                counts[WORDS_CUT] += cut
            remaining = iter(of_words)
            usable += [(chunk.ids, self._aligned(chunk, [next(remaining) for _ in chunk.starts])) for chunk in kept]
        counts["examples used"] += len(usable)
        return usable

    def _kept(self, chunks: Sequence[Chunk], counts: Counter[str]) -> Sequence[Chunk]:
        if len(chunks) == 1:
            return chunks
        reason = "dropped" if self.overlong == "drop" else self.overlong
        counts[f"overlong examples {reason}"] += 1
        return {"drop": [], "cut": chunks[:1], "split": chunks}[self.overlong]

    def _aligned(self, chunk: Chunk, tags: Sequence[int]) -> list[int]:
        sequence = [self.target.symbols.pad] * len(chunk.ids)
        for start, tag in zip(chunk.starts, tags, strict=True):
            sequence[start] = tag
        return sequence
