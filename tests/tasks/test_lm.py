import math

import pytest

from jformer.data.sources import Pair
from tests.tasks.conftest import TEXTS, make_task


def test_bits_per_character_by_hand():
    """24 nats are 24 / ln 2 bits, for the 12 characters of two texts; a blank one is no example."""
    examples = [Pair("", "abcdef"), Pair("", "  \t"), Pair("ignored", "ghi jk")]
    scores = make_task("lm")[0].score([], examples, {"nll": (24.0, 8.0), "correct": (2.0, 8.0)})
    assert scores["bits_per_character"]["score"] == pytest.approx(2 / math.log(2))
    assert scores["perplexity"]["score"] == pytest.approx(math.exp(3))
    assert scores["token_accuracy"]["score"] == 0.25


def test_no_text_has_no_bits_per_character():
    scores = make_task("lm")[0].score([], [], {"nll": (0.0, 0.0), "correct": (0.0, 0.0)})
    assert math.isnan(scores["bits_per_character"]["score"])


@pytest.mark.parametrize("overlong", ["drop", "cut", "split"])
def test_evaluation_loses_no_text_whatever_training_does(make, overlong):
    training, evaluation = (
        make("lm", max_target_length=10, overlong=overlong, evaluating=evaluating).corpus
        for evaluating in (False, True)
    )
    whole = sum(len(text) + 1 for text in TEXTS)  # with the end symbols
    assert evaluation.target.values.size == whole
    assert (training.target.values.size == whole) == (overlong == "split")
    assert evaluation.target.lengths.max() == 10


def test_the_target_is_all_there_is(make):
    made = make("lm")
    assert not made.corpus.source.values.size
    assert made.tokenizers[0] is made.tokenizers[1]
    assert {key.partition("_")[0] for key in made.batches[0]} == {"row", "target", "weights"}
    assert (made.task.answer, made.task.symbols) == ("continuation", 0)
