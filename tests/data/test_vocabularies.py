from collections import Counter

import numpy as np
import pytest
import sentencepiece
from etils import epath

from jformer.data import vocabularies
from jformer.data.data_config import DataConfig, SourceConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers import UNK, ImageTokenizer, LabelTokenizer, ListTokenizer
from jformer.data.tokenizers.bpe_dropout import BpeDropout
from jformer.data.vocabularies import VocabularySpec, _texts, copy_tokenizers, learn_tokenizers, load_tokenizers
from jformer.errors import UserError
from jformer.integrity import seal
from jformer.training.corpora import segmentations

PAIRS = [Pair("the house is small", "das Haus ist klein"), Pair("the dog", "der Hund"), Pair("", "ohne Quelle")]
MORE = [Pair("a zebra", "ein Zebra")]
LINES = ["the dog is small", "das Zebra ist ein Hund", "zzz ⁇"]


def split(pairs, name="train"):
    return Split(name, name, lambda counts: iter(pairs))


def options(**changes):
    return DataConfig(**{"vocab_size": 30, **changes})


def both(kind="word"):
    return {"shared": VocabularySpec(kind, ("source", "target"))}


def apart(kind="word"):
    return {side: VocabularySpec(kind, (side,)) for side in ("source", "target")}


def classes(kind="word"):
    return {"source": VocabularySpec(kind, ("source",), parts=True), "target": VocabularySpec("label", ("target",))}


def learned(folder, vocabularies, pairs=PAIRS, **changes):
    return learn_tokenizers(folder, options(**changes), [split(pairs)], vocabularies)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "digests.json")


def encoded(tokenizer):
    return tokenizer.encode(LINES)


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
@pytest.mark.parametrize("vocabularies", [both, apart])
def test_tokenizers_read_back_are_those_learned(tmp_path, kind, vocabularies):
    made = learned(tmp_path / "t", vocabularies(kind), PAIRS * 9)
    for a, b in zip(made, load_tokenizers(tmp_path / "t"), strict=True):
        assert a.fingerprint == b.fingerprint
        assert encoded(a) == encoded(b)


def test_a_shared_vocabulary_is_one_learned_on_both_sides(tmp_path):
    source, target = learned(tmp_path / "t", both())
    assert source is target
    assert source.decode(source.encode(["the Hund"])[0]) == "the Hund"
    assert names(tmp_path / "t") == ["shared.json"]


def test_separate_vocabularies_know_their_own_side_only(tmp_path):
    source, target = learned(tmp_path / "t", apart())
    assert source.decode(source.encode(["the Hund"])[0]) == "the ⁇"
    assert target.decode(target.encode(["the Hund"])[0]) == "⁇ Hund"
    assert source.vocab_size < target.vocab_size


def test_a_task_of_one_side_has_one_vocabulary_of_it_for_both(tmp_path):
    source, target = learned(tmp_path / "t", {"shared": VocabularySpec("word", ("target",))})
    assert source is target
    assert target.decode(target.encode(["the Hund"])[0]) == "⁇ Hund"


def test_labels_are_numbered_apart_from_their_texts_whose_tabs_are_no_text(tmp_path):
    pairs = [Pair("a b\tc", "same"), Pair("d\ta", "other")]
    source, target = learned(tmp_path / "t", classes("char"), pairs)
    assert sorted(source.tokens[4:]) == [" ", "a", "b", "c", "d"]
    assert target.encode(["other", "same"]) == [[4], [5]]
    assert names(tmp_path / "t") == ["source.json", "target.json"]


def test_every_corpus_of_a_mixture_is_learned_from(tmp_path):
    source, _ = learn_tokenizers(tmp_path / "t", options(), [split(PAIRS), split(MORE, "more")], both())
    assert source.decode(source.encode(["zebra house"])[0]) == "zebra house"


