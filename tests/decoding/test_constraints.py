import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.decoding.beam import beam_search
from jformer.decoding.constraints import (
    add_constraint_tokens,
    advance_progress,
    allocate,
    initial_progress,
    make_constraints,
    tokens_met,
)

from .conftest import EOS, PAD
from .reference import assert_same, constraint_tokens, contains, exhaustive, hypotheses, penalty

PHRASES = [  # of each sentence
    [(4,)],
    [(3, 4), (4, 4)],  # may overlap
    [(3, 3, 4)],  # 3 3 3 4 has it, though the first 3 3 is interrupted
    [],
    [(1,), (4, 3)],
    [(3, 4), (3, 4), (3, 1)],  # asked for twice, met by one; two begin alike
    [(4, 1, 3), (3,)],
    [(4, 4, 4), (1,)],  # as long as the limit and more
]


SPELT = [  # each phrase in its spellings
    [[(4,), (3, 1)]],
    [[(3, 4), (1,)], [(4, 4)]],
    [[(3, 3, 4), (4, 4)]],
    [],
    [[(1,), (3, 3)], [(4, 3), (3, 4)]],  # 3 3 4 has both
    [[(3, 4), (3,)]],  # one within the other
    [[(4, 1, 3), (1, 1)], [(3,)]],
    [[(4, 4, 4), (3, 3, 3)], [(1,)]],
]


def as_array(phrases):
    """Lay out the phrases of each sentence; one that is no list of spellings has one."""
    array = np.full((len(phrases), 3, 2, 3), PAD, np.int32)
    for i, mine in enumerate(phrases):
        for j, phrase in enumerate(mine):
            for k, spelling in enumerate(phrase if isinstance(phrase, list) else [phrase]):
                array[i, j, k, : len(spelling)] = spelling
    return array


@pytest.mark.parametrize("phrases", [PHRASES, SPELT], ids=["phrases", "spellings"])
def test_full_width_finds_what_exhaustive_search_finds_among_outputs_with_all_phrases(toy, phrases):
    model, limits = toy(3, 8, 1.5), [4, 4, 4, 3, 3, 4, 4, 3]
    constraints = as_array(phrases)
    found = model.search(beam_search, limits, constraints=constraints, size=121, n_best=121, length_penalty=1.0)
    for i, limit in enumerate(limits):
        assert_same(hypotheses(found, i), exhaustive(model, i, limit, 1.0, phrases=phrases[i]))


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 2])
def test_narrow_beams_find_room_for_unlikely_phrases(toy, beam_size):
    model = toy(4, 8)
    model.table[:, 0, :, 1] -= 6.0  # no search would take those
    model.table[:, 0, :, 4] -= 8.0
    phrases = [[(4,), (4, 3)], [(1,)], [(4, 1, 3)], [(4, 4)]] * 2
    options = {"size": beam_size, "n_best": beam_size, "length_penalty": 0.6}
    found = model.search(beam_search, [6] * 8, constraints=as_array(phrases), **options)
    for i in range(8):
        outputs = hypotheses(found, i)
        assert len({tokens for tokens, _ in outputs}) == len(outputs) == beam_size
        assert all(contains(outputs[0][0], phrase) for phrase in phrases[i])
        for tokens, score in outputs:
            assert score == pytest.approx(model.score(i, tokens) / penalty(len(tokens), 0.6), abs=2e-5)


@pytest.mark.slow
def test_phrases_go_with_groups_and_rules(toy):
    model = toy(6, 4)
    model.table[:, 2, :, EOS] += 4.0
    phrases = [[(4, 3)], [(1,)], [(3, 3)], []]
    rules = {"min_length": 3, "prefix": np.full((4, 1), 4, np.int32), "prefix_length": np.array([1, 0, 1, 1])}
    options = {"size": 6, "groups": 2, "diversity": 1.0, "length_penalty": 0.6}
    found = model.search(beam_search, [6] * 4, rules, constraints=as_array(phrases), **options)
    for i in range(4):
        [(tokens, _)] = hypotheses(found, i)
        assert all(contains(tokens, phrase) for phrase in phrases[i])
        assert tokens[-1] == EOS
        assert len(tokens) > 3
        assert tokens[0] == 4 or i == 1


@pytest.mark.slow
def test_a_sentence_without_phrases_is_ranked_as_if_its_batch_had_none(toy):
    model, phrases = toy(11, 12, 0.3), [[], [(4,)]] * 6
    model.table[:, :, :, EOS] -= 2.0
    options = {"size": 4, "n_best": 4, "length_penalty": 0.6, "ended_first": False}
    alone = model.search(beam_search, [3] * 12, **options)
    mixed = model.search(beam_search, [3] * 12, **options, constraints=as_array(phrases))
    for i in range(0, 12, 2):
        assert_same(hypotheses(mixed, i), hypotheses(alone, i))
    firsts = [hypotheses(mixed, i)[0][0] for i in range(12)]
    assert any(tokens[-1] != EOS for tokens in firsts[::2])  # cut at the limit, and better than what ended
    assert all(4 in tokens for tokens in firsts[1::2])


def test_progress_is_what_reading_the_tokens_again_finds():
    rng = np.random.default_rng(0)

    def drawn():
        return tuple(rng.integers(3, 5, rng.integers(0, 4)))

    phrases = [[[drawn(), drawn()] if j else drawn() for j in range(3)] for _ in range(40)]
    tokens = rng.integers(3, 5, (40, 2, 9))
    constraints = make_constraints(jnp.asarray(as_array(phrases)), PAD)
    progress, read = initial_progress(constraints, 2), jax.jit(advance_progress)
    for now in range(9):
        candidates = read(constraints, progress, jnp.asarray(tokens[:, :, now : now + 1]))
        progress = type(progress)(*(leaf[:, :, 0] for leaf in candidates))
        found = np.asarray(tokens_met(constraints, progress))
        for i in range(40):
            for beam in range(2):
                assert found[i, beam] == constraint_tokens(tuple(tokens[i, beam, : now + 1]), phrases[i])


@pytest.mark.slow
def test_banks_share_the_beam():
    ranks = -jnp.arange(8.0)[None]
    bank = jnp.array([[0, 0, 0, 0, 1, 1, 2, 2]])
    cases = {3: [6, 4, 0], 4: [6, 7, 4, 0], 6: [6, 7, 4, 5, 0, 1], 7: [6, 7, 4, 5, 0, 1, 2]}
    for size, expected in cases.items():
        assert sorted(allocate(ranks, bank, jnp.array([2]), size)[0].tolist()) == sorted(expected)
    impossible = ranks.at[:, 4:].set(-jnp.inf)  # no bank but the first has candidates
    assert allocate(impossible, bank, jnp.array([2]), 3)[0].tolist() == [0, 1, 2]
    assert allocate(ranks, bank, jnp.array([6]), 3)[0].tolist() == [6, 7, 4]  # more banks than places


def test_a_token_that_two_phrases_want_is_added_once_and_every_other_too():
    constraints = make_constraints(jnp.array([[[[3]], [[3]], [[2]]]]), pad=0)
    log_probs = jnp.array([[[-jnp.inf, -0.1, -3.0, -4.0]]])
    best = jnp.array([[[-0.1]]]), jnp.array([[[1]]])
    values, tokens = add_constraint_tokens(constraints, initial_progress(constraints, 1), log_probs, *best)
    added = sorted(zip(values[0, 0].tolist(), tokens[0, 0].tolist(), strict=True), reverse=True)
    np.testing.assert_allclose(added, [(-0.1, 1), (-3.0, 2), (-4.0, 3), (-np.inf, 3)])
