import math

import numpy as np
import pytest

from jformer.data.tokenizers import EOS
from jformer.tasks.sums import Sum
from tests.tasks.conftest import TEXTS, make_task


def sequences(batch, name, side):
    """Yield the examples of a batch array, one by one."""
    for row, segments in enumerate(batch[f"{side}_segments"]):
        for segment in range(1, segments.max() + 1):
            yield batch[name][row][segments == segment].tolist()


def examples(made):
    for step in range(len(made.batches)):
        batch = made.batches[step]
        pairs = zip(sequences(batch, "source", "source"), sequences(batch, "target_out", "target"), strict=True)
        yield from pairs


@pytest.mark.parametrize("batching", ["buckets", "packed"])
@pytest.mark.parametrize("noise", ["t5", "bart"])
def test_an_epoch_holds_every_text(make, batching, noise):
    made = make("denoise", batching=batching, noise=noise, noise_density=0.3)
    first = made.tokenizers[1].vocab_size
    texts = []
    for source, target in examples(made):
        assert source[-1] == EOS == target[-1]
        assert max(source) < first + made.task.symbols
        if noise == "t5":
            spans = {part[0]: part[1:] for part in np.split(target[:-1], np.flatnonzero(np.array(target) >= first))[1:]}
            target = [token for place in source for token in spans.get(place, [place])]
        texts.append(made.tokenizers[1].decode(target))
    assert sorted(texts) == sorted(TEXTS)


@pytest.mark.parametrize(("options", "symbols"), [
    ({"noise": "bart"}, 1),
    ({"max_target_length": 256}, 13),  # 255 tokens, 38 of them noise
    ({"max_target_length": 569}, 28),
    ({"max_target_length": 569, "noise_density": 0.3, "mean_span": 2.0}, 85),
    ({"max_target_length": 3}, 1),
])  # fmt: skip
def test_the_longest_text_has_enough_sentinels(options, symbols):
    assert make_task("denoise", **options)[0].symbols == symbols


@pytest.mark.parametrize("noise", ["t5", "bart"])
def test_both_sides_keep_to_the_limit_of_the_target(make, noise):
    made = make("denoise", noise=noise, max_target_length=10, overlong="split", noise_density=0.5, mean_span=1.0)
    assert max(len(side) for pair in examples(made) for side in pair) <= 10
    assert made.corpus.target.values.size == sum(map(len, TEXTS))
    assert made.corpus.counts["overlong examples split"] > 10


def test_evaluation_loses_no_text(make):
    training, evaluation = (make("denoise", max_target_length=10, evaluating=e).corpus for e in (False, True))
    assert training.target.values.size < evaluation.target.values.size == sum(map(len, TEXTS))


def test_scores_are_of_the_tokens_said():
    scores = make_task("denoise")[0].score([], [], {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)})
    assert scores == {"perplexity": {"score": pytest.approx(math.exp(2))}, "token_accuracy": {"score": 0.5}}
