"""What is asked becomes pieces and arrays within every limit, and what cannot be written is refused by name."""

import dataclasses

import jax
import numpy as np
import pytest

from jformer.config import resolve
from jformer.data.tokenizers import BOS, EOS, PAD, UNK, learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import CUT, EMPTY, SPLIT, UNKNOWN, EncodedPair, Piece, Request
from jformer.inference.generation import _keys
from jformer.inference.inputs import Attempt, Inputs, writable
from jformer.tasks.build import build_sized, build_task

TOKENIZER = learn("char", ["abcdefgh .。，"], 99, "identity", False)
A = TOKENIZER.encode(["abcdefgh"])[0][0]


def ids(text):
    return TOKENIZER.encode([text])[0]


def inputs(task="translate", max_positions=None, limit=64, target_limit=None, piece_start="bos", **options):
    model = {"family": {"translate": "encdec", "lm": "decoder"}.get(task, "encoder")}
    data = {"max_source_length": limit, "max_target_length": target_limit or limit, "piece_start": piece_start}
    data |= {"overlong": "split"} if piece_start == "previous" else {}
    config = resolve({"task": task, "model": model, "data": {**data, "tokenizer": "char"}})
    made = build_task(config)
    sized = build_sized(config, made, (TOKENIZER, TOKENIZER)).config
    if max_positions:
        sized = dataclasses.replace(sized, positions="learned", max_length=max_positions)
    return Inputs(DecodeConfig(**options), made, (TOKENIZER, TOKENIZER), [sized])


def pieces(reader, *texts):
    return [list(map(list, (piece.ids for piece in group))) for group in reader.pieces([Request(t) for t in texts])]


def test_empty_inputs_have_no_piece_and_are_counted_with_unknown_ones():
    reader = inputs()
    assert pieces(reader, "ab", "", " ", "ax") == [[[*ids("ab"), EOS]], [], [], [[A, UNK, EOS]]]
    assert reader.counts == {EMPTY: 2, UNKNOWN: 1, CUT: 0}
    assert pieces(inputs("lm"), "") == [[[]]]  # to be continued all the same


def test_an_input_over_the_limit_is_cut_or_split():
    cut, split = inputs(limit=4), inputs(limit=4, overlong="split")
    assert pieces(cut, "abcdefgh", "abc") == [[[*ids("abc"), EOS]], [[*ids("abc"), EOS]]]
    assert cut.counts[CUT] == 1
    whole = [[*ids("abc"), EOS], [*ids("def"), EOS], [*ids("gh"), EOS]]
    assert pieces(split, "abcdefgh", "abc", "abcdef") == [whole, whole[:1], whole[:2]]
    assert (split.counts[SPLIT], split.counts[CUT]) == (2, 0)
    prompt = inputs("lm", limit=4)
    assert pieces(prompt, "abcdefgh", "abc", "abcd") == [[ids("fgh")], [ids("abc")], [ids("bcd")]]
    assert prompt.counts[CUT] == 2
    with pytest.raises(UserError, match="joins translations, not a continuation"):
        inputs("lm", overlong="split")
    with pytest.raises(UserError, match=r"decode\.overlong='split' joins one output of each piece, not 2"):
        DecodeConfig(overlong="split", n_best=2).check()


def test_a_text_to_embed_may_be_as_long_as_either_one_of_a_pair():
    for limits in ((4, 8), (8, 4)):
        reader = inputs("embed", limit=limits[0], target_limit=limits[1])
        assert pieces(reader, "abcdef") == [[[BOS, *ids("abcdef"), EOS]]]
        assert pieces(reader, "abcdefgh") == [[[BOS, *ids("abcdef"), EOS]]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ab cd. ef gh. ab", ("ab cd.", "ef gh.", "ab")),
        ("ab. cd. ef gh ab cd.", ("ab. cd.", "ef gh", "ab cd.")),  # a sentence over the limit is cut at its spaces
        ("ab cdef gh abc", ("ab cdef", "gh abc")),
        ("abcde。fgh，abcdefghabc", ("abcde。", "fgh，", "abcdefgh", "abc")),
    ],
)
def test_an_input_is_split_where_sentences_or_words_end(text, parts):
    assert pieces(inputs(limit=9, overlong="split"), text) == [[[*ids(part), EOS] for part in parts]]


@pytest.mark.parametrize("task", ["translate", "lm", "classify"])
def test_a_request_without_a_line_has_that_of_its_place(task):
    found = inputs(task).pieces([Request("a"), Request("b", line=7), Request("c")])
    assert [piece.line for (piece,) in found] == [0, 7, 2]


def test_prefix_and_phrases_become_tokens():
    (found,), _ = inputs(limit=4).pieces([Request("ab", "cd", ("e", "fg", ""), 6), Request("a")])
    assert found == Piece([*ids("ab"), EOS], 6, ids("cd"), [[ids("e")], [ids("fg")]], text="ab")
    first, second = inputs(limit=4, overlong="split").pieces([Request("abcde", "cd")])[0]
    assert (first.prefix, second.prefix) == (ids("cd"), ())
    assert (first.text, second.text) == ("abc", "de")


