"""Answers as server-sent events (WHATWG HTML, section 9.2): each text as it grows, then the whole answer."""

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse

from jformer.errors import UserError
from jformer.inference.answers import Output, Piece
from jformer.inference.streaming import Update
from jformer.tools.server.guard import Receive, Scope, Send
from jformer.tools.server.streams import Stream, Streams

LOG = logging.getLogger("uvicorn.error")
KIND = "text/event-stream"
Asked = Sequence[Piece]  # a request, as a stream has it
Record = Callable[[Sequence[Output]], Mapping[str, object]]


class Events(StreamingResponse):
    """A stream as a response. The stream is closed at the end, or when the client leaves."""

    def __init__(self, streams: Streams[Asked, Update], stream: Stream[Asked, Update], record: Record) -> None:
        """Send what is told of a stream, whole answers as `record` writes them."""
        super().__init__(_events(stream, record), media_type=KIND)
        self._close = lambda: streams.close(stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(stream: Stream[Asked, Update], record: Record) -> AsyncIterator[str]:
    """Yield the events of a stream.

    One without a name has the text that is new of an input, `answer` has the whole answer, and `error` says why there
    will be no more. What goes wrong inside is logged with its trace, as a failure before an answer is.
    """
    sent = [""] * len(stream.items)
    try:
        async for number, update in stream:
            if update.text.startswith(sent[number]) and update.text != sent[number]:
                yield _event({"input": number, "text": update.text[len(sent[number]) :]})
                sent[number] = update.text
            if update.outputs is not None:
                yield _event({"input": number, **record(update.outputs)}, "answer")
    except UserError as error:
        yield _event({"detail": str(error)}, "error")
    except TimeoutError:
        yield _event({"detail": f"no answer within {stream.seconds:g} s"}, "error")
    except Exception as error:
        LOG.error("a stream failed", exc_info=error)
        yield _event({"detail": "the server failed"}, "error")


def _event(content: Mapping[str, Any], name: str = "") -> str:
    """Return an event; JSON has no line breaks of its own."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
