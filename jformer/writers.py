"""Where the rows of a run go on disk: metrics.jsonl and TensorBoard. A row is one flat dict with `step` and `split`."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from jformer.errors import UserError


class JsonlWriter:
    """Appends rows to a file as JSON, one a line, each on disk before the next; nan and infinity become null."""

    def __init__(self, path: Path) -> None:
        """Open the file to append to, with its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
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
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


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

    def close(self) -> None:
        """Write what is left and close the file."""
        self._events.close()
