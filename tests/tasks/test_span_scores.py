"""Spans and their scores, by hand and as the rules of conlleval have them."""

import pytest

from jformer.tasks.span_scores import Span, find_spans, mark_spans, span_scores


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O O", []),
        ("B-x I-x O", [("x", 0, 2)]),
        ("B-x B-x", [("x", 0, 1), ("x", 1, 2)]),
        ("I-x I-x", [("x", 0, 2)]),  # begins all the same
        ("B-x I-y", [("x", 0, 1), ("y", 1, 2)]),
        ("B-x O I-x", [("x", 0, 1), ("x", 2, 3)]),
        ("B-x-y I-x-y", [("x-y", 0, 2)]),
        ("B-x I-x E-x S-x", [("x", 0, 3), ("x", 3, 4)]),
        ("S-x E-x I-x", [("x", 0, 1), ("x", 1, 2), ("x", 2, 3)]),
    ],
)
def test_spans_of_a_sentence(tags, spans):
    assert find_spans(tags.split()) == [Span(*span) for span in spans]


def test_only_tags_with_a_prefix_and_a_type_mark_spans():
    assert mark_spans(["O", "B-x", "I-x-y", "E-x", "S-x"])
    assert not mark_spans(["O", "NOUN"])
    assert not mark_spans(["B-"])


def test_precision_recall_and_f1_by_hand():
    """Of 3 spans wanted and 2 found, 1 is right; of x 1 of 2 and 1, of y none of 1 and 1."""
    wanted = [["B-x", "I-x", "O", "B-x"], ["B-y", "I-y"]]
    found = [["B-x", "I-x", "O", "O"], ["B-y", "O"]]
    scores = span_scores(found, wanted)
    assert scores["span_precision"] == {"score": 1 / 2}
    assert scores["span_recall"] == {"score": 1 / 3}
    assert scores["span_f1"] == {"score": 2 / 5, "by_group": {"x": 2 / 3, "y": 0.0}}


def test_no_span_at_all_scores_nothing():
    assert span_scores([["O"]], [["O"]])["span_f1"] == {"score": 0.0, "by_group": {}}
    assert span_scores([["O"]], [["B-x"]])["span_precision"] == {"score": 0.0}
