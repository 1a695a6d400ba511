"""Files in, files out, window by window: as many lines as there are, in the memory of one window.

A window is read, answered, written and flushed before the next one is read. The first window of a file is one batch,
so that something is seen soon, and all others are WINDOW lines. What comes through a pipe or from a keyboard is
answered as it arrives: its windows are what is there once one line is.
"""

import contextlib
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from jformer import hosts
from jformer.config import Config
from jformer.data.text import digest, read_lines
from jformer.errors import UserError
from jformer.formats import Question, read_question, read_request, write_outputs, write_scored
from jformer.predict import Predictor, load
from jformer.requests import Request

WINDOW = 4_096  # lines
CHARACTERS = 1 << 22  # of a window: the line that goes over it is the last one
SILENCE = (0.5, 30.0)  # seconds between two words on how far it is: on a terminal, elsewhere

Line = tuple[int, str]
"""Its number, from 0, and its text."""


def predict_file(settings: Config, workdir: Path, source: str, target: str, resume: bool = False) -> None:
    """Answer a file or standard input ('-') into another or standard output: a line for a line, in order.

    With `resume` a half-written output file is continued: its whole lines stay, and as many lines of the input are
    skipped. Without it the file is written anew. Raises UserError with file:line for a line that asks nothing.
    """
    options = settings.decode
    if options.outputs == "text" and options.returned > 1:
        raise UserError(f"decode.outputs='text' has no place for {options.returned} outputs a line: use tsv or jsonl")
    predictor = _open_run(settings, workdir, source)

    def read(line: Line, counts: Counter[str]) -> Request:
        return read_request(*line, options.inputs, counts)

    def answer(requests: list[Request]) -> list[str]:
        answers = predictor.generate(requests)
        return [write_outputs(outputs, options.outputs, options.scores, options.alignments) for outputs in answers]

    answer_lines(read, answer, source, target, resume, options.batch_size, predictor.counts)


def score_file(settings: Config, workdir: Path, source: str, target: str, resume: bool = False) -> None:
    """Score the targets in a file or standard input ('-'), and write as `predict_file` does."""
    options = settings.decode
    predictor = _open_run(settings, workdir, source)

    def read(line: Line, counts: Counter[str]) -> Question:
        question = read_question(line[1], options.inputs, predictor.task.answer == "continuation", counts)
        if question.ranked and options.outputs == "text":
            raise ValueError("'targets' are ranked, which decode.outputs='text' has no place for: use tsv or jsonl")
        return question

    def answer(questions: list[Question]) -> list[str]:
        scored = iter(predictor.score([(one.source, target) for one in questions for target in one.targets]))
        return [
            write_scored(one, [next(scored) for _ in one.targets], options.outputs, options.scores) for one in questions
        ]

    answer_lines(read, answer, source, target, resume, options.batch_size, predictor.counts)


def _open_run(settings: Config, workdir: Path, source: str) -> Predictor:
    """Return the predictor of a run. Raise UserError, in all processes, if they would not answer the same lines.

    Those are the lines of a plain file: what is there of a pipe is another thing for each process at each moment.
    """
    if not hosts.alone():
        if not Path(source).is_file():
            raise UserError(
                f"--input={source}: several processes answer a plain file, no pipe: name one that all of them see"
            )
        hosts.same({"the text of --input": digest(Path(source))[0]})
    hosts.reach("opening the trained run")
    return load(workdir, settings)


def answer_lines(
    read: Callable[[Line, Counter[str]], Any],
    answer: Callable[[list[Any]], list[str]],
    source: str,
    target: str,
    resume: bool,
    first: int,
    counted: Mapping[str, int],
) -> None:
    """Read a request from every line of `source` and write its answer as a line of `target`.

    `first` is the number of lines in the first window, and `counted` is reported in the end, with what reading altered.
    """
    if resume and target == "-":
        raise UserError("--resume goes on with a file: name it by --output")
    path, counts = Path("/dev/stdin" if source == "-" else source), Counter[str]()
    done = hosts.agree(whole_lines(Path(target)) if resume and hosts.first() else 0, max)
    if not hosts.first():  # all processes answer every line together, and one of them writes
        target = os.devnull
    progress = Progress(path)
    lines = numbered_lines(path, done, counts, progress)

    def answers() -> Iterator[list[str]]:
        for window in windows(lines, first) if path.is_file() else arriving(lines):
            size = sum(len(text) for _, text in window).bit_length()
            hosts.reach(f"lines {window[0][0] + 1} to {window[-1][0] + 1}", like=(len(window), size))
            asked = []
            for line in window:
                try:
                    asked.append(read(line, counts))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}:{line[0] + 1}: {error}") from error
            yield answer(asked)

    found = answers()
    begun = next(found, [])  # before the file is opened: a mistake in the first lines leaves it as it was
    with contextlib.nullcontext(sys.stdout) if target == "-" else _open(Path(target), "a" if resume else "w") as out:
        for texts in chain([begun], found):
            out.writelines(text + "\n" for text in texts)
            out.flush()
            progress.advance(len(texts))
    progress.end({**counts, **counted, "lines kept": done})