def test_options_reach_the_tokenizer(tmp_path):
    pairs = [Pair("2026 ２０２６", "im Jahr 2026")] * 9
    plain = learned(tmp_path / "a", both("bpe"), pairs, vocab_size=40)[0]
    digits = learned(tmp_path / "b", both("bpe"), pairs, vocab_size=40, split_digits=True, normalization="nfkc")[0]
    assert len(plain.encode(["2026"])[0]) < len(digits.encode(["2026"])[0])
    assert digits.encode(["２０２６"]) == digits.encode(["2026"])
    assert learned(tmp_path / "c", both(), vocab_size=6)[0].vocab_size == 6


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_subwords_have_a_coverage_bytes_and_symbols_that_are_never_cut(tmp_path, kind):
    pairs = [Pair("<BT> the house is small", "das Haus ist klein")] * 30 + [Pair("ž", "ß")]
    few = learned(tmp_path / "a", both(kind), pairs, vocab_size=40, character_coverage=0.99, symbols=("<BT>",))[0]
    assert few.decode(few.encode(["ß ist klein"])[0]) == "⁇ ist klein"
    assert [few.tokens[i] for i in few.encode(["<BT> the"])[0]].count("<BT>") == 1
    counts = Counter()
    PairEncoder(Side(few, 20), Side(few, 20), "drop").encode([*pairs[-1:], Pair("<BT> žž ů", "klein")], counts)
    assert {name: count for name, count in counts.items() if "unknown" in name} == {
        "unknown: 'ž'": 3,
        "unknown: 'ů'": 1,
        "unknown: 'ß'": 1,
    }
    byte = {"vocab_size": 320, "character_coverage": 0.99, "byte_fallback": True}
    whole = learned(tmp_path / "b", both(kind), pairs, **byte)[0]
    assert whole.decode(whole.encode(["ß ist klein 日"])[0]) == "ß ist klein 日"
    if kind == "bpe":
        dropping = BpeDropout(whole, 0.5, "key")
        assert dropping.decode(dropping.encode(["ß ist klein 日"])[0]) == "ß ist klein 日"
        never = BpeDropout(few, 1.0, "key").encode(["<BT> das<BT>"])[0]
        assert [few.tokens[i] for i in never] == ["▁", "<BT>", "▁", "d", "a", "s", "<BT>"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_given_model_cuts_as_before_behind_our_symbols_and_those_added(tmp_path, kind):
    texts = [text for pair in PAIRS for text in pair[:2]] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "given"), model_type=kind, vocab_size=30,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "given.model"))
    given = {"vocabulary": str(tmp_path / "given.model"), "symbols": ("<BT>",), "tokenizer": kind}
    ours = learned(tmp_path / "t", both(kind), **given, language_symbols="source")[0]
    assert ours.tokens[:7] == ["<pad>", "<s>", "</s>", "<unk>", "__de__", "__en__", "<BT>"]
    assert theirs.piece_to_id("<s>") == 1
    lines = [*LINES, "  das   Haus"]
    cut = [[ours.tokens[i] for i in ids if i != UNK] for ids in ours.encode(lines)]
    assert cut == [[theirs.id_to_piece(i) for i in ids if i != theirs.unk_id()] for ids in theirs.encode(lines)]
    assert ours.decode(ours.encode(["das Haus ⁇"])[0]) == "das Haus ⁇"
    (tmp_path / "no").write_bytes(b"no model")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        learned(tmp_path / "t", both(kind), vocabulary=str(tmp_path / "no"))


