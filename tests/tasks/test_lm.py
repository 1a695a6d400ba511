import math

import numpy as np
import pytest

from jformer.data.sources.split import Pair
from jformer.data.tokenizers import BOS, EOS
from jformer.tasks.sums import Sum
from tests.tasks.conftest import TEXTS, make_task


def test_bits_per_character_by_hand():
    """24 nats are 24 / ln 2 bits, for the 12 characters of two texts; a blank one is no example."""
    examples = [Pair("", "abcdef"), Pair("", "  \t"), Pair("ignored", "ghi jk")]
    scores = make_task("lm")[0].score([], examples, {"nll": Sum(24.0, 8.0), "correct": Sum(2.0, 8.0)})
    assert scores["bits_per_character"]["score"] == pytest.approx(2 / math.log(2))
    assert scores["perplexity"]["score"] == pytest.approx(math.exp(3))
    assert scores["token_accuracy"]["score"] == 0.25


def test_no_text_has_no_bits_per_character():
    scores = make_task("lm")[0].score([], [], {"nll": Sum(0.0, 0.0), "correct": Sum(0.0, 0.0)})
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


def test_the_pieces_of_a_text_are_read_after_its_previous_token(make):
    """So every token of a text but the last is read once, and the model sees BOS where texts begin, and only there."""
    made = make("lm", max_target_length=10, overlong="split", piece_start="previous", num_buckets=1)
    batches = [made.batches[i] for i in range(len(made.batches))]
    inputs, real = (np.concatenate([batch[f"target_{key}"] for batch in batches]) for key in ("in", "segments"))
    assert (inputs[real > 0] == BOS).sum() == len(TEXTS)
    assert sorted(inputs[real > 0]) == sorted(
        [*[BOS] * len(TEXTS), *made.corpus.target.values[made.corpus.target.values != EOS]]
    )


def test_the_target_is_all_there_is(make):
    made = make("lm")
    assert not made.corpus.source.values.size
    assert made.tokenizers[0] is made.tokenizers[1]
    assert {key.partition("_")[0] for key in made.batches[0]} == {"row", "target", "weights"}
    assert (made.task.answer, made.task.symbols) == ("continuation", 0)
