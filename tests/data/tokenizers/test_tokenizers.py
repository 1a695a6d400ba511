import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from jformer.data.tokenizers import BOS, EOS, NUM_SYMBOLS, PAD, SYMBOLS, UNK, beginning, learn, load, spellings
from jformer.errors import UserError

KINDS = ("word", "char", "byte", "bpe", "unigram")  # of text; those of images are tested in test_images
TEXT = "the house is small while a man doesn't see 1234 dogs and Straßen über 56 Brücken ; it's “so” ."


def corpus(size=300):
    rng = random.Random(0)
    return [" ".join(rng.choices(TEXT.split(), k=rng.randrange(3, 12))) for _ in range(size)]


def learn_from(kind, lines=None, vocab_size=200, normalization="identity", split_digits=False):
    return learn(kind, corpus() if lines is None else lines, vocab_size, normalization, split_digits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_of_the_training_set_comes_back(kind):
    tokenizer = learn_from(kind)
    lines = ["the house doesn't see a man", "über 56 Brücken; it's “so”."]
    ids = tokenizer.encode(lines)
    assert [tokenizer.decode(sentence) for sentence in ids] == lines
    assert all(UNK < i < tokenizer.vocab_size for sentence in ids for i in sentence)
    assert tokenizer.encode([]) == []
    assert tokenizer.encode([""]) == [[]]
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_phrase_of_a_text_has_the_spelling_that_it_has_there(kind):
    chinese = ["一大的房子", "房子很大", "大的房子在这里", "这里很大"]
    lines = corpus(40) if kind == "word" else [*corpus(40), *chinese * 5]
    tokenizer = learn_from(kind, lines)
    for ids in tokenizer.encode([*lines[:10], *lines[-4:]]):
        for start in range(len(ids)):
            for end in range(start + 1, min(start + 4, len(ids)) + 1):
                phrase = tokenizer.decode(ids[start:end])
                found = [ids[i : i + n] for n in range(1, end - start + 1) for i in range(start, end - n + 1)]
                if phrase and "\N{REPLACEMENT CHARACTER}" not in phrase:  # half of a character
                    assert any(one in found for one in spellings(tokenizer, phrase)), (phrase, ids[start:end])


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_at_the_end_of_a_beginning_belongs_to_the_next_token(kind):
    tokenizer = learn_from(kind)
    for first, second in [("the house", "while a man"), ("1234 dogs", "56"), ("small", "“so”.")]:
        (whole,) = tokenizer.encode([f"{first} {second}"])
        begun = beginning(tokenizer, f"{first} ")
        assert begun == whole[: len(begun)]
        assert tokenizer.decode(begun).rstrip() == first


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_symbols_are_left_out_and_the_unknown_is_shown(kind):
    tokenizer = learn_from(kind)
    (house,) = tokenizer.encode(["house"])
    assert tokenizer.decode(np.array([BOS, *house, EOS, PAD, PAD], np.int32)) == "house"
    assert tokenizer.decode([UNK]) == "⁇"


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"byte"}))
def test_what_training_did_not_hold_is_unknown(kind):
    tokenizer = learn_from(kind)
    (ids,) = tokenizer.encode(["the 家"])
    assert ids.count(UNK) == 1
    assert tokenizer.decode(ids) == "the ⁇"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "unigram"])