@pytest.mark.parametrize("held", [(), ("user_defined_symbols",), ("control_symbols",)], ids=str)
def test_a_symbol_is_a_single_token_whatever_piece_a_given_model_has_of_it(tmp_path, held):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a @@ b@@ c"] * 9), model_prefix=str(tmp_path / "given"), model_type="bpe",
        vocab_size=16, hard_vocab_limit=False, minloglevel=2, **{key: ["@@"] for key in held},
    )  # fmt: skip
    assert "@@" in [line.split("\t")[0] for line in (tmp_path / "given.vocab").read_text().splitlines()]
    given = {"vocabulary": str(tmp_path / "given.model"), "symbols": ("@@",), "tokenizer": "bpe"}
    ours = learned(tmp_path / "t", both("bpe"), **given)[0]
    assert ours.uncut == ["@@"]
    for text in ("a @@ b", "b@@c"):
        assert "@@" in [ours.tokens[i] for i in ours.encode([text])[0]]


@pytest.mark.parametrize("spaces", ["treat_whitespace_as_suffix", "split_by_whitespace"])
def test_bpe_dropout_refuses_a_given_model_with_spaces_within_pieces(tmp_path, spaces):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PAIRS[0][:2] * 9), model_prefix=str(tmp_path / "given"), model_type="bpe", vocab_size=30,
        hard_vocab_limit=False, minloglevel=2, **{spaces: spaces == "treat_whitespace_as_suffix"},
    )  # fmt: skip
    given = {"vocabulary": str(tmp_path / "given.model"), "tokenizer": "bpe"}
    pair = (learned(tmp_path / "t", both("bpe"), **given)[0],) * 2
    assert list(segmentations(pair, options(**given))) == [pair]
    with pytest.raises(UserError, match=r"bpe_dropout needs .* which that of data\.vocabulary is not: set it to 0"):
        next(segmentations(pair, options(**given, bpe_dropout=0.1)))


def test_texts_of_small_corpora_are_learned_from_more_often_at_a_temperature():
    large, small = [Pair(f"a{i}", "") for i in range(90)], [Pair(f"b{i}", "") for i in range(10)]
    spec = VocabularySpec("bpe", ("source",))
    texts = list(_texts([split(large), split(small)], spec, 100.0))
    assert 48 <= Counter(text[0] for text in texts)["b"] <= 50 <= len(texts) - 49
    assert list(_texts([split(large), split(small)], spec, 1.0)) == [pair.source for pair in [*large, *small]]
    cleaned = split([*large[:10], *[Pair("", "")] * 80])
    assert Counter(text[:1] for text in _texts([cleaned, split(small)], spec, 100.0)) == {"a": 10, "b": 10, "": 80}


def test_a_temperature_loses_neither_labels_nor_characters(tmp_path):
    large, small = ([Pair(chr(i), f"label {i}") for i in some] for some in (range(0x4E00, 0x4E5A), range(97, 107)))
    source, target = learn_tokenizers(
        tmp_path / "t", options(vocab_temperature=100.0), [split(large), split(small, "small")], classes("char")
    )
    assert {*source.tokens[4:]} == {pair.source for pair in [*large, *small]}
    assert {*target.tokens[4:]} == {pair.target for pair in [*large, *small]}
    assert target.counts == [1] * 100


def test_balanced_labels_are_counted_as_a_mixture_draws_them(tmp_path):
    parts = [split([Pair("x", label) for label in labels]) for labels in ("aaab", "bbbbbbbb")]
    for changes, a, b in (({}, 3, 9), ({"weight": 0.25}, 3, 3), ({"temperature": 1e9}, 4.5, 7.5)):
        mixture = (SourceConfig(weight=changes.get("weight", 1.0)),)
        config = options(label_weights="balanced", mixture=mixture, mixture_temperature=changes.get("temperature", 1.0))
        _, labels = learn_tokenizers(tmp_path / "t", config, parts, classes())
        assert labels.counts[0] / labels.counts[1] == pytest.approx(a / b)


def test_a_folder_may_have_the_characters_of_patterns_in_its_name(tmp_path):
    folder = epath.Path(tmp_path / "lr[0.1]")
    learned(folder, both())
    assert len({tokenizer.fingerprint for tokenizer in load_tokenizers(folder)}) == 1


