"""One line out per line in, in order, from files and pipes; a half-written file is continued where it stopped."""

import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import os
import queue
import random
import re
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jformer.config.options import Config, EvaluateConfig
from jformer.data import progress
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference import answer_files as files
from jformer.inference.answers import Activations, Output, Scored
from jformer.inference.output_file import lines_to_keep, open_output
from jformer.inference.predict import load
from jformer.storage import is_special
from jformer.tools.pages import explorer
from tests import terminal
from tests.faults.full_disk import no_file_above
from tests.inference import untrained

LINES = ["abc", "", "ä\u2028b", "  ", "d\te", "f" * 30, "g"]


class Echo:
    """A predictor that answers a text with its line number and itself, and scores a target by its length."""

    task = SimpleNamespace(answer="text")
    inputs = SimpleNamespace(towards=lambda languages: None)

    steps = (40,)
    parameters = "those of one run"
    compile_seconds = 0.0

    def __init__(self):
        self.windows = []  # sizes
        self.counts = Counter({"inputs cut": 1, "nothing": 0})

    def fingerprint(self):
        return self.parameters

    def generate(self, requests):
        self.windows.append(len(requests))
        return [[Output(f"{request.line}:{request.text}{request.prefix}")] for request in requests]

    def score(self, pairs):
        return [Scored(-float(len(target)), (), ("x",) * len(target)) for _, target, *_ in pairs]


@pytest.fixture
def echo(monkeypatch):
    predictor = Echo()

    def load(workdir, settings):
        predictor.config = settings
        return predictor

    monkeypatch.setattr(files, "load", load)
    monkeypatch.setattr(files, "WINDOW", 3)
    return predictor


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes("\n".join(LINES).encode() + b"\r\n")
    return path


def settings(**options):
    return dataclasses.replace(Config(), decode=DecodeConfig(**{"batch_size": 2, **options}))


def predict(source, target, resume=False, **options):
    files.predict_file(settings(**options), Path("run"), str(source), str(target), resume)
    return target.read_bytes().decode()


ANSWERS = "".join(f"{number}:{line}\n" for number, line in enumerate(LINES))


def test_every_line_is_answered_in_its_place_window_by_window(echo, source, tmp_path, capsys):
    assert predict(source, tmp_path / "out.txt") == ANSWERS
    assert echo.windows == [2, 3, 2]  # a batch first, so that something is seen soon
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"7 lines, [\d,.]+ a second, 1 text with unusual line separators, kept, "
        r"1 carriage return removed from line ends, 1 input cut\n",
        err,
    )


@pytest.mark.parametrize("inputs", ["text", "jsonl"])
def test_ten_thousand_hostile_lines_give_ten_thousand_lines(echo, tmp_path, capsys, inputs):
    rng = random.Random(0)
    hostile = [b"\0", b"\xff", b"\xed\xa0\x80", b"\r", b"\x0b\x0c\x1c", "\u2028\x85\ufeff".encode(), b"\t", b" ", b""]
    lines = [b"%d %s." % (number, b"".join(rng.choices(hostile, k=3))) for number in range(10_000)]
    source = tmp_path / "in.txt"
    texts = lines
    if inputs == "jsonl":  # a byte that is no UTF-8 is a lone surrogate here, which JSON can spell
        texts = [json.dumps({"source": line.decode(errors="surrogateescape")}).encode() for line in lines]
    source.write_bytes(b"\n".join(texts) + b"\n")
    predict(source, tmp_path / "out.txt", inputs=inputs)
    answers = (tmp_path / "out.txt").read_bytes().removesuffix(b"\n").split(b"\n")
    assert len(answers) == 10_000
    bad = [number for number, line in enumerate(lines, start=1) if re.search(rb"[\0\xff]|\xed\xa0", line)]
    err = capsys.readouterr().err
    told = [int(number) for number in re.findall(r"in\.txt:(\d+): .*, replaced by U\+FFFD\n", err)]
    assert told == bad[:10]
    assert f"{len(bad):,} texts with invalid characters, replaced by U+FFFD" in err


def test_a_gzipped_and_an_empty_file_are_read_too(echo, source, tmp_path):
    (tmp_path / "in.gz").write_bytes(gzip.compress(source.read_bytes()))
    assert predict(tmp_path / "in.gz", tmp_path / "out.txt") == ANSWERS
    source.write_text("")
    assert predict(source, tmp_path / "out.txt") == ""  # and what was there is written anew


