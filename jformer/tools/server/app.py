"""The routes of a server and its error responses: each request gets one answer, never a path or a traceback."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from jformer.errors import UserError
from jformer.tools.server.batcher import Batcher, BusyError, Item, Reply
from jformer.tools.server.engine import Engine
from jformer.tools.server.events import MEDIA_TYPE, Events
from jformer.tools.server.guard import Access, Guard
from jformer.tools.server.limits import Limits
from jformer.tools.server.meters import Meters
from jformer.tools.server.schema import InputsBody, Mistake, PairsBody, WatchedBody
from jformer.tools.server.streams import Streams

PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Mistake, "description": "the request is invalid, or the server is too busy"}
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "answers, or with `stream` events", "content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}
}


class Workers:
    """Compute answers, scores and views in one thread, and streams in another."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        """Make the workers; `running` starts them."""
        self._model, self.growing = ThreadPoolExecutor(1, "model"), ThreadPoolExecutor(1, "stream")
        full, self._limits = engine.predictor.config.decode.batch_size, limits
        self.answers = Batcher(engine.answer, self._model, full, limits)
        self.scores = Batcher(engine.score, self._model, full, limits)
        self.views = Batcher(engine.look_into, self._model, 1, limits)
        self.streams = Streams(engine.grow, self.growing, full, limits)

    @property
    def waiting(self) -> int:
        """The number of texts without an answer so far."""
        return sum(each.waiting for each in (self.answers, self.scores, self.views, self.streams))

    async def ask(self, batcher: Batcher[Item, Reply], items: Sequence[Item]) -> list[Reply]:
        """Return the answers to some items; raise TimeoutError after `answer_seconds`."""
        async with asyncio.timeout(self._limits.answer_seconds):
            return await batcher.ask(items)

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the workers for the duration of the context."""
        workers = (self.answers, self.scores, self.views, self.streams)
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        yield
        for task in tasks:
            task.cancel()
        for pool in (self._model, self.growing):
            pool.shutdown(wait=False, cancel_futures=True)


def build_app(engine: Engine, limits: Limits, access: Access) -> Guard:
    """Return the ASGI application that serves a model."""
    work = Workers(engine, limits)
    meters = Meters(lambda: work.waiting)
    work.answers.on_batch = meters.note_batch
    app = FastAPI(
        title="jformer",
        version=version("jformer"),
        lifespan=work.running,
        docs_url=None,
        redoc_url=None,
        responses=REFUSED,
    )
    _add_answers(app, engine, work)

    @app.get("/v1/health", summary="What is served")
    async def health() -> dict[str, Any]:
        """Return facts about the model, and how many texts wait."""
        return {"status": "ok", **engine.facts(), "waiting": work.waiting}

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        """Return counts and times in Prometheus' text format."""
        return Response(meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_pages(app)
    _add_mistakes(app, limits)
    paths = tuple(str(getattr(route, "path", "")) for route in app.routes)
    return Guard(app, limits, access, paths, meters)


def make_server(app: Guard, limits: Limits) -> uvicorn.Server:
    """Return a server of an application, which stops `stop_seconds` after it was asked to."""
    options = uvicorn.Config(
        app,
        ws="none",
        log_level="warning",
        use_colors=False,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(limits.stop_seconds),
    )
    return uvicorn.Server(options)


def _add_answers(app: FastAPI, engine: Engine, work: Workers) -> None:
    """Add the routes that a model answers."""

    @app.post(
        f"/v1/{engine.route}", summary=f"{engine.route.capitalize()} texts", responses=STREAMED, response_model=Any
    )
    async def answer(body: InputsBody) -> Any:
        """Answer each text with its outputs, best first, and their scores."""
        requests = engine.requests(body)
        if not body.stream:
            return {"answers": await work.ask(work.answers, requests)}
        groups = await asyncio.get_running_loop().run_in_executor(work.growing, engine.streamed, requests)
        return Events(work.streams, work.streams.open(groups), engine.record)

    if engine.scores:

        @app.post("/v1/score", summary="Score targets")
        async def score(body: PairsBody) -> dict[str, Any]:
            """Return the log-probability of each target, and those of its tokens."""
            return {"scores": await work.ask(work.scores, engine.pairs(body))}

    @app.post("/v1/attention", summary="Look into an answer")
    async def attention(body: WatchedBody) -> dict[str, Any]:
        """Return each token with the likeliest alternatives, and what it attends to in the source."""
        return (await work.ask(work.views, [engine.watched(body)]))[0]


def _add_pages(app: FastAPI) -> None:
    """Add the page to type into, whose files are next to this one."""
    for path, (name, kind) in PAGE.items():
        content = files("jformer.tools.server").joinpath(name).read_bytes()

        async def show(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8")

        app.add_api_route(path, show, include_in_schema=False)


def _add_mistakes(app: FastAPI, limits: Limits) -> None:
    """Add the responses to errors."""

    def refuse(status: int, why: str, **headers: str) -> JSONResponse:
        return JSONResponse({"detail": why.encode("utf-8", "replace").decode()}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        """Name the invalid fields, not their values: these may be long, or not JSON."""
        found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
        return refuse(422, "; ".join(found))

    @app.exception_handler(Exception)  # Starlette logs it, too, with its traceback
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return refuse(500, "the server failed")

    @app.exception_handler(UserError)
    async def mistaken(request: Request, error: Exception) -> JSONResponse:
        return refuse(422, str(error))

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> JSONResponse:
        seconds = str(math.ceil(limits.gather_seconds))
        return refuse(429, "too many texts are waiting; try again later", **{"Retry-After": seconds})

    @app.exception_handler(TimeoutError)
    async def late(request: Request, error: TimeoutError) -> JSONResponse:
        return refuse(503, f"no answer within {limits.answer_seconds:g} s", **{"Retry-After": "1"})
