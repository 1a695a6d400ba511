import functools

import numpy as np
import pytest

from jformer.decoding.beam import beam_search
from jformer.decoding.greedy import greedy
from tests.slow import slow_but

from .conftest import EOS, LENGTH, PAD, VOCABULARY
from .reference import assert_same, exhaustive, hypotheses, patient, penalty

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("alpha", slow_but([0.0, 1.0], 1.0))
def test_full_width_finds_what_exhaustive_search_finds(toy, alpha):
    model, limits = toy(3, 8), [4, 3, 1, 2] * 2
    found = model.search(beam_search, limits, size=121, n_best=121, length_penalty=alpha)
    for i, limit in enumerate(limits):
        assert_same(hypotheses(found, i), exhaustive(model, i, limit, alpha))
        assert (found.scores[i][found.lengths[i] == 0] == -np.inf).all()


@pytest.mark.parametrize(("beam_size", "n_best", "alpha"), [(2, 2, 0.0), (3, 2, 0.6), slow(2, 1, 1.0), slow(5, 5, 1.0)])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_stopping_early_loses_nothing(toy, beam_size, n_best, alpha, scale):
    model, limits = toy(beam_size, 24, scale), [6, 5, 4, 3, 2, 1] * 4
    found = model.search(beam_search, limits, size=beam_size, n_best=n_best, length_penalty=alpha)
    assert found.scores.shape == (24, n_best)
    for i, limit in enumerate(limits):
        assert_same(hypotheses(found, i), patient(model, i, limit, alpha, beam_size)[:n_best])


@pytest.mark.slow
def test_asking_for_fewer_hypotheses_stops_earlier(toy):
    model = toy(2, 1, 0.1)
    model.table[:, 0, :, EOS] += 3.0  # so the empty hypothesis wins, and its rivals end one after another
    steps = {n_best: model.steps(beam_search, [6], size=3, n_best=n_best, length_penalty=0.0) for n_best in (1, 3)}
    assert steps[1] < steps[3]


@pytest.mark.slow
def test_patience_is_over_when_enough_have_ended(toy):
    model, limits = toy(2, 24, 0.5), [6, 5, 4, 3, 2, 1] * 4
    found = model.search(beam_search, limits, patience=1.0, size=4, n_best=2, length_penalty=1.0)
    for i, limit in enumerate(limits):
        assert_same(hypotheses(found, i), patient(model, i, limit, 1.0, 4, enough=4)[:2])


def test_patience_waits_for_all_that_is_asked_for(toy):
    model, limits = toy(2, 24, 0.5), [6] * 24
    found = model.search(beam_search, limits, patience=0.25, size=4, n_best=4, length_penalty=1.0)
    for i in range(24):
        for tokens, score in hypotheses(found, i):
            assert score == pytest.approx(model.score(i, tokens) / penalty(len(tokens), 1.0), abs=2e-5)


def cost(cache):
    """Return a coverage term: what is added for each token 3 that was said."""
    return -0.7 * (cache["self"]["history"] == 3).sum(1).astype(np.float32)


@pytest.mark.slow
def test_coverage_is_added_to_the_scores_of_ends(toy):
    model, limits, alpha = toy(4, 6, 1.5), [4, 3, 2] * 2, 1.0
    wide = model.search(beam_search, limits, size=121, n_best=121, length_penalty=alpha, coverage=cost)
    best = model.search(beam_search, limits, size=121, length_penalty=alpha, coverage=cost)
    for i, limit in enumerate(limits):
        expected = exhaustive(model, i, limit, alpha, coverage=lambda tokens: -0.7 * tokens.count(3))
        assert_same(hypotheses(wide, i), expected)
        assert_same(hypotheses(best, i), expected[:1])


