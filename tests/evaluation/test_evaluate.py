"""What a scored run is told to try next is what works: commands that can be copied as they are."""

import dataclasses
from pathlib import Path

from jformer.config import resolve
from jformer.evaluation.evaluate import report_scores


def report(workdir="runs/a", **decode):
    config = resolve({"task": "translate", "data": {"dir": "nowhere"}})
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, **decode))
    return report_scores({"test": {"bleu": {"score": 30.0}}}, config, Path(workdir))


def test_a_wider_beam_is_recommended_where_there_is_a_beam():
    assert "--config.decode.beam_size=9 " in report(search="beam", beam_size=5)
    assert "beam_size" not in report(search="sample")


def test_a_folder_with_a_space_is_quoted():
    assert "--workdir='runs/my first' --mode=predict" in report("runs/my first")
    assert "--logdir='runs/my first' " in report("runs/my first")
