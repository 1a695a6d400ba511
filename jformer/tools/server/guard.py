"""ASGI middleware that every request passes: token, host name, size of the body, security headers, metrics."""

import asyncio
import hmac
import re
import time
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jformer.tools.server.limits import Limits
from jformer.tools.server.meters import Meters

OPEN = ("/", "/page.js", "/page.css", "/v1/health", "/openapi.json")  # without the token, too
HEADERS = (  # of every response: pages load nothing from elsewhere, and no other page embeds them
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


class Access(NamedTuple):
    """Who may send requests."""

    token: str = ""  # that requests must have; "" = none is needed
    hosts: tuple[str, ...] = ()  # accepted Host names; () = all


class Guard:
    """Wraps an ASGI application, which sees only admitted requests whose body has arrived."""

    def __init__(self, app: ASGIApp, limits: Limits, access: Access, paths: tuple[str, ...], meters: Meters) -> None:
        """Wrap an application.

        Args:
            app: the application.
            limits: on the size of a body and the time it may take to arrive.
            access: who may send requests.
            paths: counted by name; all others are counted as "other".
            meters: counts requests and their durations.
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
        except HTTPException as error:
            await JSONResponse({"detail": error.detail}, error.status_code)(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._meters.note_request(path, sending.status, time.monotonic() - began)

    def _check_access(self, scope: Scope) -> None:
        headers, (token, hosts) = dict(scope["headers"]), self._access
        name = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1"))
        if hosts and name not in hosts:
            raise HTTPException(421, f"this server answers as {' or '.join(hosts)}")
        given = headers.get(b"authorization", b"")
        if token and scope["path"] not in OPEN and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "this server needs a token: Authorization: Bearer TOKEN")

    async def _body(self, receive: Receive) -> bytes:
        """Return the whole body; raise HTTPException if it is too large, or does not arrive in time."""
        body = b""
        try:
            async with asyncio.timeout(self._limits.read_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(400, "the client left before its request arrived")
                    body += message.get("body", b"")
                    if len(body) > self._limits.body:
                        raise HTTPException(413, f"a request has at most {self._limits.body:,} bytes; send several")
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise HTTPException(408, f"a request has {self._limits.read_seconds:g} s to arrive") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then the messages of the connection."""
    whole = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(whole, None) or await receive()

    return replayed


class _Sending:
    """Adds HEADERS to a response and remembers its status: 500 until it starts."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await self._send(message)
