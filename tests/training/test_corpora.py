"""The text of a run: how it is cut, which pairs come twice, and what identifies it."""

import contextlib
import dataclasses
import itertools
import re
import string

import numpy as np
import pytest
import sentencepiece
from etils import epath

from jformer import main
from jformer.config import default_config, resolve, save_config
from jformer.config.resume import resume_config
from jformer.data import preparation, progress
from jformer.data.encoders import PairEncoder
from jformer.data.tokenizers.lists import ListTokenizer
from jformer.errors import UserError
from jformer.integrity import seal
from jformer.tasks.build import build_task
from jformer.training.corpora import fingerprints, open_data, prepare_data, with_vocabulary_of_parent
from tests import small_run

SET = ("cache_dir", "num_pairs", "tokenizer", "vocab_size")


def opened(config, workdir, learned=False):
    return open_data(config.data, config.train, config.seed, build_task(config), workdir, learned)


def test_every_text_and_vocabulary_has_a_fingerprint_by_its_own_name(tmp_path):
    options = small_run.get_config()
    options.data.cache_dir = str(tmp_path / "cache")
    found = fingerprints(opened(resolve(options), tmp_path))
    assert list(found) == [
        "the source tokenizer", "the target tokenizer", "training text train", "validation text valid",
    ]  # fmt: skip
    assert len(set(found.values())) == 3  # one vocabulary for both sides


def test_what_takes_long_before_training_is_told(tmp_path, monkeypatch):
    told = []

    @contextlib.contextmanager
    def showing_line(line, share):
        yield
        told.append(line())

    monkeypatch.setattr(progress, "showing_line", showing_line)
    options = small_run.get_config()
    options.data.cache_dir = str(tmp_path / "cache")
    config = resolve(options)
    opened(config, tmp_path)
    assert {"reading the text", "planning the batches"} <= {line.partition(":")[0] for line in told}
    assert any(re.fullmatch(r"tokenizing .*: [\d,]+( of [\d,]+)? examples, 0:0\d", line) for line in told), told


def test_rules_of_cleaning_do_not_take_labels_for_texts(tmp_path):
    rows = [("a fine film", "positive"), ("a dull film", "negative"), ("dull", "negative")]
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    given = {"source": "labelled", "dir": str(tmp_path), "cache_dir": str(tmp_path / "cache"), "tokenizer": "char"}
    values = default_config("bert_base")
    values.task = "classify"
    values.data.update(**given, valid="", test=(), clean=("characters=9-20",))
    values.train.eval_every = 0
    counts = opened(resolve(values), tmp_path).texts["training text train"].counts
    assert (counts["pairs dropped by characters=9-20"], counts["examples used"]) == (1, 2)
    config = resolve(values)
    translated = dataclasses.replace(config.data, source="files", clean=("ratio=9",))
    with pytest.raises(
        UserError, match=r"^data\.clean: 'ratio=9' reads a target text, and the targets of this task are"
    ):
        opened(dataclasses.replace(config, data=translated), tmp_path)


