"""Answers as spans of words: split contexts into words and windows, and mark the answers in them.

A text is a question, a TAB and its context. An answer is some consecutive words of the context, or none.
"""

import dataclasses
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from jformer.data.aligned import encode_words, spells_spaces
from jformer.data.encoders import FORMAT, Example, Side
from jformer.data.sources.split import Pair
from jformer.data.text import MARKS
from jformer.data.tokenizers import Tokenizer

START, END, MAY_START, MAY_END = 1, 2, 4, 8
"""Bits marked at a token: the answer starts or ends there, or may, as a word does."""
NOWHERE = MAY_START | MAY_END  # at the first position, where "no answer" starts and ends

IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # written without spaces: each is a word
JOINED = f"[{MARKS}\u200c\u200d]*"  # what follows a letter within a word: marks, and (non-)joiners
WORD = re.compile(rf"[{IDEOGRAPHS}][{MARKS}]*|(?:[^\W\d_{IDEOGRAPHS}]{JOINED})+|\d+|[^\w\s]|_")

SEVERAL = "contexts in several windows"
WIDENED = "answers that begin or end within a word, widened to whole words"
TOO_LONG = "answers longer than a window, learned as none"
QUESTIONS_CUT = "questions cut to half of data.max_source_length"

Place = tuple[int, int]
"""The first character of something, and the one after its last."""


class Window(NamedTuple):
    """A question and a part of its context as model input; `marks` and `places` have an entry for each token."""

    context: str
    ids: list[int]
    marks: list[int]
    places: list[Place]  # of the token's word in the context; (0, 0) for tokens outside the context


class Windows(NamedTuple):
    """The parts of one text, in order."""

    windows: list[Window]
    cut: bool  # whether the question was cut


def words_of(text: str) -> list[str]:
    """Return runs of letters with their marks, runs of digits, and every other character that is not white space.

    >>> words_of("In 1998, $5m.")
    ['In', '1998', ',', '$', '5', 'm', '.']
    """
    return WORD.findall(text)


def joined_text(question: str, context: str) -> str:
    """Return a question and its context as one text, replacing their own TABs by spaces."""
    return "\t".join(text.replace("\t", " ") for text in (question, context))


def fault_of(text: str) -> str:
    """Return why a text is not a question and its context, or "" if it is."""
    tabs = text.count("\t")
    return f"{tabs} TABs; a text is a question, one TAB, its context" if text.strip() and tabs != 1 else ""


def is_blank(text: str) -> bool:
    """Return whether a text lacks its question or its context."""
    return not all(part.strip() for part in text.split("\t"))


