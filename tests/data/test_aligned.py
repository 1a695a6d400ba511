import dataclasses

import pytest

from jformer.data.aligned import Chunk, encode_chunks, encode_words
from jformer.data.encoders import Side
from jformer.data.tokenizers import BOS, EOS, UNK, FastTokenizer, learn
from jformer.errors import UserError


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe"])
def test_the_tokens_of_each_word_stand_from_its_start_to_the_next(kind):
    words = [["very", "unlikely", "things"], [], ["things"]]
    tokenizer = learn(kind, ["very unlikely things are very things"] * 3, 40, "identity", False)
    for text, (ids, starts) in zip(words, encode_words(tokenizer, words), strict=True):
        ends = [*starts[1:], len(ids)]
        found = [tokenizer.decode(ids[start:end]) for start, end in zip(starts, ends, strict=False)]
        assert [word.rstrip() for word in found] == text
        assert tokenizer.decode(ids) == " ".join(text)


def test_a_word_without_tokens_is_the_unknown_one():
    tokenizer = learn("word", ["a b"], 10, "identity", False)
    assert encode_words(tokenizer, [["a", "\u200b \t", "b"]])[0][1] == [0, 1, 2]
    assert encode_words(tokenizer, [["a", " "]])[0][0][1] == UNK


def test_chunks_end_between_words_and_only_a_long_word_is_cut():
    tokenizer = learn("char", ["abc defg"], 20, "identity", False)
    ids = {letter: tokenizer.encode([letter])[0][0] for letter in "abcdefg "}
    side = Side(tokenizer, 5, begin=True)
    chunks, none = encode_chunks(side, [["ab", "c", "de", "abcdefg", "f"], []])
    texts = ["ab", "c", "de", "abc", "f"]
    assert chunks == [
        Chunk([BOS, *(ids[letter] for letter in text), EOS], starts, cut)
        for text, starts, cut in zip(texts, [[1]] * 5, [0, 0, 0, 1, 0], strict=True)
    ]
    assert none == []
    with pytest.raises(UserError, match=r"data\.max_source_length=2 holds 2 symbols and no token: raise it"):
        encode_chunks(dataclasses.replace(side, max_length=2), [["a"]])


def test_words_of_a_byte_level_vocabulary_begin_with_their_space():
    library = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    fast = library.Tokenizer(library.models.BPE())
    fast.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(vocab_size=400, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())
    fast.train_from_iterator(["we live in London now"] * 9, trainer)
    tokenizer = FastTokenizer(fast.to_str(), {"pad": 0, "bos": 0, "eos": 1, "unk": 2})
    ((ids, starts),) = encode_words(tokenizer, [["live", "in", "London"]])
    assert ids == tokenizer.encode([" live in London"])[0]
    assert starts == [0, 1, 2]
    prefixed = FastTokenizer(fast.to_str(), {"pad": 0, "bos": 0, "eos": 1, "unk": 2}, prefix="now we ")
    assert encode_words(prefixed, [["live", "in", "London"]]) == [(ids, starts)]
