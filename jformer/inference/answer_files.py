"""Answer or score a file line by line, in windows of bounded memory.

A window is read, answered, written and flushed before the next one. The first window of a file is one batch, so that
output appears early; the others take about SECONDS each. For a pipe or a terminal, a window is all lines available.
"""

import contextlib
import dataclasses
import hashlib
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
from etils import epath

from jformer.config.options import Config, score_commands
from jformer.data.file_digests import digest
from jformer.data.progress import counted, show, show_progress, showing_line
from jformer.data.sources.split import Pair
from jformer.data.text import INVALID_REPLACED, PACKED, read_lines
from jformer.errors import UserError
from jformer.inference.answers import Request
from jformer.inference.formats import Question, read_asked, read_question, read_request, write_outputs, write_scored
from jformer.inference.output_file import check_files, input_path, lines_to_keep, open_output, whole_lines_only
from jformer.inference.predict import Predictor, load, stacked
from jformer.parallel import processes
from jformer.storage import replacing, unwritten, writing
from jformer.tasks.metrics import tokenization
from jformer.tasks.scoring_command import check_commands
from jformer.tasks.task import VECTOR

WINDOW = 4_096  # lines
SECONDS = 20.0  # target duration of a window: a killed command loses at most about this much work
CHARACTERS = 1 << 22  # of a window; it ends with the line that exceeds this
FLATTENED = "outputs with line breaks written as spaces, which decode.outputs=jsonl keeps"
HEAD = 1 << 16  # bytes of an input that identify it
WARNINGS = 10
ARRAYS = ("npy", "safetensors")

Asked = TypeVar("Asked")  # a parsed line: a request to answer, or a question to score
Line = tuple[int, str]
"""The number of a line, from 0, and its text."""


class Job(NamedTuple, Generic[Asked]):
    """How to read and answer the lines of an input."""

    source: str  # a path, or '-' for standard input
    target: str  # a path, or '-' for standard output
    resume: bool
    read: Callable[[Line, Counter[str]], Asked]  # a line → its request
    answer: Callable[[list[Asked]], list[Any]]  # several requests → their lines in the output
    save: Callable[[list[Any]], None] | None = None  # all answers → the output, instead of a line for each


