"""Which process is dead, stuck or slow? Judged from the status of every process; nothing is sent or ended here.

All processes of a run enter the same phases in the same order: update 1, update 2, validation, … So the
process that has entered the fewest phases is the one that others wait for: slow while it makes progress, else stuck.
"""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

MIN_STALL_SECONDS = 60.0  # the shortest limit for a stuck process
STALL_UPDATES = 10  # times as long as an update takes, if that is more
OTHER_PHASES = 10  # times as long in phases that were not timed: starting, compiling, validating, saving
STEADY_SHARE = 0.5  # of the limit: a slower phase is not expected to take as long again
BUSY_SHARE = 0.02  # of a core, from which a process counts as busy
RECENT_UPDATES = 100
SLOW_SECONDS = 2.0  # from which a slow process is logged
MAX_LISTED = 8  # processes in a line


class Status(NamedTuple):
    """The status that a process reports with each beat."""

    beat: int = 0  # counts up as long as the process lives
    entered: int = 0  # phases so far
    phase: str = "the start"
    steady: bool = False  # whether the phase, like the last of its kind, should end well within the limit
    idle: float = 0.0  # seconds without progress
    failed: bool = False  # it raised an error, maybe because another process died


class Pace:
    """A process's own record of its phase, and for how long it has made no progress there.

    In a steady phase, only the next phase counts as progress. Elsewhere a busy processor does, too: compiling, learning
    a tokenizer or scoring may take any time. So does waiting for another program.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.process_time):
        self._clock, self._used = clock, used
        self._status = Status()
        self._kind: Hashable = None
        self._times: dict[Hashable, float] = {}  # seconds of the last phase of each kind
        self._entered = self._progress = self._looked = clock()
        self._processor = used()
        self._updates: deque[float] = deque(maxlen=RECENT_UPDATES)  # seconds
        self._elsewhere = 0  # contexts of `working_elsewhere`

    def enter(self, phase: str, kind: Hashable = None, limit: float = math.inf) -> None:
        """Record the start of a phase: a steady one, if the last of its kind ended well within the limit."""
        now = self._clock()
        self._times[self._kind] = now - self._entered
        steady = kind is not None and self._times.get(kind, math.inf) <= STEADY_SHARE * limit
        self._status = Status(entered=self._status.entered + 1, phase=phase, steady=steady)
        self._kind, self._entered, self._progress = kind, now, now

    @contextlib.contextmanager
    def working_elsewhere(self) -> Iterator[None]:
        """While the context lasts, another program works for this process."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    def record_step_time(self, seconds: float) -> None:
        """Record how long an update took."""
        self._updates.append(seconds)

    def status(self) -> Status:
        """Return the process's current status."""
        now, used, status = self._clock(), self._used(), self._status
        busy = self._elsewhere > 0 or used - self._processor > BUSY_SHARE * (now - self._looked)
        if busy and not status.steady:
            self._progress = now
        self._looked, self._processor = now, used
        return status._replace(idle=now - self._progress)

    @property
    def median(self) -> float:
        """Return the median seconds of an update; 0 before any is known."""
        return statistics.median(tuple(self._updates)) if self._updates else 0.0

    def limit(self, seconds: float) -> float:
        """Return how long a process may be stuck in a steady phase: `seconds`, unless that is 0."""
        longest = max(MIN_STALL_SECONDS, STALL_UPDATES * self.median)
        return seconds or (longest if self._updates else OTHER_PHASES * MIN_STALL_SECONDS)


class PeerWatch:
    """Judges the statuses of all processes, in process 0."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`names` are those of the processes in messages."""
        self._names, self._clock = names, clock
        self._statuses = [Status()] * len(names)
        self._heard = [clock()] * len(names)
        self._waiting: dict[int, tuple[float, Status]] = {}  # process → since when others wait for it, and where

    def update(self, statuses: Mapping[int, Status]) -> None:
        """Take the newest statuses; an unchanged beat means silence."""
        for i, status in statuses.items():
            if status.beat != self._statuses[i].beat:
                self._statuses[i], self._heard[i] = status, self._clock()

    def dead(self, seconds: float, shorter: float) -> str | None:
        """Return a line about the first process that was silent for `seconds`, if there is one.

        Silence counts in steady phases. Elsewhere long work may hold the interpreter, and only JAX's own heartbeat,
        which is not a Python thread, can tell the difference. Once a process has failed, silence anywhere explains it,
        and `shorter` is enough.
        """
        failed = any(status.failed for status in self._statuses)
        for name, status, heard in zip(self._names, self._statuses, self._heard, strict=True):
            silent = self._clock() - heard
            if silent > (shorter if failed else seconds) and (failed or status.steady):
                return f"{name} died or is frozen at {status.phase}: no beat for {silent:.0f} s"
        return None

    def stuck(self, limit: float) -> str | None:
        """Return a line about the processes that all others wait for and that make no progress, if there are any."""
        statuses = self._now()
        stuck = waited_for(statuses, limit)
        if not stuck:
            return None
        status = statuses[stuck[0]]
        where = f"at {status.phase} for {status.idle:.0f} s (train.stall_seconds); the stacks are above"
        if len(stuck) == len(self._names):
            return f"all processes are stuck {where}"
        listed = ", ".join(self._names[i] for i in stuck[:MAX_LISTED]) + (", …" if len(stuck) > MAX_LISTED else "")
        return f"{listed} {'is' if len(stuck) == 1 else 'are'} stuck {where}"

    def slow(self, median: float) -> list[str]:
        """Return a line for each process that kept all others waiting and has moved on."""
        statuses, lines = self._now(), []
        for i, (since, before) in list(self._waiting.items()):
            if statuses[i].entered > before.entered:
                del self._waiting[i]
                lines.append(f"all waited {self._clock() - since:.0f} s for {self._names[i]} at {before.phase}")
        slow = waited_for(statuses, max(SLOW_SECONDS, 3 * median))
        for i in slow if len(slow) < len(statuses) else ():
            self._waiting.setdefault(i, (self._clock() - statuses[i].idle, statuses[i]))
        return lines

    def _now(self) -> list[Status]:
        """Return the statuses; in steady phases, silence adds to the idle time."""
        now = self._clock()
        return [
            status._replace(idle=status.idle + (now - heard if status.steady else 0.0))
            for status, heard in zip(self._statuses, self._heard, strict=True)
        ]


def waited_for(statuses: Sequence[Status], longer: float) -> list[int]:
    """Return the processes that all others wait for, if none has made progress for more than `longer` seconds.

    These have entered the fewest phases. If that is all of them, the stuck one is unknown. A process outside a steady
    phase gets ten times as long.
    """
    if any(each.idle <= longer * (1 if each.steady else OTHER_PHASES) for each in statuses):
        return []
    fewest = min(status.entered for status in statuses)
    return [i for i, status in enumerate(statuses) if status.entered == fewest]
