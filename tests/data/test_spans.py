"""Contexts as windows of words, answers as marks in them, and back."""

from collections import Counter

import numpy as np
import pytest

from jformer.data.aligned import encode_words
from jformer.data.sources.split import Pair
from jformer.data.spans import (
    END,
    MAY_END,
    MAY_START,
    QUESTIONS_CUT,
    SEVERAL,
    START,
    TOO_LONG,
    WIDENED,
    SpanEncoder,
    fault_of,
    is_blank,
    words_of,
)
from jformer.data.tokenizers import BOS, EOS, Symbols, learn

CONTEXT = "In 1998, Ada Lee moved to “Old Ham”; she’d 5m of rope."
TEXTS = [CONTEXT, "Who moved where, and when?"]


def pair(answer, question="Who moved?", context=CONTEXT, start=None):
    found = context.index(answer) if start is None else start
    return Pair(f"{question}\t{context}", answer, start=found) if answer else Pair(f"{question}\t{context}", "")


def encoder(kind="char", max_length=96, stride=8, overlong="drop"):
    tokenizer = learn(kind, [*TEXTS, "unlikely words"], 60, "identity", False)
    return SpanEncoder(tokenizer, max_length, stride, overlong)


def answers(made, example):
    """Return the texts that the marks of an example stand for."""
    windows = [window for (windows, _) in made.windows([example.source]) for window in windows]
    counts, found = Counter(), []
    for (ids, marks), window in zip(made.encode([example], counts), windows, strict=True):
        assert ids == window.ids
        first, last = (next(i for i, mark in enumerate(marks) if mark & which) for which in (START, END))
        assert marks[first] & MAY_START
        assert marks[last] & MAY_END
        found.append(window.context[window.places[first][0] : window.places[last][1]])
    return found, counts


def test_words_are_runs_of_letters_or_digits_and_single_marks():
    assert words_of("In 1998. $5m_x") == ["In", "1998", ".", "$", "5", "m", "_", "x"]
    assert words_of("“Élan”\u00a0東京タ") == ["“", "Élan", "”", "東", "京", "タ"]
    assert words_of("  \t ") == []
    assert words_of("हिन्दी ភាសា. i\u0307l می\u200cخواهم 1\u0301") == [
        "हिन्दी",
        "ភាសា",
        ".",
        "i\u0307l",
        "می\u200cخواهم",
        "1",
        "\u0301",
    ]


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
def test_an_answer_is_read_back_character_by_character_whatever_the_tokens(kind):
    for text in ("Ada Lee", "1998", "“Old Ham”", "In", ".", "5", CONTEXT):
        example = pair(text)
        found, counts = answers(encoder(kind, max_length=256), example)
        assert found == [text]
        assert counts == {"examples read": 1, "empty examples dropped": 0, "examples used": 1}


def test_a_window_is_the_symbols_around_question_and_context():
    made = encoder("word")
    ((window,), _) = next(iter(made.windows(["Who moved?\tAda moved."])))
    asked, told = (ids for ids, _ in encode_words(made.tokenizer, [["Who", "moved", "?"], ["Ada", "moved", "."]]))
    assert window.ids == [BOS, *asked, EOS, *told, EOS]
    assert made.source.encode(["Who moved?\tAda moved."]) == [window.ids]
    made.tokenizer.symbols = Symbols(before=(7,), between=(8, 8), after=(9,))
    ((window,), _) = next(iter(made.windows(["Who moved?\tAda moved."])))
    assert window.ids == [BOS, 7, *asked, EOS, 8, 8, *told, EOS, 9]
    assert window.marks == [12, 0, 0, 0, 0, 0, 0, 0, 12, 12, 12, 0, 0]
    assert window.places[8:11] == [(0, 3), (4, 9), (9, 10)]


@pytest.mark.parametrize(("max_length", "stride"), [(28, 1), (28, 3), (28, 100), (34, 8), (256, 8)])
def test_windows_hold_all_of_a_context_and_an_answer_wherever_one_has_it_whole(max_length, stride):
    made = encoder(max_length=max_length, stride=stride)
    ((windows, cut),) = made.windows([pair("Ada").source])
    assert not cut
    assert all(len(window.ids) <= max_length for window in windows)
    assert {place for window in windows for place in window.places} >= {(0, 2), (3, 7), (49, 53)}
    whole = [window for window in windows if "Ada" in _told(made, window)]
    found, counts = answers(made, pair("Ada"))
    assert [text for text in found if text] == ["Ada"] * len(whole)
    assert len(found) == len(windows) == counts["examples used"]
    assert counts[SEVERAL] == (len(windows) > 1)
    assert TOO_LONG not in counts or not whole


def _told(made, window):
    return made.tokenizer.decode(window.ids[len(window.ids) - window.ids[-2::-1].index(EOS) - 1 :])


def test_no_answer_is_the_first_position_of_every_window():
    found, counts = answers(encoder(max_length=28), pair(""))
    assert len(found) > 1
    assert set(found) == {""}
    assert TOO_LONG not in counts


def test_what_cannot_be_learned_as_it_is_is_counted():
    assert answers(encoder(), pair("99"))[0] == ["1998"]
    assert answers(encoder(), pair("99"))[1][WIDENED] == 1
    assert answers(encoder(), pair(" Ada "))[0] == ["Ada"]
    assert WIDENED not in answers(encoder(), pair(" Ada "))[1]
    found, counts = answers(encoder(max_length=28), pair(CONTEXT))
    assert set(found) == {""}
    assert counts[TOO_LONG] == 1
    long = pair("Ada", question="Who " * 20)
    assert encoder().encode([long], counts := Counter()) == []
    assert counts["overlong examples dropped"] == 1
    found, counts = answers(encoder(overlong="cut"), long)
    assert "Ada" in found
    assert counts[QUESTIONS_CUT] == 1
    for blank in (Pair("\tx", ""), Pair("x\t ", "")):
        assert encoder().encode([blank], counts := Counter()) == []
        assert counts["empty examples dropped"] == 1


def test_the_second_of_two_equal_words_is_marked_where_the_answer_is_it():
    example = pair("Lee", context="Lee met Lee.", start=8)
    ((_, marks),) = encoder("word").encode([example], Counter())
    assert np.flatnonzero(np.array(marks) & START).tolist() == [len(marks) - 3]


def test_the_fingerprint_tells_what_the_arrays_depend_on():
    assert encoder().fingerprint() == encoder().fingerprint()
    assert (
        len({encoder(**each).fingerprint() for each in ({}, {"stride": 9}, {"max_length": 65}, {"overlong": "cut"})})
        == 4
    )


def test_a_text_is_a_question_a_tab_and_its_context():
    assert fault_of("a\tb") == fault_of(" ") == ""
    assert fault_of("a b") == "0 TABs; a text is a question, one TAB, its context"
    assert fault_of("a\tb\tc").startswith("2 TABs")
    assert [is_blank(text) for text in ("a\tb", "", " ", "\tb", "a\t ")] == [False, True, True, True, True]
