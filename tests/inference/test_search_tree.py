"""The tree of a search is the search: its answers are those of generate, and nothing it weighed is missing."""

import jax
import numpy as np
import pytest

from jformer.decoding.search import Trace
from jformer.errors import UserError
from jformer.inference.answers import NODE_STATES, Request
from jformer.inference.batching import NBest
from jformer.inference.search_tree import read_tree
from tests.inference.untrained import CHARS


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (
            "translate",
            # Few letters may be written, so that outputs end: coverage says nothing of those that are cut.
            {"beam_size": 4, "n_best": 3, "length_penalty": 0.6, "coverage_penalty": 30.0, "forbid": tuple("bcdefg")},
        ),
        pytest.param(
            "translate", {"beam_size": 4, "n_best": 4, "beam_groups": 2, "diversity": 0.1}, marks=pytest.mark.slow
        ),
        pytest.param("lm", {"beam_size": 3, "n_best": 2, "length_penalty": 0.0}, marks=pytest.mark.slow),
    ],
)
def test_the_outputs_of_a_tree_are_those_of_generate(predictor, task, options):
    run, texts = predictor(task, **options), ["abc", "hgfedcba hgfe", "b"]
    trees = [tree for (tree,) in run.search_trees(texts)]
    assert [answer(tree) for tree in trees] == [ids(each[0]) for each in run.generate(texts)]
    for tree, outputs in zip(trees, run.generate(texts), strict=True):
        assert set(tree.states) <= set(NODE_STATES)
        assert sorted(tree.ranks[tree.ranks > 0]) == list(range(1, len(outputs) + 1))
        for rank, output in enumerate(outputs, start=1):
            (node,) = np.flatnonzero(tree.ranks == rank)
            path = tree.path(node)
            assert [tree.tokens[i] for i in path] == ids(output)
            assert tree.scores[node] == np.float32(output.score)
            assert tree.states[node] == ("ended" if output.ids[-1] == CHARS.symbols.eos else "cut")
            if not options.get("coverage_penalty"):
                penalty = ((5 + len(path)) / 6) ** options.get("length_penalty", 0.6)
                assert tree.log_probs[path].sum() / penalty == pytest.approx(output.score, abs=1e-5)


def ids(output):
    return [CHARS.tokens[i] for i in output.ids]


def answer(tree):
    return [tree.tokens[i] for i in tree.path(int(np.argmax(tree.ranks == 1)))]


def test_every_step_keeps_as_many_as_there_are_beams(predictor):
    ((tree,),) = predictor(beam_size=4, n_best=4, beam_groups=2, diversity=0.1).search_trees(["abc"])
    steps = np.array([len(tree.path(i)) for i in range(len(tree.parents))])
    live = np.isin(tree.states, ("kept", "left", "cut"))
    assert np.bincount(steps[live]).tolist() == [1, *[4] * steps.max()]
    assert (np.array(tree.states)[np.unique(tree.parents[1:])] == "kept").all()  # nothing follows what went nowhere


@pytest.mark.slow
def test_a_search_with_phrases_has_its_tree(predictor):
    run = predictor(beam_size=4, max_extra_length=9)
    asked = Request("abc", prefix="h", constraints=["ga"])
    ((tree,),) = run.search_trees([asked])
    assert answer(tree) == ids(run.generate([asked])[0][0])
    assert answer(tree)[0] == "h"
    assert "ga" in "".join(answer(tree))


@pytest.mark.slow
def test_an_empty_text_has_no_tree_and_one_that_is_split_several(predictor):
    run = predictor(beam_size=2, overlong="split")
    limit = run.inputs.side.max_length
    assert [len(trees) for trees in run.search_trees(["", "a " * limit, "ab"])] == [0, 3, 1]


def test_a_search_by_hand():
    """Two beams, two steps, the tokens 2 (the end), 3 and 4: one ends, one is left, and the rest is dropped."""
    no = -np.inf
    trace = Trace(
        searched=np.array([True, True, False]),
        tokens=np.array([[[3, 4, 2], [3, 4, 2]], [[4, 2, 3], [2, 3, 4]], [[9, 9, 9], [9, 9, 9]]]),
        sums=np.array([[[-1, -2, -3], [no, no, no]], [[-1.5, -2.5, -4], [-2.1, -5, -6]], np.zeros((2, 3))]),
        live_sums=np.array([[-1, -2], [-1.5, no], [0, 0]]),
        live_tokens=np.array([[3, 4], [4, 4], [9, 9]]),
        live_parents=np.array([[0, 0], [0, 1], [0, 0]]),
        end_parents=np.array([[0, 0], [0, 1], [0, 0]]),
        end_scores=np.array([[no, no], [no, -1.05], [0, 0]]),
    )
    tree = read_tree(trace, NBest([[4, 2], []], [-1.05, no]), 2, ["", "", "end", "a"], limit=9, penalty=2.0)
    assert tree.tokens == ("", "a", "<4>", "end", "<4>", "end", "a", "end", "a", "<4>")
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    dropped = ["dropped"] * 2
    assert tree.states == ("kept", "kept", "kept", "dropped", "left", *dropped, "ended", *dropped)
    assert tree.ranks.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(tree.log_probs, [0, -1, -2, -3, -0.5, -1.5, -3, -0.1, -3, -4], rtol=1e-6)
    np.testing.assert_allclose(tree.scores, [0, -1, -2, -3, -1.5, -2.5, -4, -1.05, -5, -6], rtol=1e-6)
    unasked = read_tree(trace, NBest([], []), 2, ["", "", "end", "a"], limit=9, penalty=2.0)
    assert (unasked.states[7], unasked.ranks[7]) == ("ended", 0)  # ended, but is no output: its score is the search's
    assert unasked.scores[7] == np.float32(-1.05)
    for outputs, rank in ((NBest([[4, 2], [3, 4]], [-1.05, -0.75]), 2), (NBest([[4, 2]], [-1.05]), 0)):
        cut = read_tree(trace, outputs, 2, ["", "", "end", "a"], limit=2, penalty=2.0)
        assert (cut.states[4], cut.scores[4], cut.ranks[4]) == ("cut", -0.75, rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"beam_size": 1},
            r"decode\.beam_size=1 searches without a beam: set decode\.search='beam' and beam_size of 2",
        ),
        ({"search": "sample", "beam_size": 1}, r"decode\.search='sample' searches without a beam"),
        ({"beam_size": 2, "rerank": "comet"}, r"decode\.rerank='comet' chooses among the outputs of a beam: leave it"),
    ],
)
def test_a_search_without_a_beam_has_no_tree(predictor, options, message):
    with pytest.raises(UserError, match=message):
        predictor(**options).search_trees(["abc"])


@pytest.mark.slow
def test_broken_weights_are_refused(predictor):
    run = predictor(beam_size=2)
    run.params, healthy = jax.tree.map(lambda x: x * np.nan, run.params), run.params
    with pytest.raises(UserError, match="scores are NaN"):
        run.search_trees(["abc"])
    run.params = healthy
