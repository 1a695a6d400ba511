"""What a connection may take of a server's patience: those that neither ask nor read are closed."""

import asyncio
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jformer.tools.server.guard import Guard
from jformer.tools.server.limits import Limits

if TYPE_CHECKING:
    from asyncio import Transport


def make_server(app: Guard, limits: Limits) -> uvicorn.Server:
    """Return a server of an application whose connections wait no longer than the limits say."""
    options = uvicorn.Config(
        app,
        http=patient(AutoHTTPProtocol, limits.read_seconds),
        ws="none",
        log_level="warning",
        use_colors=False,  # as nowhere here, so that nobody has to turn them off
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(limits.stop_seconds),
    )
    return uvicorn.Server(options)


def patient(protocol: Any, seconds: float) -> Any:
    """Return a protocol of uvicorn that gives up a client after so many seconds.

    uvicorn waits for ever for the first bytes of a first request, for the rest of a head, and for a client that takes
    nothing on. Here time begins anew when a connection is made, an answer is complete, and writing stops or goes on;
    when it is over, a connection without a request to answer, or whose client does not read, is closed. A body has a
    time of its own, in `guard`.
    """

    class Patient(protocol):
        _over: asyncio.TimerHandle | None = None

        def connection_made(self, transport: "Transport") -> None:
            super().connection_made(transport)
            self._begin()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._over:
                self._over.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._begin()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._begin()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._begin()

        def _begin(self) -> None:
            if self._over:
                self._over.cancel()
            self._over = self.loop.call_later(seconds, self._end)

        def _end(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if not answering or self.flow.write_paused:
                self.transport.abort()  # what close() does only once all is read

    return Patient
