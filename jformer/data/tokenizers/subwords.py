"""Subwords: sentencepiece models, BPE and unigram, imported or learned so that no character of the text is lost."""

import functools
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from jformer.data.tokenizers.symbols import BOS, EOS, PAD, SYMBOLS, UNK, UNKNOWN, OneFile, texts_only
from jformer.errors import UserError

THREADS = -1  # that encode texts: -1 = one per core; 1 in a worker process, because others use the other cores
LONGEST_LINE = 4_096  # characters of a training line; longer lines are split
NORMALIZATIONS = ("identity", "nfkc")
KINDS = ("unigram", "bpe")  # by the number that sentencepiece gives them, from 1
NORMAL, UNKNOWN_PIECE, CONTROL, USER_DEFINED = range(1, 5)  # types of pieces; user-defined ones are never split


class SubwordTokenizer(OneFile):
    """A sentencepiece model, BPE or unigram, with its normalization inside.

    With identity normalization, decoding restores the text, including runs of spaces and line feeds. The exception is
    sentencepiece's own sign for a space, ▁ (U+2581), which becomes a space.
    """

    def __init__(self, model: bytes) -> None:
        super().__init__(".model", model)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def content(self) -> bytes:
        """The model, as sentencepiece stores it."""
        return self._content

    @property
    def vocab_size(self) -> int:
        """The pieces of the model, the symbols among them."""
        return self._processor.get_piece_size()

    @property
    def tokens(self) -> list[str]:
        """The pieces, ▁ standing for a space."""
        return self._processor.id_to_piece(list(range(self.vocab_size)))

    @property
    def scores(self) -> list[float]:
        """The score of every piece: unigram log-probabilities, or the order of merges."""
        return [self._processor.get_score(i) for i in range(self.vocab_size)]

    @functools.cached_property
    def _stored(self) -> Any:
        return _parsed(self._content)

    @property
    def kind(self) -> str:
        """How it was learned: bpe or unigram."""
        return KINDS[self._stored.trainer_spec.model_type - 1]

    @property
    def byte_fallback(self) -> bool:
        """Whether a character that is not in the vocabulary is split into bytes."""
        return bool(self._stored.trainer_spec.byte_fallback)

    @functools.cached_property
    def uncut(self) -> list[str]:
        """The symbols that are single pieces wherever a text holds them."""
        return [piece.piece for piece in self._stored.pieces if piece.type == USER_DEFINED]

    @functools.cached_property
    def reserved(self) -> frozenset[str]:
        """The pieces that no text is split into: symbols, languages and bytes."""
        return frozenset(piece.piece for piece in self._stored.pieces if piece.type not in (NORMAL, USER_DEFINED))

    @property
    def starts_words(self) -> bool:
        """Whether a space in a piece can only be its first character."""
        spec = self._stored.trainer_spec
        return bool(spec.split_by_whitespace and not spec.treat_whitespace_as_suffix)

    @property
    def is_ours(self) -> bool:
        """Whether texts are prepared as in models that jformer learns, which other libraries can reproduce."""
        spec = self._stored.normalizer_spec
        plain = spec.add_dummy_prefix and spec.escape_whitespaces and not spec.remove_extra_whitespaces
        known = plain and spec.name in NORMALIZATIONS and not (self.kind == "unigram" and self.byte_fallback)
        return bool(known) and not self.uncut

    @property
    def normalization(self) -> str:
        """The name of the normalization applied to a text before it is split."""
        return str(self._stored.normalizer_spec.name)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Split the texts into pieces, in THREADS threads."""
        pieces: list[list[int]] = self._processor.encode(list(lines), num_threads=THREADS)
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Join the pieces."""
        text: str = self._processor.decode([int(i) for i in texts_only(ids)])
        return text

    def unknown(self, text: str) -> str:
        """Return the characters of a text that are not in the vocabulary, in their order."""
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return "".join(piece for piece in pieces if self._processor.piece_to_id(piece) == UNK)