def test_every_text_over_known_characters_round_trips_exactly(kind):
    characters = " abc\t\n\r\v\x85\u2028é\u0301“<>s/unkpad"
    rng = random.Random(1)
    lines = ["".join(rng.choices(characters, k=rng.randrange(30))) for _ in range(300)]
    lines += ["", " ", "   ", " a", "a  b   c  ", "<s></s> <unk><pad>", "<unk>" * 9]
    lines += ["\n", "a\n", "\n\na", "a\r\n\r\n", "\n \n a \n"]
    tokenizer = learn_from(kind, [*lines, characters])
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(lines)] == lines


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n\n"])
@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "unigram"])
def test_line_ends_are_learned_where_nothing_follows_them(kind, ending):
    tokenizer = learn_from(kind, [f"a man{ending}"] * 9, vocab_size=300)
    (ids,) = tokenizer.encode([f"man{ending}"])
    assert UNK not in ids
    assert tokenizer.decode(ids) == f"man{ending}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_line_feed_joins_what_stands_before_it(kind):
    tokenizer = learn_from(kind, ["who ?\nhe :\nwho ?\n"] * 50, vocab_size=60)
    assert any(token.endswith("?\n") for token in tokenizer.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_id_has_its_written_form(kind):
    tokenizer = learn_from(kind)
    tokens = tokenizer.tokens
    assert len(tokens) == tokenizer.vocab_size
    assert tuple(tokens[:NUM_SYMBOLS]) == SYMBOLS
    (ids,) = tokenizer.encode(["the house"])
    assert [tokens[i] for i in ids] == {
        "word": ["the", "house"],
        "char": list("the house"),
        "byte": [f"<0x{byte:02X}>" for byte in b"the house"],
    }.get(kind, ["▁the", "▁house"])


def test_labels_are_listed_in_order_whatever_the_size(tmp_path):
    tokenizer = learn_from("label", ["not so", "b", "", "not so", "a\tz"], vocab_size=5)
    assert tokenizer.tokens == [*SYMBOLS, "a\tz", "b", "not so"]
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode(["not so", "a\tz"]) == [[6], [4]]
    assert tokenizer.decode([6]) == "not so"
    tokenizer.save(tmp_path, "target")
    loaded = load(tmp_path, "target")
    assert (loaded.fingerprint, loaded.encode(["b"])) == (tokenizer.fingerprint, [[5]])
    for known in (tokenizer, loaded):
        with pytest.raises(
            UserError, match=r"label 'not' does not occur in the training data, which has 'a\\tz', 'b', 'not so'; "
        ):
            known.encode(["b", "not", "c"])


def test_tags_stand_between_spaces_and_an_unknown_one_is_named(tmp_path):
    learn_from("tag", ["O B-x", "", "O I-x"], normalization="nfkc").save(tmp_path, "target")
    tokenizer = load(tmp_path, "target")
    assert tokenizer.tokens == [*SYMBOLS, "B-x", "I-x", "O"]
    assert tokenizer.encode(["O O B-x", ""]) == [[6, 6, 4], []]
    assert tokenizer.decode([4, 6]) == "B-x O"
    with pytest.raises(UserError, match="tag 'B-y' does not occur in the training data, which has 'B-x', 'I-x', 'O'; "):
        tokenizer.encode(["O", "O B-y"])


def test_normalized_labels_are_one_and_many_are_not_all_named():
    assert learn_from("label", ["ﬁ", "fi"], normalization="nfkc").encode(["ﬁ"]) == [[4]]
    with pytest.raises(UserError, match=r"'119' and 180 more; ") as caught:
        learn_from("label", map(str, range(100, 300))).encode(["5"])
    assert len(str(caught.value)) < 250


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_signs_of_sentencepiece_in_the_text_cost_no_more_than_themselves(kind):
    tokenizer = learn_from(kind, [*corpus(), "▁ xyz", "▅ XYZ"])
    assert tokenizer.decode(tokenizer.encode(["xyz XYZ"])[0]) == "xyz XYZ"
    assert tokenizer.decode(tokenizer.encode(["a▁man"])[0]) == "a man"
    assert tokenizer.decode(tokenizer.encode(["a▅man"])[0]) == "a⁇man"


def test_learning_is_the_same_in_every_process(tmp_path):
    here = {kind: learn_from(kind).fingerprint for kind in KINDS}
    code = (
        "import json, sys; from jformer.data.tokenizers import learn; lines = json.load(sys.stdin)\n"
        f"print(json.dumps({{kind: learn(kind, lines, 200, 'identity', False).fingerprint for kind in {KINDS}}}))"
    )
    run = [sys.executable, "-c", code]
    root = Path(__file__).parents[3]
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            run, input=json.dumps(corpus()), env=environment, cwd=root, capture_output=True, text=True
        )
        assert json.loads(done.stdout) == here
        assert done.stderr == ""
    assert len(set(here.values())) == len(KINDS)


