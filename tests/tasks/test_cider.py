import math

import pytest

from jformer.tasks.cider import cider_d, ngrams


def test_ngrams_are_of_lowercase_words_without_punctuation():
    assert ngrams("A man's hat.") == {
        ("a",): 1, ("man's",): 1, ("hat",): 1, ("a", "man's"): 1, ("man's", "hat"): 1, ("a", "man's", "hat"): 1,
    }  # fmt: skip
    assert not ngrams(" ... ")
    assert ngrams("大房，man's") == ngrams("大 房 man's")
    assert [*ngrams("हिन्दी ភាសា")][:3] == [("हिन्दी",), ("ភា",), ("សា",)]  # vowels are combining marks


def test_what_is_the_same_and_nobody_else_says_scores_ten():
    texts = ["a red cat sat here", "two dogs ran off fast"]
    assert cider_d(texts, [[text] for text in texts]) == pytest.approx([10, 10])
    assert cider_d(texts[::-1], [[text] for text in texts]) == [0, 0]


def test_one_word_of_two_by_hand():
    """Of two images, "cat" is said of one and "a" of both, whose weight is log 1 = 0.

    "a cat" for "a cat" is the same in 1-grams and 2-grams, and has no others: 10 · (1 + 1 + 0 + 0) / 4.
    """
    assert cider_d(["a cat", "a"], [["a cat"], ["a dog"]]) == pytest.approx([5, 0])


def test_repetitions_are_clipped_and_longer_outputs_weigh_less_by_hand():
    """1-grams: output 3 · log 2 clipped to log 2, so cosine 1·1 / (3·1) = 1/3; others none; two words more."""
    found = cider_d(["cat cat cat", "x"], [["cat"], ["dog"]])
    assert found[0] == pytest.approx(10 / 4 * (1 / 3) * math.exp(-4 / 72))


def test_rare_words_weigh_more_and_references_are_averaged_by_hand():
    """Of three images "red" is said of two, "cat" of one: log 3/2 and log 3."""
    red, cat = math.log(3 / 2), math.log(3)
    found = cider_d(["red cat", "x", "y"], [["red dog", "red cat"], ["red"], ["blue"]])
    shared = red**2 / (red**2 + cat**2)  # 1-grams of the first reference, of which "dog" is said of one image too
    assert found[0] == pytest.approx(10 * (shared / 4 + 2 / 4) / 2)


def test_one_image_alone_says_nothing_and_lists_must_be_as_long():
    assert cider_d(["a cat"], [["a cat"]]) == [0]
    with pytest.raises(ValueError, match="2 outputs but references of 1 images"):
        cider_d(["a", "b"], [["a"]])