def test_pairs_that_come_twice_or_are_trained_on_are_told(tmp_path):
    options = small_run.get_config()
    options.data.update(dir=str(tmp_path / "text"), source="files", cache_dir=str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for split, lines in {
        "train": "abc\tcba\n" * 3 + "ab\tba\n",
        "valid": "ab\tba\nbb\tbb\n",
        "test": "abc\tcba\n",
    }.items():
        (tmp_path / "text" / f"{split}.tsv").write_text(lines)
    config = resolve(options)
    assert opened(config, tmp_path).repeats == [
        "training text train: 2 of 4 pairs repeat an earlier one",
        "validation text valid: 1 of 2 pairs are also training pairs",
        "test set test: 1 of 1 pairs are also training pairs",
    ]


def test_bpe_dropout_cuts_training_text_in_several_ways_and_nothing_else(tmp_path):
    options = small_run.get_config()
    options.data.update(tokenizer="bpe", vocab_size=60, num_pairs=50, cache_dir=str(tmp_path / "cache"))
    plain = resolve(options)
    options.data.update(bpe_dropout=0.2, segmentations=4)
    dropping = resolve(options)
    whole, cut = (opened(each, tmp_path) for each in (plain, dropping))
    assert len(cut.corpora) == 1
    assert cut.repeats == whole.repeats
    np.testing.assert_array_equal(cut.valid["1"].source.values, whole.valid["1"].source.values)
    texts = [whole.tokenizers[0].decode(ids) for ids in sequences(whole.batches.source)]
    assert [cut.tokenizers[0].decode(ids) for ids in sequences(cut.batches.source)] == texts * 4
    assert len({tuple(ids) for ids in sequences(cut.batches.source)}) > len(texts)
    units = [{*np.concatenate([batch.units for batch in cut.batches.plan.epoch(i)])} - {-1} for i in range(2)]
    assert all(abs(len(each) - len(texts)) <= 4 for each in units)  # of each way a fourth, give or take one
    assert units[0] != units[1]


def test_a_part_of_a_mixture_is_cut_the_same_whether_the_one_before_was_cached_or_not(tmp_path):
    config = dropping_mixture(cache=tmp_path / "one")
    both = opened(config, tmp_path)
    config = dropping_mixture(cache=tmp_path / "two")
    first = dataclasses.replace(config, data=dataclasses.replace(config.data, mixture=()))
    opened(first, tmp_path, learned=True)
    again = opened(config, tmp_path, learned=True)
    assert again.corpora[0].fingerprint != again.corpora[1].fingerprint
    for ours, theirs in zip(again.corpora, both.corpora, strict=True):
        assert ours.fingerprint == theirs.fingerprint
    np.testing.assert_array_equal(
        *(np.concatenate(sequences(each.batches.source)) for each in (again, both)), strict=True
    )


def test_shards_prepared_in_any_order_leave_a_run_nothing_to_tokenize(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparation, "BLOCK", 16)
    monkeypatch.setattr(preparation, "FEW", 1_000)  # blocks are made here
    shard, encoded = ["jformer", f"--config={small_run.__file__}", "--mode=prepare"], []

    def config(cache):
        settings = small_run.get_config()
        settings.data.update(cache_dir=str(tmp_path / cache), num_pairs=100, tokenizer="bpe", vocab_size=60)
        shard[3:] = [f"--config.data.{key}={settings.data[key]}" for key in SET]
        return resolve(settings)

    whole = opened(config("whole"), tmp_path)
    shared = config("shared")
    for number in (1, 0, 1):
        assert main.main([*shard, f"--shard={number}/2"]) == 0
    encode = PairEncoder.encode
    monkeypatch.setattr(PairEncoder, "encode", lambda self, *all: encoded.extend(all[0]) or encode(self, *all))
    found = opened(shared, tmp_path)
    assert len(encoded) == len(found.texts["validation text valid"])  # which are few, so that every run makes them
    assert fingerprints(found) == fingerprints(whole)
    for side in ("source", "target"):
        ours, theirs = getattr(found.corpora[0], side), getattr(whole.corpora[0], side)
        np.testing.assert_array_equal(ours.values, theirs.values)
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    dropping = [*shard, "--config.data.bpe_dropout=0.1", "--config.data.segmentations=2"]
    assert main.main([*dropping, "--shard=0/2"]) == 2
    assert "--shard: data.bpe_dropout" in capsys.readouterr().err
    assert main.main(dropping) == 0
    encoded.clear()
    data = dataclasses.replace(shared.data, bpe_dropout=0.1, segmentations=2)
    opened(dataclasses.replace(shared, data=data), tmp_path)
    assert not encoded


def test_what_was_prepared_with_another_vocabulary_or_is_damaged_is_prepared_anew(tmp_path):
    options, given, cache = small_run.get_config(), tmp_path / "given.model", tmp_path / "cache"
    options.data.update(tokenizer="bpe", vocabulary=str(given), num_pairs=50, cache_dir=str(cache))
    config, letters = resolve(options), [string.ascii_lowercase[i:] for i in range(20)]
    for size in (40, 50):
        with given.open("wb") as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(letters), model_writer=model, vocab_size=size, model_type="bpe"
            )
        prepare_data(config, (0, 1))
    tokenizers = [folder / "shared.model" for folder in cache.glob("*.tokenizer")]
    assert len(tokenizers) == 2
    contents = [path.read_bytes() for path in tokenizers]
    tokenizers[0].write_bytes(b"")
    tokenizers[1].write_bytes(contents[1][:-1])
    prepare_data(config, (0, 1))
    assert sum(path.read_bytes() == content for path, content in zip(tokenizers, contents, strict=True)) == 1


