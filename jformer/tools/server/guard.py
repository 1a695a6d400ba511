"""What every request passes: the token, the size and the time of its body, and what is counted of it."""

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from jformer.tools.server.limits import Limits
from jformer.tools.server.meters import Meters

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/page.js", "/page.css", "/docs", "/v1/health", "/openapi.json")  # for those without the token, too
HEADERS = (  # of every answer: a page that loads nothing from elsewhere and is shown within no other
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


class Access(NamedTuple):
    """Who may ask."""

    token: str = ""  # that requests must bring; "" is none
    hosts: tuple[str, ...] = ()  # names that requests may call this server by; () are all


class RefusedError(Exception):
    """A request that goes no further, with its status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """An ASGI application around another one, which gets only requests that have arrived whole."""

    def __init__(self, app: App, limits: Limits, access: Access, paths: tuple[str, ...], meters: Meters) -> None:
        """Stand before an application.

        Args:
            app: what answers the requests that are let pass.
            limits: of bodies, and of the time until one is there.
            access: who may ask.
            paths: those that are counted by their names; all others are one.
            meters: what requests and their times are told to.
        """
        self._app, self._limits, self._access, self._paths, self._meters = app, limits, access, paths, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        sending = _Sending(send)
        try:
            self._check_access(scope)
            body = await self._body(receive)
            await self._app(scope, _replay(body, receive), sending)
        except RefusedError as error:
            await JSONResponse({"detail": str(error)}, error.status)(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._meters.note_request(path, sending.status, time.monotonic() - began)

    def _check_access(self, scope: Scope) -> None:
        headers, (token, hosts) = dict(scope["headers"]), self._access
        name = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1"))
        if hosts and name not in hosts:
            raise RefusedError(421, f"this server answers as {' or '.join(hosts)}")
        given = headers.get(b"authorization", b"")
        if token and scope["path"] not in OPEN and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise RefusedError(401, "this server answers to those who send its token: Authorization: Bearer TOKEN")

    async def _body(self, receive: Receive) -> bytes:
        """Return the whole body; it has so much time to arrive."""
        body = b""
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "the client left before its request had arrived")
                    body += message.get("body", b"")
                    if len(body) > self._limits.body:
                        raise RefusedError(413, f"a request has at most {self._limits.body:,} bytes; send several")
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise RefusedError(408, f"a request has {self._limits.read_seconds:g} s to arrive") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives the body once, and then what the connection has to tell."""
    whole = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> MutableMapping[str, Any]:
        return next(whole, None) or await receive()

    return replayed


class _Sending:
    """Sends an answer with the headers that all have, and remembers its status: 500 until there is one."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self._send = send

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await self._send(message)
