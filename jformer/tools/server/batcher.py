"""Dynamic batching: requests that arrive at about the same time are answered together.

Requests that arrive while the model computes form the next batch: the busier the server, the larger its batches. Each
answer is returned as soon as it is ready, before the rest of its batch. The Predictor sorts texts by length and pads
them. No HTTP and no models here.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, NamedTuple, TypeVar

from jformer.errors import BrokenRunError
from jformer.inference.answers import whole_groups
from jformer.tools.server.limits import Limits

AHEAD = 16  # full batches gathered at most; sorted by length, they pad less
# Newest batches, as full as they may be, whose rates are kept, and how many it takes to trust them.
RATES, ENOUGH = 8, 3

Item = TypeVar("Item")
Reply = TypeVar("Reply")
Answer = Callable[[Sequence[Item]], Iterable[Mapping[int, Reply]]]
"""Items → number of an item → its answer, some at a time. Called in another thread, one call at a time."""


class BusyError(Exception):
    """Too many items are waiting."""


class _Job(NamedTuple, Generic[Item, Reply]):
    """The items of one caller, and their answers."""

    items: Sequence[Item]
    answers: asyncio.Future[list[Reply]]


class Batcher(Generic[Item, Reply]):
    """Gathers the items of several callers, and gives each caller its own answers."""

    def __init__(self, answer: Answer[Item, Reply], executor: Executor, full: int, limits: Limits) -> None:
        """Gather up to AHEAD full batches; `run` must be running to answer them."""
        self._answer, self._executor, self._full, self._limits = answer, executor, full, limits
        self._queue: asyncio.Queue[_Job[Item, Reply]] = asyncio.Queue()
        self._rates: deque[float] = deque(maxlen=RATES)  # items per second
        self.waiting = 0  # items without an answer so far
        self.on_batch: Callable[[int], None] = lambda size: None  # called with the size of each batch

    async def ask(self, items: Sequence[Item]) -> list[Reply]:
        """Return the answers to some items, in order.

        Raises BusyError if more are waiting than can be answered in time, and what `answer` raises for these items:
        an error in the items of one caller does not affect others.
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
        """Answer until cancelled, skipping callers that have left."""
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
            if size >= min(self._full, most):  # a low rate makes batches small, and must not last forever
                self._rates.append(size / max(loop.time() - began, 1e-6))

    def _within(self, seconds: float) -> float:
        """Return how many items can be answered in some seconds, at the best rate of the newest batches.

        Small batches are slower per item, and compiled ones are ignored by taking the best rate.
        """
        rate = max(self._rates) if len(self._rates) >= ENOUGH else math.inf
        return min(self._limits.waiting, rate * seconds)

    def _answer_all(self, jobs: Sequence[_Job[Item, Reply]], loop: asyncio.AbstractEventLoop) -> None:
        """Answer jobs, each as soon as possible; after an error of a job, halve the rest until that job is alone."""
        left = dict(enumerate(jobs))
        try:
            found = self._answer([item for job in jobs for item in job.items])
            for some in whole_groups([len(job.items) for job in jobs], found):
                _resolve(loop, [(left.pop(number), answers) for number, answers in some.items()])
        except Exception as error:  # any error fails only the job that causes it
            rest, half = list(left.values()), len(left) // 2
            if len(rest) == 1 or isinstance(error, BrokenRunError):
                _resolve(loop, [(job, error) for job in rest])
            elif rest:
                self._answer_all(rest[:half], loop)
                self._answer_all(rest[half:], loop)


def _resolve(loop: asyncio.AbstractEventLoop, resolved: Sequence[tuple[_Job[Any, Any], list[Any] | Exception]]) -> None:
    """Give callers that still wait their answers or errors in the event loop's thread, unless the loop is closed."""

    def resolve() -> None:
        for job, answers in resolved:
            if job.answers.done():
                continue
            if isinstance(answers, Exception):
                job.answers.set_exception(answers)
            else:
                job.answers.set_result(answers)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(resolve)


async def gather(queue: "asyncio.Queue[Any]", most: float, seconds: float) -> list[Any]:
    """Wait for a first element, then up to some seconds for more, until they have `most` items in all."""
    found = [await queue.get()]
    count, until = len(found[0].items), asyncio.get_running_loop().time() + seconds
    while count < most:
        if not queue.empty():  # a timer for each would take as long as everything else
            found.append(queue.get_nowait())
        else:
            try:
                async with asyncio.timeout_at(until):
                    found.append(await queue.get())
            except TimeoutError:
                break
        count += len(found[-1].items)
    return found
