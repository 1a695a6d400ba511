"""Who stands still? Judged from what every process says of itself; nothing is sent and nobody is ended here.

All processes of a run pass the same places in the same order: update 1, update 2, validation, … So who has passed
fewer places than another is the one that is waited for, and it is slow as long as it makes progress, else stuck.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

LEAST = 60.0  # seconds that a process may stand still
MEDIANS = 10  # or so many times as long as an update takes
ELSEWHERE = 10  # times as long where nothing of the kind was timed: starting, compiling, validating, saving
USUAL = 0.5  # of the limit: a place that takes more is not one to be hurried
BUSY = 0.02  # the share of a core from which a process counts as at work
RECENT = 100


class Standing(NamedTuple):
    """Where a process is, as it says itself."""

    passed: int = 0  # places reached so far
    place: str = "the start"
    steady: bool = False  # a place that takes no longer than the ones of its kind before it
    idle: float = 0.0  # seconds without progress, when it said so


class Pace:
    """A process's own account of where it is and since when nothing goes on there.

    At a steady place nothing but the next place is progress. Elsewhere a busy processor is, too: compiling, learning a
    tokenizer or scoring may take any time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.process_time):
        self._clock, self._used = clock, used
        self._here = Standing()
        self._like: Hashable = None
        self._times: dict[Hashable, float] = {}  # seconds of the last place of each kind
        self._reached = self._progress = self._looked = clock()
        self._processor = used()
        self._updates: deque[float] = deque(maxlen=RECENT)  # seconds

    def reach(self, place: str, like: Hashable = None, limit: float = math.inf) -> None:
        """Note that the next place is reached: a steady one, if the last one like it was done well within the limit."""
        now = self._clock()
        self._times[self._like] = now - self._reached
        steady = like is not None and self._times.get(like, math.inf) <= USUAL * limit
        self._here, self._like = Standing(self._here.passed + 1, place, steady), like
        self._reached = self._progress = now

    def took(self, seconds: float) -> None:
        """Note how long an update takes."""
        self._updates.append(seconds)

    def standing(self) -> Standing:
        """Return where the process is now."""
        now, used, here = self._clock(), self._used(), self._here
        if not here.steady and used - self._processor > BUSY * (now - self._looked):
            self._progress = now
        self._looked, self._processor = now, used
        return here._replace(idle=now - self._progress)

    @property
    def median(self) -> float:
        """Return the seconds of an update; 0 before any is known."""
        return statistics.median(tuple(self._updates)) if self._updates else 0.0

    def limit(self, seconds: float) -> float:
        """Return how long a process may stand still at a steady place: `seconds`, unless that is 0."""
        return seconds or (max(LEAST, MEDIANS * self.median) if self._updates else ELSEWHERE * LEAST)


def waited_for(standings: Sequence[Standing], longer: float) -> list[int]:
    """Return the processes that all are waiting for, if nobody has made progress for longer than so many seconds.

    Those are the ones that passed the fewest places. That may be all of them: then nobody knows who is stuck. Whoever
    is not at a steady place has ten times as long.
    """
    if any(each.idle <= longer * (1 if each.steady else ELSEWHERE) for each in standings):
        return []
    fewest = min(standing.passed for standing in standings)
    return [i for i, standing in enumerate(standings) if standing.passed == fewest]
