import numpy as np

from jformer.data.corpus import open_corpus
from jformer.data.repeats import duplicate_warnings, hashes
from jformer.data.sources.split import Pair, Split
from tests.data.test_corpus import DROPPING

PAIRS = [Pair("a", "b"), Pair("a", "c"), Pair("ab", ""), Pair("a", "b", group="other"), Pair(" ", ""), Pair("a", "b")]


def test_equal_texts_have_equal_hashes_and_what_holds_no_text_has_none():
    found = hashes(PAIRS)
    assert len(found) == 5
    assert len(set(found.tolist())) == 3
    assert found.tolist() == hashes(PAIRS).tolist()
    assert hashes([]).dtype == np.uint64


def test_pairs_that_come_twice_and_those_trained_on_are_told_and_nothing_else():
    training = {"training text 1": np.sort(hashes(PAIRS)), "training text 2": np.sort(hashes([Pair("x", "y")]))}
    scored = {"validation text": hashes([Pair("x", "y"), *PAIRS[:2]]), "test set": hashes([Pair("y", "x")])}
    assert duplicate_warnings(training, scored) == [
        "training text 1: 2 of 5 pairs repeat an earlier one",
        "validation text: 3 of 3 pairs are also training pairs",
    ]
    assert duplicate_warnings({"none": hashes([])}, {"some": hashes(PAIRS)}) == []


def test_a_corpus_has_the_hashes_of_its_pairs_in_order_and_a_cache_without_them_is_made_again(tmp_path, capsys):
    split = Split("train", "repeats", lambda counts: iter(PAIRS))
    corpus = open_corpus(split, DROPPING, str(tmp_path))
    assert corpus.pairs.tolist() == sorted(hashes(PAIRS).tolist())
    (file,) = tmp_path.glob("*/pairs.npy")
    file.unlink()
    assert open_corpus(split, DROPPING, str(tmp_path)).pairs.tolist() == corpus.pairs.tolist()
    assert "pairs.npy damaged: tokenizing train again" in capsys.readouterr().err
