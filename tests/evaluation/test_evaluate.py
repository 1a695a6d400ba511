"""What a scored run is told to try next is what works: commands that can be copied as they are."""

import dataclasses
import json
from pathlib import Path

import pytest
from etils import epath

from jformer.config import resolve, save_config
from jformer.config.options import Config
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.evaluate import evaluate, report_scores


def report(workdir="runs/a", command="", **decode):
    config = resolve({"task": "translate", "data": {"dir": "nowhere"}, "evaluate": {"command": command}})
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, **decode))
    return report_scores({"test": {"bleu": {"score": 30.0}}}, config, Path(workdir))


def test_a_wider_beam_is_recommended_where_there_is_a_beam():
    assert "--config.decode.beam_size=9 " in report(search="beam", beam_size=5)
    assert "--config.decode.beam_size=18 " in report(search="beam", beam_size=6, beam_groups=3, diversity=0.5)
    assert "beam_size" not in report(search="sample")


def test_a_run_without_a_test_set_is_told_so():
    config = resolve({"task": "translate", "data": {"dir": "nowhere", "test": ()}, "decode": {"beam_size": 4}})
    text = report_scores({"run": {"updates": 3}}, config, Path("runs/a"))
    assert text.startswith("\nno test set: name one in data.test")
    assert "outputs" not in text
    assert "--mode=evaluate" not in text
    assert "--mode=predict" in text


def test_a_folder_with_a_space_is_quoted():
    assert "--workdir='runs/my first' --mode=predict" in report("runs/my first")
    assert "--logdir='runs/my first' " in report("runs/my first")
    named = "--workdir=runs/a --config.evaluate.command='python comet.py' --mode="
    assert report(command="python comet.py").count(named) == 2


def test_scores_do_not_go_into_another_run(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_config(Config(), epath.Path(tmp_path / name / "config.json"))
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one = epath.Path(tmp_path / "one")
    with pytest.raises(UserError, match="/other is the directory of another run, whose scores it holds: name another"):
        evaluate(Config(), one, epath.Path(tmp_path / "other"))
    with pytest.raises(UserError, match="tokenizer"):  # which it has not: its own directory is passed over
        evaluate(Config(), one, epath.Path(tmp_path / "link"))


def test_scores_of_a_newer_version_are_noticed_before_anything_is_answered(tmp_path):
    save_config(Config(), epath.Path(tmp_path / "config.json"))
    (tmp_path / "results.json").write_text(json.dumps({"schema": records.SCHEMA + 1}))
    with pytest.raises(UserError, match=r"results\.json: schema=3, and this version .*: upgrade jformer"):
        evaluate(Config(), epath.Path(tmp_path))
