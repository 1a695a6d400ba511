"""Subwords: sentencepiece models, BPE and unigram, trained so that no character of the text is lost."""

import functools
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sentencepiece

from jformer.data.tokenizers.symbols import BOS, EOS, PAD, UNK, UNKNOWN, OneFile, texts_only
from jformer.errors import UserError

THREADS = -1  # that cut texts: as many as there are cores; 1 in a process beside which others use the other cores
LONGEST_LINE = 4_096  # characters of a training line; longer lines are split


class SubwordTokenizer(OneFile):
    """A sentencepiece model, BPE or unigram, with its normalization inside.

    With identity normalization decoding gives the text back, runs of spaces and line feeds too. The exception is
    sentencepiece's own sign for a space, ▁ (U+2581): it comes back as a space.
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
        from sentencepiece import sentencepiece_model_pb2

        read: Any = sentencepiece_model_pb2  # its classes are made when it is imported
        return read.ModelProto.FromString(self._content)

    @property
    def kind(self) -> str:
        """How it was learned: bpe or unigram."""
        return ("unigram", "bpe")[self._stored.trainer_spec.model_type - 1]

    @property
    def normalization(self) -> str:
        """What is done to a text before it is cut."""
        return str(self._stored.normalizer_spec.name)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Cut the texts into pieces, in THREADS threads."""
        pieces: list[list[int]] = self._processor.encode(list(lines), num_threads=THREADS)
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Join the pieces."""
        text: str = self._processor.decode([int(i) for i in texts_only(ids)])
        return text


def learn_subwords(
    model_type: str, lines: Iterable[str], vocab_size: int, normalization: str, split_digits: bool
) -> SubwordTokenizer:
    """Learn a model of subwords; the same text gives the same bytes.

    Args:
        model_type: "bpe" or "unigram".
        lines: the training text, read once.
        vocab_size: the most ids, the four symbols included; a small text may have fewer pieces.
        normalization: "identity" or "nfkc", applied to each text before it is cut, also later.
        split_digits: each digit is a piece of its own.

    Raises:
        UserError: `vocab_size` is below what the characters need.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_learnable(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # a small text may not hold that many pieces
            character_coverage=1.0,
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


def _learnable(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text in a form of which sentencepiece skips nothing.

    sentencepiece skips lines with ▅ (U+2585), its sign for unknown characters, so replace it; it remains unknown.
    Unigram training takes minutes on a line of a million letters, so split long lines. And sentencepiece strips line
    feeds and carriage returns from the end of a line, so append a space, which no piece joins to the left.
    """
    for line in lines:
        line = line.replace("▅", " ")
        for start in range(0, len(line), LONGEST_LINE):
            part = line[start : start + LONGEST_LINE]
            yield f"{part} " if part.endswith(("\n", "\r")) else part
