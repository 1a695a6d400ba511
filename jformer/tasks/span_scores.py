"""Spans in tagged words, such as names, and how well some agree with others. Words and texts, no tokens.

A tag is O, or a prefix and a type: B-X begins a span of type X, I-X goes on with it; where spans have marked ends, E-X
is the last word of one and S-X a span of one word.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jformer.tasks.metrics import Scores

TAG_OF_SPANS = re.compile(r"O|[BIES]-.+")


class Span(NamedTuple):
    """Words of one type, from `start` to just before `end`, both counted from 0."""

    type: str
    start: int
    end: int


def mark_spans(tags: Iterable[str]) -> bool:
    """Tell whether tags mark spans: all are O, or a prefix and a type. Parts of speech are others."""
    return all(map(TAG_OF_SPANS.fullmatch, tags))


def find_spans(tags: Sequence[str]) -> list[Span]:
    """Return the spans of a sentence, in order, whether its tags follow the rules or not.

    A word goes on with the span before it if it has I or E, the word before it B or I, and both one type; any other
    tag than O begins a span. That is what conlleval of CoNLL-2000 (Tjong Kim Sang and Buchholz 2000) makes of such
    tags, and seqeval by default.

    >>> find_spans(["O", "B-x", "I-x", "I-y", "B-y"])
    [Span(type='x', start=1, end=3), Span(type='y', start=3, end=4), Span(type='y', start=4, end=5)]
    """
    spans: list[Span] = []
    before = "O"
    for i, tag in enumerate(tags):
        if tag[0] in "IE" and before[0] in "BI" and before[1:] == tag[1:]:
            spans[-1] = spans[-1]._replace(end=i + 1)
        elif tag != "O":
            spans.append(Span(tag[2:], i, i + 1))
        before = tag
    return spans


def span_scores(found: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> Scores:
    """Return precision, recall and their harmonic mean of the spans of all sentences, given as tags.

    A span is right if its type, its first and its last word are. `by_group` has each type. What has no span to be
    divided by is 0, as in conlleval.
    """
    of_found, of_wanted, right = Counter[str](), Counter[str](), Counter[str]()
    for one, other in zip(found, wanted, strict=True):
        for total, counted in zip((right, of_found, of_wanted), span_counts(one, other), strict=True):
            total.update(counted)
    types = sorted({*of_found, *of_wanted})
    f1 = _share(2 * right.total(), of_found.total() + of_wanted.total())
    by_type = {each: _share(2 * right[each], of_found[each] + of_wanted[each]) for each in types}
    return {
        "span_f1": {"score": f1, "by_group": by_type},
        "span_precision": {"score": _share(right.total(), of_found.total())},
        "span_recall": {"score": _share(right.total(), of_wanted.total())},
    }


def span_counts(found: Sequence[str], wanted: Sequence[str]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return how many spans of each type are right in a sentence, given as tags, how many were found, and wanted."""
    spans, references = find_spans(found), find_spans(wanted)
    right, of_found, of_wanted = (
        Counter(s.type for s in each) for each in ({*spans} & {*references}, spans, references)
    )
    return right, of_found, of_wanted


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
