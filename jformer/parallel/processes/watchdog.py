"""The watchdog of a process that runs alone: a thread that checks whether its updates make progress.

It judges steady phases only (`stall.Pace`): updates and rows of a kind that was timed before. Compiling, validating
and saving may take any time.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from jformer.errors import STUCK
from jformer.parallel.processes.ending import leave
from jformer.parallel.processes.stall import Pace, Status

LOOK_SECONDS = 1.0  # between checks; a longer pause counts as two of these, so a suspended process is not stuck


class Watchdog:
    """Tracks the progress of a process that runs alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without any timings."""
        self.pace, self.stall_seconds = Pace(clock), 0.0
        self._clock, self._last_check = clock, clock()
        self._status, self._stalled = Status(), 0.0

    def enter_phase(self, phase: str, kind: object) -> None:
        """Record the start of a phase; see `stall.Pace`."""
        self.pace.enter(phase, kind, self.pace.limit(self.stall_seconds))

    def stuck(self) -> str | None:
        """Check the progress; return a line if a steady phase has exceeded its limit."""
        now, status = self._clock(), self.pace.status()
        same = status.steady and status.entered == self._status.entered
        self._stalled = self._stalled + min(now - self._last_check, 2 * LOOK_SECONDS) if same else 0.0
        self._status, self._last_check = status, now
        if self._stalled <= self.pace.limit(self.stall_seconds):
            return None
        return f"stuck at {status.phase} for {self._stalled:.0f} s (train.stall_seconds); the stacks are above"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the context lasts, end the process with its stacks, one line and STUCK if it makes no progress."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                if line := self.stuck():
                    leave(STUCK, f"{line}; rerun the same command to resume from the last checkpoint", stacks=True)

        self.pace = Pace(self._clock)  # timings of an earlier run do not apply to this one
        thread = threading.Thread(target=watch, daemon=True, name="watchdog")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
