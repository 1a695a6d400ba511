"""A run with the vocabulary of a corpus answers that corpus as before, and all else with what it still knows.

`python -m pytest tests/tools/hf/test_prune.py -s -k shrink` prints the sizes of docs/weights.md.
"""

import functools
import json
import shutil
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from jformer.config import load_config
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.inference.answers import UNKNOWN
from jformer.inference.predict import load
from jformer.inference.restore import saved_config
from jformer.integrity import DIGESTS
from jformer.tools.hf.__main__ import main
from jformer.tools.hf.convert import Texts, import_model
from jformer.tools.hf.embedding_rows import prune
from jformer.tools.hf.write_model import export_model
from tests.slow import slow_but
from tests.tools.hf import small_runs
from tests.tools.hf.small_runs import FURTHER, LINES

pytest.importorskip("tokenizers", reason="the extra hf is not installed")
RUNS = {"marian": small_runs.marian, "nllb": small_runs.nllb, "bert": small_runs.bert}


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def targets_of(run, directory):
    """Return a file of what a run may write, if it writes texts."""
    translates = load_config(run / "config.json").task == "translate"
    return [write_lines(directory / "targets", LINES)] if translates else []


@pytest.fixture(scope="module", params=slow_but(RUNS, "nllb"))
def runs(request, tmp_path_factory):
    """Return a run, the same one pruned to LINES, and what was said of it."""
    directory = tmp_path_factory.mktemp(request.param)
    run = RUNS[request.param](directory / "run")
    text = write_lines(directory / "text", LINES)
    said = prune(str(run), str(directory / "pruned"), [text], targets_of(run, directory))
    return run, directory / "pruned", said


@functools.cache
def predictor(run, **decode):
    """Return what answers with a run, loaded and compiled once for all tests."""
    return load(run, saved_config(run, **decode))


def size_of(run):
    return sum(leaf.size for leaf in jax.tree.leaves(predictor(run).params))


def answers(run, lines, **decode):
    found = predictor(run, **decode)
    found.forget()
    return found.generate(lines), Counter(found.counts)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_texts_of_the_corpus_are_answered_as_before(runs, beams):
    run, pruned, _ = runs
    best = beams if load_config(run / "config.json").task != "classify" else 1
    (before, _), (after, counts) = (answers(each, LINES, beam_size=beams, n_best=best) for each in (run, pruned))
    assert [[one.text for one in each] for each in after] == [[one.text for one in each] for each in before]
    assert len({f"{each[0].text} {each[0].labels}" for each in after}) > 1
    assert counts[UNKNOWN] == 0
    for one, other in zip((x for each in after for x in each), (x for each in before for x in each), strict=True):
        assert one.labels == other.labels
        np.testing.assert_allclose(one.score or 0, other.score or 0, atol=1e-3)


def test_parameters_shrink_by_the_rows_that_are_gone(runs):
    run, pruned, said = runs
    config = load_config(run / "config.json").model
    gone = config.vocab_size - load_config(pruned / "config.json").model.vocab_size
    of_each = config.d_model + (config.head.bias or (config.family == "encoder" and not config.head.num_classes))
    stored = [sum(path.stat().st_size for path in Path(each / "checkpoints").rglob("*") if path.is_file())
              for each in (run, pruned)]  # fmt: skip
    print(f"{said}; checkpoint of {stored[1]:,} bytes, it was {stored[0]:,}")
    assert gone > 20
    assert size_of(run) - size_of(pruned) == gone * of_each
    assert said.endswith(f"{size_of(pruned):,} of {size_of(run):,} parameters")


@pytest.mark.slow
def test_what_was_dropped_is_unknown_and_counted(runs):
    _, pruned, _ = runs
    outputs, counts = answers(pruned, FURTHER)
    assert counts[UNKNOWN] == len(FURTHER)
    assert len(outputs) == len(FURTHER)


def test_tokens_keep_their_written_form_and_symbols_their_roles(runs):
    run, pruned, _ = runs
    for before, after in zip(*(load_tokenizers(each / "tokenizer") for each in (run, pruned)), strict=True):
        if not hasattr(before, "pruned"):  # labels
            assert before.fingerprint == after.fingerprint
            continue
        cut = [[each.tokens[i] for i in ids] for each in (before, after) for ids in each.encode(LINES)]
        assert cut[: len(LINES)] == cut[len(LINES) :]
        assert [after.decode(ids) for ids in after.encode(LINES)] == [before.decode(i) for i in before.encode(LINES)]
        for one, other in zip(before.symbols, after.symbols, strict=True):
            ids, new = (each if isinstance(each, tuple) else (each,) for each in (one, other))
            assert [before.tokens[i] for i in ids] == [after.tokens[i] for i in new]