def test_learning_again_leaves_nothing_of_the_run_before(tmp_path):
    learned(tmp_path / "t", apart())
    learned(tmp_path / "t", both())
    assert names(tmp_path / "t") == ["shared.json"]


def copied(folder, vocabularies, pairs=MORE):
    return copy_tokenizers(folder / "parent", folder / "child", options(), [split(pairs)], vocabularies)


@pytest.mark.parametrize("vocabularies", [both, apart])
def test_a_copy_is_the_parents_and_replaces_what_was_there(tmp_path, vocabularies):
    parents = learned(tmp_path / "parent", vocabularies())
    learned(tmp_path / "child", both("bpe"), MORE * 9)
    copies = copied(tmp_path, vocabularies())
    assert [t.fingerprint for t in copies] == [t.fingerprint for t in parents]
    assert names(tmp_path / "parent") == names(tmp_path / "child")


def test_a_classifier_takes_a_shared_vocabulary_for_its_texts(tmp_path):
    parent, _ = learned(tmp_path / "parent", both())
    source, target = copied(tmp_path, classes(), [Pair("the new text", "good")])
    assert source.fingerprint == parent.fingerprint
    assert target.encode(["good"]) == [[4]]


@pytest.mark.parametrize("sides", [("source",), ("target",), ("source", "target")])
def test_a_run_of_one_vocabulary_takes_the_texts_of_a_classifier(tmp_path, sides):
    parent, _ = learned(tmp_path / "parent", classes(), [Pair("a text", "bad")])
    source, target = copied(tmp_path, {"shared": VocabularySpec("char", sides)})
    assert source.fingerprint == target.fingerprint == parent.fingerprint


def test_a_classifier_that_starts_from_another_learns_its_own_labels(tmp_path):
    parent, _ = learned(tmp_path / "parent", classes(), [Pair("a text", "bad")])
    source, target = copied(tmp_path, classes(), [Pair("the new text", "good")])
    assert source.fingerprint == parent.fingerprint
    assert target.tokens[4:] == ["good"]


def test_labels_keep_the_order_that_the_parents_head_has_them_in(tmp_path):
    learned(tmp_path / "parent", classes(), [Pair("a text", "bad")])
    LabelTokenizer("label", "identity", ["yes", "no", "maybe"]).save(tmp_path / "parent", "target")  # as if imported
    seal(tmp_path / "parent")
    pairs = [Pair("one", "maybe"), Pair("two", "no"), Pair("two", "yes"), Pair("three", "yes")]
    _, target = copied(tmp_path, classes(), pairs)
    assert target.tokens[4:] == ["yes", "no", "maybe"]
    assert target.counts == [2, 1, 1]
    assert copied(tmp_path, classes(), pairs[1:])[1].tokens[4:] == ["no", "yes"]


@pytest.mark.parametrize("steps", [{"sides": [2, 2], "filter": 2}, {}])
def test_images_are_prepared_as_those_of_a_published_parent(steps, tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((1, 3, 3, 1), np.uint8))
    (tmp_path / "parent").mkdir()
    parent = ImageTokenizer((2, 2, 1), steps=steps)
    parent.save(tmp_path / "parent", "source")
    wanted = {"source": VocabularySpec("image", ("source",)), "target": VocabularySpec("label", ("target",))}
    source, _ = copied(tmp_path, wanted, [Pair(f"{tmp_path / 'images.npy'}#0", "good")])
    assert (source.fingerprint == parent.fingerprint) == bool(steps)


@pytest.mark.parametrize("sides", [("target",), ("source", "target")])
def test_a_run_of_one_table_takes_both_of_its_segmentations(tmp_path, sides):
    (tmp_path / "parent").mkdir()
    parents = [ListTokenizer("char", normalization, ["a", "b"]) for normalization in ("identity", "nfkc")]
    for parent, side in zip(parents, ("source", "target"), strict=True):
        parent.save(tmp_path / "parent", side)
    seal(tmp_path / "parent")
    copies = copied(tmp_path, {"shared": VocabularySpec("char", sides)})
    assert [t.fingerprint for t in copies] == [t.fingerprint for t in parents]


