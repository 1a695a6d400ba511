"""A run with further tokens answers as before where they are not met, and begins to know them where they are."""

import json

import jax
import numpy as np
import pytest

import jformer
from jformer.config import default_config, load_config, resolve
from jformer.data.tokenizers.pretrained import FastTokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.inference.restore import saved_config
from jformer.parallel.sharding import named_leaves
from jformer.tools.hf.__main__ import main
from jformer.tools.hf.convert import Texts, import_model
from jformer.tools.hf.embedding_rows import TABLES, extend, prune
from jformer.tools.hf.write_model import export_model
from tests.slow import slow_but
from tests.tools.hf import small_runs
from tests.tools.hf.small_runs import LINES
from tests.tools.hf.test_prune import predictor, write_lines

pytest.importorskip("tokenizers", reason="the extra hf is not installed")
RUNS = {"marian": small_runs.marian, "nllb": small_runs.nllb, "t5": small_runs.t5, "bert": small_runs.bert}
TOKENS = ["<name>", "catfish", "☃", "的", "hat rack"]
SPARE = {"marian": 3, "nllb": 1, "t5": 2, "bert": 0}  # rows past the vocabulary


@pytest.fixture(scope="module", params=slow_but(RUNS, "marian", "bert"))
def runs(request, tmp_path_factory):
    """Return the name of a kind of run, a run, the same one extended by TOKENS, and what was said of it."""
    directory = tmp_path_factory.mktemp(request.param)
    run = RUNS[request.param](directory / "run")
    said = extend(str(run), str(directory / "extended"), [write_lines(directory / "tokens", TOKENS)])
    return request.param, run, directory / "extended", said


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    """Return a run that nothing writes into."""
    return small_runs.nllb(tmp_path_factory.mktemp("nllb") / "run")


def tables_of(run):
    """Return the tables of tokens, name → array with tokens first."""
    named = named_leaves(predictor(run).params).items()
    return {name: np.moveaxis(np.asarray(leaf), TABLES[name], 0) for name, leaf in named if name in TABLES}


def answers(run, **decode):
    return predictor(run, **decode).generate(LINES)


@pytest.mark.slow
def test_texts_without_the_tokens_are_answered_as_before(runs):
    """If the tokens are forbidden: they have a share of the probabilities, so scores are others."""
    _, run, extended, _ = runs
    writes = load_config(run / "config.json").task == "translate"
    forbid = {"forbid": (*saved_config(run).decode.forbid, *TOKENS)} if writes else {}
    before, after = answers(run), answers(extended, **forbid)
    assert [[(x.text, x.labels) for x in each] for each in after] == [
        [(x.text, x.labels) for x in each] for each in before
    ]
    assert len({f"{x.text}{x.labels}" for (x,) in after}) > 1


def test_each_new_row_is_the_mean_of_what_the_token_was_cut_into(runs):
    name, run, extended, said = runs
    sides, before, after = load_tokenizers(run / "tokenizer"), tables_of(run), tables_of(extended)
    sides = sides if name != "bert" else sides[:1]  # the other one is its labels
    size, added = sides[0].vocab_size, len(TOKENS) - SPARE[name]
    assert before.keys() == after.keys() != set()
    for key, table in after.items():
        assert len(table) == len(before[key]) + added == size + len(TOKENS)
        np.testing.assert_array_equal(table[:size], before[key][:size])
        for i, token in enumerate(TOKENS):
            cut = [each for tokenizer in sides for each in tokenizer.cut([token])[0]]
            known = [each for each in cut if each != sides[0].symbols.unk] or slice(size)
            np.testing.assert_allclose(table[size + i], before[key][known].mean(axis=0), rtol=1e-5, atol=1e-6)
    grown = sum(table.size for table in after.values()) - sum(table.size for table in before.values())
    assert f"5 tokens more than {size:,}, {grown:,} parameters more;" in said


def test_the_tokens_are_read_and_written_whole(runs):
    _, run, extended, _ = runs
    old, new = (load_tokenizers(each / "tokenizer")[0] for each in (run, extended))
    assert [new.cut([token]) for token in TOKENS] == [[[old.vocab_size + i]] for i in range(len(TOKENS))]
    for text in ("the cat and <name> sat", "☃ rats", "a hat rack and a catfish", "a catfish <name>"):
        (ids,) = new.encode([text])
        there = [token for token in TOKENS if token in text]
        assert {*there} == {new.tokens[i] for i in ids if i >= old.vocab_size}
        assert new.decode(ids).endswith(text)
    assert new.encode(LINES) == old.encode(LINES)
    assert [new.decode(each) for each in new.encode(LINES)] == [old.decode(each) for each in old.encode(LINES)]


@pytest.mark.parametrize(("past", "expected"), [(True, 99), (False, 1)], ids=["GPT-2", "T5"])
def test_padding_past_the_vocabulary_is_past_it_still(tmp_path, past, expected):
    run = small_runs.t5(tmp_path / "run")
    rows, stored = load_config(run / "config.json").model.vocab_size, run / "tokenizer" / "target.json"
    content = json.loads(stored.read_text())
    pad = {"pad": rows} if past else {}
    tokenizer = FastTokenizer(content["content"], content["symbols"] | pad)
    assert tokenizer.extended(TOKENS, rows, 99).symbols.pad == expected