def test_a_pruned_run_can_be_pruned_again_and_keeps_where_it_came_from(runs, tmp_path):
    _, pruned, _ = runs
    few, targets = write_lines(tmp_path / "few", LINES[:1]), targets_of(pruned, tmp_path)
    prune(str(pruned), str(tmp_path / "twice"), [few], targets)
    assert targets or size_of(tmp_path / "twice") < size_of(pruned)
    assert [x.text for (x,) in answers(tmp_path / "twice", LINES[:1])[0]] == [
        x.text for (x,) in answers(pruned, LINES[:1])[0]
    ]
    assert (tmp_path / "twice" / "imported.json").read_text() == (pruned / "imported.json").read_text()


@pytest.mark.slow
def test_a_pruned_marian_goes_to_transformers_and_comes_back(tmp_path):
    run = small_runs.marian(tmp_path / "run")
    text = write_lines(tmp_path / "text", LINES)
    prune(str(run), str(tmp_path / "pruned"), [text], [text])
    export_model(str(tmp_path / "pruned"), tmp_path / "theirs")
    import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    assert load(tmp_path / "again").predict(LINES) == load(run).predict(LINES)


@pytest.mark.slow
def test_a_pruned_tokenizer_json_stays_here(tmp_path):
    run = small_runs.bert(tmp_path / "run")
    prune(str(run), str(tmp_path / "pruned"), [write_lines(tmp_path / "text", LINES)])
    assert "without a tokenizer" in export_model(str(tmp_path / "pruned"), tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "tokenizer.json").exists()


def test_entries_that_are_forbidden_go_with_their_rows(runs):
    run, pruned, _ = runs
    forbidden, left = (load_config(each / "config.json").decode.forbid for each in (run, pruned))
    tokens = load_tokenizers(pruned / "tokenizer")[1].tokens
    assert set(left) == {word for word in forbidden if word in tokens}
    assert not forbidden or (forbidden, left) == (("h", "z"), ("h",))


@pytest.mark.slow
def test_entries_that_alone_may_be_written_stay(tmp_path, monkeypatch):
    monkeypatch.setitem(small_runs.DECODE, "only", ("z",))
    run, text = small_runs.bart(tmp_path / "run"), write_lines(tmp_path / "text", LINES)
    prune(str(run), str(tmp_path / "pruned"), [text], [text])
    assert load_config(tmp_path / "pruned" / "config.json").decode.only == ("z",)


def test_languages_that_no_text_names_stay(runs):
    before, after = (load_tokenizers(each / "tokenizer")[0].tokens for each in runs[:2])
    assert {"fra_Latn", "<mask>", "[MASK]"} & {*before} == {"fra_Latn", "<mask>", "[MASK]"} & {*after}


def test_words_of_questions_are_kept_as_the_task_cuts_them(tmp_path):
    run = small_runs.bert(tmp_path / "run", "qa")
    lines = ["what did the cat eat?\tthe cat ate 1 hat and2rats"]
    assert main(["prune", str(run), f"--workdir={tmp_path / 'pruned'}", "--text",
                 str(write_lines(tmp_path / "text", lines))]) == 0  # fmt: skip
    (before, _), (after, counts) = (answers(each, lines) for each in (run, tmp_path / "pruned"))
    assert [x.span for x in after[0]] == [x.span for x in before[0]]
    assert counts[UNKNOWN] == 0


def test_what_cannot_be_pruned_is_one_line(tmp_path, capsys):
    run = small_runs.nllb(tmp_path / "run")
    text = write_lines(tmp_path / "text", LINES)
    command = ["prune", str(run), f"--workdir={tmp_path / 'new'}", "--text", str(text)]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("jformer: --target is missing")
    bert = small_runs.bert(tmp_path / "other")
    with pytest.raises(UserError, match="--target is for"):
        prune(str(bert), str(tmp_path / "new"), [text], [text])
    stored = run / "tokenizer" / "source.json"
    (stored.parent / DIGESTS).unlink()  # what follows is no damage
    content = json.loads(stored.read_text())
    stored.write_text(json.dumps({**content, "symbols": {**content["symbols"], "unk": -1}}))
    with pytest.raises(UserError, match="has no unknown token"):
        prune(str(run), str(tmp_path / "new"), [text], [text])
    shutil.copy(bert / "tokenizer" / "source.json", stored)
    with pytest.raises(UserError, match="has two vocabularies"):
        prune(str(run), str(tmp_path / "new"), [text], [text])
    stored.write_text(json.dumps({"kind": "byte", "normalization": "identity"}))
    with pytest.raises(UserError, match="only vocabularies of imported runs can be pruned"):
        prune(str(run), str(tmp_path / "new"), [text], [text])
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="is not empty"):
        prune(str(run), str(run), [text], [text])