def learn_subwords(
    model_type: str,
    lines: Iterable[str],
    vocab_size: int,
    normalization: str,
    split_digits: bool,
    *,
    coverage: float = 1.0,
    byte_fallback: bool = False,
    symbols: Sequence[str] = (),
    controls: Sequence[str] = (),
) -> SubwordTokenizer:
    """Learn a model of subwords; the same text gives the same bytes.

    Args:
        model_type: "bpe" or "unigram".
        lines: the training text, read once.
        vocab_size: maximum number of ids, the four symbols included; a small text may have fewer pieces.
        normalization: "identity" or "nfkc", applied to each text before it is split, now and later.
        split_digits: each digit is a piece of its own.
        coverage: the share of the text's characters that the vocabulary holds, the most frequent ones.
        byte_fallback: any other character is split into bytes, which are pieces.
        symbols: single pieces wherever a text holds them.
        controls: pieces that no text holds, such as languages.

    Raises:
        UserError: `vocab_size` is below what the symbols and the characters need.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_learnable(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # a small text may not hold that many pieces
            character_coverage=coverage,
            byte_fallback=byte_fallback,
            user_defined_symbols=[*symbols],
            control_symbols=[*controls],
            max_sentence_length=4 * LONGEST_LINE,  # in bytes; longer lines would be skipped
            normalization_rule_name=normalization,
            remove_extra_whitespaces=False,
            split_digits=split_digits,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            unk_surface=UNKNOWN,
            num_threads=1,  # a unigram model depends on the number of threads
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if not needed:
            raise
        raise UserError(f"data.vocab_size={vocab_size}: the characters of the text alone need {needed[1]}") from error
    return SubwordTokenizer(model.getvalue())


def read_subwords(path: Path, symbols: Sequence[str] = (), controls: Sequence[str] = ()) -> SubwordTokenizer:
    """Read a sentencepiece model from a file, its pieces renumbered after our four symbols and the added ones.

    Pieces are chosen by their scores, so their numbers are arbitrary. `symbols` and `controls` are as for
    `learn_subwords`, even if the model has such pieces. Raises UserError for anything but a BPE or unigram model.
    """
    try:
        stored = _parsed(path.read_bytes())
        spec, pieces = stored.trainer_spec, list(stored.pieces)
        if not pieces or spec.model_type > len(KINDS):
            raise ValueError("words or characters")
    except OSError as error:
        raise UserError(f"data.vocabulary={str(path)!r}: {error.strerror}; name a sentencepiece model") from error
    except Exception as error:  # protobuf has its own types
        raise UserError(f"data.vocabulary={str(path)!r} is not a sentencepiece model of BPE or unigram") from error
    roles = {spec.pad_piece, spec.bos_piece, spec.eos_piece, spec.unk_piece}
    ours = [piece for piece in pieces if piece.piece not in roles and piece.piece not in SYMBOLS]
    present = {piece.piece for piece in ours}
    make = type(pieces[0])
    first = [make(piece=name, score=0.0, type=UNKNOWN_PIECE if i == UNK else CONTROL) for i, name in enumerate(SYMBOLS)]
    kinds = {**dict.fromkeys(controls, CONTROL), **dict.fromkeys(symbols, USER_DEFINED)}
    added = [make(piece=name, score=0.0, type=kind) for name, kind in kinds.items() if name not in present]
    for piece in ours:
        if piece.piece in kinds:
            piece.type, piece.score = kinds[piece.piece], 0.0
    del stored.pieces[:]
    stored.pieces.extend([*first, *added, *ours])
    for role, i in (("pad", PAD), ("bos", BOS), ("eos", EOS), ("unk", UNK)):
        setattr(spec, f"{role}_id", i)
        setattr(spec, f"{role}_piece", SYMBOLS[i])
    spec.unk_surface, spec.vocab_size = UNKNOWN, len(stored.pieces)
    return SubwordTokenizer(stored.SerializeToString(deterministic=True))


def _parsed(content: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    read: Any = sentencepiece_model_pb2  # its classes are created at import
    return read.ModelProto.FromString(content)


def _learnable(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text in a form in which sentencepiece skips nothing.

    sentencepiece skips lines with ▅ (U+2585), its sign for unknown characters, so replace it; it remains unknown.
    Unigram training takes minutes on a line of a million letters, so split long lines. And sentencepiece strips line
    feeds and carriage returns from the end of a line, so append a space, which no piece joins to the left.
    """
    for line in lines:
        line = line.replace("▅", " ")
        for start in range(0, len(line), LONGEST_LINE):
            part = line[start : start + LONGEST_LINE]
            yield f"{part} " if part.endswith(("\n", "\r")) else part
