"""The record of a run: rows, answers to validation examples and log lines, written to files and to trackers.

metrics.jsonl, samples.jsonl, training.log and TensorBoard's events. A row is one flat dict with `step`.
"""

import contextlib
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from etils.epath import Path

without_torch = sys.modules.setdefault("torch", None) is None  # type: ignore[arg-type]
# tensorboardX would import torch if it is installed, which takes seconds and is of no use here.
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, directory_check
from tensorboardX.summary import scalar

if without_torch:
    del sys.modules["torch"]

from jformer.config.options import Config
from jformer.errors import UnavailableError, UserError
from jformer.integrity import with_digest
from jformer.storage import in_bucket, replace_content, unwritten, writing
from jformer.training.rows import Sample, read_row, read_sample
from jformer.training.trackers import Tracker, open_tracker

FLUSH_SECONDS = 10.0  # between flushes of TensorBoard's events


class AppendedFile:
    """Lines at the end of a file.

    On disk each line is flushed at once. Objects in a bucket cannot be appended to: `keep` writes them whole.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and create its folder; every method raises UserError for a full disk."""
        self._path, self._failed = path, False
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if in_bucket(path):
                self._file: TextIO = io.StringIO(path.read_text() if path.exists() else "")
                self._file.seek(0, io.SEEK_END)
            else:
                self._file = path.open("a", encoding="utf-8")

    def append(self, line: str) -> None:
        """Append one line."""
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._failed = True  # closing would fail again, writing the buffer
            raise unwritten(self._path, error) from error

    def keep(self) -> None:
        """Write all lines; from then on they outlive the process."""
        if not isinstance(self._file, io.StringIO):
            return
        try:
            self._path.write_text(self._file.getvalue())
        except Exception as error:  # buckets also raise errors other than OSError
            self._failed = True
            raise unwritten(self._path, error) from error

    def close(self) -> None:
        """Write all lines and close the file; a failure that was raised before is not raised again."""
        with contextlib.suppress(OSError, UserError) if self._failed else writing(self._path):
            self.keep()
            self._file.close()


class JsonlWriter(AppendedFile):
    """Appends rows to a file as JSON, one a line, each with its digest; nan and infinity become null."""

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.append(json.dumps(with_digest(finite), ensure_ascii=False, allow_nan=False))

    @staticmethod
    def truncate_after(path: Path, step: int, read: Callable[[bytes, str], Mapping[str, Any]] = read_row) -> int:
        """Drop the rows of later steps and a half-written last line, atomically; return how many rows are left.

        `read` parses a line; its second argument is the line's place, for messages. Raises UserError for any other line
        that is not a row, or was changed.
        """
        if not path.exists():
            return 0
        *whole, last = path.read_bytes().split(b"\n")
        kept = [line + b"\n" for n, line in enumerate(whole, 1) if read(line, f"{path}:{n}")["step"] <= step]
        if last or len(kept) < len(whole):
            with writing(path):
                replace_content(path, b"".join(kept))
        return len(kept)


class TensorBoardWriter:
    """Writes the numbers of rows as scalars `split/name`, without TensorFlow.

    It writes synchronously and raises disk errors. In tensorboardX's SummaryWriter, an error ends the writing thread,
    and callers block forever once its queue is full.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Open an event file; TensorBoard ignores `purge_step` and later steps of earlier files."""
        directory_check(str(folder))
        self._flushes_itself = not in_bucket(folder)  # in a bucket, each flush uploads the whole file
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._events = RecordWriter(f"{folder}/{name}")
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._flushed = time.monotonic()

    def write(self, row: Mapping[str, object]) -> None:
        """Add every number of a row."""
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._add(Event(step=row["step"], summary=scalar(f"{row['split']}/{name}", value)))
        if self._flushes_itself and time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.keep()

    def keep(self) -> None:
        """Write the remaining events."""
        with self._closed_by_error():
            self._events.flush()
        self._flushed = time.monotonic()

    def close(self, failed: bool = False) -> None:
        """Write the remaining events and close the file."""
        self._events.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        with self._closed_by_error():
            self._events.write(event.SerializeToString())

    @contextlib.contextmanager
    def _closed_by_error(self) -> Iterator[None]:
        """Close the file after a failed write; otherwise Python would on exit, printing the error again."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError):
                self._events.close()
            raise


class Record:
    """The files of a run, and the trackers that receive its rows, TensorBoard among them.

    The run continues without a tracker that fails, even if that is when it resumes, and without training.log. Rows and
    answers are required: if they cannot be written, the run ends with a UserError, and rewrites them when resumed.
    """

    def __init__(self, workdir: Path, config: Config, step: int, show: Callable[[str], None]) -> None:
        """Open all files, dropping rows after `step`: a killed run wrote them, and its restart repeats them.

        `show` logs a line. Raises UserError for a damaged file, a full disk, and a service that a new run cannot reach.
        """
        path, samples = workdir / "metrics.jsonl", workdir / "samples.jsonl"
        self.rows = JsonlWriter.truncate_after(path, step)  # in metrics.jsonl
        JsonlWriter.truncate_after(samples, step, read_sample)
        self._show = show
        self.missing: list[str] = []  # a line for each tracker that a resumed run cannot reach
        self._trackers: dict[str, Tracker] = {}
        for name in config.train.trackers:
            try:
                self._trackers[name] = open_tracker(name, workdir, config)
            except UnavailableError as error:
                if not step:
                    raise
                self.missing.append(f"{name} gets no rows; metrics.jsonl has all of them: {error}")
        with writing(workdir / "tensorboard"):
            self._trackers["TensorBoard"] = TensorBoardWriter(workdir / "tensorboard", step + 1)
        self._metrics, self._samples = JsonlWriter(path), JsonlWriter(samples)
        self._text: AppendedFile | None = AppendedFile(workdir / "training.log")

    def write(self, row: Mapping[str, object]) -> None:
        """Write a row to the file and the trackers."""
        self._metrics.write(row)
        self._send(lambda tracker: tracker.write(row))
        self.rows += 1

    def write_sample(self, step: int, number: int, sample: Sample) -> None:
        """Add a sample; those of a step are counted from 1."""
        self._samples.write({"step": step, "sample": number, **sample._asdict()})

    def write_line(self, text: str) -> None:
        """Append a line to training.log."""
        if not self._text:
            return
        with self._without_text_on_errors():
            self._text.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    @contextlib.contextmanager
    def _without_text_on_errors(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            text, self._text = self._text, None
            if text:
                text.close()
            self._show(f"training.log gets no further lines: {error.__cause__}")

    def keep(self) -> None:
        """Flush everything; from then on it outlives the process."""
        self._metrics.keep()
        self._samples.keep()
        if self._text:
            with self._without_text_on_errors():
                self._text.keep()
        self._send(lambda tracker: tracker.keep())

    def close(self, failed: bool = False) -> None:
        """Flush and close everything; trackers mark the run as finished or failed."""
        self._send(lambda tracker: tracker.close(failed))
        with contextlib.closing(self._metrics), contextlib.closing(self._samples):
            if self._text:
                with self._without_text_on_errors():
                    self._text.close()

    def _send(self, send: Callable[[Tracker], None]) -> None:
        """Call `send` with every tracker; one that fails is dropped, and the run continues."""
        for name, tracker in list(self._trackers.items()):
            try:
                send(tracker)
            except Exception as error:  # any error of a tracker is less important than the run
                del self._trackers[name]
                self._show(f"{name} failed and gets no further rows; metrics.jsonl has all of them: {error}")
