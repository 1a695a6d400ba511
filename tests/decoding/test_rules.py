import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.decoding.beam import beam_search
from jformer.decoding.greedy import greedy
from jformer.decoding.rules import CHUNK, Rules, initial_history, next_log_probs, top_k
from jformer.decoding.sample import sample
from tests.slow import slow_but

from .conftest import EOS, PAD, VOCABULARY
from .reference import assert_same, counts, every, exhaustive, hypotheses, penalty

NO_FOUR = (False, False, True, True, False)  # EOS and 3 may be written
PROMPTS = ((3, 4), (4,), (3, 3, 4), (3,), (4, 4, 4), (3,))
PREFIXES = ((), (4,), (3, 3), (4, 3, 4), (1,), (3,))
RULES = {
    "mask and length": {"allowed": NO_FOUR, "min_length": 2},
    "unigrams": {"no_repeat_ngram": 1},
    "bigrams after a prompt": {"no_repeat_ngram": 2, "prompt": PROMPTS},
    "penalty after a prompt": {"repetition_penalty": 1.7, "prompt": PROMPTS},
    "prefix": {"prefix": PREFIXES},
    "forced end": {"last": (3, 2, 3, 3, 1, 0), "min_length": 2},
    "forced end after normalising again": {"last": (3, 2, 3, 3, 1, 0), "allowed": NO_FOUR, "renormalize": True},
    "all": {
        "allowed": (False, False, True, True, True),
        "min_length": 1,
        "no_repeat_ngram": 3,
        "repetition_penalty": 1.3,
        "prefix": PREFIXES,
        "prompt": PROMPTS,
        "renormalize": True,
    },
}


def as_arrays(rules):
    """Return the rules as a search reads them: what belongs to sentences in arrays, with its lengths."""
    found = {key: value for key, value in rules.items() if key not in ("prefix", "prompt")}
    if "last" in rules:
        found["last"] = np.array(rules["last"], np.int32)
    for key in ("prefix", "prompt"):
        if key in rules:
            found[key] = np.array([[*one, *[PAD] * (4 - len(one))] for one in rules[key]], np.int32)
            found[f"{key}_length"] = np.array([len(one) for one in rules[key]], np.int32)
    return found


def of_sentence(rules, i):
    return {key: value[i] if key in ("prefix", "prompt", "last") else value for key, value in rules.items()}


@pytest.mark.parametrize("name", slow_but(RULES, "all"))
def test_full_width_under_rules_finds_what_exhaustive_search_finds(toy, name):
    model, limits, rules = toy(6, 6), [4, 3, 4, 4, 2, 1], RULES[name]
    found = model.search(beam_search, limits, as_arrays(rules), size=121, n_best=121, length_penalty=0.6)
    for i, limit in enumerate(limits):
        assert_same(hypotheses(found, i), exhaustive(model, i, limit, 0.6, **of_sentence(rules, i)))


@pytest.mark.parametrize("name", ["bigrams after a prompt", "all"])
def test_greedy_search_and_one_beam_take_the_likeliest_that_rules_allow(toy, name):
    model, limits, rules = toy(7, 6), [6, 5, 6, 6, 2, 6], RULES[name]
    found = model.search(greedy, limits, as_arrays(rules))
    one = model.search(beam_search, limits, as_arrays(rules), size=1, length_penalty=0.6)
    for i, limit in enumerate(limits):
        tokens, score = (), 0.0
        while len(tokens) < limit and EOS not in tokens:
            best = counts(model, i, tokens, **of_sentence(rules, i))
            tokens, score = (*tokens, int(best.argmax())), score + best.max()
        assert_same(hypotheses(found, i), [(tokens, score)])
        assert_same(hypotheses(one, i), [(tokens, score / penalty(len(tokens), 0.6))])


def test_samples_obey_rules_and_are_scored_by_the_model_alone(toy):
    model, limits, rules = toy(8, 6, 0.3), [4, 3, 4, 4, 2, 1], RULES["all"]
    found = model.search(sample, limits, as_arrays(rules), keys=jax.random.split(jax.random.key(0), 60))
    assert found.tokens.shape[:2] == (6, 10)
    for i, limit in enumerate(limits):
        allowed = {tokens for tokens, _ in every(model, i, limit, **of_sentence(rules, i))}
        samples = hypotheses(found, i)
        assert {tokens for tokens, _ in samples} <= allowed
        assert_same(samples, [(tokens, model.score(i, tokens)) for tokens, _ in samples])


