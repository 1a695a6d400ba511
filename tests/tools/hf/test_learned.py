"""Tokenizers that jformer learned give the same ids as a tokenizer.json, and runs that have them come back."""

import json

import jax
import numpy as np
import pytest
from etils.epath import Path

from jformer.config import load_config
from jformer.data.tokenizers import SYMBOLS, UNK, learn
from jformer.errors import UserError
from jformer.inference.answers import Request
from jformer.inference.predict import load
from jformer.tools.hf import learned, vocabulary
from jformer.tools.hf.convert import Texts, import_model
from jformer.tools.hf.write_model import export_model
from tests.hostile_texts import documents, hostile_lines
from tests.tools.hf import small_runs

tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
pytest.importorskip("safetensors", reason="the extra hf is not installed")
KINDS = ("bpe", "unigram", "word", "char", "byte")
TEXTS = {"signs": documents(), "letters": [*small_runs.LINES, *small_runs.FURTHER]}  # symbols' names are spelt, or not


def read(content):
    """Return a tokenizer of the library that takes symbols in a text for text, as tokenizer_config.json says."""
    fast = tokenizers.Tokenizer.from_str(content)
    fast.encode_special_tokens = True
    return fast


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_run(kind, texts):
    ours = learn(kind, TEXTS[texts], 400, "identity", False)
    theirs = read(learned.to_json(ours, "encdec", mask=False))
    lines = [*hostile_lines(1_500), *("".join(SYMBOLS), "a<s>b</s>", "<unk><unk>", "", "  ", "\n")]
    found = [each.ids for each in theirs.encode_batch(lines, add_special_tokens=False)]
    differ = [case for case in zip(found, ours.encode(lines), strict=True) if case[0] != case[1]]
    if kind == "unigram":  # of cuts that are equally probable, as of "aaa" in "a" and "aa", another may be taken
        assert len(differ) < len(lines) / 200
        assert all(sorted(one) == sorted(other) for one, other in differ)
    else:
        assert not differ, differ[:1]
    if kind != "word":
        known = [ids for ids in found if UNK not in ids]
        assert known
        assert [theirs.decode(ids) for ids in known] == [ours.decode(ids) for ids in known]


def test_what_a_tokenizer_json_does_otherwise_is_told():
    assert learned.differences(learn("bpe", TEXTS["letters"], 70, "identity", False)) == []
    assert "nfkc" in learned.differences(learn("bpe", TEXTS["letters"], 70, "nfkc", False))[0]
    assert "equally" in learned.differences(learn("unigram", TEXTS["letters"], 70, "identity", False))[0]
    assert "space" in learned.differences(learn("word", TEXTS["letters"], 70, "identity", False))[0]


def test_symbols_stand_around_texts_as_the_model_reads_them():
    ours = learn("char", TEXTS["letters"], 70, "identity", False)
    around = {family: read(learned.to_json(ours, family, mask=False)) for family in learned.AROUND}
    assert around["encdec"].encode("cat").tokens == ["c", "a", "t", "</s>"]
    assert around["decoder"].encode("cat").tokens == ["<s>", "c", "a", "t"]
    two = around["encoder"].encode("c", "a")
    assert (two.tokens, two.type_ids) == (["<s>", "c", "</s>", "a", "</s>"], [0, 0, 0, 1, 1])


def test_a_source_begins_with_its_own_language_and_two_vocabularies_are_not_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "io.text_encoding", lambda given, _=2: given or "iso8859-9"
    )  # a locale that files do not follow
    shared = learn("bpe", TEXTS["letters"], 72, "identity", False, controls=["__de__", "__en__"])
    en, de = map(shared.tokens.index, ("__en__", "__de__"))
    (cat,) = shared.encode(["cat"])
    sides = shared.with_symbols(before=(en,)), shared.with_symbols(before=(de,))
    assert vocabulary.write(tmp_path, "marian", sides, "encdec")
    theirs = read((tmp_path / vocabulary.FAST).read_text("utf-8"))
    assert vocabulary.TokenizerFiles(tmp_path, "marian", {}).ids == {each: i for i, each in enumerate(shared.tokens)}
    assert theirs.encode("cat").ids == [en, *cat, 2]
    assert theirs.decode([de, *cat]) == "cat"
    assert not vocabulary.write(tmp_path, "marian", (shared, learn("char", ["cat"], 9, "identity", False)), "encdec")


@pytest.mark.slow
def test_a_translator_comes_back_as_it_was(tmp_path):
    run = small_runs.learned(tmp_path / "run")
    assert "tokenizer" not in export_model(str(run), tmp_path / "theirs")
    import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    before, after = load(str(run)), load(str(tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    lines = [*small_runs.LINES, "a</s>cat"]
    assert after.tokenizers[0].encode(lines) == before.tokenizers[0].encode(lines)
    export_model(str(tmp_path / "again"), tmp_path / "twice")
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_mask_that_had_no_name_has_one(tmp_path):
    text = learn("bpe", TEXTS["letters"], 70, "identity", False)
    head = {"transform": True, "num_segments": 2, "pooler": True}
    run = small_runs.write_run(tmp_path / "run", "bert_base", "mlm", (text, text), data={"source": "text"},
                               head=head, max_length=32, vocab_size=text.vocab_size + 1)  # fmt: skip
    with pytest.raises(UserError, match="pad_token_id=0 in its vocabulary, and roberta needs 1"):
        export_model(str(run), tmp_path / "theirs", "roberta")
    export_model(str(run), tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / vocabulary.CONFIG).read_text())
    content = (tmp_path / "theirs" / vocabulary.FAST).read_text()
    assert read(content).token_to_id(config["mask_token"]) == text.vocab_size
    found = tokenizers.Tokenizer.from_str(content).encode("the <mask> sat on the <mask>").ids
    assert [found] == [
        piece.ids for (piece,) in load(str(run)).inputs.pieces([Request("the <mask> sat on the <mask>")])
    ]
    import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    assert load_config(Path(tmp_path) / "again" / "config.json").model.vocab_size == text.vocab_size + 1
    assert load(str(tmp_path / "again")).tokenizers[0].symbols.noise == (text.vocab_size,)
