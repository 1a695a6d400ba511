"""The files of a run's rows: metrics.jsonl, samples.jsonl, TensorBoard. A row is one flat dict with `step`."""

import contextlib
import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from etils.epath import Path
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, directory_check
from tensorboardX.summary import scalar

from jformer.integrity import with_digest
from jformer.storage import in_bucket, replace_content, unwritten, writing
from jformer.training.rows import read_row

FLUSH_SECONDS = 10.0  # between two looks of TensorBoard's that show something new


class AppendedFile:
    """Lines at the end of a file.

    On disk each line is there before the next. An object of a bucket cannot be appended to: it is written by `keep`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file to append to, with its folder; this and all else here raises UserError for a full disk."""
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
            self._failed = True  # what is left in its buffer would fail again when it is closed
            raise unwritten(self._path, error) from error

    def keep(self) -> None:
        """Make sure that all lines outlive this process."""
        if isinstance(self._file, io.StringIO):
            self._path.write_text(self._file.getvalue())

    def close(self) -> None:
        """Keep all lines and close the file; a failure that was told already is not told again."""
        with contextlib.suppress(OSError) if self._failed else writing(self._path):
            self.keep()
            self._file.close()


class JsonlWriter:
    """Appends rows to a file as JSON, one a line, each with its digest; nan and infinity become null."""

    def __init__(self, path: Path) -> None:
        """Open the file to append to, with its folder."""
        self._lines = AppendedFile(path)

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._lines.append(json.dumps(with_digest(finite), ensure_ascii=False, allow_nan=False))

    def keep(self) -> None:
        """Make sure that all rows outlive this process."""
        self._lines.keep()

    def close(self) -> None:
        """Keep all rows and close the file."""
        self._lines.close()

    @staticmethod
    def truncate_after(path: Path, step: int, read: Callable[[bytes, str], Mapping[str, Any]] = read_row) -> int:
        """Drop the rows of later steps, and a last line that a killed run left half-written, in one atomic move.

        `read` makes a row of a line and says, for messages, of which place. Returns how many rows are left. Raises
        UserError for any other line that is no row, or not what was written.
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

    It writes as it is called and raises what the disk does. tensorboardX's own SummaryWriter has a thread, which an
    error ends, and a queue, which then fills and lets its callers wait for ever.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Open an event file; TensorBoard forgets what earlier files say of `purge_step` and later steps."""
        directory_check(str(folder))
        self._flushes_itself = not in_bucket(folder)  # there each flush is an upload of the whole file
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
        """Write what is left."""
        with self._closed_by_error():
            self._events.flush()
        self._flushed = time.monotonic()

    def close(self, failed: bool = False) -> None:
        """Write what is left and close the file, whether the run failed or not."""
        self._events.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        with self._closed_by_error():
            self._events.write(event.SerializeToString())

    @contextlib.contextmanager
    def _closed_by_error(self) -> Iterator[None]:
        """Close the file where the disk refuses to be written to; else Python does, and prints what that raises."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError):
                self._events.close()
            raise
