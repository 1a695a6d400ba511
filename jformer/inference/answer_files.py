"""Files in, files out, window by window: as many lines as there are, in the memory of one window.

A window is read, answered, written and flushed before the next one is read. The first window of a file is one batch,
so that something is seen soon; the others are as many lines as take SECONDS. What comes through a pipe or from a
keyboard is answered as it arrives: its windows are what is there once one line is.
"""

import contextlib
import dataclasses
import hashlib
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Generic, NamedTuple, TypeVar

from jformer.config.options import Config
from jformer.data.file_digests import digest
from jformer.data.progress import counted, show_progress
from jformer.data.text import INVALID_REPLACED, read_lines
from jformer.errors import UserError
from jformer.inference.answers import Request
from jformer.inference.file_progress import Progress
from jformer.inference.formats import Question, read_asked, read_question, read_request, write_outputs, write_scored
from jformer.inference.output_file import check_files, input_path, lines_to_keep, open_output, whole_lines_only
from jformer.inference.predict import Predictor, load
from jformer.parallel import processes
from jformer.tasks.task import SPAN

WINDOW = 4_096  # lines
SECONDS = 20.0  # that a window takes, about: a killed command loses no more work
CHARACTERS = 1 << 22  # of a window: the line that goes over it is the last one
FLATTENED = "outputs with line breaks written as spaces, which decode.outputs=jsonl keeps"
HEAD = 1 << 16  # bytes of an input that tell it from another one

T = TypeVar("T")
Asked = TypeVar("Asked")  # what is read of a line: a request to answer, or a question to score
Line = tuple[int, str]
"""Its number, from 0, and its text."""


class Job(NamedTuple, Generic[Asked]):
    """What is done with every line of an input."""

    source: str  # a path, or '-' for standard input
    target: str  # a path, or '-' for standard output
    resume: bool
    read: Callable[[Line, Counter[str]], Asked]  # a line → its request
    answer: Callable[[list[Asked]], list[str]]  # several requests → their lines in the output


def predict_file(settings: Config, workdir: Path, source: str, target: str, resume: bool = False) -> None:
    """Answer a file or standard input ('-') into another or standard output: a line for a line, in order.

    Args:
        settings: what takes the place of the run's own config, to decode otherwise.
        workdir: of the run.
        source: the file of inputs; "-" = standard input.
        target: the file of outputs; "-" = standard output.
        resume: a half-written output file is continued: its whole lines stay, and as many lines of the input are
            skipped. Without it the file is overwritten.

    Raises:
        UserError: with file:line for a line that cannot be read, and for an output that is the input or was begun
            under other settings.
    """
    options = settings.decode
    if options.outputs in ("text", "conll") and options.returned > 1:
        raise UserError(
            f"decode.outputs={options.outputs!r} has no place for {options.returned} outputs a line: use tsv or jsonl"
        )
    predictor = _open_run(settings, workdir, source, target, resume)

    def read(line: Line, counts: Counter[str]) -> Request:
        if predictor.task.answer == SPAN:
            return read_asked(*line, options.inputs, counts)
        return read_request(*line, options.inputs, counts, predictor.task.answer == "continuation")

    def answer(requests: list[Request]) -> list[str]:
        answers = predictor.generate(requests)
        if options.outputs != "jsonl":
            predictor.counts[FLATTENED] += sum("\n" in output.text for outputs in answers for output in outputs)
        return [write_outputs(outputs, options.outputs, options.scores, options.alignments) for outputs in answers]

    answer_lines(Job(source=source, target=target, resume=resume, read=read, answer=answer), predictor, "predict")


def score_file(settings: Config, workdir: Path, source: str, target: str, resume: bool = False) -> None:
    """Score the targets in a file or standard input, and write a line for a line, in order.

    Args:
        settings, workdir, target, resume: those of `predict_file`, which also says what is raised.
        source: the file of questions, as `read_question` reads them; "-" = standard input.
    """
    options = settings.decode
    predictor = _open_run(settings, workdir, source, target, resume)

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

    answer_lines(Job(source=source, target=target, resume=resume, read=read, answer=answer), predictor, "score")


def answer_lines(job: Job[Asked], predictor: Predictor, mode: str) -> None:
    """Do a job, and tell how far it is and what was altered on the way."""
    path, counts = input_path(job.source), Counter[str]()
    settings = settings_of(predictor, mode, path)
    done = _lines_to_keep(job, settings)
    progress = Progress(path, lambda: predictor.compile_seconds)
    predictor.on_answered = progress.answered
    lines = numbered_lines(path, done, counts, progress)
    size = predictor.config.decode.batch_size
    answers = (
        _answer(window, path, job, counts, progress)
        for window in (windows(lines, size) if path.is_file() else arriving(lines))
    )
    with progress.told():
        first = next(answers, [])  # before the file is opened: a mistake in the first lines leaves it as it was
        with whole_lines_only(Path(job.target)), _opened(job, settings) as out:
            for texts in chain([first], answers):
                out.writelines(text + "\n" for text in texts)
                out.flush()
                progress.written(len(texts))
    progress.end({**counts, **predictor.counts, "lines kept": done})