@pytest.mark.parametrize("function", [greedy, beam_search, sample])
def test_a_sentence_whose_rules_leave_nothing_has_no_hypothesis(toy, function):
    model, options = toy(9, 3), {"no_repeat_ngram": 1, "allowed": NO_FOUR}
    own = {"keys": jax.random.split(jax.random.key(0), 3)} if function is sample else {}
    own = {"size": 2, "n_best": 2, "length_penalty": 0.6} if function is beam_search else own
    found = model.search(function, [4, 1, 4], {**options, "min_length": 4}, **own)
    assert (found.lengths[[0, 2]] == 0).all()
    assert (found.scores[[0, 2]] == -np.inf).all()
    assert (found.tokens[[0, 2]] == PAD).all()
    assert hypotheses(found, 1)[0][0] == (3,)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("index", [0, 3])
def test_a_rule_takes_no_share_of_the_probability_from_others(many, index):
    logits = jax.random.normal(jax.random.key(0), (3, 200)) * 9
    allowed = np.random.default_rng(0).permutation(200) < (50 if many else 170)
    allowed[2] = True
    rules = Rules(eos=2, pad=0, allowed=allowed, min_length=2)
    found = next_log_probs(rules, logits, None, jnp.int32(index)).dense()
    allowed[[0, 2]] = False, index >= 2
    np.testing.assert_allclose(found, jnp.where(allowed, jax.nn.log_softmax(logits), -jnp.inf), rtol=1e-5)


@pytest.mark.parametrize("rules", [Rules(EOS, PAD), Rules(EOS, PAD, np.ones(VOCABULARY, bool), min_length=3)])
def test_rules_that_read_no_history_carry_none(rules):
    assert initial_history(rules, 4, 3, 10) is None


@pytest.mark.parametrize("vocabulary", [7, 4 * CHUNK, 4 * CHUNK + 1, 6 * CHUNK - 1])
@pytest.mark.parametrize("k", [1, 3])
def test_the_k_largest_scores_are_exact_and_equals_are_ordered_by_token(vocabulary, k):
    rng = np.random.default_rng(vocabulary)
    many_equals = rng.integers(0, 4, (30, vocabulary)).astype(np.float32)
    many_equals[:10] = rng.permuted(np.tile(np.arange(vocabulary, dtype=np.float32), (10, 1)), axis=1)
    many_equals[10, :-1] = -np.inf
    values, tokens = jax.jit(top_k, static_argnums=1)(many_equals, k)
    expected = np.argsort(-many_equals, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(many_equals, expected, axis=1))


def test_a_gpu_ranks_the_whole_vocabulary_at_once_and_others_rank_chunks():
    traced = jax.jit(top_k, static_argnums=1).trace(jax.ShapeDtypeStruct((4, 32_000), np.float32), 8)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu", "tpu")}
    assert [(text.count("chlo.top_k"), text.count("stablehlo.sort")) for text in texts.values()] == [
        (1, 0),
        (2, 1),
        (2, 1),
    ]


def test_the_end_of_a_source_that_is_continued_has_not_been_written():
    prompts = jnp.array([[1, 4, 3, EOS], [1, 4, 3, PAD], [EOS, PAD, PAD, PAD]])
    lengths = jnp.array([4, 3, 1])
    rules = Rules(eos=EOS, pad=PAD, no_repeat_ngram=2, prompt=prompts, prompt_length=lengths)
    found = initial_history(rules, sentences=3, beams=1, room=1)
    assert found.tolist() == [[PAD] * 2 + [1, 4, 3, PAD], [PAD] * 3 + [1, 4, 3], [PAD] * 5 + [EOS]]
    of_text = initial_history(rules._replace(of_text=True), sentences=3, beams=1, room=1)
    assert of_text.tolist() == [*found.tolist()[:2], [PAD] * 6]
