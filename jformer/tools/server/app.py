"""The routes of a server and its error responses: each request gets one answer, never a path or a traceback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from jformer.errors import BrokenRunError, UserError
from jformer.tools.server.batcher import Batcher, BusyError, Item, Reply
from jformer.tools.server.engine import Engine
from jformer.tools.server.events import FAILURE, LOG, MEDIA_TYPE, Events
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
    """Gather the requests of one model, the run or an adapter of it: a batch never mixes models."""

    def __init__(self, engine: Engine, limits: Limits, model: Executor, growing: Executor) -> None:
        """Compute answers, scores and views in one thread, `model`, and streams in `growing`."""
        full, self._limits = engine.predictor.config.decode.batch_size, limits
        self.engine = engine
        self.answers = Batcher(engine.answer, model, full, limits)
        self.scores = Batcher(engine.score, model, full, limits)
        self.views = Batcher(engine.look_into, model, 1, limits)
        self.streams = Streams(engine.predictor.inputs.pieces, engine.grow, growing, full, limits)

    @property
    def waiting(self) -> int:
        """The number of texts without an answer so far."""
        return sum(each.waiting for each in self.all)

    @property
    def all(self) -> tuple[Batcher[Any, Any] | Streams, ...]:
        """All batchers and streams, each of which must be running."""
        return self.answers, self.scores, self.views, self.streams

    async def ask(self, batcher: Batcher[Item, Reply], items: Sequence[Item]) -> list[Reply]:
        """Return the answers to some items; raise TimeoutError after `answer_seconds`."""
        async with asyncio.timeout(self._limits.answer_seconds):
            return await batcher.ask(items)


def build_app(engine: Engine, limits: Limits, access: Access, adapters: Mapping[str, Engine] | None = None) -> Guard:
    """Return the ASGI application that serves a run, and adapters of it by name."""
    model = ThreadPoolExecutor(1, "model")  # for all models, like the other executor
    devices = engine.predictor.mesh.size if engine.predictor.mesh else 1  # two threads could deadlock their collectives
    threads = model, model if devices > 1 else ThreadPoolExecutor(1, "stream")
    works: dict[str | None, Workers] = {None: Workers(engine, limits, *threads)}
    for name, each in (adapters or {}).items():
        works[name] = Workers(each, limits, *threads)
    meters = Meters(lambda: sum(work.waiting for work in works.values()))
    for work in works.values():
        work.answers.on_batch = meters.note_batch

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each.run()) for work in works.values() for each in work.all]
        yield
        for task in tasks:
            task.cancel()
        for thread in threads:
            thread.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="jformer", version=version("jformer"), lifespan=running, docs_url=None, redoc_url=None, responses=REFUSED
    )
    _add_answers(app, engine, works)

    @app.get("/v1/health", summary="What is served")
    async def health() -> dict[str, Any]:
        """Return facts about the model, and how many texts wait."""
        waiting = sum(work.waiting for work in works.values())
        return {"status": "ok", **engine.facts(), "adapters": [*(adapters or {})], "waiting": waiting}

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


def _add_answers(app: FastAPI, engine: Engine, works: Mapping[str | None, Workers]) -> None:
    """Add the routes that a run and its adapters answer; all have those of the run."""

    def chosen(adapter: str | None) -> Workers:
        if adapter not in works:
            names = ", ".join(repr(name) for name in works if name) or "none"
            raise HTTPException(404, f"adapter {str(adapter)[:40]!r} is not served; there are: {names}")
        return works[adapter]

    @app.post(
        f"/v1/{engine.route}", summary=f"{engine.route.capitalize()} texts", responses=STREAMED, response_model=Any
    )
    async def answer(body: InputsBody) -> Any:
        """Answer each text with its outputs, best first, and their scores."""
        work = chosen(body.adapter)
        requests = work.engine.requests(body)
        if not body.stream:
            return {"answers": await work.ask(work.answers, requests)}
        work.engine.check_streamed(requests)
        return Events(work.streams, await work.streams.open(requests), work.engine.record)

    if engine.scores:

        @app.post("/v1/score", summary="Score targets")
        async def score(body: PairsBody) -> dict[str, Any]:
            """Return the log-probability of each target, and those of its tokens."""
            work = chosen(body.adapter)
            return {"scores": await work.ask(work.scores, work.engine.pairs(body))}

    @app.post("/v1/attention", summary="Look into an answer")
    async def attention(body: WatchedBody) -> dict[str, Any]:
        """Return each token with the likeliest alternatives, and what it attends to in the source."""
        work = chosen(body.adapter)
        return (await work.ask(work.views, [work.engine.watched(body)]))[0]


def _add_pages(app: FastAPI) -> None:
    """Add the page to type into, whose files are next to this one."""
    for path, (name, kind) in PAGE.items():
        content = files("jformer.tools.server").joinpath(name).read_bytes()

        async def show(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8")

        app.add_api_route(path, show, include_in_schema=False)


def _add_mistakes(app: FastAPI, limits: Limits) -> None:
    """Add the responses to errors."""

    def add(kind: type[Exception], status: int, say: Callable[[Any], str], **headers: str) -> None:
        async def refuse(request: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"detail": say(error).encode("utf-8", "replace").decode()}, status, headers)

        app.add_exception_handler(kind, refuse)

    def invalid(error: RequestValidationError) -> str:
        """Name the invalid fields, not their values: these may be long, or not JSON."""
        if isinstance(error.body, bytes):
            return "body: send JSON, with the header Content-Type: application/json"
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])

    def broken(error: BrokenRunError) -> str:
        """Tell the log what to repair, not the client: it may name files."""
        LOG.error("%s", error)
        return FAILURE

    busy, late = "too many texts are waiting; try again later", f"no answer within {limits.answer_seconds:g} s"
    add(RequestValidationError, 422, invalid)
    add(Exception, 500, lambda error: FAILURE)  # Starlette logs it, too, with its traceback
    add(UserError, 422, str)
    add(BrokenRunError, 500, broken)
    add(BusyError, 429, lambda error: busy, **{"Retry-After": "1"})
    add(TimeoutError, 503, lambda error: late, **{"Retry-After": "1"})