def _lines_to_keep(job: Job[Asked], settings: dict[str, object]) -> int:
    """Return how many lines of the output are there; it is the main process that writes them, and that counts them."""
    return _found_by_main(lambda: lines_to_keep(Path(job.target), settings) if job.resume else 0)


def _found_by_main(find: Callable[[], T]) -> T:
    """Return what the main process finds, as plain JSON, or raise its UserError, in all processes."""
    found: list[T] = []
    refusal = ""
    if processes.is_main_process():
        try:
            found = [find()]
        except UserError as error:
            refusal = str(error)
    agreed, refused = processes.agree((found, refusal), lambda values: values[0])
    if refused:
        raise UserError(refused)
    return agreed[0]


def _opened(job: Job[Asked], settings: dict[str, object]) -> contextlib.AbstractContextManager[IO[str]]:
    """Open the output; all processes answer every line together, and one of them writes."""
    if not processes.is_main_process():
        return Path(os.devnull).open("w")
    return (
        contextlib.nullcontext(sys.stdout) if job.target == "-" else open_output(Path(job.target), job.resume, settings)
    )


def settings_of(predictor: Predictor, mode: str, path: Path) -> dict[str, object]:
    """Return what the lines of an output depend on, as plain JSON; the sizes of batches are not among it."""
    decode = dataclasses.asdict(predictor.config.decode)
    del decode["batch_size"]
    with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
        head = hashlib.sha256(file.read(HEAD)).hexdigest()[:16] if file else ""
    return {
        "mode": mode,
        "input": head,
        "weights": predictor.config.evaluate.weights,
        "steps": list(predictor.steps),
        "model": predictor.fingerprint(),
        **{f"decode.{key}": value for key, value in decode.items()},
    }


def _open_run(settings: Config, workdir: Path, source: str, target: str, resume: bool) -> Predictor:
    """Return the predictor of a run; what is wrong with the files is found before it is loaded.

    Raises UserError, in all processes, for such a file, and if they would not answer the same lines. Those are the
    lines of a plain file: what is there of a pipe is another thing for each process at each moment.
    """
    if target == "-" and resume:
        raise UserError("--resume goes on with a file: name it by --output")
    _found_by_main(lambda: check_files(input_path(source), None if target == "-" else Path(target)))
    if processes.process_count() > 1:
        if not Path(source).is_file():
            raise UserError(
                f"--input={source}: several processes answer a plain file, no pipe: name one that all of them see"
            )
        processes.check_same({"the text of --input": digest(Path(source))[0]})
    processes.enter_phase("opening the trained run")
    with show_progress("opening the trained run", quiet=not processes.is_main_process()):
        return load(workdir, settings)


def _answer(window: list[Line], path: Path, job: Job[Asked], counts: Counter[str], progress: Progress) -> list[str]:
    """Return the answers to a window; raise UserError naming the line that cannot be read."""
    size = sum(len(text) for _, text in window).bit_length()
    processes.enter_phase(f"lines {window[0][0] + 1} to {window[-1][0] + 1}", kind=(len(window), size))
    requests = []
    for line in window:
        altered: Counter[str] = Counter()
        try:
            requests.append(job.read(line, altered))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{line[0] + 1}: {error}") from error
        if altered[INVALID_REPLACED]:
            progress.warn(f"{path}:{line[0] + 1}: NUL or half a surrogate pair in a text, replaced by U+FFFD")
        counts.update(altered)
    return job.answer(requests)


def numbered_lines(path: Path, done: int, counts: Counter[str], progress: Progress) -> Iterator[Line]:
    """Yield the lines after the first `done` ones, whatever is in them: characters that are no text are replaced.

    Raises UserError if there are not even so many lines.
    """

    def warn(line: int, reason: str) -> None:
        if line > done:
            progress.warn(f"{path}:{line}: {reason}, replaced by U+FFFD")

    number = -1
    for number, text in enumerate(read_lines(path, counts, invalid="replace", warn=warn)):
        progress.read(len(text.encode()) + 1, skipped=number < done)
        if number >= done:
            yield number, text
    if number + 1 < done:
        raise UserError(
            f"--resume: the output has {counted(done, 'lines')} and {path} only {number + 1}: it answers another file"
        )


def windows(lines: Iterator[Line], first: int) -> Iterator[list[Line]]:
    """Yield the lines in lists: `first` of them, then as many as take SECONDS going by the time the last ones took.

    None is longer than WINDOW, eight times the one before it, or much larger than CHARACTERS.
    """
    size = first
    while window := list(_up_to(lines, size)):
        began = time.monotonic()
        yield window
        rate = len(window) / max(time.monotonic() - began, 1e-6)
        own = max(first, min(WINDOW, 8 * size, int(rate * SECONDS)))
        size = processes.agree(own, min)  # all processes answer the same windows


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
