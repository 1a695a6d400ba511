"""Tokenizers of published models keep their own ids and symbols; what stands for no text is neither cut nor shown."""

import base64
import io

import pytest
import sentencepiece
from etils.epath import Path

from jformer.data.encoders import Side
from jformer.data.tokenizers import PiecesTokenizer, load
from jformer.errors import UserError

TEXTS = ["a red house", "the house is red", "a house", "red and blue houses"] * 5
SYMBOLS = {"pad": 90, "bos": 90, "eos": 0, "unk": 1, "before": [91], "noise": []}


def pieces(specials, symbols=SYMBOLS):
    """Return a tokenizer of a small sentencepiece model, whose ids run backwards."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    written = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    ids = {piece: 89 - i for i, piece in enumerate(written)} | {"</s>": 0, "<unk>": 1, "<pad>": 90}
    return PiecesTokenizer(
        base64.b64encode(model.getvalue()).decode(), ids | {s: 91 + i for i, s in enumerate(specials)}, symbols,
        [*specials, "</s>", "<unk>", "<pad>"],
    )  # fmt: skip


def test_ids_are_those_of_the_list_and_text_comes_back():
    tokenizer = pieces([">>fra<<"])
    (ids,) = tokenizer.encode(["a red house"])
    assert all(2 < i < 90 for i in ids)
    assert tokenizer.tokens[ids[0]].startswith("▁")
    assert tokenizer.decode([90, *ids, 0]) == "a red house"
    assert tokenizer.vocab_size == 92
    assert tokenizer.tokens[2] == "<id 2>"


def test_specials_in_a_text_are_themselves_and_what_is_unknown_is_unk():
    tokenizer = pieces([">>fra<<"])
    first, second, third = tokenizer.encode([">>fra<< a house", "a</s>house", ">>xyz<< ß"])
    assert first[0] == 91
    assert 0 in second
    assert third[0] == 1  # a language that is not in the list
    assert tokenizer.decode(first) == "a house"


def test_texts_of_a_side_begin_with_what_the_symbols_say_and_the_end_survives_a_cut():
    side = Side(pieces(["__de__"], SYMBOLS | {"after": [91]}), 4)
    (ids,) = side.encode(["a red house"])
    assert (ids[0], ids[-2:]) == (91, [0, 91])
    assert side.cut(ids) == [*ids[:2], 0, 91]
    parts = side.pieces(ids)
    assert all(part[0] == 91 and part[-2:] == [0, 91] and len(part) <= 4 for part in parts)
    assert [i for part in parts for i in part[1:-2]] == ids[1:-2]


def test_what_was_saved_is_read_back(tmp_path):
    tokenizer = pieces([">>fra<<"])
    tokenizer.save(Path(tmp_path), "shared")
    again = load(Path(tmp_path), "shared")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.symbols == tokenizer.symbols
    assert again.encode(TEXTS) == tokenizer.encode(TEXTS)


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "shared.json").write_text(
        '{"kind": "pieces", "model": "AAAA", "ids": {}, "symbols": {}, "specials": []}'
    )
    with pytest.raises(UserError, match="not a jformer tokenizer"):
        load(Path(tmp_path), "shared")