@pytest.mark.parametrize("sides", [("target",), ("source", "target")])
def test_a_folder_without_the_vocabulary_asked_for_is_refused(tmp_path, sides):
    learned(tmp_path / "parent", apart())
    with pytest.raises(
        UserError, match=r"has two vocabularies, and this run needs one: start from a run with data\.voc"
    ):
        copied(tmp_path, {"shared": VocabularySpec("word", sides)})
    (tmp_path / "parent" / "source.json").unlink()
    with pytest.raises(UserError, match=r"source\.json is missing; restore it or train again"):
        load_tokenizers(tmp_path / "parent")


def test_a_folder_without_one_of_two_vocabularies_is_refused(tmp_path):
    learned(tmp_path / "parent", classes(), [Pair("a text", "good")])
    with pytest.raises(UserError, match=r"holds no tokenizer 'other'"):
        copied(tmp_path, {"other": VocabularySpec("char", ("source",))})


def test_a_parent_without_vocabularies_is_refused_and_nothing_is_removed(tmp_path):
    learned(tmp_path / "child", both())
    with pytest.raises(UserError, match=r"no such directory; train\.init_from must name the workdir of a run$"):
        copied(tmp_path, both())
    load_tokenizers(tmp_path / "child")


def test_a_tokenizer_that_was_damaged_is_refused_by_name(tmp_path):
    learned(tmp_path / "t", both())
    (path,) = (tmp_path / "t").glob("shared.*")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"e", b"a", 1))
    with pytest.raises(UserError, match=rf"{path.name} is damaged: it has changed since the run began; restore it"):
        load_tokenizers(tmp_path / "t")
    path.write_bytes(content)
    load_tokenizers(tmp_path / "t")


@pytest.mark.parametrize("link", [False, True])
def test_a_file_in_the_place_of_the_folder_is_refused_and_stays(tmp_path, link):
    place, other = tmp_path / "tokenizer", tmp_path / "other"
    other.mkdir()
    place.symlink_to(other) if link else place.write_text("")
    with pytest.raises(
        UserError,
        match="/tokenizer is a file or a link, but a run needs a folder of that name for its tokenizers: move it",
    ):
        learned(place, both())
    assert place.resolve() == other if link else place.read_text() == ""
    assert other.is_dir()


@pytest.mark.parametrize("reads", [True, False])
def test_words_of_a_large_text_are_learned_from_runs_all_over_it(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(vocabularies, "SAMPLE", 30)
    monkeypatch.setattr(vocabularies, "RUN", 10)
    pairs = [Pair(f"w{i}", f"w{i}") for i in range(100)]
    large = split(pairs)
    if reads:
        large = Split("train", "train", lambda counts, first=0: iter(pairs[first:]), 100, seekable=True)
    tokenizer, _ = learn_tokenizers(tmp_path / "t", options(tokenizer="word", vocab_size=200), [large], both())
    assert sorted(tokenizer.tokens[4:]) == sorted(f"w{i}" for run in (0, 40, 80) for i in range(run, run + 10))


def test_corpora_keep_their_shares_where_one_is_sampled(monkeypatch):
    monkeypatch.setattr(vocabularies, "SAMPLE", 30)
    monkeypatch.setattr(vocabularies, "RUN", 10)
    large, small = (split([Pair(f"{name}{i}", "") for i in range(size)]) for name, size in (("a", 90), ("b", 30)))
    for temperature, shares in ((1.0, (30, 10)), (2.0, (25, 14)), (1e9, (20, 20))):
        texts = _texts([large, small], VocabularySpec("bpe", ("source",)), temperature)
        found = Counter(text[0] for text in texts)
        assert (found["a"], found["b"]) == pytest.approx(shares, abs=1)
