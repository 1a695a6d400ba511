"""Answers that are sent while they grow: each client gets its own, and none is computed for those who leave."""

import asyncio
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jformer.inference.answers import Request
from jformer.parallel.mesh import make_mesh
from jformer.tools.server import app
from jformer.tools.server.engine import Engine
from jformer.tools.server.events import Events
from jformer.tools.server.guard import Access
from jformer.tools.server.streams import Streams
from tests.tools.server.serving import LIMITS, PATH, as_events, ask, served, small_predictor
from tests.watching import wait_until


@pytest.fixture(scope="module")
def predictor(tiny):
    return small_predictor(tiny, beam_size=1, n_best=1, max_extra_length=20)


@pytest.fixture(scope="module")
def port(predictor):
    with served(Engine(predictor, LIMITS)) as port:
        yield port


def stream(port, *inputs):
    status, content = ask(port, body={"inputs": inputs, "stream": True})
    return as_events(content) if status == 200 else (status, content)


def slow(engine, monkeypatch, seconds, advanced=None):
    """Let every step of an engine's streams take some time, and count them in a list."""
    grow, advanced = engine.grow, [] if advanced is None else advanced

    def slowly(groups):
        growing = grow(groups)
        advance = growing.advance
        monkeypatch.setattr(growing, "advance", lambda: [time.sleep(seconds), advanced.append(1), advance()][2])
        return growing

    monkeypatch.setattr(engine, "grow", slowly)
    return engine


@pytest.mark.slow
def test_streams_end_as_predict_answers_whoever_asks_at_the_same_time(port, predictor):
    texts = [letter * (1 + i % 9) + " " + letter for i in range(3) for letter in "abcdefgh"]
    expected = [outputs[0].text for outputs in predictor.generate(texts)]
    with ThreadPoolExecutor(12) as clients:
        found = list(clients.map(lambda text: stream(port, text), texts))
    for events, text in zip(found, expected, strict=True):
        assert events[-1][0] == "answer"
        assert events[-1][1]["outputs"][0]["text"] == text
        assert [name for name, _ in events[:-1]] == [""] * (len(events) - 1)
        assert "".join(content["text"] for _, content in events[:-1]) == text
    assert max(map(len, found)) > 5


@pytest.mark.slow
def test_the_inputs_of_a_request_are_told_apart(port, predictor):
    events = stream(port, "abc", {"source": "hg", "prefix": "ab"}, "")
    grown = ["".join(content["text"] for name, content in events if not name and content["input"] == i) for i in (0, 1)]
    answers = {content.pop("input"): content for name, content in events if name == "answer"}
    asked = [Request("abc"), Request("hg", "ab"), Request("")]
    expected = [outputs[0].text for outputs in predictor.generate(asked)]
    assert [answers[i]["outputs"][0]["text"] for i in range(3)] == expected
    assert grown == expected[:2]
    plain = ask(port, body={"inputs": ["abc"]})[1]["answers"][0]["outputs"][0]
    assert answers[0]["outputs"][0] == {**plain, "score": pytest.approx(plain["score"], abs=1e-4)}


def test_a_mistake_is_answered_before_a_stream_begins(port):
    assert stream(port, "a\nb")[0] == 422
    assert stream(port, {"source": "a", "constraints": ["b"]})[0] == 422
    status, content = ask(port, body={"inputs": ["a"], "stream": 1})
    assert (status, "stream" in content["detail"]) == (422, True)


@pytest.mark.slow
def test_nothing_is_computed_for_a_client_that_leaves(predictor, monkeypatch):
    advanced = []
    with served(slow(Engine(predictor, LIMITS), monkeypatch, 0.05, advanced)) as port:
        body = json.dumps({"inputs": ["abcdefgh" * 5], "stream": True}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.readline().startswith(b"data: ")
        connection.close()
        stopped = len(advanced)
        wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 0)
        time.sleep(0.2)
        assert len(advanced) <= stopped + 3
        whole = stream(port, "abcdefgh" * 5)
        assert whole[-1][0] == "answer"
    assert len(advanced) > 2 * stopped + 3


