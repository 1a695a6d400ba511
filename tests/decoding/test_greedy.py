import numpy as np
import pytest

from jformer.decoding.greedy import greedy

PAD, EOS = 0, 2


def by_hand(toy, sentence, limit):
    tokens = ()
    while len(tokens) < limit and EOS not in tokens:
        log_probs = toy.log_probs(sentence, tokens)
        log_probs[PAD] = -np.inf
        tokens += (int(log_probs.argmax()),)
    return tokens


@pytest.mark.parametrize("seed", range(3))
def test_greedy_takes_the_likeliest_token_until_the_end_or_the_limit(toy, seed):
    model, limits = toy(seed, 6), [6, 5, 4, 3, 1, 6]
    found = model.search(greedy, limits)
    assert found.tokens.shape == (6, 1, 6)
    for i, limit in enumerate(limits):
        tokens = by_hand(model, i, limit)
        assert found.tokens[i, 0].tolist() == [*tokens, *[PAD] * (6 - len(tokens))]
        assert found.lengths[i, 0] == len(tokens)
        assert found.scores[i, 0] == pytest.approx(model.score(i, tokens), abs=1e-5)


def test_a_limit_above_the_room_may_leave_a_sentence_undone(toy):
    found = toy(3, 12).search(greedy, [9] * 6 + [6] * 6)
    ended = (found.tokens[:, 0] == EOS).any(axis=1)
    assert found.done.tolist() == [*ended[:6].tolist(), *[True] * 6]
    assert 0 < ended[:6].sum() < 6


def test_rows_that_fill_a_batch_stay_padding_and_cost_no_step(toy):
    model = toy(0, 2)
    found = model.search(greedy, [0, 0])
    assert (found.tokens == PAD).all()
    assert (found.lengths == 0).all()
    assert model.steps(greedy, [0, 0]) == 0


def test_nan_logits_end_their_own_sentence_only(toy):
    model = toy(1, 3)
    model.table[1, 0, :, EOS] -= 9.0
    healthy = model.search(greedy, [6, 6, 6])
    model.table[1, 1] = np.nan
    found = model.search(greedy, [6, 6, 6])
    assert np.isnan(found.scores[1, 0])
    assert found.lengths[1, 0] == 0
    assert (found.tokens[1] == PAD).all()
    for field, expected in zip(found, healthy, strict=True):
        np.testing.assert_array_equal(field[[0, 2]], expected[[0, 2]])
    model.table[:, 1] = np.nan
    assert model.steps(greedy, [6, 6, 6]) == 2
