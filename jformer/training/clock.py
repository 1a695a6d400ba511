"""When a run ends, and when a save is due by the clock. Several processes decide alike."""

import math
import time

from jformer.config.options import TrainConfig
from jformer.parallel import processes
from jformer.training.state import Progress


def has_ended(train: TrainConfig, progress: Progress) -> bool:
    """Return whether all updates are done, or the patience or the time limit is exhausted."""
    timed_out = 0 < 60 * train.max_minutes <= progress.seconds
    return progress.step >= train.num_steps or 0 < train.patience <= progress.since_best or timed_out


class Clock:
    """Counts the seconds of training, over all restarts, and those since the last checkpoint."""

    def __init__(self, train: TrainConfig, seconds: float) -> None:
        """Continue from this many seconds of training."""
        self._limit, self._between = 60 * train.max_minutes, 60 * train.checkpoint_minutes
        self._began = time.monotonic() - seconds
        self._saved = time.monotonic()
        self._most = math.nextafter(self._limit, 0.0) if self._limit else math.inf  # seconds before `ends_run`

    @property
    def seconds(self) -> float:
        """Seconds of training so far, with validations and saves."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Return whether this process has trained for train.max_minutes."""
        return 0 < self._limit <= self.seconds

    def ends_run(self) -> bool:
        """Return whether any process has reached the limit, which then counts for all; all processes call this."""
        over = self._limit > 0 and processes.agree(self.is_over(), any)
        if over:
            self._began, self._most = min(self._began, time.monotonic() - self._limit), math.inf
        return over

    def is_save_due(self) -> bool:
        """Return whether any process last saved train.checkpoint_minutes ago or earlier; all processes call this."""
        since = time.monotonic() - self._saved
        return self._between > 0 and processes.agree(since >= self._between, any)

    def note_save(self) -> float:
        """Restart the count until the next save; return the seconds of training so far.

        They stay below a limit reached in the meantime; it ends the run, in all processes, at the next update.
        """
        self._saved = time.monotonic()
        return min(self.seconds, self._most)