@pytest.mark.slow
def test_more_than_are_streamed_at_a_time_are_told_to_come_back(predictor, monkeypatch):
    limits = LIMITS._replace(streams=3)
    engine = slow(Engine(predictor, limits), monkeypatch, 0.1)
    with served(engine, limits) as port, ThreadPoolExecutor(2) as clients:
        first = clients.submit(stream, port, "abc", "b")
        wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 2)
        assert stream(port, "a", "b")[0] == 429
        assert stream(port, *"abcd")[0] == 422
        assert ask(port, body={"inputs": ["a"]})[0] == 200  # others are answered meanwhile
        assert first.result()[-1][0] == "answer"
        assert stream(port, "a", "b")[-1][0] == "answer"


def test_a_stream_that_takes_too_long_says_so(predictor, monkeypatch):
    limits = LIMITS._replace(answer_seconds=0.5)
    with served(slow(Engine(predictor, limits), monkeypatch, 0.3), limits) as port:
        assert stream(port, "abcdefgh")[-1] == ("error", {"detail": "no answer within 0.5 s"})
        wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 0)


def test_limits_hold_before_a_stream_begins_while_the_thread_of_streams_is_busy(predictor, monkeypatch):
    limits, engine, free = LIMITS._replace(answer_seconds=0.5, streams=2), Engine(predictor, LIMITS), threading.Event()
    pieces = predictor.inputs.pieces
    monkeypatch.setattr(predictor.inputs, "pieces", lambda requests: [free.wait(30), pieces(requests)][1])
    with served(engine, limits) as port, ThreadPoolExecutor(1) as clients:
        first = clients.submit(stream, port, "abc", "b")
        wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 2)
        assert stream(port, "a")[0] == 429
        assert first.result() == (503, {"detail": "no answer within 0.5 s"})
        assert ask(port, "/v1/health")[1]["waiting"] == 0
        free.set()


def test_a_failure_in_the_middle_tells_nothing_of_the_inside(predictor, monkeypatch):
    engine, broken = Engine(predictor, LIMITS), [True]
    grow = engine.grow

    def fail(groups):
        if broken.pop():
            raise OSError("/secret/path")
        return grow(groups)

    monkeypatch.setattr(engine, "grow", fail)
    with served(engine) as port:
        assert stream(port, "a") == [("error", {"detail": "the server failed"})]
        broken.append(False)
        assert stream(port, "a")[-1][0] == "answer"


def test_a_stream_is_ended_before_the_server_stops(predictor, monkeypatch):
    with ThreadPoolExecutor(1) as clients:
        with served(slow(Engine(predictor, LIMITS), monkeypatch, 0.05)) as port:
            found = clients.submit(stream, port, "abc")
            wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 1)
        assert found.result()[-1][0] == "answer"


@pytest.mark.parametrize(("devices", "threads"), [(1, ["model", "stream"]), (2, ["model"])])
def test_programs_of_several_devices_start_in_one_thread(tiny, monkeypatch, devices, threads):
    made = []
    monkeypatch.setattr(app, "ThreadPoolExecutor", lambda count, name: made.append(name) or ThreadPoolExecutor(count))
    app.build_app(Engine(small_predictor(tiny, mesh=make_mesh(devices)), LIMITS), LIMITS, Access())
    assert made == threads


def test_what_has_no_beginning_is_not_streamed(tiny):
    with served(Engine(small_predictor(tiny, search="mbr", samples=2, n_best=1, beam_size=4), LIMITS)) as port:
        assert stream(port, "a")[0] == 422
        assert ask(port, "/v1/health")[1]["streams"] is False


def test_a_stream_that_its_client_does_not_read_is_closed():
    async def scenario():
        streams = Streams(list, None, None, 8, LIMITS._replace(answer_seconds=0.05))
        response = Events(streams, await streams.open(["a"]), None)
        blocked = asyncio.Event()
        async with asyncio.timeout(10):
            await response({"type": "http"}, lambda: blocked.wait(), lambda message: blocked.wait())
        return streams.waiting

    assert asyncio.run(scenario()) == 0
