import math
from collections import Counter

import numpy as np
import pytest

from jformer.data.corpus import open_corpus
from jformer.data.pipeline import make_batches
from jformer.data.sources.split import Pair, listed
from jformer.data.tokenizers import EOS, ByteTokenizer, Symbols
from jformer.errors import UserError
from jformer.tasks.denoise import corrupted_spans
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


@pytest.mark.parametrize("noise", ["t5", "bart"])
def test_noise_spares_the_symbols_of_an_imported_vocabulary(tmp_path, noise):
    """Each side has its own around it, as in translation, and both keep to the limit."""
    options = {"noise": noise, "overlong": "split", "noise_density": 0.5, "mean_span": 1.0}
    task, config = make_task("denoise", max_target_length=10, **options)
    plain = ByteTokenizer("identity")
    tokenizers = plain.with_symbols(after=(200,)), plain.with_symbols(before=(201, 202), bos=203)
    split = listed("train", "1", [Pair("", text) for text in TEXTS], Counter())
    corpus = open_corpus(split, task.encoder(*tokenizers), str(tmp_path))
    assert corpus.target.lengths.max() == 7
    batches = make_batches([corpus], [1.0], config, 0, task.features(*tokenizers))
    count = 0
    for step in range(len(batches)):
        batch = batches[step]
        for name, before, after in (("source", [], [EOS, 200]), ("target_out", [201, 202], [EOS])):
            for sequence in sequences(batch, name, name.partition("_")[0]):
                text = sequence[len(before) : len(sequence) - len(after)]
                assert sequence == [*before, *text, *after]
                assert not {200, 201, 202, EOS} & {*text}
                assert len(sequence) <= 10
                count += 1
        assert (batch["target_in"][:, 0] == 203).all()
    assert count == 2 * len(corpus)
    full, _ = make_task("denoise", max_target_length=3, noise=noise)
    with pytest.raises(UserError, match=r"data\.max_target_length=3 holds 3 symbols and no token: raise it"):
        full.encoder(*tokenizers)


def test_scores_are_of_the_tokens_said():
    scores = make_task("denoise")[0].score([], [], {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)})
    assert scores == {"perplexity": {"score": pytest.approx(math.exp(2))}, "token_accuracy": {"score": 0.5}}


def test_a_text_of_more_spans_than_the_vocabulary_has_sentinels_is_refused_before_any_batch():
    symbols = Symbols(noise=tuple(range(300, 303)))
    planned = corrupted_spans(0.5, 1.0, 400, (symbols, symbols)).lengths
    planned(np.zeros(2), np.array([4, 6]))
    with pytest.raises(UserError, match="a text of 5 noise spans needs 5 sentinels, and the vocabulary has 3"):
        planned(np.zeros(2), np.array([4, 10]))
