"""Requests that come at about the same time are answered together, as a model answers many texts as fast as a few.

While the model answers, what comes in the meantime waits, and is the next batch: the busier, the larger. Answers are
given as soon as they are there, before the rest of their batch. How texts are sorted by length and padded is the
Predictor's own business. Knows nothing of HTTP and nothing of models.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jformer.inference.answers import whole_groups
from jformer.tools.server.limits import Limits

AHEAD = 16  # full batches are gathered at most: sorted by length, they are that many batches
RATES, ENOUGH = 8, 3  # batches of which the pace is known, and from how many on

Item = TypeVar("Item")
Reply = TypeVar("Reply")
Answer = Callable[[Sequence[Item]], Iterable[Mapping[int, Reply]]]
"""Items → number of an item → what answers it, some at a time. It is called in another thread, once at a time."""


class _HasItems(Protocol):
    @property
    def items(self) -> Sequence[object]: ...


T = TypeVar("T", bound=_HasItems)


class BusyError(Exception):
    """More items wait than the server takes on."""


class _Job(NamedTuple, Generic[Item, Reply]):
    """The items of one caller, and what answers them."""

    items: Sequence[Item]
    answers: asyncio.Future[list[Reply]]

    def tell(self, answers: list[Reply] | Exception) -> None:
        """Give the caller its answers, or why it has none, if it still waits."""
        if self.answers.done():
            return
        if isinstance(answers, Exception):
            self.answers.set_exception(answers)
        else:
            self.answers.set_result(answers)


class Batcher(Generic[Item, Reply]):
    """Gathers the items of several callers, and gives each the answers to its own."""

    def __init__(self, answer: Answer[Item, Reply], executor: Executor, full: int, limits: Limits) -> None:
        """Gather up to AHEAD times what fills a batch; `run` must be running to answer them."""
        self._answer, self._executor, self._full, self._limits = answer, executor, full, limits
        self._queue: asyncio.Queue[_Job[Item, Reply]] = asyncio.Queue()
        self._rates: deque[float] = deque(maxlen=RATES)  # items answered in a second, of the newest full batches
        self.waiting = 0  # items that are not answered yet
        self.on_batch: Callable[[int], None] = lambda size: None  # is told how many items are answered together

    async def ask(self, items: Sequence[Item]) -> list[Reply]:
        """Return the answers to some items, in order.

        Raises BusyError if more wait already than can be answered in time, and what `answer` raises for these items
        alone: a mistake in the items of one caller is no other's.
        """
        if self.waiting and self.waiting + len(items) > self._within(self._limits.answer_seconds / 2):
            raise BusyError
        job: _Job[Item, Reply] = _Job(items, asyncio.get_running_loop().create_future())
        self.waiting += len(items)
        try:
            self._queue.put_nowait(job)
            return await job.answers
        finally:
            self.waiting -= len(items)

    async def run(self) -> None:
        """Answer until it is cancelled. Callers that do not wait any more are left out."""
        loop = asyncio.get_running_loop()
        while True:
            most = min(AHEAD * self._full, self._within(self._limits.answer_seconds / 6))
            gathered = await gather(self._queue, most, self._limits.gather_seconds)
            jobs = [job for job in gathered if not job.answers.done()]
            if not jobs:
                continue
            self.on_batch(sum(len(job.items) for job in jobs))
            began = loop.time()
            await loop.run_in_executor(self._executor, self._answer_all, jobs, loop)
            size = sum(len(job.items) for job in jobs)
            if size >= self._full:
                self._rates.append(size / max(loop.time() - began, 1e-6))

    def _within(self, seconds: float) -> float:
        """Return how many items can be answered in some seconds, at the pace of full batches.

        Small ones are slower for each of their items, and those that were compiled tell nothing: so it is the best of
        some.
        """
        rate = max(self._rates) if len(self._rates) >= ENOUGH else math.inf
        return min(self._limits.waiting, rate * seconds)

    def _answer_all(self, jobs: Sequence[_Job[Item, Reply]], loop: asyncio.AbstractEventLoop) -> None:
        """Give jobs their answers, or why they have none; one that fails is parted from the others.

        So some are sent, and the next requests read, while the model computes the rest.
        """
        left = dict(enumerate(jobs))
        try:
            found = self._answer([item for job in jobs for item in job.items])
            for some in whole_groups([len(job.items) for job in jobs], found):
                _tell(loop, [(left.pop(number), answers) for number, answers in some.items()])
        except Exception as error:  # whatever it is, its callers are told, and the others are answered
            rest, half = list(left.values()), len(left) // 2
            if len(rest) == 1:
                _tell(loop, [(rest[0], error)])
            elif rest:
                self._answer_all(rest[:half], loop)
                self._answer_all(rest[half:], loop)


def _tell(loop: asyncio.AbstractEventLoop, told: Sequence[tuple[_Job[Any, Any], list[Any] | Exception]]) -> None:
    """Give callers their answers, or why they have none, in a loop's thread, unless it has ended with its server."""

    def tell() -> None:
        for job, answers in told:
            job.tell(answers)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


async def gather(queue: "asyncio.Queue[T]", most: float, seconds: float) -> list[T]:
    """Wait for something that has items, and some seconds for more that comes with it, until there are `most` items."""
    found = [await queue.get()]
    count, until = len(found[0].items), asyncio.get_running_loop().time() + seconds
    while count < most:
        if not queue.empty():  # a timer for each of many would take as long as they do
            found.append(queue.get_nowait())
        else:
            try:
                async with asyncio.timeout_at(until):
                    found.append(await queue.get())
            except TimeoutError:
                break
        count += len(found[-1].items)
    return found