@pytest.mark.parametrize(
    ("beam_size", "groups", "diversity", "n_best", "words"),
    [(10, 2, 9.0, 10, 2), (6, 3, 0.9, 2, 3), slow(3, 3, 0.4, 3, 3)],
)
def test_groups_are_kept_apart_by_what_earlier_groups_chose(toy, beam_size, groups, diversity, n_best, words):
    model, limits = toy(beam_size, 12), [6, 5, 4, 3, 2, 1] * 2
    rules = {"allowed": (False, words == 3, True, True, True)}  # with two words there are empty beams at first
    options = {"size": beam_size, "groups": groups, "diversity": diversity, "n_best": n_best}
    found = model.search(beam_search, limits, rules, length_penalty=0.6, **options)
    for i, limit in enumerate(limits):
        expected = patient(model, i, limit, 0.6, beam_size, groups, diversity, **rules)
        assert_same(hypotheses(found, i), expected[:n_best])


def test_search_stops_when_no_live_hypothesis_can_win(toy):
    model = toy(0, 2, 0.1)
    model.table[:, 0, :, EOS] -= 40.0
    model.table[:, 1, :, EOS] += 80.0  # every hypothesis ends with its second token
    assert model.steps(beam_search, [6, 0], size=2, n_best=2, length_penalty=0.6) == 2


def test_a_live_hypothesis_may_win_by_growing(toy):
    model = toy(0, 1)
    wanted = np.full((LENGTH, VOCABULARY), 1e-9)  # the probabilities of each place, whatever came before
    wanted[0, [EOS, 3, 4]] = 0.41, 0.45, 0.14
    wanted[1, [EOS, 4]] = 0.58, 0.42
    wanted[[2, 3, 4, 5], [3, 3, 3, EOS]] = 1.0
    model.table[:] = np.diff(np.log(wanted), axis=0, prepend=0)[None, :, None]
    found = hypotheses(model.search(beam_search, [6], size=2, n_best=2, length_penalty=1.0), 0)
    assert [tokens for tokens, _ in found] == [(EOS,), (3, 4, 3, 3, 3, EOS)]


def test_one_beam_is_greedy_search(toy):
    model, limits, alpha = toy(5, 8), [6, 6, 6, 6, 3, 2, 1, 0], 0.6
    one = model.search(beam_search, limits, size=1, length_penalty=alpha)
    best = model.search(greedy, limits)
    np.testing.assert_array_equal(one.tokens, best.tokens)
    np.testing.assert_array_equal(one.lengths, best.lengths)
    np.testing.assert_allclose(one.scores, best.scores / penalty(best.lengths, alpha), rtol=1e-6)


def test_a_sentence_does_not_depend_on_its_neighbours(toy):
    model = toy(7, 8, 1.5)
    together = model.search(beam_search, [6, 2, 6, 0, 4, 6, 1, 1], size=3, n_best=3, length_penalty=0.6)
    others = toy(8, 8)
    others.table[4] = model.table[0]
    apart = others.search(beam_search, [1, 6, 3, 6, 6, 5, 0, 2], size=3, n_best=3, length_penalty=0.6)
    for field, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(field[0], other[4])


def test_hypotheses_cut_at_the_limit_follow_those_that_ended(toy):
    model = toy(11, 1, 0.3)
    model.table[0, 0, :, EOS] -= 2.5  # ends are unlikely, so cut hypotheses score better
    found = hypotheses(model.search(beam_search, [3], size=40, n_best=40, length_penalty=0.6), 0)
    ended = [tokens[-1] == EOS for tokens, _ in found]
    assert 0 < sum(ended) < len(found)
    assert ended == sorted(ended, reverse=True)
    assert found[0][1] < found[sum(ended)][1]


