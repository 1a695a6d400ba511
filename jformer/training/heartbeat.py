"""The heartbeat of a run: a small file for programs that watch it, and a line for people when nothing else is logged.

It runs in a thread of its own, so it also reports while the main thread compiles, validates or saves. Detecting and
ending stuck processes is the job of parallel/processes.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable

from etils.epath import Path

from jformer.parallel import processes
from jformer.storage import in_bucket, replace_content

TERMINAL, FILE = 2.0, 30.0  # seconds without output before it reports, on a terminal or in a log
WRITES, BUCKET_WRITES = 1.0, 30.0  # minimum seconds between writes of the file; in a bucket, they cost more
UPDATING = "updating"


class Heartbeat:
    """Writes {step, time, loss, phase} when any of them changes; `time` is when step or phase last changed."""

    def __init__(self, path: Path, step: int, total: int, show: Callable[[str], None], terminal: bool) -> None:
        """Prepare; `start` starts the thread.

        Args:
            path: of the file.
            step: updates so far.
            total: updates of the whole run.
            show: called with the current phase, and on a terminal with "" when it ends.
            terminal: whether stderr is a terminal, where it reports sooner.
        """
        self.step, self.loss, self._total = step, math.nan, total
        self._path, self._show = path, show
        self._terminal = terminal
        self._phase, self._entered = "starting", time.monotonic()
        self._last_output = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def start(self) -> None:
        """Start the thread, in the main process only."""
        if processes.is_main_process():
            self._thread.start()

    def stop(self) -> None:
        """Write the last heartbeat and end the thread."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join()

    def enter(self, phase: str) -> None:
        """Start a phase."""
        if self._terminal:
            self._show("")
        self._phase, self._entered = phase, time.monotonic()

    def note_output(self) -> None:
        """Note that something was logged, which restarts the wait for the next report."""
        self._last_output = time.monotonic()

    def _beat(self) -> None:
        written: tuple[int, str] | None = None
        changed, at, least = time.time(), -math.inf, BUCKET_WRITES if in_bucket(self._path) else WRITES
        while True:
            ending = self._stopping.wait(WRITES)
            state = self.step, "ended" if ending else self._phase
            if state != written and (ending or time.monotonic() - at >= least):
                changed, at, written = time.time(), time.monotonic(), state
                self._write(state, changed)
            if ending:
                return
            self._report()

    def _write(self, state: tuple[int, str], changed: float) -> None:
        step, phase = state
        loss = self.loss if math.isfinite(self.loss) else None
        content = {"step": step, "time": round(changed, 1), "loss": loss, "phase": phase}
        # Saving a checkpoint reports a full disk; errors of buckets are not all OSErrors.
        with contextlib.suppress(Exception):
            replace_content(self._path, json.dumps(content).encode() + b"\n")

    def _report(self) -> None:
        now, updating = time.monotonic(), self._phase == UPDATING
        lasts = now - self._entered
        if self._terminal:  # during updates the bar shows the time
            if updating or lasts >= TERMINAL:
                self._show("" if updating else f"{self._phase}, {lasts:.0f} s")
        elif now - self._last_output >= FILE:
            done = f"updating: {self.step:,} of {self._total:,} done"
            self._show(done if updating else f"{self._phase}: {lasts:.0f} s so far")