class FileProgress:
    """Counts lines read, answered and written, and reports them on standard error."""

    def __init__(self, path: Path, compiling: Callable[[], float]) -> None:
        """Start; the total is known for plain files only.

        `compiling` returns the seconds spent on compiling so far, which rates and estimates exclude.
        """
        self._size = path.stat().st_size if path.is_file() and path.suffix not in PACKED else 0
        self._compiling = compiling
        self._written = self._answered = self._reading = 0  # lines; the last two since the last write
        self._read = self._skipped = self._finished = 0  # bytes: read, skipped, written
        self._warned = 0
        self._began = time.monotonic()

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Report the progress periodically inside the context, from the main process only."""
        return showing_line(self.line, self.share) if processes.is_main_process() else contextlib.nullcontext()

    def read(self, size: int, skipped: bool) -> None:
        """Count a line of `size` bytes as read."""
        self._read += size
        if skipped:
            self._skipped = self._finished = self._read
        else:
            self._reading += 1

    def answered(self, count: int) -> None:
        """Count inputs as answered, though not yet written."""
        self._answered += count

    def written(self, lines: int) -> None:
        """Count lines as written: all those read so far."""
        self._written, self._answered, self._reading = self._written + lines, 0, 0
        self._finished = self._read

    def warn(self, text: str) -> None:
        """Report an altered line, up to WARNINGS of them; all are counted."""
        self._warned += 1
        if self._warned <= WARNINGS:
            _report(text)

    def end(self, counts: Mapping[str, int]) -> None:
        """Report the totals and all counts."""
        _report(", ".join([self._done(), *(counted(count, what) for what, count in counts.items() if count)]))

    def line(self) -> str:
        """Return the progress, and the time left at the current rate."""
        seconds = time.monotonic() - self._began
        if not self._written + self._answered:
            return f"no line answered yet, {seconds:.0f} s"
        at = self._at()
        if not self._size or at <= self._skipped:
            return self._done()
        left = max(0, self._size - at) / (at - self._skipped) * max(0.0, seconds - self._compiling())
        return f"{self._done()}, {int(left) // 60}:{int(left) % 60:02} left"

    def share(self) -> float | None:
        """Return the share of the input that is answered; None if its length is unknown."""
        return self._at() / self._size if self._size else None

    def _at(self) -> float:
        """Return the byte up to which the input is answered, estimated within a window."""
        share = min(1.0, self._answered / max(1, self._reading))
        return self._finished + share * (self._read - self._finished)

    def _done(self) -> str:
        lines, compiling = self._written + self._answered, self._compiling()
        rate = lines / max(time.monotonic() - self._began - compiling, 1e-3)
        aside = f" after {compiling:.0f} s of compiling" if compiling >= 1 else ""
        return f"{counted(lines, 'lines')}, {rate:,.1f} a second{aside}"


def _report(text: str) -> None:
    if processes.is_main_process():
        show(text, "\n")


def predict_file(settings: Config, workdir: Path, source: str, target: str, resume: bool = False) -> None:
    """Answer a file or standard input ('-') line by line into another or standard output, in order.

    Args:
        settings: replaces the run's own config, to change decoding.
        workdir: of the run.
        source: the file of inputs; "-" = standard input.
        target: the file of outputs; "-" = standard output.
        resume: continue a half-written output file: keep its whole lines, and skip that many lines of the input.
            Otherwise the file is overwritten.

    Raises:
        UserError: with file:line for a line that cannot be read; for an output that is the input, or that was started
            with other settings.
    """
    options = settings.decode
    if options.outputs in ("text", "conll") and options.returned > 1:
        raise UserError(
            f"decode.outputs={options.outputs!r} cannot hold {options.returned} outputs per line: use tsv or jsonl"
        )
    if options.ranked_by:
        processes.from_main_process(lambda: check_commands(settings))
    predictor = _open_run(settings, workdir, source, target, resume)
    if predictor.task.answer == VECTOR:
        raise UserError(f"task={settings.task!r} answers a text with a vector: use --mode=embed")

    def read(line: Line, counts: Counter[str]) -> Request:
        if predictor.task.answer == "span":
            return read_asked(*line, options.inputs, counts)
        request = read_request(*line, options.inputs, counts, predictor.task.answer == "continuation")
        if predictor.task.answer == "text":
            predictor.inputs.towards(request.languages)  # raises for an unknown language
        return request

    def answer(requests: list[Request]) -> list[str]:
        answers = predictor.generate(requests)
        if options.outputs != "jsonl":
            predictor.counts[FLATTENED] += sum("\n" in output.text for outputs in answers for output in outputs)
        return [write_outputs(outputs, options.outputs, options.scores, options.alignments) for outputs in answers]

    answer_lines(Job(source=source, target=target, resume=resume, read=read, answer=answer), predictor, "predict")


def write_activations(settings: Config, workdir: Path, source: str, target: str, names: Sequence[str]) -> None:
    """Write activations for the lines of a file, read by `Predictor.pair_of`, to a safetensors file.

    The array of NAME for the first line is `1/NAME`. The file's metadata has `1/source` and `1/target`, the tokens as
    a JSON list. Blank lines are skipped, and counted.

    Args:
        settings, workdir, source, target: as for `predict_file`; the target must be a file.
        names: as for `Predictor.activations`, which lists the errors, too.
    """
    if target == "-":
        raise UserError("--activations are written to a file: name it by --output")
    if processes.process_count() > 1:
        raise UserError("--activations are written by one process: start one")
    if settings.decode.inputs != "text":
        raise UserError("--activations reads lines of text: set --config.decode.inputs=text")
    save_arrays = _safetensors_writer("--activations")
    predictor = _open_run(settings, workdir, source, target, resume=False, whole=True)
    read = enumerate(read_lines(input_path(source), Counter(), invalid="replace"), start=1)
    lines = {number: predictor.pair_of(line) for number, line in read if line.strip()}
    arrays: dict[str, np.ndarray] = {}
    tokens: dict[str, str] = {}
    for number, found in zip(lines, predictor.activations(lines.values(), names), strict=True):
        arrays |= {f"{number}/{name}": np.ascontiguousarray(array) for name, array in found.arrays.items()}
        tokens |= {f"{number}/source": json.dumps(found.source), f"{number}/target": json.dumps(found.target)}
    save_arrays(arrays, target, tokens)


def score_file(settings: Config, workdir: Path, source: str, target: str, resume: bool = False) -> None:
    """Score the targets in a file or standard input, and write one output line per line, in order.

    Args:
        settings, workdir, target, resume: as for `predict_file`, which lists the errors, too.
        source: the file of questions, as `read_question` reads them; "-" = standard input.
    """
    options = settings.decode
    predictor = _open_run(settings, workdir, source, target, resume)

    def read(line: Line, counts: Counter[str]) -> Question:
        question = read_question(line[1], options.inputs, predictor.task.answer == "continuation", counts)
        if question.ranked and options.outputs == "text":
            raise ValueError("'targets' are ranked, which decode.outputs='text' cannot show: use tsv or jsonl")
        predictor.inputs.towards(question.languages)
        return question

    def answer(questions: list[Question]) -> list[str]:
        pairs = [Pair(one.source, target, languages=one.languages) for one in questions for target in one.targets]
        scored = iter(predictor.score(pairs))
        return [
            write_scored(one, [next(scored) for _ in one.targets], options.outputs, options.scores) for one in questions
        ]

    answer_lines(Job(source=source, target=target, resume=resume, read=read, answer=answer), predictor, "score")


def embed_file(
    settings: Config, workdir: Path, source: str, target: str, resume: bool = False, form: str | None = None
) -> None:
    """Write the embedding of every line of a file or standard input.

    Args:
        settings, workdir, source, target, resume: as for `predict_file`, which lists the errors, too.
        form: one of ARRAYS, f32 [lines d], written when all is done; or "jsonl", {"vector": […]} a line. None = by the
            ending of the target.
    """
    form = form or Path(target).suffix.removeprefix(".")
    if form in ARRAYS and (resume or target == "-"):
        remedy = "leave out --resume" if resume else "name it by --output"
        raise UserError(f"--format={form} is one array, written to a file at the end: {remedy}")
    save_arrays = _safetensors_writer(f"--format={form}") if form == "safetensors" else None
    predictor = _open_run(settings, workdir, source, target, resume, whole=form in ARRAYS).embedder

    def read(line: Line, counts: Counter[str]) -> Request:
        return read_request(*line, settings.decode.inputs, counts, continues=True)

    def answer(requests: list[Request]) -> list[Any]:
        answers = predictor.generate(requests)
        if form in ARRAYS:
            return [outputs[0].vector for outputs in answers]
        return [write_outputs(outputs, "jsonl", scores=False, alignments=False) for outputs in answers]

    def save(found: list[Any]) -> None:
        vectors = stacked(found, predictor.model.config.d_model)
        if save_arrays:
            save_arrays({"vectors": vectors}, target)
        else:
            with replacing(epath.Path(target)) as new, writing(target), new.open("wb") as file:
                np.save(file, vectors)

    job = Job(source=source, target=target, resume=resume, read=read, answer=answer)
    answer_lines(job._replace(save=save) if form in ARRAYS else job, predictor, "embed")


def _safetensors_writer(option: str) -> Callable[..., None]:
    """Return the function that writes arrays by name into a file; raise UserError if safetensors is not installed."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(f'{option} needs safetensors: pip install "jformer[hf]"') from error

    def save_arrays(arrays: dict[str, np.ndarray], target: str, texts: dict[str, str] | None = None) -> None:
        with replacing(epath.Path(target)) as new:
            try:
                save_file(arrays, new, texts)
            except SafetensorError as error:
                raise unwritten(target, OSError(str(error))) from error

    return save_arrays


