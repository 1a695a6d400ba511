"""Streaming: requests that arrive at about the same time form a group and advance together, a few tokens at a time.

Several groups take turns, so that a late request need not wait for an earlier group to end. No HTTP here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from jformer.inference.answers import Piece, Request
from jformer.inference.streaming import Streaming, StreamUpdate
from jformer.tools.server.batcher import BusyError, gather
from jformer.tools.server.limits import Limits

GROUPS = 4  # active at a time; later requests are gathered for the next one
Item = Sequence[Piece]  # of a request


class Stream:
    """The items of one caller. Iterate over it for their updates; `Streams.close` abandons them."""

    def __init__(self, items: Sequence[Item], seconds: float, until: float) -> None:
        """Hold the items, which must be answered within some seconds, i.e. by a time of the event loop."""
        self.items, self.seconds, self.left = items, seconds, False
        self._until = until
        self._updates: asyncio.Queue[tuple[int, StreamUpdate] | Exception] = asyncio.Queue()

    def put(self, update: tuple[int, StreamUpdate] | Exception) -> None:
        """Add (number of an item, its update), or the error that ends the stream."""
        self._updates.put_nowait(update)

    async def __aiter__(self) -> AsyncIterator[tuple[int, StreamUpdate]]:
        """Yield (number of an item, update) until all are answered; raise the error that ends them."""
        missing = len(self.items)
        while missing:
            async with asyncio.timeout_at(self._until):
                update = await self._updates.get()
            if isinstance(update, Exception):
                raise update
            missing -= update[1].outputs is not None
            yield update


class Streams:
    """Gathers the items of several callers into groups, and gives each caller its own updates."""

    def __init__(
        self,
        read: Callable[[Sequence[Request]], Sequence[Item]],
        start: Callable[[Sequence[Item]], Streaming],
        executor: Executor,
        full: int,
        limits: Limits,
    ) -> None:
        """Gather requests; `run` must be running.

        Args:
            read: makes an item of each request; called by `executor`, as `start` is.
            start: begins to answer a group.
            executor: of one thread.
            full: the most items of a group.
            limits: on the items that are active, and on the time until they are answered.
        """
        self._read, self._start, self._executor, self._full, self._limits = read, start, executor, full, limits
        self._queue: asyncio.Queue[Stream] = asyncio.Queue()
        self.waiting = 0  # items without an answer so far

    async def open(self, requests: Sequence[Request]) -> Stream:
        """Return the stream of some requests, to be closed by `close`.

        Raises BusyError if too many are active, TimeoutError if they are not read in time, and what `read` raises.
        """
        if self.waiting and self.waiting + len(requests) > self._limits.streams:
            raise BusyError
        seconds = self._limits.answer_seconds
        until = asyncio.get_running_loop().time() + seconds
        self.waiting += len(requests)
        try:
            async with asyncio.timeout_at(until):
                stream = Stream(await self._compute(self._read, requests), seconds, until)
        except BaseException:
            self.waiting -= len(requests)
            raise
        self._queue.put_nowait(stream)
        return stream

    def close(self, stream: Stream) -> None:
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

    async def _answer(self, streams: Sequence[Stream]) -> None:
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


def _advance(growing: Streaming, gone: Sequence[int]) -> Sequence[StreamUpdate]:
    for request in gone:
        growing.leave(request)
    return growing.advance()
