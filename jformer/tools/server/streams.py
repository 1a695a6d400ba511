"""Answers that are sent while they grow: requests that come at about the same time are advanced together.

Several groups of requests are under way at once, a few tokens of each in turn, so that a late one need not wait for
the end of an earlier one. Knows nothing of HTTP and nothing of models.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, Protocol, TypeVar

from jformer.tools.server.batcher import BusyError, gather
from jformer.tools.server.limits import Limits

GROUPS = 4  # under way at a time; what comes meanwhile is gathered for the next one


class Update(Protocol):
    """What is new of one item."""

    @property
    def request(self) -> int:
        """The item's number in its group."""

    @property
    def outputs(self) -> object:
        """None until it is answered."""


Item = TypeVar("Item")
News = TypeVar("News", bound=Update)
News_co = TypeVar("News_co", bound=Update, covariant=True)


class Growing(Protocol[News_co]):
    """The items of a group while they are answered; used in another thread, by one caller at a time."""

    @property
    def running(self) -> bool:
        """Whether some item is neither answered nor left."""

    def advance(self) -> Sequence[News_co]:
        """Go on for a few tokens; return the updates."""

    def leave(self, request: int) -> None:
        """Give an item up."""


class Stream(Generic[Item, News]):
    """The items of one caller. Iterate over it for their updates, and leave it when they are not wanted any more."""

    def __init__(self, items: Sequence[Item], seconds: float) -> None:
        """Hold the items; they have so many seconds to be answered."""
        self.items, self.seconds, self.left = items, seconds, False
        self._until = asyncio.get_running_loop().time() + seconds
        self._told: asyncio.Queue[tuple[int, News] | Exception] = asyncio.Queue()

    def tell(self, update: tuple[int, News] | Exception) -> None:
        """Hand on (number of the item, its update), or why there will be none."""
        self._told.put_nowait(update)

    async def __aiter__(self) -> AsyncIterator[tuple[int, News]]:
        """Yield (number of the item, update) until all are answered; raise what went wrong, TimeoutError among it."""
        missing = len(self.items)
        while missing:
            async with asyncio.timeout_at(self._until):
                told = await self._told.get()
            if isinstance(told, Exception):
                raise told
            missing -= told[1].outputs is not None
            yield told


class Streams(Generic[Item, News]):
    """Gathers the items of several callers into groups, and tells each what is new of its own."""

    def __init__(
        self, start: Callable[[Sequence[Item]], Growing[News]], executor: Executor, full: int, limits: Limits
    ) -> None:
        """Take up to `full` items in a group, which `start` begins to answer; `run` must be running."""
        self._start, self._executor, self._full, self._limits = start, executor, full, limits
        self._queue: asyncio.Queue[Stream[Item, News]] = asyncio.Queue()
        self.waiting = 0  # items that are not answered yet

    def open(self, items: Sequence[Item]) -> Stream[Item, News]:
        """Return the stream of some items, to be closed again. Raises BusyError if too many are under way."""
        if self.waiting and self.waiting + len(items) > self._limits.streams:
            raise BusyError
        self.waiting += len(items)
        stream: Stream[Item, News] = Stream(items, self._limits.answer_seconds)
        self._queue.put_nowait(stream)
        return stream

    def close(self, stream: Stream[Item, News]) -> None:
        """Compute no more for a stream."""
        stream.left = True
        self.waiting -= len(stream.items)

    async def run(self) -> None:
        """Answer until it is cancelled."""
        free = asyncio.Semaphore(GROUPS)
        async with asyncio.TaskGroup() as groups:
            while True:
                await free.acquire()
                streams = await gather(self._queue, self._full, self._limits.gather_seconds)
                groups.create_task(self._answer(streams)).add_done_callback(lambda _: free.release())

    async def _answer(self, streams: Sequence[Stream[Item, News]]) -> None:
        """Answer a group; whatever goes wrong is told to all of it."""
        streams = [stream for stream in streams if not stream.left]
        owners = [(stream, number) for stream in streams for number in range(len(stream.items))]
        try:
            growing = await self._compute(self._start, [item for stream in streams for item in stream.items])
            while growing.running:
                gone = [request for request, (stream, _) in enumerate(owners) if stream.left]
                for update in await self._compute(_advance, growing, gone):
                    stream, number = owners[update.request]
                    stream.tell((number, update))
        except Exception as error:
            for stream in streams:
                stream.tell(error)

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _advance(growing: Growing[News], gone: Sequence[int]) -> Sequence[News]:
    for request in gone:
        growing.leave(request)
    return growing.advance()