def test_a_tokenizer_json_whose_ids_have_gaps_is_one_line(tmp_path):
    stored = small_runs.t5(tmp_path / "run") / "tokenizer" / "target.json"
    content = json.loads(stored.read_text())
    vocabulary = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 3}, "unk_token": "<unk>"}
    theirs = json.loads(content["content"]) | {"model": vocabulary, "added_tokens": []}
    tokenizer = FastTokenizer(json.dumps(theirs), content["symbols"])
    with pytest.raises(UserError, match="its ids have gaps below 4, so '<name>' would get id 3"):
        tokenizer.extended(TOKENS, 4, 9)


def test_what_was_extended_can_be_extended_and_pruned(runs, tmp_path):
    name, _, extended, _ = runs
    extend(str(extended), str(tmp_path / "twice"), [write_lines(tmp_path / "tokens", ["dogfish"])])
    text = write_lines(tmp_path / "text", [*LINES, "a catfish and a dogfish"])
    targets = [text] if name != "bert" else []
    prune(str(tmp_path / "twice"), str(tmp_path / "pruned"), [text], targets)
    extend(str(tmp_path / "pruned"), str(tmp_path / "again"), [write_lines(tmp_path / "more", ["☃", "swordfish"])])
    tokenizer = load_tokenizers(tmp_path / "again" / "tokenizer")[0]
    (ids,) = tokenizer.cut(["a catfish, a dogfish, a swordfish, ☃"])
    assert {"catfish", "dogfish", "swordfish", "☃"} <= {tokenizer.tokens[i] for i in ids}
    assert "<name>" not in tokenizer.tokens
    assert (tmp_path / "again" / "imported.json").exists() == (extended / "imported.json").exists()
    assert len(answers(tmp_path / "again")) == len(LINES)


def test_an_extended_tokenizer_json_goes_to_transformers_and_comes_back(tmp_path):
    run = small_runs.bert(tmp_path / "run")
    extend(str(run), str(tmp_path / "new"), [write_lines(tmp_path / "tokens", TOKENS)])
    export_model(str(tmp_path / "new"), tmp_path / "theirs")
    import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    there, back = (load_tokenizers(tmp_path / each / "tokenizer")[0] for each in ("new", "again"))
    text = ["a catfish and a hat rack, ☃"]
    assert back.encode(text) == there.encode(text)
    for (ours,), (theirs,) in zip(answers(tmp_path / "new"), answers(tmp_path / "again"), strict=True):
        assert theirs.labels == pytest.approx(ours.labels, rel=1e-5)  # their program is another


def test_extended_pieces_stay_here(tmp_path):
    run = small_runs.marian(tmp_path / "run")
    extend(str(run), str(tmp_path / "new"), [write_lines(tmp_path / "tokens", TOKENS)])
    assert "without a tokenizer" in export_model(str(tmp_path / "new"), tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "vocab.json").exists()


@pytest.mark.slow
def test_training_goes_on_from_an_extended_run(tmp_path):
    run = small_runs.marian(tmp_path / "run")
    text = write_lines(tmp_path / "tokens", TOKENS)
    assert main(["extend", str(run), f"--workdir={tmp_path / 'new'}", "--tokens", str(text)]) == 0
    for split in ("train", "valid"):
        write_lines(tmp_path / f"{split}.en", ["the cat sat on the ☃", *LINES])
        write_lines(tmp_path / f"{split}.de", ["☃", *LINES])
    values = default_config("marian")
    values.model.update(small_runs.SIZES, vocab_size=0, target_vocab_size=0, head={"bias": True})
    values.data.update(source="files", dir=str(tmp_path), source_language="en", target_language="de", test=())
    values.train.update(init_from=str(tmp_path / "new"), num_steps=2)
    values.mesh.update(data=1)
    jformer.train(resolve(values), tmp_path / "child")
    before, after = tables_of(tmp_path / "new"), tables_of(tmp_path / "child")
    snowman = load_tokenizers(tmp_path / "child" / "tokenizer")[0].cut(["☃"])[0][0]
    for key, table in after.items():
        assert (table[snowman] != before[key][snowman]).any()
    values.train.init_from, values.model.lora.rank = str(run), 2
    rows = load_config(run / "config.json").model.vocab_size
    values.model.update(vocab_size=rows, target_vocab_size=rows)
    jformer.train(resolve(values), tmp_path / "adapters")
    export_model(str(tmp_path / "adapters"), tmp_path / "theirs")  # merged
    import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    ours, again = (jformer.load(tmp_path / name).params for name in ("adapters", "again"))
    jax.tree.map(np.testing.assert_array_equal, again, ours)
    with pytest.raises(
        UserError, match=r"adapters: holds adapters of .*run; only the vocabulary of that run can be extended"
    ):
        extend(str(tmp_path / "adapters"), str(tmp_path / "more"), [text])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["<name>", "t"], r"tokens:2: 't' is a token already"),
        (["<name>", "<name>"], r"tokens:2: '<name>' is a token already"),
        (["a b", " a"], r"tokens:2: ' a' is not a token"),
        (["a b", ""], r"tokens:2: '' is not a token"),
        ([], r"has no tokens"),
    ],
)
def test_what_is_no_new_token_is_one_line(nllb, tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        extend(str(nllb), str(tmp_path / "new"), [write_lines(tmp_path / "tokens", lines)])
    assert not (tmp_path / "new").exists()
