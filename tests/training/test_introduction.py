"""The first lines of a run speak of the sides that it has."""

import numpy as np

from jformer.data.data_config import DataConfig
from jformer.data.plan import Plan, Shape
from jformer.data.tokenizers import learn
from jformer.data.tokenizers.lists import ByteTokenizer, learn_labels
from jformer.training.introduction import shapes, unfilled, vocabulary


def plan(*each):
    return Plan(tuple(Shape(*shape) for shape in each), np.zeros(0), np.zeros(0), (1.0,), 0)


def test_batches_are_described_by_the_sides_that_hold_something():
    assert shapes(plan((24, 21, 20), (8, 64, 60))) == "of rows x source + target = 24 x 21 + 20, 8 x 64 + 60"
    assert shapes(plan((32, 0, 128))) == "of rows x target = 32 x 128"
    assert shapes(plan((32, 128, 0))) == "of rows x source = 32 x 128"


def test_labels_are_counted_without_the_symbols():
    one, other = ByteTokenizer("identity"), ByteTokenizer("nfkc")
    assert vocabulary(one, one) == "260"
    assert vocabulary(one, other) == "260 source, 260 target"
    assert vocabulary(one, learn_labels("label", ["good", "bad"], "identity")) == "260, 2 labels"


def test_a_vocabulary_that_the_text_does_not_fill_is_noted():
    words, labels = (
        learn("word", ["a b c"], 100, "identity", split_digits=False),
        learn_labels("label", ["good"], "identity"),
    )
    note = " (the text does not fill data.vocab_size=8)"
    assert unfilled(DataConfig(tokenizer="word", vocab_size=8), (words, labels)) == note
    assert unfilled(DataConfig(tokenizer="word", vocab_size=7), (words, labels)) == ""
    assert unfilled(DataConfig(tokenizer="byte", vocab_size=999), (ByteTokenizer("identity"),) * 2) == ""