REFUSED = {
    "an unknown character": ({}, Request("a", constraints=("b", "bxc"), line=6), "input line 7: 'bxc' contains what"),
    "and in a prefix": ({}, Request("a", "xyz"), "input line 1: 'xyz' contains what the vocabulary cannot write"),
    "a forbidden token": ({"forbid": ("c",)}, Request("a", constraints=("bc",)), "input line 1: 'bc' contains what"),
    "greedy": ({"beam_size": 1}, Request("a", constraints=("b",)), "input line 1: constraints need decode.search='be"),
    "groups": ({"beam_groups": 2}, Request("a", constraints=("b",)), "with decode.beam_size of 2 or more and decode."),
    "samples": ({"search": "sample"}, Request("a", constraints=("b",)), "constraints need decode.search='beam' with"),
    "a label": ({"task": "classify"}, Request("a", "b"), "input line 1: labels have no prefix and no constraints"),
    "more than there is room for": (
        {"max_extra_length": 5},
        Request("ab", "cd", constraints=("bcd", "abc")),
        "prefix and constraints of 8 tokens and the end symbol do not fit in an output of 8: shorten them, or raise",
    ),
    "a prefix that has no room": (
        {"max_length": 4},
        Request("ab", "abcd", line=2),
        "line 3: prefix of 4 tokens and the end symbol do not fit in an output of 4: shorten it, or raise decode.max_l",
    ),
    "nor enough positions": (
        {"task": "lm", "max_positions": 9},
        Request("abc", "abcdef"),
        "prefix of 6 tokens and the end symbol do not fit in an output of 6: shorten it, or raise model.max_length",
    ),
    "pieces": ({"overlong": "split"}, Request("a" * 99, constraints=("b",)), "and constraints cannot be split"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused_by_line_and_word(case):
    options, request, said = REFUSED[case]
    with pytest.raises(UserError) as error:
        inputs(**options).pieces([request])
    assert said in str(error.value)


def made(reader, *asked, rows=4):
    return reader.arrays([group[0] for group in reader.pieces(asked)], rows)


def test_shapes_are_few_and_every_row_has_its_limit():
    reader = inputs(max_extra_length=5)
    batch, room = made(reader, Request("abc", line=9), Request("a", line=3))
    assert batch["source"].shape == (4, 16)
    assert room == 21
    assert batch["limit"].tolist() == [9, 7, 0, 0]
    assert batch["line"].tolist() == [9, 3, 0, 0]
    assert not {"prefix", "constraints"} & set(batch)
    assert made(reader, Request("a" * 16))[0]["source"].shape == (4, 24)
    assert made(reader, Request("a" * 99))[0]["source"].shape == (4, 64)
    batch, room = made(inputs(max_extra_length=50, max_length=8), Request("abc"))
    assert (room, batch["limit"].max()) == (8, 8)
    batch, room = made(inputs(max_positions=10), Request("abc"))
    assert (room, batch["limit"].max()) == (10, 10)


def test_a_short_attempt_has_room_for_half_as_much_again():
    reader = inputs(max_extra_length=50)
    for length, short, whole in ((15, 24, 66), (31, 48, 82), (63, 114, 114)):
        pieces = [group[0] for group in reader.pieces([Request("a" * length)])]
        assert [reader.arrays(pieces, 1, Attempt(short=each))[1] for each in (True, False)] == [short, whole]
        assert reader.arrays(pieces, 1, Attempt(min_length=64))[0]["source"].shape == (1, 64)


def test_a_short_attempt_leaves_a_share_of_its_pieces_and_not_of_the_rows_that_fill_the_batch():
    reader, short = inputs(), Attempt(short=True)
    pieces = [Piece([5] * 3, 0)] * 64
    left = [int(reader.arrays(pieces[:count], 64, short)[0]["max_unfinished"]) for count in (64, 32, 16)]
    assert left == [2, 1, 0]
    assert reader.arrays(pieces, 64, Attempt())[0]["max_unfinished"] == 0


def test_any_corpus_needs_eight_shapes_at_most():
    reader = inputs(limit=256)
    first = {reader.arrays([Piece([5] * n, 0)], 16, Attempt(short=True))[0]["source"].shape for n in range(1, 257)}
    again = {reader.arrays([Piece([5] * n, 0)], 8, Attempt(min_length=64))[0]["source"].shape for n in range(1, 65)}
    assert len(first) + len(again) == 8


def test_a_few_long_inputs_do_not_pad_the_others():
    asked = [Piece([5] * n, 0) for n in (3, 16, 17, 24, 70, 90)]
    assert inputs().without_few_long(asked, [0, 1, 2, 3], 1) == [0, 1, 2, 3]  # two of them are longer
    assert inputs().without_few_long(asked, [0, 1, 1, 2], 2) == [0, 1, 1]
    assert inputs().without_few_long(asked, [3, 3, 3, 5], 2) == [3, 3, 3, 5]  # long ones have one attempt


def test_prompts_leave_room_among_the_positions():
    batch, room = made(inputs("lm", max_positions=20, max_extra_length=9), Request("abc"), Request("a" * 16))
    assert batch["prompt"][0, :5].tolist() == [BOS, *ids("abc"), BOS]
    assert room == 9
    assert batch["limit"].tolist() == [9, 4, 0, 0]  # the last token is said, not read


@pytest.mark.parametrize(("extra", "kept"), [(9, 11), (5, 15), (500, 10)])
def test_a_prompt_that_is_cut_leaves_room_for_its_output(extra, kept):
    reader = inputs("lm", max_positions=20, limit=20, max_extra_length=extra)
    batch, _ = made(reader, Request("abcdefgh" * 3), Request("a" * 18))
    assert (reader.counts[CUT], batch["prompt_length"].tolist()[:2]) == (1, [1 + kept, 19])
    assert batch["prompt"][0, 1 : 1 + kept].tolist() == ids("abcdefgh" * 3)[-kept:]
    assert batch["limit"].tolist()[:2] == [min(extra, 10), 2]


def test_prefixes_and_constraints_come_in_few_widths():
    asked = [Request("a", "b" * 9), Request("a", constraints=("bc", "d")), Request("a")]
    batch, _ = made(inputs(), *asked)
    assert batch["prefix"].shape == (4, 16)
    assert batch["prefix_length"].tolist() == [9, 0, 0, 0]
    assert batch["constraints"].shape == (4, 8, 1, 8)
    assert batch["constraints"][1, :2, 0, :3].tolist() == [[*ids("bc"), PAD], [*ids("d"), PAD, PAD]]
    assert (batch["constraints"] != PAD).sum() == 3


def test_both_sides_of_a_pair_lie_as_in_training():
    reader = inputs(limit=4)
    sides = reader.encode_pairs([("ab", "c"), ("abcdefgh", "x"), ("a", "")])
    assert sides == [
        ([*ids("ab"), EOS], [*ids("c"), EOS], False),
        ([*ids("abc"), EOS], [UNK, EOS], True),
        ([A, EOS], [EOS], False),
    ]
    assert reader.counts == {CUT: 1, UNKNOWN: 1, EMPTY: 1}
    batch = reader.pair_arrays(sides, 4)
    assert batch["target_in"][0, :3].tolist() == [BOS, *ids("c"), BOS]
    assert batch["weights"].sum(axis=1).tolist() == [2, 2, 1, 0]
    assert inputs("lm").encode_pairs([("ignored", "ab")]) == [([], [*ids("ab"), EOS], False)]


def test_each_text_to_score_is_a_whole_one_where_pieces_begin_with_the_token_before_them():
    reader = inputs("lm", piece_start="previous")
    sides = [EncodedPair([], ids("ab"), False), EncodedPair([], ids("cd"), False)]  # without an end
    assert reader.pair_arrays(sides, 2)["target_in"][:, :2].tolist() == [[BOS, A], [BOS, A + 2]]


def test_only_and_forbid_say_what_may_be_written():
    def written(**options):
        return np.flatnonzero(writable(TOKENIZER, DecodeConfig(beam_size=1, **options))).tolist()

    everything = list(range(2, TOKENIZER.vocab_size))
    assert written() == everything
    assert written(forbid=("<unk>", "a")) == [i for i in everything if i not in (UNK, A)]
    assert written(only=("a", "b"), forbid=("b",)) == [EOS, A]
    with pytest.raises(UserError, match=r"decode\.forbid: 'ab' is not in the vocabulary; did you mean '[ab]'\?"):
        written(forbid=("ab",))
    with pytest.raises(UserError, match=r"decode\.only: 'xyz' is not in the vocabulary; name entries as"):
        written(only=("xyz",))
    with pytest.raises(UserError, match=r"decode\.beam_size=3 is more than the 2 entries"):
        writable(TOKENIZER, DecodeConfig(beam_size=3, only=("a",)))


def test_a_token_that_the_model_has_not_is_refused_before_the_search():
    foreign = TOKENIZER.vocab_size
    with pytest.raises(UserError, match=f"the text to answer: source holds the token id {foreign}, "):
        inputs().arrays([Piece([foreign, EOS], 0)], 1)
    with pytest.raises(UserError, match=f"the text to answer: prompt holds the token id {foreign}, "):
        inputs("lm").arrays([Piece([A, foreign], 0)], 1)
    with pytest.raises(UserError, match="the text to score: target_out holds the token id -1, "):
        inputs().pair_arrays([EncodedPair([A], [-1], cut=False)], 1)


def test_pieces_of_a_split_line_draw_samples_of_their_own():
    reader = inputs(limit=4, overlong="split", search="sample")
    (split,), (whole,) = (reader.pieces([Request(text, line=7)]) for text in ("abcabc", "abc"))
    keys = [
        np.asarray(jax.random.key_data(_keys(0, batch["line"], batch.get("part"), 3))).tolist()
        for batch, _ in (reader.arrays(each, 2) for each in (split, whole))
    ]
    first, second = keys[0][:3], keys[0][3:]
    assert first == keys[1][:3]
    assert not {*map(tuple, first)} & {*map(tuple, second)}
