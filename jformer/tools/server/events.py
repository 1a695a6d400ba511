"""Answers as server-sent events (WHATWG HTML, section 9.2): each text as it grows, then the whole answer."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jformer.errors import BrokenRunError, UserError
from jformer.inference.answers import Output
from jformer.tools.server.streams import Stream, Streams

LOG = logging.getLogger("uvicorn.error")
FAILURE = "the server failed"  # what clients are told; the log has the reason
MEDIA_TYPE = "text/event-stream"
Record = Callable[[Sequence[Output]], Mapping[str, object]]


class Events(StreamingResponse):
    """A stream as a response, closed when all is sent, the client disconnects, or it reads too slowly."""

    def __init__(self, streams: Streams, stream: Stream, record: Record) -> None:
        """Send the updates of a stream; `record` makes the content of a whole answer."""
        super().__init__(_events(stream, record), media_type=MEDIA_TYPE)
        self._seconds = 2 * stream.seconds  # to compute, and to be read
        self._close = lambda: streams.close(stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(stream: Stream, record: Record) -> AsyncIterator[str]:
    """Yield the events of a stream.

    An event without a name has the new text of an input, `answer` the whole answer, and `error` the reason why the
    stream ends early. Internal errors are logged with their traceback.
    """
    sent = [""] * len(stream.items)
    try:
        async for number, update in stream:
            if update.text.startswith(sent[number]) and update.text != sent[number]:
                yield _event({"input": number, "text": update.text[len(sent[number]) :]})
                sent[number] = update.text
            if update.outputs is not None:
                yield _event({"input": number, **record(update.outputs)}, "answer")
    except BrokenRunError as error:
        LOG.error("%s", error)
        yield _event({"detail": FAILURE}, "error")
    except UserError as error:
        yield _event({"detail": str(error)}, "error")
    except TimeoutError:
        yield _event({"detail": f"no answer within {stream.seconds:g} s"}, "error")
    except Exception as error:
        LOG.error("a stream failed", exc_info=error)
        yield _event({"detail": FAILURE}, "error")


def _event(content: Mapping[str, Any], name: str = "") -> str:
    """Return an event; JSON has no line breaks of its own."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