def test_seeds_are_trained_on_the_same_cuts(tmp_path):
    prints = set()
    for seed in (0, 1):
        config = dropping_mixture(cache=tmp_path / "cache", seed=seed)
        data = opened(config, tmp_path, learned=bool(seed))
        prints.add(tuple(corpus.fingerprint for corpus in data.corpora))
    assert len(prints) == 1


def dropping_mixture(cache, seed=0):
    options = small_run.get_config()
    options.seed = seed
    options.data.update(tokenizer="bpe", vocab_size=60, num_pairs=50, cache_dir=str(cache), bpe_dropout=0.2)
    options.data.update(segmentations=2, mixture=({"source": "generated", "name": "sort", "num_pairs": 50},))
    return resolve(options)


def sequences(tokens):
    values, offsets = (array[np.arange(len(array))] for array in (tokens.values, tokens.offsets))
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def test_bpe_dropout_is_refused_where_there_is_nothing_to_drop():
    for options in ({"data": {"bpe_dropout": 0.1, "tokenizer": "char"}}, {"data": {"bpe_dropout": 1.0}},
                    {"data": {"bpe_dropout": 0.1, "segmentations": 0}},
                    {"data": {"segmentations": 4}}):  # fmt: skip
        with pytest.raises(UserError, match=r"data\.(bpe_dropout|segmentations=[04])"):
            resolve(options)
    with pytest.raises(UserError, match=r"data\.bpe_dropout=0\.1 is read by task='translate' or 'lm' only"):
        resolve({"task": "mlm", "model": {"family": "encoder"}, "data": {"bpe_dropout": 0.1}})


def test_a_child_has_its_parents_options_of_the_vocabulary(tmp_path):
    own = {"tokenizer": "bpe", "vocab_size": 90, "symbols": ("<BT>",), "normalization": "nfkc"}
    parent = resolve({"data": own})
    save_config(parent, epath.Path(tmp_path / "config.json"))
    (tmp_path / "tokenizer").mkdir()
    ListTokenizer("word", "identity", ["<BT>", "sea"]).save(epath.Path(tmp_path / "tokenizer"), "shared")
    seal(epath.Path(tmp_path / "tokenizer"))

    def child(**data):
        config = resolve({"data": {**own, "max_source_length": 7, **data}, "train": {"init_from": str(tmp_path)}})
        return config, *with_vocabulary_of_parent(config)

    given, taken, notes = child()
    assert (taken, notes) == (given, [])
    given, taken, notes = child(tokenizer="char", vocab_size=8_000, symbols=())
    assert taken.data == dataclasses.replace(parent.data, max_source_length=7)
    (note,) = notes
    assert note == (
        f"train.init_from='{tmp_path}' brings its vocabulary: data.tokenizer='bpe', not 'char'; "
        "data.vocab_size=90, not 8000; data.symbols=('<BT>',), not ()"
    )
    assert resume_config(taken, given) == taken  # the same command resumes
    with pytest.raises(UserError, match=r"^data\.symbols: .* lacks '<X>': train that run with it"):
        child(symbols=("<BT>", "<X>"))
    with pytest.raises(UserError, match=r"^data\.vocabulary='other\.model' cannot be used, as train\.init_from="):
        child(vocabulary="other.model", normalization="identity")
