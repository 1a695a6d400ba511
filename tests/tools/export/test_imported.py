"""Imported runs that leave as directories answer as they do here: each shape of symbols, in both formats."""

import json
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

from jformer.data.vocabularies import load_tokenizers
from jformer.inference.predict import load
from jformer.inference.restore import saved_config
from jformer.tools.export.folder import export
from tests.slow import slow_but
from tests.tools.hf import small_runs
from tests.tools.hf.small_runs import LINES

ctranslate2 = pytest.importorskip("ctranslate2", reason="export needs: pip install ctranslate2 flatbuffers")
pytest.importorskip("flatbuffers", reason="export needs: pip install ctranslate2 flatbuffers")
pytest.importorskip("tokenizers", reason="the extra hf is not installed")

RUNS = {"marian": small_runs.marian, "nllb": small_runs.nllb, "bart": small_runs.bart, "t5": small_runs.t5,
        "several": small_runs.several}  # fmt: skip
LONGEST = 8  # tokens of an answer


@pytest.fixture(scope="module", params=slow_but(RUNS, "marian"))
def run(request, tmp_path_factory):
    return RUNS[request.param](tmp_path_factory.mktemp(request.param) / "run")


def exported(run, target, format, **decode):  # noqa: A002
    """Export a run and return what it answers, the tokenizers, and what serving.json says."""
    settings = saved_config(run, no_repeat_ngram=0, **decode)
    export(settings, run, format, target)
    limits = json.loads((Path(target) / "serving.json").read_text())
    return load(run, settings).generate(LINES), load_tokenizers(run / "tokenizer"), limits


@pytest.mark.slow
def test_ctranslate2_writes_greedily_what_the_run_writes(run, tmp_path):
    ours, (source, target), limits = exported(run, tmp_path / "served", "ctranslate2", beam_size=1)
    prefix, around = (
        limits["target_prefix"]["tokens"],
        [limits[f"source_{end}"]["tokens"] for end in ("before", "after")],
    )
    pieces = [[*around[0], *(source.tokens[i] for i in ids), *around[1]] for ids in source.encode(LINES)]
    found = ctranslate2.Translator(str(tmp_path / "served"), intra_threads=1).translate_batch(
        pieces, target_prefix=[prefix] * len(pieces), beam_size=1,
        max_decoding_length=LONGEST + len(prefix), min_decoding_length=limits["min_length"] + len(prefix),
    )  # fmt: skip
    theirs = [one.hypotheses[0][len(prefix) :] for one in found]
    eos = target.symbols.eos
    assert theirs == [[target.tokens[i] for i in each[0].ids if i != eos] for each in ours]


def both_written(run, target, **decode):
    """Return what a run writes and what its program does: tokens, scores and texts of the best answers."""
    jaxtyping.config.update("jaxtyping_disable", True)  # whose checks take a symbolic size for no int
    ours, (source, answer), limits = exported(run, target, "stablehlo", **decode)
    jaxtyping.config.update("jaxtyping_disable", False)
    before, after = (limits[f"source_{end}"]["ids"] for end in ("before", "after"))
    ids = [[*before, *each, *after] for each in source.encode(LINES)]
    tokens = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, each in zip(tokens, ids, strict=True):
        row[: len(each)] = each
    program = jax.export.deserialize(bytearray((target / "program.bin").read_bytes()))
    params = dict(np.load(target / "params.npz"))
    written, scores, lengths = program.call(params, tokens, np.array([*map(len, ids)], np.int32))
    theirs = [
        row[0, : length[0]].tolist() for row, length in zip(np.asarray(written), np.asarray(lengths), strict=True)
    ]
    best = [each[0] for each in ours]
    return (
        ([list(each.ids) for each in best], [each.score for each in best], [each.text for each in best]),
        (theirs, np.asarray(scores)[:, 0], [answer.decode(each) for each in theirs]),
    )


def test_the_program_writes_what_the_run_writes(run, tmp_path):
    (ours, our_scores, our_texts), (theirs, their_scores, their_texts) = both_written(
        run, tmp_path / "served", beam_size=3
    )
    assert theirs == ours
    np.testing.assert_allclose(their_scores, our_scores, atol=1e-4)
    assert their_texts == our_texts


@pytest.mark.slow
@pytest.mark.parametrize("run", ["nllb", "bart"], indirect=True)
def test_the_program_has_no_more_positions_than_the_run(run, tmp_path):
    """A language or `<s>` before an answer takes one of the 32."""
    decode = {"max_length": 0, "max_extra_length": 40, "min_length": 30}
    (ours, *_), (theirs, *_) = both_written(run, tmp_path / "served", beam_size=1, **decode)
    assert {len(each) for each in ours} == {31}
    assert theirs == ours
