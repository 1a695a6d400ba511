"""Streaming: requests that arrive at about the same time form a group and advance together, a few tokens at a time.

Several groups take turns, so that a late request need not wait for an earlier group to end. No HTTP and no models here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, Protocol, TypeVar

from jformer.tools.server.batcher import BusyError, gather
from jformer.tools.server.limits import Limits

GROUPS = 4  # active at a time; later requests are gathered for the next one


class ItemUpdate(Protocol):
    """The news of one item."""

    @property
    def request(self) -> int:
        """The item's number in its group."""

    @property
    def outputs(self) -> object:
        """None until the item is answered."""


Item = TypeVar("Item")
News = TypeVar("News", bound=ItemUpdate)
News_co = TypeVar("News_co", bound=ItemUpdate, covariant=True)


class Growing(Protocol[News_co]):
    """A group of items that is being answered; used in another thread, by one caller at a time."""

    @property
    def running(self) -> bool:
        """Whether any item is neither answered nor abandoned."""

    def advance(self) -> Sequence[News_co]:
        """Advance by a few tokens; return the updates."""

    def leave(self, request: int) -> None:
        """Abandon an item."""


class Stream(Generic[Item, News]):
    """The items of one caller. Iterate over it for their updates; `Streams.close` abandons them."""

    def __init__(self, items: Sequence[Item], seconds: float) -> None:
        """Hold the items, which must be answered within some seconds."""
        self.items, self.seconds, self.left = items, seconds, False
        self._until = asyncio.get_running_loop().time() + seconds
        self._updates: asyncio.Queue[tuple[int, News] | Exception] = asyncio.Queue()

    def put(self, update: tuple[int, News] | Exception) -> None:
        """Add (number of an item, its update), or the error that ends the stream."""
        self._updates.put_nowait(update)

    async def __aiter__(self) -> AsyncIterator[tuple[int, News]]:
        """Yield (number of an item, update) until all are answered; raise the error that ends them."""
        missing = len(self.items)
        while missing:
            async with asyncio.timeout_at(self._until):
                update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            missing -= update[1].outputs is not None
            yield update


class Streams(Generic[Item, News]):
    """Gathers the items of several callers into groups, and gives each caller its own updates."""

    def __init__(
        self, start: Callable[[Sequence[Item]], Growing[News]], executor: Executor, full: int, limits: Limits
    ) -> None:
        """Take up to `full` items in a group, which `start` begins to answer; `run` must be running."""
        self._start, self._executor, self._full, self._limits = start, executor, full, limits
        self._queue: asyncio.Queue[Stream[Item, News]] = asyncio.Queue()
        self.waiting = 0  # items without an answer so far

    def open(self, items: Sequence[Item]) -> Stream[Item, News]:
        """Return the stream of some items, to be closed by `close`. Raises BusyError if too many are active."""
        if self.waiting and self.waiting + len(items) > self._limits.streams:
            raise BusyError
        self.waiting += len(items)
        stream: Stream[Item, News] = Stream(items, self._limits.answer_seconds)
        self._queue.put_nowait(stream)
        return stream

    def close(self, stream: Stream[Item, News]) -> None:
        """Stop computing for a stream."""
        stream.left = True
        self.waiting -= len(stream.items)

    async def run(self) -> None:
        """Answer until cancelled."""
        free = asyncio.Semaphore(GROUPS)
        async with asyncio.TaskGroup() as groups:
            while True:
                await free.acquire()
                streams = await gather(self._queue, self._full, self._limits.gather_seconds)
                groups.create_task(self._answer(streams)).add_done_callback(lambda _: free.release())

    async def _answer(self, streams: Sequence[Stream[Item, News]]) -> None:
        """Answer a group; an error ends all of its streams."""
        streams = [stream for stream in streams if not stream.left]
        owners = [(stream, number) for stream in streams for number in range(len(stream.items))]
        try:
            growing = await self._compute(self._start, [item for stream in streams for item in stream.items])
            while growing.running:
                gone = [request for request, (stream, _) in enumerate(owners) if stream.left]
                for update in await self._compute(_advance, growing, gone):
                    stream, number = owners[update.request]
                    stream.put((number, update))
        except Exception as error:
            for stream in streams:
                stream.put(error)

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _advance(growing: Growing[News], gone: Sequence[int]) -> Sequence[News]:
    for request in gone:
        growing.leave(request)
    return growing.advance()