@pytest.mark.parametrize(("patience", "n_best"), [(0.0, 4), (0.5, 1)])
def test_hypotheses_cut_at_the_limit_rank_by_their_scores_where_that_is_asked_for(toy, patience, n_best):
    model, limits = toy(11, 12, 0.3), [6, 5, 4, 3, 2, 1] * 2
    model.table[:, :, :, EOS] -= 1.0
    options = {"size": 4, "n_best": n_best, "length_penalty": 0.6, "ended_first": False, "patience": patience}
    found, cut_first = model.search(beam_search, limits, **options), 0
    for i, limit in enumerate(limits):
        enough = patience * 4 or np.inf
        expected = patient(model, i, limit, 0.6, 4, enough=enough, ended_first=False)
        assert_same(hypotheses(found, i), expected[:n_best])
        cut_first += expected[0][0][-1] != EOS and any(tokens[-1] == EOS for tokens, _ in expected)
    assert cut_first
    every = {"size": 121, "n_best": 1, "length_penalty": 0.6, "ended_first": False}
    for i, limit in enumerate(limits[:6]):
        best = max(exhaustive(model, i, limit, 0.6), key=lambda one: one[1])
        assert_same(hypotheses(model.search(beam_search, limits, **every), i), [best])


def test_a_limit_above_the_room_may_leave_a_sentence_undone(toy):
    model, options = toy(14, 12, 1.5), {"size": 3, "length_penalty": 0.0}
    found = model.search(beam_search, [9] * 12, **options)
    cut = model.search(beam_search, [6] * 12, **options)
    assert cut.done.all()
    assert 0 < found.done.sum() < 12
    for field, expected in zip(found, cut, strict=True):
        np.testing.assert_array_equal(field[found.done], expected[found.done])


def test_rows_that_fill_a_batch_stay_padding(toy):
    found = toy(12, 8).search(beam_search, [0] * 7 + [4], size=3, n_best=3, length_penalty=0.6)
    assert (found.tokens[:7] == PAD).all()
    assert (found.lengths[:7] == 0).all()


@pytest.mark.parametrize(
    "constraints", [{}, {"constraints": np.full((3, 1, 1, 1), 3, np.int32)}], ids=["free", "phrases"]
)
def test_nan_logits_end_their_own_sentence_only(toy, constraints):
    model, limits = toy(13, 3), [6, 2, 6]
    options = {"size": 6, "n_best": 6, "length_penalty": 0.6, **constraints}
    healthy = model.search(beam_search, limits, **options)
    model.table[1, 1, 3] = np.nan  # for one of its beams, at the last step
    found = model.search(beam_search, limits, **options)
    assert np.isnan(found.scores[1]).all()
    assert (found.lengths[1] == 0).all()
    assert (found.tokens[1] == PAD).all()
    for field, expected in zip(found, healthy, strict=True):
        np.testing.assert_array_equal(field[[0, 2]], expected[[0, 2]])


def test_a_search_is_over_when_nothing_but_nan_is_left(toy):
    model = toy(13, 1)
    model.table[0, 1] = np.nan
    assert model.steps(beam_search, [6], size=2, length_penalty=0.6) == 2


def recorded(*arguments):
    return beam_search(*arguments).record(LENGTH)


RECORDED = (
    {"size": 3, "n_best": 3},
    {"size": 6, "groups": 3, "diversity": 0.9},
    {"size": 4, "coverage": cost, "patience": 1.0},
)


@pytest.mark.parametrize(
    "options",
    slow_but(RECORDED, RECORDED[0]),
)
def test_a_recorded_search_finds_the_same(toy, options):
    model, limits = toy(4, 8, 1.5), [6, 5, 4, 3, 2, 1, 0, 6]
    found, trace = model.search(recorded, limits, length_penalty=0.6, **options)
    for field, expected in zip(found, model.search(beam_search, limits, length_penalty=0.6, **options), strict=True):
        np.testing.assert_array_equal(field, expected)
    steps = trace.searched.sum(axis=1)
    assert (steps <= limits).all()
    assert (trace.searched == (np.arange(LENGTH) < steps[:, None])).all()
    for i in range(6):  # what each beam of the last step says is worth what the step says it is
        last = steps[i] - 1
        for beam in np.flatnonzero(trace.live_sums[i, last] > -np.inf):
            tokens, at = [], beam
            for t in range(last, -1, -1):
                tokens.insert(0, int(trace.live_tokens[i, t, at]))
                at = trace.live_parents[i, t, at]
            assert trace.live_sums[i, last, beam] == pytest.approx(model.score(i, tuple(tokens)), abs=2e-5)
