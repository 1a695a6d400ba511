"""Tokenizers with a list of tokens: words, characters, bytes, labels or tags.

Two tables define how texts are normalised and split; then come the tokenizers, then how each is learned.
"""

import functools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jformer.data.tokenizers import word_splitting as words
from jformer.data.tokenizers.symbols import NUM_SYMBOLS, SYMBOLS, UNK, UNKNOWN, OneFile, texts_only, to_json
from jformer.errors import UserError

NORMALIZATIONS: dict[str, Callable[[str], str]] = {
    "identity": str,
    "nfkc": functools.partial(unicodedata.normalize, "NFKC"),
}
RULES: dict[str, tuple[Callable[[str], list[str]], Callable[[Iterable[str]], str]]] = {
    "word": (words.split, words.join),
    "char": (list, "".join),
    "label": (lambda text: [text], " ".join),
    "labels": (lambda text: label_set(text), ",".join),
    "tag": (str.split, " ".join),
}


LABELS_SHOWN = 20  # in the error for an unknown label


def label_set(text: str) -> list[str]:
    """Return the comma-separated labels of a text, each once, without the spaces around it.

    >>> label_set("calm, glad,calm")
    ['calm', 'glad']
    """
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


class ListTokenizer(OneFile):
    """Words or characters, numbered as listed. Words lose the spacing that `words.join` cannot restore."""

    def __init__(self, kind: str, normalization: str, tokens: Sequence[str], **more: object) -> None:
        super().__init__(".json", to_json(kind=kind, normalization=normalization, tokens=tokens, **more))
        self.kind, self.normalization = kind, normalization
        self._split, self._join = RULES[kind]
        self._normalize = NORMALIZATIONS[normalization]
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens, start=NUM_SYMBOLS)}

    @property
    def vocab_size(self) -> int:
        """The symbols and the list."""
        return NUM_SYMBOLS + len(self._tokens)

    @property
    def tokens(self) -> list[str]:
        """The symbols, then the words or characters."""
        return [*SYMBOLS, *self._tokens]

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Look up each word or character."""
        return [[self._ids.get(token, UNK) for token in self._split(self._normalize(line))] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Join the listed words or characters."""
        return self._join(UNKNOWN if i == UNK else self._tokens[i - NUM_SYMBOLS] for i in texts_only(ids))

    def unknown(self, text: str) -> list[str]:
        """Return the words or characters of a text that are not listed, in their order."""
        return [token for token in self._split(self._normalize(text)) if token not in self._ids]


class ByteTokenizer(OneFile):
    """The 256 bytes of UTF-8. Nothing is unknown; bytes that do not form a character are decoded as U+FFFD."""

    vocab_size = NUM_SYMBOLS + 256
    tokens = [*SYMBOLS, *(f"<0x{byte:02X}>" for byte in range(256))]  # noqa: RUF012

    def __init__(self, normalization: str) -> None:
        super().__init__(".json", to_json(kind="byte", normalization=normalization))
        self.normalization = normalization
        self._normalize = NORMALIZATIONS[normalization]

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Number the bytes after the symbols."""
        return [[byte + NUM_SYMBOLS for byte in self._normalize(line).encode()] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Read the bytes as UTF-8."""
        pieces = (UNKNOWN.encode() if i == UNK else bytes([i - NUM_SYMBOLS]) for i in texts_only(ids))
        return b"".join(pieces).decode(errors="replace")


class LabelTokenizer(ListTokenizer):
    """Labels, numbered as listed: a text is one ("label") or several ("labels"; "tag": one a word). No others."""

    def __init__(self, kind: str, normalization: str, tokens: Sequence[str], counts: Sequence[int] = ()) -> None:
        super().__init__(kind, normalization, tokens, **({"counts": counts} if counts else {}))
        self.counts = counts  # training examples of each label; empty for an imported model

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Look up each label or tag. Raise UserError for the first that the training data lacks."""
        ids = super().encode(lines)
        unknown = next((i for i, each in enumerate(ids) if UNK in each), None)
        if unknown is not None:
            label = self._split(self._normalize(lines[unknown]))[ids[unknown].index(UNK)]
            known = ", ".join(map(repr, self.tokens[NUM_SYMBOLS:][:LABELS_SHOWN]))
            more = self.vocab_size - NUM_SYMBOLS - LABELS_SHOWN
            raise UserError(
                f"{self.kind.removesuffix('s')} {label!r} does not occur in the training data, which has {known}"
                f"{f' and {more} more' if more > 0 else ''}; fix it, or train on data that has it"
            )
        return ids

    def numbered_as(self, labels: Sequence[str]) -> "LabelTokenizer":
        """Return the tokenizer with its labels in another order."""
        counts = dict(zip(self._tokens, self.counts, strict=True))
        return LabelTokenizer(self.kind, self.normalization, labels, [counts[label] for label in labels])


def learn_labels(kind: str, lines: Iterable[str], normalization: str) -> LabelTokenizer:
    """List the labels of the training text in alphabetical order, and count the examples of each.

    Raises UserError for labels that differ only in leading or trailing white space, and if there are none.
    """
    split, normalize = RULES[kind][0], NORMALIZATIONS[normalization]
    counts = Counter(label for line in lines if line.strip() for label in split(normalize(line)))
    labels = sorted(counts)
    if not labels:
        raise UserError("the training split holds no label; check data.dir and data.train")
    for label in labels:
        if label.strip() != label and label.strip() in counts:
            raise UserError(f"labels {label.strip()!r} and {label!r} differ only in white space: spell both the same")
    return LabelTokenizer(kind, normalization, labels, [counts[label] for label in labels])


def learn_list(kind: str, lines: Iterable[str], normalization: str, limit: int | None) -> ListTokenizer:
    """List the words or characters of the training text, the most frequent first."""
    split, normalize = RULES[kind][0], NORMALIZATIONS[normalization]
    counts = Counter(token for line in lines for token in split(normalize(line)))
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    return ListTokenizer(kind, normalization, by_frequency[:limit])
