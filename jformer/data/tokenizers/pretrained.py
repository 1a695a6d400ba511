"""Tokenizers of published models: those of the `tokenizers` library, and sentencepiece models with a list of ids.

They keep their own ids and symbols. Each is saved as one JSON file that holds all of the published files.
"""

import base64
import functools
import itertools
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
        symbols: Mapping[str, object],
        prefix: str = "",
        cleanup: bool = False,
        kept: Sequence[int] = (),
        split_specials: bool = False,
    ) -> None:
        """Wrap a tokenizer.json.

        Args:
            content: the tokenizer.json.
            symbols: the fields of `Symbols`, for `read_symbols`.
            prefix: put in front of every text.
            cleanup: whether decoding removes spaces as `clean_up` does.
            kept: if given, only these ids are used, renumbered by their position; all others are unknown.
            split_specials: whether special tokens spelt in a text are ordinary text.
        """
        few: dict[str, Any] = {"kept": list(kept)} if kept else {}
        few |= {"split_specials": True} if split_specials else {}
        super().__init__(
            ".json", to_json(kind="fast", content=content, symbols=symbols, prefix=prefix, cleanup=cleanup, **few)
        )
        self.content, self.prefix, self.mends_spaces, self.kept = content, prefix, cleanup, kept
        self._places = {i: place for place, i in enumerate(kept)}
        self.symbols = read_symbols(symbols)
        self._fast = library().Tokenizer.from_str(content)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = self.split_specials = split_specials

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.kept) or self._size

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The written form of every id; ids without one are shown as such."""
        written = _written(self.ids, self._size)
        return [written[i] for i in self.kept] if self.kept else written

    @property
    def ids(self) -> dict[str, int]:
        """The id that the file gives to each token."""
        return dict(self._fast.get_vocab(with_added_tokens=True))

    @property
    def _size(self) -> int:
        return max(self.ids.values()) + 1

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
        return self.cut([self.prefix + line for line in lines])

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, with nothing put in front of it."""
        found = [list(one.ids) for one in self._fast.encode_batch(list(texts), add_special_tokens=False)]
        return [[self._places.get(i, self.symbols.unk) for i in ids] for ids in found] if self.kept else found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; special tokens are left out."""
        theirs = [self.kept[int(i)] if self.kept else int(i) for i in ids]
        text = self._fast.decode(theirs, skip_special_tokens=True)
        return clean_up(text) if self.mends_spaces else text

    def pruned(self, ids: Sequence[int]) -> "FastTokenizer":
        """Return a tokenizer that segments texts like this one, restricted to some ids, which are renumbered."""
        kept = [self.kept[i] for i in ids] if self.kept else list(ids)
        symbols = _renumbered(self.symbols, ids, self.vocab_size)
        return self._changed(self.content, symbols, kept)

    def extended(self, tokens: Sequence[str], before: int, rows: int) -> "FastTokenizer":
        """Return a tokenizer with further tokens, where the embedding had `before` rows and now has `rows`.

        Raises UserError if the library would not number them from the largest id on.
        """
        fast = library().Tokenizer.from_str(self.content)
        fast.add_tokens(list(tokens))
        ids = [fast.token_to_id(token) for token in tokens]
        if not self.kept and ids != [*range(self._size, self._size + len(tokens))]:
            raise UserError(
                f"tokenizer.json: its ids have gaps below {self._size}, so {tokens[0]!r} would get id {ids[0]}: number "
                "its tokens without gaps"
            )
        kept = [*self.kept, *ids] if self.kept else ()  # pruned tokens keep their number in the file
        symbols = _past(self.symbols, before, rows)
        return self._changed(fast.to_str(), symbols, kept)

    def _changed(self, content: str, symbols: Symbols, kept: Sequence[int]) -> "FastTokenizer":
        return FastTokenizer(content, symbols._asdict(), self.prefix, self.mends_spaces, kept, self.split_specials)


class PiecesTokenizer(OneFile):
    """A sentencepiece model whose pieces get their ids from a separate list (Marian, M2M-100)."""

    def __init__(
        self,
        model: str,
        ids: Mapping[str, int],
        symbols: Mapping[str, object],
        specials: Sequence[str],
        prefix: str = "",
        added: Sequence[str] = (),
    ) -> None:
        """Wrap a sentencepiece model.

        Args:
            model: sentencepiece's, in base64.
            ids: entry → its id, of all entries.
            symbols: the fields of `Symbols`, for `read_symbols`.
            specials: entries that stand for no text.
            prefix: put in front of every text.
            added: entries that are texts but not pieces of the model.
        """
        more = {"added": list(added)} if added else {}
        super().__init__(
            ".json",
            to_json(kind="pieces", model=model, ids=ids, symbols=symbols, specials=specials, prefix=prefix, **more),
        )
        self.model, self.ids, self.specials, self.prefix, self.added = model, ids, specials, prefix, list(added)
        self.symbols = read_symbols(symbols)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(model))
        whole = sorted([*specials, *added], key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, whole)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values()) + 1

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The written form of every id; ids without one are shown as such."""
        return _written(self.ids, self.vocab_size)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Split the texts into pieces. Specials in a text keep their ids, and so does Marian's '>>fra<<' before one."""
        return self.cut([self.prefix + line for line in lines])

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, with nothing put in front of it."""
        return [self._encode(text) for text in texts]

    def _encode(self, line: str) -> list[int]:
        found: list[str] = []
        end = 0
        for entry in self._whole.finditer(line):
            found += [*self._pieces(line[end : entry.start()]), entry[0]]
            end = entry.end()
        return [self.ids.get(piece, self.symbols.unk) for piece in (*found, *self._pieces(line[end:]))]

    def _pieces(self, text: str) -> list[str]:
        language = re.match(">>.*?<<", text) if self._marks_languages else None
        rest = text[language.end() :] if language else text
        return [*([language[0]] if language else []), *self._processor.encode(rest, out_type=str)]

    @functools.cached_property
    def _marks_languages(self) -> bool:
        return not any(special.startswith("__") for special in self.specials)

    def decode(self, ids: Sequence[int]) -> str:
        """Join the pieces, leaving out specials and surrounding added entries with spaces."""
        pieces = [piece for piece in (self.tokens[int(i)] for i in ids) if piece not in self.specials]
        groups = itertools.groupby(pieces, key=frozenset(self.added).__contains__)
        texts = [" ".join(group) if added else self._processor.decode_pieces(list(group)) for added, group in groups]
        return " ".join(texts).strip()

    def pruned(self, ids: Sequence[int]) -> "PiecesTokenizer":
        """Return a tokenizer that segments texts like this one, restricted to some ids, which are renumbered."""
        places = {i: place for place, i in enumerate(ids)}
        few = {piece: places[i] for piece, i in self.ids.items() if i in places}
        symbols, added = _renumbered(self.symbols, ids, self.vocab_size), [one for one in self.added if one in few]
        return PiecesTokenizer(self.model, few, symbols._asdict(), [*self.specials], self.prefix, added)

    def extended(self, tokens: Sequence[str], before: int, rows: int) -> "PiecesTokenizer":
        """Return a tokenizer with further tokens, where the embedding had `before` rows and now has `rows`."""
        ids = {**self.ids, **{token: self.vocab_size + i for i, token in enumerate(tokens)}}
        symbols, added = _past(self.symbols, before, rows), [*self.added, *tokens]
        return PiecesTokenizer(self.model, ids, symbols._asdict(), [*self.specials], self.prefix, added)


def _past(symbols: Symbols, before: int, rows: int) -> Symbols:
    """Return symbols with padding moved past a table of `rows`, if it was past one of `before` rows."""
    return symbols._replace(pad=rows) if symbols.pad >= before else symbols


def _renumbered(symbols: Symbols, ids: Sequence[int], size: int) -> Symbols:
    """Return symbols as positions in a list of ids; padding past the vocabulary of `size` ids is then past the list."""
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


def read_symbols(stored: Mapping[str, object]) -> Symbols:
    """Return symbols as they were stored."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    return Symbols(**values)


def clean_up(text: str) -> str:
    """Remove the space before English punctuation and clitics, as transformers does when decoding BERT."""
    for apart in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(apart, apart.strip())
    return text


def library() -> Any:
    """Return the package `tokenizers`; raise UserError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("this tokenizer needs the package `tokenizers`: pip install 'jformer[hf]'") from error
    return tokenizers
