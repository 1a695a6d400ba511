import math

import numpy as np
import pytest

from jformer.data.sources.split import Pair
from jformer.data.tokenizers import BOS, EOS
from jformer.tasks.sums import Sum
from tests.tasks.conftest import TEXTS, make_task


@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_a_text_stands_between_bos_and_eos_and_a_share_of_it_is_asked_for(make, batching):
    made = make("mlm", batching=batching, noise_density=0.3)
    mask = made.tokenizers[0].vocab_size
    texts, asked, masks = [], 0, 0
    for step in range(len(made.batches)):
        batch = made.batches[step]
        for row, segments in enumerate(batch["source_segments"]):
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                whole = batch["target_out"][row][here]
                assert (whole[0], whole[-1]) == (BOS, EOS) == tuple(batch["source"][row][here][[0, -1]])
                texts.append(made.tokenizers[0].decode(whole))
        asked += batch["weights"].sum()
        masks += (batch["source"] == mask).sum()
        assert batch["source"].max() <= mask
        assert (batch["weights"][batch["source"] == mask] == 1).all()
    assert sorted(texts) == sorted(TEXTS)
    assert asked == sum(max(1, round(0.3 * len(text))) for text in TEXTS)
    assert 0.7 < masks / asked < 0.9


def test_another_epoch_asks_for_other_tokens_of_the_same_texts(make):
    made = make("mlm", num_buckets=1)
    n = len(made.batches)
    epochs = [[made.batches[epoch * n + step] for step in range(n)] for epoch in range(2)]
    masked = [
        {
            (batch["target_out"][row].tobytes(), batch["weights"][row].tobytes())
            for batch in epoch
            for row in batch["row"]
        }
        for epoch in epochs
    ]
    assert len(masked[0] & masked[1]) < len(TEXTS) / 2
    assert {text for text, _ in masked[0]} == {text for text, _ in masked[1]}


def test_every_row_of_every_step_asks_for_tokens_of_its_own(make):
    made = make("mlm", (Pair("", "abcdef" * 5),) * 40)
    asked = {made.batches[step]["weights"][row].tobytes() for step in range(len(made.batches)) for row in range(4)}
    assert len(asked) == 4 * len(made.batches) > 8


def test_scores_are_of_the_masked_tokens():
    task, _ = make_task("mlm")
    scores = task.score([], [], {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)})
    assert scores == {"perplexity": {"score": pytest.approx(math.exp(2))}, "accuracy": {"score": 0.5}}
    assert (task.symbols, task.answer) == (1, "masks")


def test_the_model_reads_the_target_of_an_example(make):
    corpus = make("mlm").corpus
    assert not corpus.target.values.size
    np.testing.assert_array_equal(corpus.source.lengths, [len(text) + 2 for text in TEXTS])
