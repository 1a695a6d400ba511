"""Tokenizers of published models: those of the `tokenizers` library, and sentencepiece models with a list of ids.

Their ids are theirs, and so are the symbols. Each is one JSON file of ours that holds all of the published files.
"""

import base64
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece

from jformer.data.tokenizers.symbols import OneFile, Symbols, to_json
from jformer.errors import UserError


class FastTokenizer(OneFile):
    """A tokenizer.json: normalizer, pre-tokenizer, model and decoder are the library's."""

    def __init__(self, content: str, symbols: Mapping[str, Any], prefix: str = "", cleanup: bool = False) -> None:
        """Hold the content of a tokenizer.json, its symbols, and what is put in front of every text."""
        super().__init__(
            ".json", to_json(kind="fast", content=content, symbols=symbols, prefix=prefix, cleanup=cleanup)
        )
        self.content, self._prefix, self._cleanup = content, prefix, cleanup
        self.symbols = read_symbols(symbols)
        self._fast = _library().Tokenizer.from_str(content)
        self._fast.no_truncation()
        self._fast.no_padding()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The written form of every id; ids without one are shown as such."""
        return _written(self._fast.get_vocab(with_added_tokens=True), self.vocab_size)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without symbols around it."""
        texts = [self._prefix + line for line in lines]
        return [list(one.ids) for one in self._fast.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; special tokens are left out."""
        text = self._fast.decode([int(i) for i in ids], skip_special_tokens=True)
        return clean_up(text) if self._cleanup else text


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