def test_unigram_is_learned_on_one_thread(tmp_path):
    """Its model depends on the number of threads, so on the machine, if left free."""
    learn_from("unigram").save(tmp_path, "shared")
    model = sentencepiece_model_pb2.ModelProto.FromString((tmp_path / "shared.model").read_bytes())
    assert model.trainer_spec.num_threads == 1


def test_words_are_the_most_frequent_ones_ties_by_code_point():
    tokenizer = learn_from("word", ["b b b", "ä z a c c", "z ä"], vocab_size=8)
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode(["b c z ä a"]) == [[4, 5, 6, 7, UNK]]


def test_char_and_byte_need_no_size():
    assert learn_from("char", ["abcab"], vocab_size=5).vocab_size == 7
    assert learn_from("byte", vocab_size=5).vocab_size == 260


def test_bytes_of_no_character_are_shown_as_replaced():
    tokenizer = learn_from("byte")
    (ids,) = tokenizer.encode(["aé"])
    assert ids == [ord("a") + 4, 0xC3 + 4, 0xA9 + 4]
    assert tokenizer.decode(ids[:2]) == "a\ufffd"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_normalization_applies_to_every_kind(kind):
    lines = [*corpus(), "ｗｉｄｅ wide"]
    for normalization, back in (("identity", "ｗｉｄｅ"), ("nfkc", "wide")):
        tokenizer = learn_from(kind, lines, normalization=normalization)
        assert tokenizer.decode(tokenizer.encode(["ｗｉｄｅ"])[0]) == back


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_split_digits_keeps_digits_apart(kind):
    lengths = {}
    for split_digits in (False, True):
        tokenizer = learn_from(kind, ["year 2024"] * 50 + ["a 2024", "b 2024"], split_digits=split_digits)
        (ids,) = tokenizer.encode(["2024"])
        lengths[split_digits] = len(ids)
        assert tokenizer.decode(ids) == "2024"
    assert lengths[False] < 4 <= lengths[True]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "at_most"), [("word", 4 + 4), ("bpe", 60), ("unigram", 60)])
def test_a_text_too_small_for_the_size_gives_a_smaller_vocabulary(kind, at_most):
    tokenizer = learn_from(kind, ["just a few words"] * 3, vocab_size=30_000)
    assert tokenizer.vocab_size <= at_most
    assert tokenizer.decode(tokenizer.encode(["a few words"])[0]) == "a few words"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_long_lines_are_learned_from_in_seconds(kind):
    tokenizer = learn_from(kind, ["short", "x" + "ü" * 300_000 + "yz"])
    assert UNK not in tokenizer.encode(["xüyz short"])[0]
    long = "xy" * 200_000
    assert tokenizer.decode(tokenizer.encode([long])[0]) == long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines", "vocab_size", "message"),
    [
        ("bep", ["a"], 100, "data.tokenizer='bep'; choose one of: word, char, byte, bpe, unigram"),
        ("word", ["a"], 4, "data.vocab_size=4 must be above 4"),
        ("bpe", ["abcdefghijklmnop"], 10, "data.vocab_size=10: the characters of the text alone need 21"),
        ("unigram", ["abcdefghijklmnop"], 10, "data.vocab_size=10: the characters of the text alone need 21"),
        *((kind, ["", "  "], 100, "holds no text") for kind in KINDS),
        *((kind, [], 100, "holds no text") for kind in KINDS),
    ],
)
def test_what_cannot_be_learned_is_refused(kind, lines, vocab_size, message):
    with pytest.raises(UserError, match=message):
        learn_from(kind, lines, vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, b"", "holds no tokenizer 'shared'"),
        ("shared.model", b"not a model", r"shared.model is not a jformer tokenizer, or is damaged"),
        ("shared.json", b'{"kind": "word"', r"shared.json is not a jformer tokenizer"),
        (
            "shared.json",
            b'{"kind": "wrod", "normalization": "nfkc", "tokens": []}',
            r"shared.json is not a jformer tokenizer",
        ),
        ("shared.json", b"[]", r"shared.json is not a jformer tokenizer"),
    ],
)
def test_a_missing_or_damaged_file_is_named(tmp_path, file, content, message):
    if file:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(tmp_path, "shared")
