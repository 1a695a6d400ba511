"""Where the rows of a run go on disk: metrics.jsonl and TensorBoard. A row is one flat dict with `step` and `split`."""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

from etils.epath import Path
from tensorboardX import SummaryWriter

from jformer.errors import UserError
from jformer.storage import in_bucket, replace_content


class JsonlWriter:
    """Appends rows to a file as JSON, one a line; nan and infinity become null.

    On disk each row is there before the next. An object of a bucket cannot be appended to: it is written by `keep`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file to append to, with its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        if in_bucket(path):
            self._file = io.StringIO(path.read_text() if path.exists() else "")
            self._file.seek(0, io.SEEK_END)
        else:
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def keep(self) -> None:
        """Make sure that all rows outlive this process."""
        if isinstance(self._file, io.StringIO):
            self._path.write_text(self._file.getvalue())

    def close(self) -> None:
        """Keep all rows and close the file."""
        self.keep()
        self._file.close()

    @staticmethod
    def truncate_after(path: Path, step: int) -> None:
        """Drop the rows of later steps, and a last line that a killed run left half-written, in one atomic move.

        Raises UserError for any other line that is not JSON.
        """
        if not path.exists():
            return
        lines = path.read_bytes().splitlines()
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if number == len(lines):
                    break
                raise UserError(f"{path}:{number} is not JSON; mend or delete this line") from error
            if row["step"] <= step:
                kept.append(line + b"\n")
        replace_content(path, b"".join(kept))


class TensorBoardWriter:
    """Writes the numbers of rows as scalars `split/name`, without TensorFlow."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Open an event file; TensorBoard forgets what earlier files say of `purge_step` and later steps."""
        self._events = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add every number of a row."""
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(f"{row['split']}/{name}", value, row["step"])

    def keep(self) -> None:
        """Write what is left."""
        self._events.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._events.close()
