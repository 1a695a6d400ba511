"""Which validation examples are answered in the course of training."""

import pytest

from jformer.data.sources.split import Pair
from jformer.training.corpora import of_each_label, prompt


def test_the_first_example_of_each_label_comes_first():
    sorted_by_label = [Pair(str(i), label) for i, label in enumerate("aaabbc")]
    assert [pair.source for pair in of_each_label(sorted_by_label)] == ["0", "3", "5", "1", "4", "2"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("short", "short"),
        ("a" * 41, "a" * 40),  # one word, or a language that writes without spaces
        ("a" * 40 + " b", "a" * 40),
        ("a" * 30 + " " + "b" * 10 + "c", "a" * 30),
        ("line\n" + "a" * 30 + " " + "b" * 9, "line\n" + "a" * 30),
    ],
)
def test_a_prompt_ends_with_a_whole_word(text, kept):
    assert prompt(text) == kept
