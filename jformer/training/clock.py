"""What time decides of a run: when it has trained long enough, and when to save. Several processes decide alike."""

import time

from jformer.config.options import TrainConfig
from jformer.parallel import processes


class Clock:
    """Counts the seconds of training, over all restarts, and those since the last checkpoint."""

    def __init__(self, train: TrainConfig, seconds: float) -> None:
        """Go on from so many seconds of training."""
        self._limit, self._between = 60 * train.max_minutes, 60 * train.checkpoint_minutes
        self._began = time.monotonic() - seconds
        self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, with validations and saves."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Tell whether this process has trained for train.max_minutes."""
        return 0 < self._limit <= self.seconds

    def ends_run(self) -> bool:
        """Tell whether that is so for one of the processes, and from then on for all; all of them ask."""
        over = self._limit > 0 and processes.agree(self.is_over(), any)
        if over:
            self._began = min(self._began, time.monotonic() - self._limit)
        return over

    def is_save_due(self) -> bool:
        """Tell whether one of the processes saved the last time train.checkpoint_minutes ago; all of them ask."""
        since = time.monotonic() - self._saved
        return self._between > 0 and processes.agree(since >= self._between, any)

    def note_save(self) -> float:
        """Begin to count anew until the next save, and return the seconds of training so far."""
        self._saved = time.monotonic()
        return self.seconds
