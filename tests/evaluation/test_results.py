"""Scores under other settings, and those of other test sets, stay in results.json."""

import dataclasses
import errno
import json
import math

import pytest
from etils import epath

from jformer.config.options import Config, EvaluateConfig
from jformer.data.data_config import DataConfig
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UnavailableError, UserError
from jformer.evaluation import records, results
from tests.faults.full_disk import no_file_above


def scored(bleu, key="test", steps=(40,), evaluate=None, data=None, **decode):
    """Return results as evaluate makes them."""
    sections = {"evaluate": EvaluateConfig(**(evaluate or {})), "data": DataConfig(**(data or {}))}
    config = dataclasses.replace(Config(), decode=DecodeConfig(**decode), **sections)
    entry = {"bleu": {"score": bleu}, "checksum": "0", "settings": results.settings_of(config, steps)}
    return {"schema": records.SCHEMA, key: entry, "run": {"seed": 1}}


def bleus(found):
    """Return key → score of the newest entries, and those of the earlier ones."""
    newest = {key: entry["bleu"]["score"] for key, entry in found.items() if key not in ("schema", "run", "earlier")}
    return newest, [(entry["set"], entry["bleu"]["score"]) for entry in found["earlier"]]


def test_the_newest_scores_have_their_key_and_those_of_other_settings_stay(tmp_path):
    results.save(tmp_path, scored(30.0, beam_size=1))
    assert bleus(results.save(tmp_path, scored(32.0, beam_size=5))) == ({"test": 32.0}, [("test", 30.0)])
    assert bleus(results.save(tmp_path, scored(31.0, beam_size=1))) == ({"test": 31.0}, [("test", 32.0)])
    found = results.save(tmp_path, scored(20.0, key="news", beam_size=1))
    assert bleus(found) == ({"test": 31.0, "news": 20.0}, [("test", 32.0)])
    assert found == records.results(tmp_path)
    assert records.metrics(tmp_path)["test/bleu"] == 31.0
    assert found["earlier"][0]["settings"]["decode"]["beam_size"] == 5


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_written_as_null_and_read_as_nan(tmp_path, score):
    results.save(tmp_path, scored(30.0, beam_size=1))
    found = results.save(tmp_path, scored(score, beam_size=5))
    assert found == records.results(tmp_path)
    assert bleus(found) == ({"test": None}, [("test", 30.0)])
    assert math.isnan(records.metrics(tmp_path)["test/bleu"])


def test_scores_of_other_weights_lengths_or_ways_to_score_stay(tmp_path):
    others = ({"evaluate": {"weights": "average"}}, {"steps": (50,)}, {"evaluate": {"lowercase": True}})
    others += ({"data": {"max_source_length": 9}}, {"data": {"max_target_length": 9}})
    for i, other in enumerate(others):
        folder = tmp_path / str(i)
        results.save(folder, scored(30.0))
        assert bleus(results.save(folder, scored(32.0, **other))) == ({"test": 32.0}, [("test", 30.0)]), other


def test_options_that_change_no_score_are_no_other_settings(tmp_path):
    results.save(tmp_path, scored(30.0, batch_size=8))
    assert bleus(results.save(tmp_path, scored(30.0, batch_size=9, outputs="jsonl", scores=True))) == (
        {"test": 30.0},
        [],
    )


@pytest.mark.parametrize("options", [{"command_seconds": 9.0}, {"during": ("bleu",)}, {"during_examples": 3}])
def test_options_of_training_and_time_limits_are_no_other_settings_even_where_they_were_recorded(tmp_path, options):
    results.save(tmp_path, scored(30.0))
    assert bleus(results.save(tmp_path, scored(30.0, evaluate=options))) == ({"test": 30.0}, [])
    old = scored(30.0)
    old["test"]["settings"]["evaluate"] |= options
    results.save(tmp_path / "old", old)
    assert bleus(results.save(tmp_path / "old", scored(31.0))) == ({"test": 31.0}, [])


def test_scores_that_an_older_version_recorded_without_lengths_are_replaced(tmp_path):
    old = scored(30.0)
    del old["test"]["settings"]["data"]
    results.save(tmp_path, old)
    assert bleus(results.save(tmp_path, scored(31.0))) == ({"test": 31.0}, [])


@pytest.mark.parametrize("text", ["{", '{"schema": 0}'])
def test_a_file_that_is_no_results_is_replaced_and_that_is_said(tmp_path, capsys, text):
    (tmp_path / "results.json").write_text(text)
    assert bleus(results.save(tmp_path, scored(30.0))) == ({"test": 30.0}, [])
    assert "results.json: cannot be read; its content is replaced by the new scores\n" in capsys.readouterr().err
    results.save(tmp_path, scored(31.0))
    assert not capsys.readouterr().err


def test_results_out_of_reach_for_a_moment_are_not_replaced(tmp_path, monkeypatch):
    results.save(tmp_path, scored(30.0))
    before, kind = (tmp_path / "results.json").read_bytes(), type(epath.Path(tmp_path))

    def stale(path, *_, **__):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as away:
        away.setattr(kind, "read_bytes", stale)
        away.setattr(kind, "exists", lambda path: False)  # as os.path.exists answers then
        with pytest.raises(
            UnavailableError, match=r"results\.json: could not be read now \(Stale file handle\); rerun"
        ):
            results.save(epath.Path(tmp_path), scored(31.0, key="other"))
    assert (tmp_path / "results.json").read_bytes() == before


def test_results_of_a_newer_version_are_kept_and_that_is_an_error(tmp_path):
    newer = json.dumps({"schema": records.SCHEMA + 1, "earlier": ["in another form"]})
    (tmp_path / "results.json").write_text(newer)
    with pytest.raises(UserError, match=r"results\.json: schema=3, and this version .*: upgrade jformer"):
        results.save(tmp_path, scored(30.0))
    assert (tmp_path / "results.json").read_text() == newer


def test_a_full_disk_leaves_the_scores_of_before(tmp_path):
    results.save(tmp_path, scored(30.0))
    before = (tmp_path / "results.json").read_text()
    with no_file_above(64), pytest.raises(OSError, match="File too large"):
        results.save(tmp_path, scored(32.0, beam_size=1))
    assert (tmp_path / "results.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert json.loads(before)["schema"] == 2


def test_outputs_are_a_line_for_a_line(tmp_path):
    for lines in (["a", "", "b\u2028c"], ["d"]):
        results.save_outputs(tmp_path, "test", lines)
        assert records.outputs(tmp_path, "test") == lines