def answer_lines(job: Job[Asked], predictor: Predictor, mode: str) -> None:
    """Run a job, and report its progress and altered lines."""
    path, counts = input_path(job.source), Counter[str]()
    settings = settings_of(predictor, mode, path)
    done = processes.from_main_process(lambda: lines_to_keep(Path(job.target), settings) if job.resume else 0)
    progress = FileProgress(path, lambda: predictor.compile_seconds)
    predictor.on_answered = progress.answered
    lines = numbered_lines(path, done, counts, progress)
    size = predictor.config.decode.batch_size
    answers = (
        _answer(window, path, job, counts, progress)
        for window in (windows(lines, size) if path.is_file() else arriving(lines))
    )
    with progress.reported():
        first = next(answers, [])  # before the file is opened: an error in the first lines leaves it unchanged
        with _opened(job, settings) as write:
            for some in chain([first], answers):
                write(some)
                progress.written(len(some))
    progress.end({**counts, **predictor.counts, "lines kept": done})


@contextlib.contextmanager
def _opened(job: Job[Asked], settings: dict[str, object]) -> Iterator[Callable[[list[Any]], None]]:
    """Open the output in the main process and yield a function that writes answers; other processes discard them."""
    if not processes.is_main_process():
        yield lambda answers: None
    elif job.save:
        found: list[Any] = []
        yield found.extend
        job.save(found)
    elif job.target == "-":
        yield lambda texts: _write_lines(sys.stdout, texts)
    else:
        target = Path(job.target)
        with whole_lines_only(target), open_output(target, job.resume, settings) as out:
            yield lambda texts: _write_lines(out, texts)


