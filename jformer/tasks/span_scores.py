"""Find spans in tagged words, such as names, and score them.

A tag is O, or a prefix and a type: B-X begins a span of type X, I-X continues it; in schemes that mark ends, E-X is the
last word of a span and S-X a span of one word.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jformer.tasks.metrics import Scores

TAG_OF_SPANS = re.compile(r"O|[BIES]-.+")


class Span(NamedTuple):
    """The words from `start` up to but excluding `end`, of one type."""

    type: str
    start: int
    end: int


def mark_spans(tags: Iterable[str]) -> bool:
    """Return whether all tags are O, or a prefix and a type; parts of speech, for example, are not."""
    return all(map(TAG_OF_SPANS.fullmatch, tags))


def find_spans(tags: Sequence[str]) -> list[Span]:
    """Return the spans of a sentence, in order, even if its tags are inconsistent.

    A word continues the span before it if its prefix is I or E, that of the word before is B or I, and their types are
    equal; any other tag but O begins a span. conlleval of CoNLL-2000 (Tjong Kim Sang and Buchholz 2000) and, by
    default, seqeval do the same.

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

    A span is right if its type, its first and its last word are. `by_group` has each type. A share of zero spans is 0,
    as in conlleval.
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
    """Return the right, found and wanted spans of each type in a sentence, given as tags."""
    spans, references = find_spans(found), find_spans(wanted)
    right, of_found, of_wanted = (
        Counter(s.type for s in each) for each in ({*spans} & {*references}, spans, references)
    )
    return right, of_found, of_wanted


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
