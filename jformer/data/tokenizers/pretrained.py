"""Tokenizers of published models: those of the `tokenizers` library, and sentencepiece models with a list of ids.

Their ids are theirs, and so are the symbols. Each is one JSON file of ours that holds all of the published files.
"""

import base64
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece

from jformer.data.tokenizers.symbols import OneFile, Symbols, to_json
from jformer.errors import UserError


class FastTokenizer(OneFile):
    """A tokenizer.json: normalizer, pre-tokenizer, model and decoder are the library's."""

    def __init__(
        self,
        content: str,
        symbols: Mapping[str, Any],
        prefix: str = "",
        cleanup: bool = False,
        kept: Sequence[int] = (),
    ) -> None:
        """Hold the content of a tokenizer.json, its symbols, and what is put in front of every text.

        Where some ids are `kept`, ours are their places in that list, and all others are the unknown one.
        """
        few = {"kept": list(kept)} if kept else {}
        super().__init__(
            ".json", to_json(kind="fast", content=content, symbols=symbols, prefix=prefix, cleanup=cleanup, **few)
        )
        self.content, self._prefix, self._cleanup, self.kept = content, prefix, cleanup, kept
        self._places = {i: place for place, i in enumerate(kept)}
        self.symbols = read_symbols(symbols)
        self._fast = _library().Tokenizer.from_str(content)
        self._fast.no_truncation()
        self._fast.no_padding()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.kept) or self._size

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The written form of every id; ids without one are shown as such."""
        written = _written(self._fast.get_vocab(with_added_tokens=True), self._size)
        return [written[i] for i in self.kept] if self.kept else written

    @property
    def _size(self) -> int:
        return max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def specials(self) -> list[int]:
        """The ids of tokens that stand for no text, such as languages."""
        ids = [token["id"] for token in json.loads(self.content)["added_tokens"] if token["special"]]
        return [self._places[i] for i in ids] if self.kept else ids

    @property
    def marks_spaces(self) -> bool:
        """Whether a word begins with the space before it, as in byte-level BPE (GPT-2)."""
        return bool(self._fast.encode("a").ids != self._fast.encode(" a").ids)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without symbols around it."""
        texts = [self._prefix + line for line in lines]
        found = [list(one.ids) for one in self._fast.encode_batch(texts, add_special_tokens=False)]
        return [[self._places.get(i, self.symbols.unk) for i in ids] for ids in found] if self.kept else found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; special tokens are left out."""
        theirs = [self.kept[int(i)] if self.kept else int(i) for i in ids]
        text = self._fast.decode(theirs, skip_special_tokens=True)
        return clean_up(text) if self._cleanup else text

    def pruned(self, ids: Sequence[int]) -> "FastTokenizer":
        """Return a tokenizer that cuts texts as this one does, and knows only some ids, which it numbers anew."""
        kept = [self.kept[i] for i in ids] if self.kept else list(ids)
        symbols = _renumbered(self.symbols, ids, self.vocab_size)
        return FastTokenizer(self.content, symbols._asdict(), self._prefix, self._cleanup, kept)


class PiecesTokenizer(OneFile):
    """A sentencepiece model, whose pieces have the ids of a list of their own (Marian, M2M-100)."""

    def __init__(
        self, model: str, ids: Mapping[str, int], symbols: Mapping[str, Any], specials: Sequence[str], prefix: str = ""
    ) -> None:
        """Hold a model in base64, the id of every piece, the symbols, and which entries stand for no text."""
        super().__init__(
            ".json", to_json(kind="pieces", model=model, ids=ids, symbols=symbols, specials=specials, prefix=prefix)
        )
        self.model, self.ids, self.specials, self._prefix = model, ids, specials, prefix
        self.symbols = read_symbols(symbols)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(model))
        self._special = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values()) + 1

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The written form of every id; ids without one are shown as such."""
        return _written(self.ids, self.vocab_size)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Cut the texts into pieces. Specials in a text are themselves, and so is Marian's '>>fra<<' before one."""
        return [self._encode(self._prefix + line) for line in lines]

    def _encode(self, line: str) -> list[int]:
        found: list[str] = []
        end = 0
        for special in self._special.finditer(line):
            found += [*self._pieces(line[end : special.start()]), special[0]]
            end = special.end()
        return [self.ids.get(piece, self.symbols.unk) for piece in (*found, *self._pieces(line[end:]))]

    def _pieces(self, text: str) -> list[str]:
        language = re.match(">>.*?<<", text) if self._marks_languages else None
        rest = text[language.end() :] if language else text
        return [*([language[0]] if language else []), *self._processor.encode(rest, out_type=str)]

    @functools.cached_property
    def _marks_languages(self) -> bool:
        return not any(special.startswith("__") for special in self.specials)

    def decode(self, ids: Sequence[int]) -> str:
        """Join the pieces; what stands for no text is left out."""
        pieces = [self.tokens[i] for i in map(int, ids)]
        return self._processor.decode_pieces([piece for piece in pieces if piece not in self.specials]).strip()

    def pruned(self, ids: Sequence[int]) -> "PiecesTokenizer":
        """Return a tokenizer that cuts texts as this one does, and knows only some ids, which it numbers anew."""
        places = {i: place for place, i in enumerate(ids)}
        few = {piece: places[i] for piece, i in self.ids.items() if i in places}
        symbols = _renumbered(self.symbols, ids, self.vocab_size)
        return PiecesTokenizer(self.model, few, symbols._asdict(), [*self.specials], self._prefix)


def _renumbered(symbols: Symbols, ids: Sequence[int], size: int) -> Symbols:
    """Return symbols as places in a list of ids; one that was past a vocabulary of some size is past the list."""
    places = {i: place for place, i in enumerate(ids)}
    new = {-1: -1, **places, **({symbols.pad: len(ids)} if symbols.pad >= size else {})}
    return read_symbols({
        role: [new[i] for i in each] if isinstance(each, tuple) else new[each]
        for role, each in symbols._asdict().items()
    })  # fmt: skip


def _written(ids: Mapping[str, int], size: int) -> list[str]:
    tokens = [f"<id {i}>" for i in range(size)]
    for token, i in ids.items():
        tokens[i] = token
    return tokens


def read_symbols(stored: Mapping[str, Any]) -> Symbols:
    """Return symbols as they were stored."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    return Symbols(**values)


def clean_up(text: str) -> str:
    """Take the space before English marks and clitics away, as their BERT does when it decodes."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    for apart, together in (
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ):
        text = text.replace(apart, together)
    return text


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("this run has a tokenizer of the package `tokenizers`: pip install 'jformer[hf]'") from error
    return tokenizers
