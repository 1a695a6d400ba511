"""The sign that a run is alive: a small file for programs that watch it, and words for people where nothing else comes.

It runs in a thread of its own, so it also speaks while the main thread compiles, validates or saves. Whether a silent
process is stuck, and what then happens, is judged in parallel/processes.
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

TERMINAL, FILE = 2.0, 30.0  # seconds of silence after which it speaks: to a person who looks, or to a log
WRITES, BUCKET_WRITES = 1.0, 30.0  # least seconds between two writes of the file, which cost more in a bucket
UPDATING = "updating"


class Heartbeat:
    """Writes {step, time, loss, phase} when any of them changes; `time` is when step or phase last changed."""

    def __init__(self, path: Path, step: int, total: int, show: Callable[[str], None], terminal: bool) -> None:
        """Say nothing yet.

        Args:
            path: of the file.
            step: how many updates there have been.
            total: how many there will be.
            show: called with the current phase, and on a terminal with "" when it is over.
            terminal: whether a person looks on, for whom it speaks sooner.
        """
        self.step, self.loss, self._total = step, math.nan, total
        self._path, self._show = path, show
        self._terminal = terminal
        self._phase, self._entered = "starting", time.monotonic()
        self._spoken = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def start(self) -> None:
        """Begin to beat; of several processes only the first one's is heard."""
        if processes.is_main_process():
            self._thread.start()

    def stop(self) -> None:
        """Write the last beat and end the thread."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join()

    def enter(self, phase: str) -> None:
        """Note what begins now."""
        if self._terminal:
            self._show("")
        self._phase, self._entered = phase, time.monotonic()

    def spoke(self) -> None:
        """Note that something was said, so that nobody misses a sign of life."""
        self._spoken = time.monotonic()

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
            self._speak()

    def _write(self, state: tuple[int, str], changed: float) -> None:
        step, phase = state
        loss = self.loss if math.isfinite(self.loss) else None
        content = {"step": step, "time": round(changed, 1), "loss": loss, "phase": phase}
        with contextlib.suppress(OSError):  # a full disk is for the checkpoints to tell
            replace_content(self._path, json.dumps(content).encode() + b"\n")

    def _speak(self) -> None:
        now, updating = time.monotonic(), self._phase == UPDATING
        lasts = now - self._entered
        if self._terminal:  # while it updates, the clock of the bar moves
            if updating or lasts >= TERMINAL:
                self._show("" if updating else f"{self._phase}, {lasts:.0f} s")
        elif now - self._spoken >= FILE:
            done = f"updating: {self.step:,} of {self._total:,} are done"
            self._show(done if updating else f"{self._phase}: {lasts:.0f} s so far")
