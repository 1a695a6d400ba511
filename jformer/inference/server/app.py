"""The paths of a server, and what becomes of mistakes: each request gets one answer, and none a path or a trace."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from jformer.errors import UserError
from jformer.inference.server.batcher import Batcher, BusyError
from jformer.inference.server.engine import Engine
from jformer.inference.server.guard import Access, Guard
from jformer.inference.server.limits import Limits
from jformer.inference.server.meters import Meters
from jformer.inference.server.schema import Inputs, Pairs, Watched

PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


def build_app(engine: Engine, limits: Limits, access: Access) -> Guard:
    """Return the application of a model; it computes in one thread of its own."""
    executor = ThreadPoolExecutor(1, "model")
    full = engine.predictor.config.decode.batch_size
    answers, scores = (Batcher(work, executor, full, limits) for work in (engine.answer, engine.score))
    views = Batcher(engine.look_into, executor, 1, limits)
    batchers = (answers, scores, views)
    meters = Meters(lambda: sum(batcher.waiting for batcher in batchers))
    answers.on_batch = meters.note_batch

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(batcher.run()) for batcher in batchers]
        yield
        for task in tasks:
            task.cancel()
        executor.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="jformer", version=version("jformer"), lifespan=lifespan, docs_url=None, redoc_url=None)

    async def ask(batcher: Batcher, items: Sequence[Any]) -> list[Any]:
        async with asyncio.timeout(limits.answer_seconds):
            return await batcher.ask(items)

    @app.post(f"/v1/{engine.route}", summary=f"{engine.route.capitalize()} texts")
    async def answer(body: Inputs) -> dict[str, Any]:
        """Answer each text with its outputs, best first, and the numbers that the search gives."""
        return {"answers": await ask(answers, engine.requests(body))}

    if engine.scores:

        @app.post("/v1/score", summary="Score targets")
        async def score(body: Pairs) -> dict[str, Any]:
            """Return the log-probability of each target, and those of its tokens."""
            return {"scores": await ask(scores, engine.pairs(body))}

    @app.post("/v1/attention", summary="Look into an answer")
    async def attention(body: Watched) -> dict[str, Any]:
        """Return each token with what might have stood there instead, and what it attends to in the source."""
        return (await ask(views, [engine.watched(body)]))[0]

    @app.get("/v1/health", summary="What is served")
    async def health() -> dict[str, Any]:
        """Return what the model is and how many texts wait."""
        return {"status": "ok", **engine.facts(), "waiting": sum(batcher.waiting for batcher in batchers)}

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        """Return counts and times in Prometheus' text format."""
        return Response(meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_page(app)
    _add_mistakes(app, limits)
    paths = tuple(str(getattr(route, "path", "")) for route in app.routes)
    return Guard(app, limits, access, paths, meters)


def _add_page(app: FastAPI) -> None:
    """Add the page for people; its files lie beside this one."""
    here = files("jformer.inference.server")
    for path, (name, kind) in PAGE.items():
        content = here.joinpath(name).read_bytes()

        async def show(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=f"{kind}; charset=utf-8")

        app.add_api_route(path, show, include_in_schema=False)


def _add_mistakes(app: FastAPI, limits: Limits) -> None:
    """Say what is answered to what cannot be done."""

    def refuse(status: int, why: str, **headers: str) -> JSONResponse:
        return JSONResponse({"detail": why.encode("utf-8", "replace").decode()}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        """Name the places, and not what stands there: it may be long, and no JSON."""
        found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
        return refuse(422, "; ".join(found))

    @app.exception_handler(Exception)  # it is logged, too, with its trace
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return refuse(500, "the server failed")

    @app.exception_handler(UserError)
    async def mistaken(request: Request, error: Exception) -> JSONResponse:
        return refuse(422, str(error))

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> JSONResponse:
        seconds = str(math.ceil(limits.gather_seconds))
        return refuse(429, "more texts wait already than are answered soon; ask again then", **{"Retry-After": seconds})

    @app.exception_handler(TimeoutError)
    async def late(request: Request, error: TimeoutError) -> JSONResponse:
        return refuse(503, f"no answer within {limits.answer_seconds:g} s", **{"Retry-After": "1"})