@pytest.mark.parametrize("size", [*range(0, len(ANSWERS.encode()), 7), len(ANSWERS.encode())])
def test_a_half_written_file_is_continued_to_the_byte(echo, source, tmp_path, size):
    target = tmp_path / "out.txt"
    assert predict(source, target) == ANSWERS
    echo.windows.clear()
    target.write_bytes(ANSWERS.encode()[:size])
    assert predict(source, target, resume=True, batch_size=5) == ANSWERS  # the sizes of batches change no answer
    assert sum(echo.windows) == len(LINES) - ANSWERS.encode()[:size].count(b"\n")


def test_an_output_that_has_no_room_ends_with_a_whole_line_and_is_continued(echo, tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("some words\n" * 500)
    with (
        no_file_above(5_000),
        pytest.raises(UserError, match=r"out\.txt: writing failed after \d+ lines \(File too large\)"),
    ):
        predict(source, target)
    assert 0 < target.stat().st_size <= 5_000
    assert target.read_bytes().endswith(b"\n")
    assert predict(source, target, resume=True) == "".join(f"{number}:some words\n" for number in range(500))


def test_resuming_needs_a_file_that_answers_the_input(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    assert predict(source, target, resume=True) == ANSWERS  # begins it
    target.write_text("x\n" * 9)
    with pytest.raises(UserError, match=r"the output has 9 lines and .*in\.txt only 7: it answers another file"):
        predict(source, target, resume=True)
    with pytest.raises(UserError, match="--resume continues a file: name it by --output"):
        files.predict_file(settings(), Path("run"), str(source), "-", True)


def test_a_mistake_at_the_beginning_leaves_the_output_as_it_was(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("precious\n")
    source.write_text('{"source": "a"}\n{"source": 3}\n')
    with pytest.raises(UserError, match=r"in\.txt:2: 'source' must be a text"):
        predict(source, target, inputs="jsonl")
    with pytest.raises(UserError, match=r"decode\.outputs='text' cannot hold 2 outputs per line"):
        predict(source, target, n_best=2)
    assert target.read_text() == "precious\n"


def test_json_goes_in_and_out(echo, source, tmp_path):
    source.write_text('{"source": "a", "prefix": "b"}\n{"source": "c"}\n')
    assert predict(source, tmp_path / "out", inputs="jsonl", outputs="jsonl") == (
        '{"outputs": [{"text": "0:ab"}]}\n{"outputs": [{"text": "1:c"}]}\n'
    )


def test_vectors_are_written_a_line_each_or_as_one_array(echo, source, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(len(LINES), 3)).astype(np.float32)
    echo.embedder, echo.model = echo, SimpleNamespace(config=SimpleNamespace(d_model=3))
    echo.generate = lambda requests: [[Output("", vector=vectors[request.line])] for request in requests]
    files.embed_file(Config(), tmp_path, str(source), str(tmp_path / "out.jsonl"))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    np.testing.assert_array_equal(np.float32([json.loads(line)["vector"] for line in lines]), vectors)
    for name, read in (("out.npy", np.load), ("out.safetensors", lambda path: load_file(path)["vectors"])):
        files.embed_file(Config(), tmp_path, str(source), str(tmp_path / name))
        np.testing.assert_array_equal(read(tmp_path / name), vectors)
        with pytest.raises(UserError, match="is one array, written to a file at the end: leave out --resume"):
            files.embed_file(Config(), tmp_path, str(source), str(tmp_path / name), resume=True)
    (tmp_path / "none").touch()
    files.embed_file(Config(), tmp_path, str(tmp_path / "none"), str(tmp_path / "out.npy"))
    assert np.load(tmp_path / "out.npy").shape == (0, 3)


WHOLE = {  # what is written at the end, in the place of what is there
    "npy": files.embed_file,
    "safetensors": files.embed_file,
    "activations": functools.partial(files.write_activations, names=["*"]),
}


@pytest.mark.parametrize("form", WHOLE)
def test_arrays_that_find_no_room_leave_what_was_there(echo, source, tmp_path, form):
    vector, target = np.zeros(10_000, np.float32), tmp_path / f"out.{form}"  # its header finds room
    echo.embedder, echo.model = echo, SimpleNamespace(config=SimpleNamespace(d_model=10_000))
    echo.generate = lambda requests: [[Output("", vector=vector)] for _ in requests]
    echo.pair_of = lambda line: (line, None)
    echo.activations = lambda pairs, names: (Activations((), (), {"logits": vector}) for _ in pairs)
    write = WHOLE[form]
    target.write_text("old")
    said = rf"{target}: could not be written \(.*(File too large.*|\d+ written)\); free some space"
    with no_file_above(100_000), pytest.raises(UserError, match=said):
        write(Config(), tmp_path, str(source), str(target))
    assert target.read_text() == "old"
    assert not [*tmp_path.glob("*.new")]


@pytest.mark.parametrize("form", WHOLE)
def test_no_array_takes_the_place_of_a_pipe(echo, source, tmp_path, form):
    target = tmp_path / f"out.{form}"
    os.mkfifo(target)
    with pytest.raises(UserError, match=rf"{target} is not a plain file and would be replaced by one: name another"):
        WHOLE[form](Config(), tmp_path, str(source), str(target))
    assert target.is_fifo()


def test_activations_of_json_lines_are_refused(echo, source, tmp_path):
    with pytest.raises(UserError, match=r"--activations reads lines of text: set --config\.decode\.inputs=text"):
        files.write_activations(settings(inputs="jsonl"), tmp_path, str(source), str(tmp_path / "out"), ["*"])


def test_activations_are_written_with_the_tokens_of_their_line(echo, source, tmp_path):
    echo.pair_of = lambda line: (line, None)
    echo.activations = lambda pairs, names: (
        Activations((pair[0], "</s>"), ("x",), {"logits": np.zeros(1)}) for pair in pairs
    )
    source.write_text("a\n\nb\n")
    files.write_activations(Config(), tmp_path, str(source), str(tmp_path / "out"), ["*"])
    with safe_open(tmp_path / "out", "numpy") as found:
        assert sorted(found.keys()) == ["1/logits", "3/logits"]
        tokens = {key: json.loads(value) for key, value in found.metadata().items()}
    assert tokens == {"1/source": ["a", "</s>"], "1/target": ["x"], "3/source": ["b", "</s>"], "3/target": ["x"]}


def test_targets_are_scored_and_lists_of_them_ranked(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    source.write_text("a\tbcd\ne\tf\n")
    files.score_file(settings(outputs="tsv"), Path("run"), str(source), str(target))
    assert target.read_text() == "-3.0\t3\n-1.0\t1\n"
    source.write_text('{"source": "a", "targets": ["bcd", "b", "bc"]}\n{"source": "a", "target": "bc"}\n')
    files.score_file(settings(inputs="jsonl", outputs="tsv"), Path("run"), str(source), str(target))
    assert target.read_text() == "b\t-1.0\t1\tbc\t-2.0\t2\tbcd\t-3.0\t3\n-2.0\t2\n"
    with pytest.raises(UserError, match=r"in\.txt:1: 'targets' are ranked"):
        files.score_file(settings(inputs="jsonl"), Path("run"), str(source), str(target))


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


def test_answers_go_into_a_pipe_in_a_folder_that_only_reads(echo, source, tmp_path, monkeypatch):
    may = os.access  # of which root is never told no
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and may(path, mode))
    target = tmp_path / "out"
    os.mkfifo(target)
    pipe = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    files.predict_file(settings(), Path("run"), str(source), str(target))
    assert os.read(pipe, 1 << 16).decode() == ANSWERS
    os.close(pipe)
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out"}  # no record


@contextlib.contextmanager
def standard_input(file):
    before = os.dup(0)
    os.dup2(file, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_standard_input_is_read_from_where_it_is(echo, source, tmp_path):
    with source.open("rb", buffering=0) as file, standard_input(file.fileno()):
        assert is_special(Path("/dev/stdin"))  # beside which nothing is written, though it leads to a file
        os.read(0, len("abc\n"))
        for _ in range(2):
            files.predict_file(settings(), Path("run"), "-", str(tmp_path / "out.txt"))
            assert (tmp_path / "out.txt").read_text().startswith("0:\n1:ä")


def test_standard_input_may_be_a_socket(echo, tmp_path):
    own, other = socket.socketpair()
    with own, standard_input(own.fileno()):
        other.sendall(b"abc\n")
        other.close()
        assert predict("-", tmp_path / "out.txt") == "0:abc\n"


def test_arriving_lines_come_in_windows_and_errors_after_them():
    waiting = queue.Queue()

    def lines():
        while (line := waiting.get()) != "end":
            yield line
        raise UserError("broken")

    found = files.arriving(lines())
    waiting.put((0, "a"))
    assert next(found) == [(0, "a")]
    for line in ((1, "b"), (2, "c"), "end"):
        waiting.put(line)
    rest = []
    with pytest.raises(UserError, match="broken"):
        rest.extend(itertools.chain.from_iterable(found))
    assert rest in ([], [(1, "b"), (2, "c")])


def test_windows_are_bounded_in_characters_too(monkeypatch):
    monkeypatch.setattr(files, "CHARACTERS", 10)
    lines = [(number, "x" * size) for number, size in enumerate((6, 6, 6, 99, 1, 1))]
    assert [len(window) for window in files.windows(iter(lines), 9)] == [2, 2, 2]


def at(monkeypatch, seconds):
    monkeypatch.setattr(files.time, "monotonic", lambda: float(seconds))


def test_progress_tells_the_rate_and_the_time_left_without_compiling(tmp_path, monkeypatch):
    source = tmp_path / "in.txt"
    source.write_text("abc\n" * 100)
    at(monkeypatch, 0)
    told = files.FileProgress(source, lambda: 20.0)
    at(monkeypatch, 3)
    assert told.line() == "no line answered yet, 3 s"
    for _ in range(10):
        told.read(4, skipped=False)
    told.answered(5)  # of the ten that were read
    at(monkeypatch, 30)
    assert told.line() == "5 lines, 0.5 a second after 20 s of compiling, 3:10 left"  # two seconds a line, and 95 lines
    told.written(10)
    at(monkeypatch, 40)
    assert told.line() == "10 lines, 0.5 a second after 20 s of compiling, 3:00 left"


def test_lines_that_were_there_already_say_nothing_of_the_time_left(tmp_path, monkeypatch):
    source = tmp_path / "in.txt"
    source.write_text("abc\n" * 100)
    at(monkeypatch, 0)
    told = files.FileProgress(source, lambda: 0.0)
    for number in range(60):
        told.read(4, skipped=number < 50)
    told.written(10)
    at(monkeypatch, 10)
    assert told.line() == "10 lines, 1.0 a second, 0:40 left"


def test_silence_is_broken_while_lines_are_answered(echo, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", (0.125, 0.125))  # a line for each of three batches, and none after them
    answer = echo.generate
    monkeypatch.setattr(echo, "generate", lambda requests: [time.sleep(0.15), answer(requests)][1])
    predict(source, tmp_path / "out.txt")
    opening = "opening the trained run"  # says so too, where that takes longer than the silence
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(opening)]
    assert said[0] == "no line answered yet, 0 s"
    assert re.fullmatch(r"5 lines, [\d.]+ a second, 0:00 left", said[-2])


def test_a_terminal_sees_a_bar_as_wide_as_it_is_and_no_colours(echo, source, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    answer = echo.generate
    monkeypatch.setattr(echo, "generate", lambda requests: [time.sleep(0.1), answer(requests)][1])
    with terminal.standard_error(monkeypatch, columns=90) as said:
        predict(source, tmp_path / "out.txt")
    bars = re.findall(r"( *\d+)%\|([^|]*)\| ([^\r]*)\r", said[0])
    shares = [int(share) for share, _, _ in bars]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert any(30 < share < 50 for share in shares)  # of the characters: most are in the last lines
    assert any("█" in drawn for _, drawn, _ in bars)
    assert max(len(f"{share}%|{drawn}| {line}") for share, drawn, line in bars) == 89
    assert any(re.match(r"5 lines, [\d.]+ a second, 0:00 left", line) for _, _, line in bars)
    assert terminal.sequences(said[0]) <= terminal.MOVES


def test_of_a_pipe_or_a_compressed_file_nobody_knows_the_share(echo, monkeypatch, tmp_path):
    (tmp_path / "in.xz").write_bytes(b"a")
    assert all(files.FileProgress(path, lambda: 0.0).share() is None for path in (tmp_path, tmp_path / "in.xz"))


def test_windows_grow_to_what_takes_some_seconds(monkeypatch):
    clock = itertools.count(0.0, 2.0)  # a window takes two seconds
    monkeypatch.setattr(files.time, "monotonic", clock.__next__)
    monkeypatch.setattr(files, "SECONDS", 20.0)
    sizes = [len(window) for window in files.windows(((i, "") for i in range(9_999)), 2)]
    assert sizes == [2, 16, 128, 1_024, 4_096, 4_096, 637]  # eight times as many at most, WINDOW at most


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_an_output_that_is_the_input_is_refused(echo, source, tmp_path, link):
    target = source
    if link:
        target = tmp_path / "link.txt"
        link(source, target)
    before = source.read_bytes()
    said = "is the input itself and would overwrite it: name another file"
    with pytest.raises(UserError, match=said):
        predict(source, target)
    with pytest.raises(UserError, match=said):  # a page may have any name
        explorer.explore(settings(), Path("run"), str(source), str(target), "html")
    assert source.read_bytes() == before


def test_an_input_that_is_the_record_of_its_output_is_refused(echo, source, tmp_path):
    record = source.rename(tmp_path / "out.txt.settings.json")
    before = record.read_bytes()
    with pytest.raises(UserError, match=r"out\.txt, which also writes .*\.settings\.json, is the input itself"):
        predict(record, tmp_path / "out.txt")
    assert record.read_bytes() == before
    assert not (tmp_path / "out.txt").exists()


MISNAMED = {
    "an input that is not there": ("nowhere.txt", "out.txt", r"--input=.*nowhere\.txt does not exist: name a file"),
    "an input that is a folder": (".", "out.txt", "--input=.* is a folder: name a file"),
    "an output that is a folder": ("in.txt", ".", "--output=.*: is a folder; name a file in a folder"),
    "an output in no folder": ("in.txt", "nowhere/out.txt", r"--output=.*: there is no folder .*nowhere; name a file"),
    "an output in a file": ("in.txt", "in.txt/out.txt", r"--output=.*: there is no folder .*in\.txt; name a file"),
    "an output in a folder that only reads": ("in.txt", "locked/out.txt", "locked cannot be written; name a folder"),
    "an output that only reads": ("in.txt", "locked.txt", r"--output=.*locked\.txt: cannot be written; name a file"),
}


@pytest.mark.parametrize("command", [files.predict_file, files.score_file])
@pytest.mark.parametrize("case", MISNAMED)
def test_files_that_cannot_be_are_refused_before_the_run_is_loaded(source, tmp_path, monkeypatch, case, command):
    monkeypatch.setattr(files, "load", lambda *_: pytest.fail("loaded"))
    may = os.access  # of which root is never told no
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and may(path, mode))
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked.txt").touch()
    given, output, said = MISNAMED[case]
    with pytest.raises(UserError, match=said):
        command(settings(), Path("run"), str(tmp_path / given), str(tmp_path / output))


def test_a_command_of_a_saved_config_is_refused_before_the_run_is_loaded(source, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "load", lambda *_: pytest.fail("loaded"))
    ranked = dataclasses.replace(settings(rerank="best"), evaluate=EvaluateConfig(command="best.py"))
    with pytest.raises(UserError, match=r"evaluate\.command='best\.py' comes from a saved config"):
        files.predict_file(ranked, Path("run"), str(source), str(tmp_path / "out.txt"))


def test_an_output_is_continued_under_the_settings_it_was_begun_with_alone(echo, source, tmp_path):
    target = tmp_path / "out.txt"
    assert predict(source, target, beam_size=1) == ANSWERS
    target.write_text("0:abc\n")
    with pytest.raises(
        UserError, match=r"out\.txt was started with decode\.beam_size=1, this command has 5: set it back"
    ):
        predict(source, target, resume=True, beam_size=5)
    echo.steps = (50,)
    with pytest.raises(UserError, match=r"was started with steps=\[40\], this command has \[50\]"):
        predict(source, target, resume=True, beam_size=1)
    echo.steps, echo.parameters = (40,), "those of another run"
    with pytest.raises(
        UserError, match="was started with model='those of one run', this command has 'those of another"
    ):
        predict(source, target, resume=True, beam_size=1)
    echo.parameters = Echo.parameters
    (tmp_path / "other.txt").write_text("a\n" * 7)
    with pytest.raises(UserError, match="was started with input='"):
        predict(tmp_path / "other.txt", target, resume=True, beam_size=1)
    assert target.read_text() == "0:abc\n"
    assert predict(source, target, resume=True, beam_size=1) == ANSWERS
    (tmp_path / "out.txt.settings.json").unlink()
    with pytest.raises(
        UserError, match=r"the settings of .*out\.txt cannot be read from .*settings\.json \(.*\); leave out --resume"
    ):
        predict(source, target, resume=True, beam_size=1)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("data", "max_source_length", 9, "data.max_source_length=256, this command has 9"),
        ("data", "max_target_length", 9, "data.max_target_length=256, this command has 9"),
        ("evaluate", "tokenize", "char", "decode.tokenize='13a', this command has 'char'"),
    ],
)
def test_lengths_and_the_words_of_bleu_are_settings_of_an_output(echo, source, tmp_path, section, key, value, said):
    begun, target = settings(search="mbr", samples=2, mbr_utility="bleu"), tmp_path / "out.txt"
    changed = dataclasses.replace(begun, **{section: dataclasses.replace(getattr(begun, section), **{key: value})})
    files.predict_file(begun, Path("run"), str(source), str(target))
    with pytest.raises(UserError, match=re.escape(said)):
        files.predict_file(changed, Path("run"), str(source), str(target), True)
    record = tmp_path / "out.txt.settings.json"  # as a version wrote it that did not know the key
    known = {name: old for name, old in json.loads(record.read_text()).items() if name != said.partition("=")[0]}
    record.write_text(json.dumps(known))
    files.predict_file(changed, Path("run"), str(source), str(target), True)
    assert target.read_bytes().decode() == ANSWERS


@pytest.mark.parametrize("emptied", [False, True])
def test_an_output_that_resume_begins_has_its_own_settings(echo, source, tmp_path, emptied):
    target = tmp_path / "out.txt"
    predict(source, target, beam_size=5)
    if emptied:
        target.write_text("")
    else:
        target.unlink()
    assert predict(source, target, resume=True, beam_size=1) == ANSWERS
    with pytest.raises(UserError, match=r"was started with decode\.beam_size=1, this command has 5"):
        predict(source, target, resume=True, beam_size=5)


def test_line_breaks_that_a_line_cannot_hold_are_counted(echo, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(echo, "generate", lambda requests: [[Output("a\nb")] for _ in requests])
    told = "7 outputs with line breaks written as spaces, which decode.outputs=jsonl keeps"
    assert predict(source, tmp_path / "out.txt").splitlines() == ["a b"] * 7
    assert told in capsys.readouterr().err
    echo.counts.clear()
    assert r'"a\nb"' in predict(source, tmp_path / "out.jsonl", outputs="jsonl")
    assert "line breaks" not in capsys.readouterr().err


def test_what_an_empty_line_ends_is_an_answer_of_conll(tmp_path):
    answers, settings = tmp_path / "answers.conll", {"mode": "predict", "decode.outputs": "conll"}
    whole = "Ada\tB-person\nsleeps\tO\n\n\n"  # and the answer to an empty line
    with open_output(answers, False, settings) as file:
        file.write(whole + "in\tO\nLon")
    assert lines_to_keep(answers, settings) == 2
    assert answers.read_text() == whole


def test_vectors_of_a_tagger_that_writes_conll_are_a_line_each(tmp_path):
    vectors, settings = tmp_path / "vectors.jsonl", {"mode": "embed", "decode.outputs": "conll"}
    with open_output(vectors, False, settings) as file:
        file.write('{"vector": [1.0]}\n' * 2)
    assert lines_to_keep(vectors, settings) == 2


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000], ids=["empty", "cut", "nested too deep"])
def test_a_record_that_cannot_be_read_is_refused(tmp_path, content):
    answers = tmp_path / "answers.txt"
    with open_output(answers, False, {"mode": "predict"}) as file:
        file.write("one\n")
    assert lines_to_keep(answers, {"mode": "predict"}) == 1
    (tmp_path / "answers.txt.settings.json").write_text(content)
    with pytest.raises(UserError, match=r"the settings of .* cannot be read"):
        lines_to_keep(answers, {"mode": "predict"})


@pytest.mark.slow
def test_activations_of_a_file_are_those_of_the_library(tmp_path):
    run = untrained.write_run(tmp_path / "run", untrained.MODEL)
    asked, written = tmp_path / "asked.txt", tmp_path / "inside.safetensors"
    asked.write_text("the cat\tthat hat\n\nthe mat\n")
    settings = untrained.settings_of(run)
    files.write_activations(settings, run, str(asked), str(written), ["encoder/block/output", "logits"])
    expected = load(run).activations([("the cat", "that hat"), ("the mat", None)], ["encoder/block/output", "logits"])
    with safe_open(written, "numpy") as found:
        for line, each in zip((1, 3), expected, strict=True):
            assert json.loads(found.metadata()[f"{line}/target"]) == list(each.target)
            for name, array in each.arrays.items():
                np.testing.assert_array_equal(found.get_tensor(f"{line}/{name}"), array)
        assert len(found.keys()) == 4
    with pytest.raises(UserError, match="--activations are written to a file"):
        files.write_activations(settings, run, str(asked), "-", ["logits"])