@dataclasses.dataclass(frozen=True)
class SpanEncoder:
    """Splits questions and contexts into windows, and encodes each window as tokens and marks.

    A window is BOS, the question, EOS, as much of the context as fits, EOS, with the symbols of imported vocabularies
    around them. The next one begins `stride` tokens of the context later. A window that does not hold the whole answer
    has none (Devlin et al. 2019, section 4.3, and their published code).
    """

    tokenizer: Tokenizer
    max_length: int
    stride: int
    overlong: str  # drop | cut examples whose question takes over half of a window

    @property
    def source(self) -> Side:
        """The source: the tokens of a window."""
        return Side(self.tokenizer, self.max_length, begin=True, parts=True)

    @property
    def target(self) -> Side:
        """The target: marks, which have no vocabulary."""
        return Side(None, self.max_length)

    def fingerprint(self) -> str:
        """Identify everything that the arrays depend on besides the text."""
        spans = "spans without prefix" if getattr(self.tokenizer, "prefix", "") else "spans 2"
        spans += " and spaces" * spells_spaces(self.tokenizer)
        parts = [self.tokenizer.fingerprint, self.max_length, self.stride, self.overlong, spans, FORMAT]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def encode(self, pairs: Sequence[Pair], counts: Counter[str]) -> list[Example]:
        """Return the examples of the usable pairs, one for each window; count the others by reason."""
        filled = [pair for pair in pairs if not is_blank(pair.source)]
        counts["examples read"] += len(pairs)
        counts["empty examples dropped"] += len(pairs) - len(filled)
        usable: list[Example] = []
        for pair, (windows, cut) in zip(filled, self.windows([pair.source for pair in filled]), strict=True):
            if cut and self.overlong == "drop":
                counts["overlong examples dropped"] += 1
                continue
            counts.update(reason for reason, holds in ((QUESTIONS_CUT, cut), (SEVERAL, len(windows) > 1)) if holds)
            marked = _marked(pair, windows, counts)
            usable += [(window.ids, marks) for window, marks in zip(windows, marked, strict=True)]
        counts["examples used"] += len(usable)
        return usable

    def windows(self, texts: Sequence[str]) -> Iterator[Windows]:
        """Yield the windows of every text; a question of over half a window is cut."""
        questions, contexts = zip(*(text.split("\t") for text in texts), strict=True) if texts else ((), ())
        question_ids = encode_words(self.tokenizer, [words_of(question) for question in questions])
        context_ids = encode_words(self.tokenizer, [words_of(context) for context in contexts])
        for (question, _), context, (ids, starts) in zip(question_ids, contexts, context_ids, strict=True):
            most = (self.max_length - len(self._around([]))) // 2
            whole = _whole_context(context, ids, starts)
            yield Windows(list(self._windows(question[:most], whole)), len(question) > most)

    def _windows(self, question: list[int], whole: Window) -> Iterator[Window]:
        symbols = self.tokenizer.symbols
        after = [symbols.eos, *symbols.after]
        before = self._around(question)[: -len(after)]
        room = self.max_length - len(before) - len(after)
        for start in _starts(len(whole.ids), room, self.stride):
            part = slice(start, start + room)
            yield Window(
                whole.context,
                [*before, *whole.ids[part], *after],
                [NOWHERE, *[0] * (len(before) - 1), *whole.marks[part], *[0] * len(after)],
                [*[(0, 0)] * len(before), *whole.places[part], *[(0, 0)] * len(after)],
            )

    def _around(self, question: list[int]) -> list[int]:
        """Return the tokens of a window whose context is empty."""
        symbols = self.tokenizer.symbols
        first = [symbols.bos, *symbols.before, *question, symbols.eos]
        return [*first, *symbols.between, symbols.eos, *symbols.after]


def _whole_context(context: str, ids: list[int], starts: list[int]) -> Window:
    """Return all tokens of a context with the places of their words, marked where a word starts and where it ends."""
    marks, places = [0] * len(ids), []
    for place, (start, end) in zip(_places(context), pairwise([*starts, len(ids)]), strict=True):
        marks[start] |= MAY_START
        marks[end - 1] |= MAY_END
        places += [place] * (end - start)
    return Window(context, ids, marks, places)


def _starts(length: int, room: int, stride: int) -> list[int]:
    """Return the starts of windows of `room` tokens; the last one reaches the end, and there are no gaps.

    >>> _starts(10, 6, 3)
    [0, 3, 6]
    """
    step = min(stride, room)
    return [0, *range(step, length - room + step, step)]


def _marked(pair: Pair, windows: Sequence[Window], counts: Counter[str]) -> Iterator[list[int]]:
    """Yield the marks of every window, with those of the answer if the window holds all of it."""
    place = _widened(pair, counts) if pair.start is not None else None
    ends = [_ends(window, place) if place else None for window in windows]
    if place and not any(ends):
        counts[TOO_LONG] += 1
    for window, found in zip(windows, ends, strict=True):
        marks = list(window.marks)
        first, last = found or (0, 0)
        marks[first] |= START
        marks[last] |= END
        yield marks


def _widened(pair: Pair, counts: Counter[str]) -> Place:
    """Return the place of the words that an answer overlaps."""
    assert pair.start is not None
    start, end = pair.start, pair.start + len(pair.target.rstrip())
    start += len(pair.target) - len(pair.target.lstrip())
    touched = [at for at in _places(pair.source.partition("\t")[2]) if at[0] < end and start < at[1]]
    place = touched[0][0], touched[-1][1]
    if place != (start, end):
        counts[WIDENED] += 1
    return place


@functools.lru_cache(maxsize=64)  # questions about one context follow each other
def _places(context: str) -> list[Place]:
    return [match.span() for match in WORD.finditer(context)]


def _ends(window: Window, place: Place) -> tuple[int, int] | None:
    """Return the tokens where the words of a place start and end, if a window has both."""
    both = list(zip(window.marks, window.places, strict=True))
    first = [i for i, (mark, at) in enumerate(both) if mark & MAY_START and at[0] == place[0] and at[1] > at[0]]
    last = [i for i, (mark, at) in enumerate(both) if mark & MAY_END and at[1] == place[1] and at[1] > at[0]]
    return (first[0], last[0]) if first and last else None
