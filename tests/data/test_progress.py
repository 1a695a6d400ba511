"""Long preparations are told while they last, short ones not at all."""

import math
import re
import sys
import time

from jformer.data import progress
from tests import terminal


def test_what_takes_long_is_told_with_its_count_and_time(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    with progress.show_progress("tokenizing train") as done:
        done.examples = 1_234
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert set(lines) - {"tokenizing train: 0:00"} == {"tokenizing train: 1,234 examples, 0:00"}  # it may speak at once


def test_what_is_done_soon_is_not_told(capsys):
    with progress.show_progress("learning the bpe tokenizer"):
        pass
    assert capsys.readouterr().err == ""


def test_a_total_is_told_and_one_of_several_processes_speaks(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    for quiet in (False, True):
        with progress.show_progress("answering test", 2_000, quiet) as done:
            done.count(1_000)
            done.count(5)
            time.sleep(0.1)
        said = capsys.readouterr().err.splitlines()
        assert set(said) == (set() if quiet else {"answering test: 1,005 of 2,000 examples, 0:00"})


def test_a_terminal_sees_a_bar_of_what_has_a_total_and_no_colours(monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    with terminal.standard_error(monkeypatch, columns=80) as said:
        for total in (2_000, 0):
            with progress.show_progress("tokenizing train", total) as done:
                done.count(1_000)
                time.sleep(0.1)
        print("the line after it", file=sys.stderr)
    shown = said[0].split("\r")
    assert "\x1b[K 50%|████████████████▌                | tokenizing train: 1,000 of 2,000 examples, 0:00" in [
        re.sub("█+.?( +)", "████████████████▌                ", line) for line in shown
    ]
    assert "\x1b[Ktokenizing train: 1,000 examples, 0:00" in shown
    assert "\x1b[Kthe line after it" in said[0]
    assert terminal.sequences(said[0]) <= terminal.MOVES


def test_one_of_a_kind_is_singular():
    for noun in ("word", "kernel"):
        assert [progress.counted(count, f"{noun}s cut") for count in (1, 2)] == [f"1 {noun} cut", f"2 {noun}s cut"]


def test_a_curve_has_no_more_bars_than_asked_for_and_leaves_out_what_is_no_number():
    assert progress.sparkline([math.nan, 3.0, math.inf, 1.0]) == "█▁"
    assert progress.sparkline([9.0, 9.0, 5.0, 5.0, 1.0, 1.0], width=3) == "█▅▁"
    assert progress.sparkline([2.0] * 50) == "▁" * 12
    assert progress.sparkline([]) == ""


def test_one_of_a_kind_is_told_as_one():
    found = [progress.counted(1, what) for what in ("empty inputs", "line feeds within a text made spaces", "parts")]
    assert found == ["1 empty input", "1 line feed within a text made spaces", "1 parts"]
    assert progress.counted(1, "files that are not .png, left out") == "1 file that is not .png, left out"
    assert progress.counted(2_000, "inputs with unknown tokens") == "2,000 inputs with unknown tokens"
    assert progress.counted(0, "lines") == "0 lines"