def numbered_lines(path: Path, done: int, counts: Counter[str], progress: "Progress") -> Iterator[Line]:
    """Yield the lines after the first `done` ones. Raise UserError if there are not even so many."""
    number = -1
    for number, text in enumerate(read_lines(path, counts)):
        progress.see(len(text.encode()) + 1, skipped=number < done)
        if number >= done:
            yield number, text
    if number + 1 < done:
        raise UserError(f"--resume: the output has {done} lines and {path} only {number + 1}: it answers another file")


def windows(lines: Iterator[Line], first: int) -> Iterator[list[Line]]:
    """Yield the lines in lists: the first one short, none longer than WINDOW or much larger than CHARACTERS."""
    most = first
    while window := list(_up_to(lines, most)):
        yield window
        most = WINDOW


def _up_to(lines: Iterator[Line], most: int) -> Iterator[Line]:
    characters = 0
    for line in islice(lines, most):
        yield line
        characters += len(line[1])
        if characters > CHARACTERS:
            return


def arriving(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Yield the lines in lists as they arrive: once there is one, all that are there. A thread reads ahead."""
    arrived: queue.Queue[Line | Exception] = queue.Queue(WINDOW)

    def read() -> None:
        try:
            for line in lines:
                arrived.put(line)
            arrived.put(StopIteration())
        except Exception as error:
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        window: list[Line] = []
        while not window or (len(window) < WINDOW and not arrived.empty()):
            item = arrived.get()
            if isinstance(item, Exception):
                if window:
                    yield window
                if isinstance(item, StopIteration):
                    return
                raise item
            window.append(item)
        yield window


def whole_lines(path: Path) -> int:
    """Count the lines of a half-written file, and cut off what follows the last line feed."""
    if not path.is_file():
        return 0
    count = end = 0
    with path.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        file.truncate(end)
    return count


class Progress:
    """How far it is, told on standard error."""

    def __init__(self, path: Path) -> None:
        """Begin; how much there is to do is known of plain files only."""
        self.size = path.stat().st_size if path.is_file() and path.suffix != ".gz" else 0
        self.lines = self.bytes = self.skipped = 0
        self.began = self.told = time.monotonic()

    def see(self, size: int, skipped: bool) -> None:
        """Note that so many bytes were read."""
        self.bytes += size
        self.skipped += size if skipped else 0

    def advance(self, lines: int) -> None:
        """Note that so many lines were written, and tell, unless that was just done."""
        self.lines += lines
        now = time.monotonic()
        if now - self.told < SILENCE[0 if sys.stderr.isatty() else 1]:
            return
        self.told, left = now, ""
        if self.size and self.bytes > self.skipped:
            seconds = (now - self.began) * max(0, self.size - self.bytes) / (self.bytes - self.skipped)
            left = f", {int(seconds) // 60}:{int(seconds) % 60:02} left"
        _tell(self._done() + left, "" if sys.stderr.isatty() else "\n")

    def end(self, counts: Mapping[str, int]) -> None:
        """Tell what was done, and all that was counted."""
        _tell(", ".join([self._done(), *(f"{count:,} {what}" for what, count in counts.items() if count)]), "\n")

    def _done(self) -> str:
        return f"{self.lines:,} lines, {self.lines / max(time.monotonic() - self.began, 1e-3):,.1f} a second"


def _tell(text: str, end: str) -> None:
    """Write over the line before, on a terminal."""
    if hosts.first():
        print(("\r\033[K" if sys.stderr.isatty() else "") + text, end=end, file=sys.stderr, flush=True)


def _open(path: Path, mode: str) -> IO[str]:
    try:
        return path.open(mode, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror}; name a file in a folder that can be written") from error
