import pytest

from jformer.data.config import DataConfig
from jformer.data.sources import Pair, Split
from jformer.data.vocabularies import copy_tokenizers, learn_tokenizers, load_tokenizers
from jformer.errors import UserError

PAIRS = [Pair("the house is small", "das Haus ist klein"), Pair("the dog", "der Hund"), Pair("", "ohne Quelle")]
MORE = [Pair("a zebra", "ein Zebra")]
LINES = ["the dog is small", "das Zebra ist ein Hund", "zzz ⁇"]


def split(pairs, name="train"):
    return Split(name, name, lambda counts: iter(pairs))


def options(**changes):
    return DataConfig(**{"tokenizer": "word", "vocab_size": 30, **changes})


def encoded(tokenizer):
    return tokenizer.encode(LINES)


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
@pytest.mark.parametrize("shared", [True, False])
def test_tokenizers_read_back_are_those_learned(tmp_path, kind, shared):
    learned = learn_tokenizers(tmp_path / "t", options(tokenizer=kind, vocab_shared=shared), [split(PAIRS * 9)])
    loaded = load_tokenizers(tmp_path / "t", shared)
    for a, b in zip(learned, loaded, strict=True):
        assert a.fingerprint == b.fingerprint
        assert encoded(a) == encoded(b)


def test_a_shared_vocabulary_is_one_learned_on_both_sides(tmp_path):
    source, target = learn_tokenizers(tmp_path / "t", options(), [split(PAIRS)])
    assert source is target
    assert source.decode(source.encode(["the Hund"])[0]) == "the Hund"
    assert len(list((tmp_path / "t").iterdir())) == 1


def test_separate_vocabularies_know_their_own_side_only(tmp_path):
    source, target = learn_tokenizers(tmp_path / "t", options(vocab_shared=False), [split(PAIRS)])
    assert source.decode(source.encode(["the Hund"])[0]) == "the ⁇"
    assert target.decode(target.encode(["the Hund"])[0]) == "⁇ Hund"
    assert source.vocab_size < target.vocab_size


def test_every_corpus_of_a_mixture_is_learned_from(tmp_path):
    source, _ = learn_tokenizers(tmp_path / "t", options(), [split(PAIRS), split(MORE, "more")])
    assert source.decode(source.encode(["zebra house"])[0]) == "zebra house"


def test_options_reach_the_tokenizer(tmp_path):
    pairs = [Pair("2026 ２０２６", "im Jahr 2026")] * 9
    plain = learn_tokenizers(tmp_path / "a", options(tokenizer="bpe", vocab_size=40), [split(pairs)])[0]
    split_up = options(tokenizer="bpe", vocab_size=40, split_digits=True, normalization="nfkc")
    digits = learn_tokenizers(tmp_path / "b", split_up, [split(pairs)])[0]
    assert len(plain.encode(["2026"])[0]) < len(digits.encode(["2026"])[0])
    assert digits.encode(["２０２６"]) == digits.encode(["2026"])
    small = learn_tokenizers(tmp_path / "c", options(vocab_size=6), [split(PAIRS)])[0]
    assert small.vocab_size == 6


def test_learning_again_leaves_nothing_of_the_run_before(tmp_path):
    learn_tokenizers(tmp_path / "t", options(vocab_shared=False), [split(PAIRS)])
    learn_tokenizers(tmp_path / "t", options(), [split(PAIRS)])
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["shared.json"]


@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_is_the_parents_and_replaces_what_was_there(tmp_path, shared):
    parents = learn_tokenizers(tmp_path / "parent", options(vocab_shared=shared), [split(PAIRS)])
    learn_tokenizers(tmp_path / "child", options(tokenizer="bpe"), [split(MORE * 9)])
    copied = copy_tokenizers(tmp_path / "parent", tmp_path / "child", shared)
    assert [t.fingerprint for t in copied] == [t.fingerprint for t in parents]
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("parent", "child")]
    assert names[0] == names[1]


def test_a_folder_without_the_vocabulary_asked_for_is_refused(tmp_path):
    learn_tokenizers(tmp_path / "t", options(), [split(PAIRS)])
    with pytest.raises(UserError, match=r"holds no tokenizer 'source'"):
        load_tokenizers(tmp_path / "t", shared=False)


def test_a_parent_without_vocabularies_is_refused_and_nothing_is_removed(tmp_path):
    learn_tokenizers(tmp_path / "child", options(), [split(PAIRS)])
    with pytest.raises(UserError, match=r"no such directory; train\.init_from must name the workdir of a run$"):
        copy_tokenizers(tmp_path / "parent", tmp_path / "child", shared=True)
    load_tokenizers(tmp_path / "child", shared=True)
