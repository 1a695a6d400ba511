"""As many lines out as in, in order, from files and pipes; what was half written goes on where it stopped."""

import dataclasses
import gzip
import itertools
import os
import queue
import re
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from jformer import stream
from jformer.config import Config
from jformer.decoding.config import DecodeConfig
from jformer.errors import UserError
from jformer.requests import Output, Scored

LINES = ["abc", "", "ä\u2028b", "  ", "d\te", "f" * 30, "g"]


class Echo:
    """A predictor that answers a text with its line number and itself, and scores a target by its length."""

    task = SimpleNamespace(answer="text")

    def __init__(self):
        self.windows = []  # sizes
        self.counts = Counter({"inputs cut": 1, "nothing": 0})

    def generate(self, requests):
        self.windows.append(len(requests))
        return [[Output(f"{request.line}:{request.text}{request.prefix}")] for request in requests]

    def score(self, pairs):
        return [Scored(-float(len(target)), (), ("x",) * len(target)) for _, target in pairs]


@pytest.fixture
def echo(monkeypatch):
    predictor = Echo()
    monkeypatch.setattr(stream, "load", lambda workdir, settings: predictor)
    monkeypatch.setattr(stream, "WINDOW", 3)
    return predictor


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes("\n".join(LINES).encode() + b"\r\n")
    return path


def settings(**options):
    return dataclasses.replace(Config(), decode=DecodeConfig(**{"batch_size": 2, **options}))


def predict(source, target, resume=False, **options):
    stream.predict_file(settings(**options), Path("run"), str(source), str(target), resume)
    return target.read_bytes().decode()


ANSWERS = "".join(f"{number}:{line}\n" for number, line in enumerate(LINES))


def test_every_line_is_answered_in_its_place_window_by_window(echo, source, tmp_path, capsys):
    assert predict(source, tmp_path / "out.txt") == ANSWERS
    assert echo.windows == [2, 3, 2]  # a batch first, so that something is seen soon
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"7 lines, [\d,.]+ a second, 1 texts with unusual line separators, kept, "
        r"1 carriage returns removed from line ends, 1 inputs cut\n",
        err,
    )


def test_a_gzipped_and_an_empty_file_are_read_too(echo, source, tmp_path):
    (tmp_path / "in.gz").write_bytes(gzip.compress(source.read_bytes()))
    assert predict(tmp_path / "in.gz", tmp_path / "out.txt") == ANSWERS
    source.write_text("")
    assert predict(source, tmp_path / "out.txt") == ""  # and what was there is written anew


@pytest.mark.parametrize("size", [*range(0, len(ANSWERS.encode()), 7), len(ANSWERS.encode())])
def test_a_half_written_file_is_continued_to_the_byte(echo, source, tmp_path, size):
    target = tmp_path / "out.txt"
    target.write_bytes(ANSWERS.encode()[:size])
    assert predict(source, target, resume=True) == ANSWERS
    assert sum(echo.windows) == len(LINES) - ANSWERS.encode()[:size].count(b"\n")


def test_resuming_needs_a_file_that_answers_the_input(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    assert predict(source, target, resume=True) == ANSWERS  # begins it
    target.write_text("x\n" * 9)
    with pytest.raises(UserError, match=r"the output has 9 lines and .*in\.txt only 7: it answers another file"):
        predict(source, target, resume=True)
    with pytest.raises(UserError, match="--resume goes on with a file: name it by --output"):
        stream.predict_file(settings(), Path("run"), str(source), "-", True)


def test_a_mistake_at_the_beginning_leaves_the_output_as_it_was(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("precious\n")
    source.write_bytes(b"abc\n\xff\n")
    with pytest.raises(UserError, match=r"in\.txt:2: invalid UTF-8"):
        predict(source, target)
    source.write_text('{"source": "a"}\n{"source": 3}\n')
    with pytest.raises(UserError, match=r"in\.txt:2: 'source' must be a text"):
        predict(source, target, inputs="jsonl")
    with pytest.raises(UserError, match=r"decode\.outputs='text' has no place for 2 outputs a line"):
        predict(source, target, n_best=2)
    assert target.read_text() == "precious\n"
    with pytest.raises(UserError, match=r"nowhere/out\.txt: No such file or directory; name a file in a folder"):
        predict(source, tmp_path / "nowhere" / "out.txt")


def test_json_goes_in_and_out(echo, source, tmp_path):
    source.write_text('{"source": "a", "prefix": "b"}\n{"source": "c"}\n')
    assert predict(source, tmp_path / "out", inputs="jsonl", outputs="jsonl") == (
        '{"outputs": [{"text": "0:ab"}]}\n{"outputs": [{"text": "1:c"}]}\n'
    )


def test_targets_are_scored_and_lists_of_them_ranked(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    source.write_text("a\tbcd\ne\tf\n")
    stream.score_file(settings(outputs="tsv"), Path("run"), str(source), str(target))
    assert target.read_text() == "-3.0\t3\n-1.0\t1\n"
    source.write_text('{"source": "a", "targets": ["bcd", "b", "bc"]}\n{"source": "a", "target": "bc"}\n')
    stream.score_file(settings(inputs="jsonl", outputs="tsv"), Path("run"), str(source), str(target))
    assert target.read_text() == "b\t-1.0\t1\tbc\t-2.0\t2\tbcd\t-3.0\t3\n-2.0\t2\n"
    with pytest.raises(UserError, match=r"in\.txt:1: 'targets' are ranked"):
        stream.score_file(settings(inputs="jsonl"), Path("run"), str(source), str(target))


def test_what_comes_through_a_pipe_is_answered_before_more_comes(echo, tmp_path):
    fifo, target = tmp_path / "in", tmp_path / "out.txt"
    os.mkfifo(fifo)
    thread = threading.Thread(target=predict, args=(fifo, target))
    thread.start()
    with fifo.open("w") as pipe:
        for number, line in enumerate(("abc", "de")):
            print(line, file=pipe, flush=True)
            for _ in range(1_000):
                if target.exists() and target.read_text().endswith(f"{number}:{line}\n"):
                    break
                time.sleep(0.01)
    thread.join(timeout=10)
    assert target.read_text() == "0:abc\n1:de\n"
    assert echo.windows == [1, 1]


def test_arriving_lines_come_in_windows_and_errors_after_them():
    waiting = queue.Queue()

    def lines():
        while (line := waiting.get()) != "end":
            yield line
        raise UserError("broken")

    found = stream.arriving(lines())
    waiting.put((0, "a"))
    assert next(found) == [(0, "a")]
    for line in ((1, "b"), (2, "c"), "end"):
        waiting.put(line)
    rest = []
    with pytest.raises(UserError, match="broken"):
        rest.extend(itertools.chain.from_iterable(found))
    assert rest in ([], [(1, "b"), (2, "c")])


def test_windows_are_bounded_in_characters_too(monkeypatch):
    monkeypatch.setattr(stream, "CHARACTERS", 10)
    lines = [(number, "x" * size) for number, size in enumerate((6, 6, 6, 99, 1, 1))]
    assert [len(window) for window in stream.windows(iter(lines), 9)] == [2, 2, 2]


def test_progress_tells_the_rate_and_the_time_left(echo, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stream, "SILENCE", (0, 0))
    monkeypatch.setattr(stream.time, "monotonic", itertools.count(0.0, 5.0).__next__)
    predict(source, tmp_path / "out.txt")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert re.fullmatch(r"2 lines, 0\.2 a second, \d:\d\d left", said[0])
    assert said[2].endswith("0:00 left")
