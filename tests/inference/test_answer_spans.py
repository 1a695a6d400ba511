"""The best spans are those of a search through all of them, in one window and in several."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data.sources.split import Pair
from jformer.data.spans import END, MAY_END, MAY_START, START, SpanEncoder, Window
from jformer.data.tokenizers import learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference.answers import Output, Piece
from jformer.inference.heads import Spans, best_of_windows, likeliest_spans, marked_pair, read_spans
from jformer.tasks.losses import span_log_probs

RNG = np.random.default_rng(0)
BOTH = MAY_START | MAY_END


def random_marks(length, real):
    """Return the marks of a window: BOS, some of a question, words of 1 to 3 tokens, padding."""
    marks, at = [BOTH, 0, 0], 3
    while at < real - 1:
        size = min(int(RNG.integers(1, 4)), real - 1 - at)
        marks += [BOTH] if size == 1 else [MAY_START, *[0] * (size - 2), MAY_END]
        at += size
    return [*marks, *[0] * (length - len(marks))]


def all_spans(log_probs, marks, longest):
    """Yield (score, first, last) of every span, word by word."""
    starts = [i for i, mark in enumerate(marks) if mark & MAY_START and i]
    ends = [i for i, mark in enumerate(marks) if mark & MAY_END and i]
    for first, last in itertools.product(starts, ends):
        words = sum(first <= i <= last for i in starts)
        if first <= last and words <= longest:
            yield float(log_probs[first, 0] + log_probs[last, 1]), first, last


@pytest.mark.parametrize(("longest", "best"), [(1, 1), (3, 4), (30, 7), (30, 200)])
def test_the_best_spans_are_those_of_all_spans(longest, best):
    length = 24
    marks = np.array([random_marks(length, real) for real in (24, 17, 9, 6, 5)])
    logits = jnp.array(RNG.normal(size=(len(marks), length, 2)), jnp.float32)
    options = DecodeConfig(max_answer_length=longest, n_best=best, beam_size=best)
    found = jax.jit(lambda x, y: likeliest_spans(x, {"target_out": y}, options))(logits, jnp.array(marks))
    log_probs = np.asarray(span_log_probs(logits, jnp.array(marks)))
    for row in range(len(marks)):
        assert found.ends[row, 0].tolist() == [0, 0]
        assert float(found.log_probs[row, 0]) == pytest.approx(log_probs[row, 0].sum(), abs=1e-5)
        expected = sorted(all_spans(log_probs[row], marks[row], longest), reverse=True)[:best]
        real = np.flatnonzero(~np.isneginf(found.log_probs[row, 1:])) + 1
        assert len(real) == len(expected) > 0
        assert real[-1] == len(real)  # unused slots come last
        for i, (score, first, last) in zip(real, expected, strict=True):
            assert float(found.log_probs[row, i]) == pytest.approx(score, abs=1e-5)
            assert found.ends[row, i].tolist() == [first, last]


def test_a_span_is_read_as_the_characters_of_its_context():
    window = Window(
        "Ada, Lee", [1, 9, 2, 5, 6, 7, 2], [12, 0, 0, 12, 12, 12, 0], [(0, 0)] * 3 + [(0, 3), (3, 4), (5, 8), (0, 0)]
    )
    found = Spans(np.array([[0, 0], [3, 5], [4, 4], [0, 1]]), np.array([-3.0, -1.0, -2.0, -np.inf]))
    outputs = read_spans(found, None, Piece(window.ids, 0, window=window))
    assert outputs == [
        Output("", log_prob=-3.0),
        Output("Ada, Lee", log_prob=-1.0, span=(0, 8)), Output(",", log_prob=-2.0, span=(3, 4)),
    ]  # fmt: skip


def windows(*each):
    return [[Output(text, log_prob=value, span=span) for text, value, span in one] for one in each]


def test_of_several_windows_a_span_counts_where_it_is_best_and_none_where_it_is_worst():
    found = windows(
        [("", -0.1, None), ("Lee", -4.0, (9, 12)), ("Ada", -5.0, (0, 3))],
        [("", -2.0, None), ("Lee", -1.0, (9, 12)), ("Bo", -3.0, (20, 22))],
    )

    def best(n, threshold=0.0):
        options = DecodeConfig(n_best=n, beam_size=max(n, 4), no_answer_threshold=threshold)
        return [(output.text, output.log_prob) for output in best_of_windows(found, options)]

    assert best(1) == [("Lee", -1.0)]
    assert best(9) == [("Lee", -1.0), ("", -2.0), ("Bo", -3.0), ("Ada", -5.0)]
    assert best(2, threshold=1.5) == [("", -2.0), ("Lee", -1.0)]
    assert best(1, threshold=1.0) == [("", -2.0)]  # a span must be more probable, and not as probable
    assert best(1, threshold=-1000.0) == [("Lee", -1.0)]
    assert best(4, threshold=-1000.0)[-1] == ("", -2.0)
    assert best_of_windows([], DecodeConfig()) == [Output("", log_prob=0.0)]


@pytest.mark.parametrize("start", [None, 14])
def test_of_several_windows_the_one_with_the_answer_is_looked_into(start):
    pair = Pair("who\ta b c d e f g a", "a", start=start)  # the answer is in the first window, and in the last
    letters = learn("word", ["who a b c d e f g"], 99, "identity", False)
    encoder = SpanEncoder(letters, max_length=8, stride=2, overlong="cut")
    ids, marks, cut = marked_pair(encoder, pair)
    assert cut
    (first,) = [i for i, mark in enumerate(marks) if mark & START]
    (last,) = [i for i, mark in enumerate(marks) if mark & END]
    assert first == last > 0
    assert letters.decode(ids[first : last + 1]) == "a"
    assert (first == 3) == (start is None)  # after BOS, the question and EOS


def test_without_an_answer_the_first_window_is_looked_into():
    letters = learn("word", ["who a b c d e f g"], 99, "identity", False)
    encoder = SpanEncoder(letters, max_length=8, stride=2, overlong="cut")
    ids, marks, _ = marked_pair(encoder, Pair("who\ta b c d e f g", ""))
    assert letters.decode(ids) == letters.decode(letters.encode(["who a b c d"])[0])
    assert marks[0] & START
    assert marks[0] & END
