"""The watch over a run's only process, which no other one can watch: a thread of its own looks whether updates go on.

It judges steady phases alone (`stall.Pace`): updates and rows whose like was timed before. What compiles, validates or
saves may take any time.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from jformer.errors import STUCK
from jformer.parallel.processes.stall import Pace, Status

LOOK_SECONDS = 1.0  # between looks; no more than two of them count as one, so a process that was suspended is not stuck


class Alone:
    """How this process is, as it sees it itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet."""
        self.pace, self.stall_seconds = Pace(clock), 0.0
        self._clock, self._looked = clock, clock()
        self._status, self._stands = Status(), 0.0

    def enter_phase(self, phase: str, kind: object) -> None:
        """Note what this process begins to do; see `stall.Pace`."""
        self.pace.enter(phase, kind, self.pace.limit(self.stall_seconds))

    def stuck(self) -> str | None:
        """Look how it is, and return a line if it stands still in a steady phase for longer than it may."""
        now, status = self._clock(), self.pace.status()
        same = status.steady and status.entered == self._status.entered
        self._stands = self._stands + min(now - self._looked, 2 * LOOK_SECONDS) if same else 0.0
        self._status, self._looked = status, now
        if self._stands <= self.pace.limit(self.stall_seconds):
            return None
        return f"stuck at {status.phase} for {self._stands:.0f} s (train.stall_seconds); the stacks are above"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """End the process with its stacks, one line and STUCK, should it stand still while this lasts."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                if line := self.stuck():
                    give_up(line)

        self.pace = Pace(self._clock)  # what an earlier run took is no measure for this one
        thread = threading.Thread(target=watch, daemon=True, name="watchdog")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def give_up(line: str) -> NoReturn:
    """Show the stacks of all threads and a line, and end the process: what is stuck runs no handlers."""
    try:
        with contextlib.suppress(Exception):  # nobody may be reading, or standard error is closed
            faulthandler.dump_traceback(all_threads=True)
            os.write(2, f"jformer: {line}; the same command goes on from the last checkpoint\n".encode())
    finally:
        os._exit(STUCK)