def _write_lines(out: IO[str], texts: list[str]) -> None:
    out.writelines(text + "\n" for text in texts)
    out.flush()


def settings_of(predictor: Predictor, mode: str, path: Path) -> dict[str, object]:
    """Return everything that the lines of an output depend on, as plain JSON; batch sizes are left out."""
    config = predictor.config
    decode = dataclasses.asdict(config.decode)
    del decode["batch_size"]
    if name := config.decode.ranked_by:
        decode["command"] = score_commands(config.evaluate)[name]
    if config.decode.mbr_utility == "bleu":
        decode["tokenize"] = tokenization(config, config.decode.target_language)
    with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
        head = hashlib.sha256(file.read(HEAD)).hexdigest()[:16] if file else ""
    return {
        "mode": mode,
        "input": head,
        "weights": config.evaluate.weights,
        "steps": list(predictor.steps),
        "model": predictor.fingerprint(),
        "data.max_source_length": config.data.max_source_length,
        "data.max_target_length": config.data.max_target_length,
        **{f"decode.{key}": value for key, value in decode.items()},
    }


def _open_run(
    settings: Config, workdir: Path, source: str, target: str, resume: bool, whole: bool = False
) -> Predictor:
    """Check the files, then load the predictor of a run; an output is written line by line or, if `whole`, replaced.

    Raises UserError, in all processes, for files that cannot be read or written, and for inputs that differ between
    processes, such as pipes.
    """
    if target == "-" and resume:
        raise UserError("--resume continues a file: name it by --output")
    written = None if target == "-" else Path(target)
    processes.from_main_process(lambda: check_files(input_path(source), written, whole))
    if processes.process_count() > 1:
        if not Path(source).is_file():
            raise UserError(
                f"--input={source}: several processes need a plain file, not a pipe: name one that all of them can read"
            )
        processes.check_same({"the text of --input": digest(Path(source))[0]})
    processes.enter_phase("opening the trained run")
    with show_progress("opening the trained run", quiet=not processes.is_main_process()):
        return load(workdir, settings)


def _answer(window: list[Line], path: Path, job: Job[Asked], counts: Counter[str], progress: FileProgress) -> list[Any]:
    """Return the answers to a window; raise UserError naming the line that cannot be read."""
    size = sum(len(text) for _, text in window).bit_length()
    processes.enter_phase(f"lines {window[0][0] + 1} to {window[-1][0] + 1}", kind=(len(window), size))
    requests = []
    for line in window:
        altered: Counter[str] = Counter()
        try:
            requests.append(job.read(line, altered))
        except ValueError as error:
            raise UserError(f"{path}:{line[0] + 1}: {error}") from error
        if altered[INVALID_REPLACED]:
            progress.warn(f"{path}:{line[0] + 1}: NUL or a lone surrogate in a text, replaced by U+FFFD")
        counts.update(altered)
    return job.answer(requests)


def numbered_lines(path: Path, done: int, counts: Counter[str], progress: FileProgress) -> Iterator[Line]:
    """Yield the lines after the first `done` ones, with invalid characters replaced.

    Raises UserError if there are fewer lines.
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
    """Yield lists of lines: `first` of them, then as many as take SECONDS at the speed of the last list.

    A list has at most WINDOW lines, eight times the one before it, and about CHARACTERS.
    """

    def up_to(most: int) -> Iterator[Line]:
        characters = 0
        for line in islice(lines, most):
            yield line
            characters += len(line[1])
            if characters > CHARACTERS:
                return

    size = first
    while window := list(up_to(size)):
        began = time.monotonic()
        yield window
        rate = len(window) / max(time.monotonic() - began, 1e-6)
        own = max(first, min(WINDOW, 8 * size, int(rate * SECONDS)))
        size = processes.agree(own, min)  # all processes answer the same windows


def arriving(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Yield lists of lines as they arrive: all that are waiting, at least one. A thread reads ahead."""
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
