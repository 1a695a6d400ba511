"""A server of a small model on the loopback: every request gets one answer, the model's own or why there is none."""

import json
import logging
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest

from jformer.data.tokenizers.lists import ByteTokenizer
from jformer.errors import BrokenRunError, UserError
from jformer.inference.answers import Attended, Choice, Request, check_texts
from jformer.inference.predict import load
from jformer.tools.server import schema
from jformer.tools.server.app import make_server
from jformer.tools.server.engine import ROUTES, Engine
from jformer.tools.server.guard import Access
from jformer.tools.server.serve import LOCAL, opened
from tests.tools.hf import small_runs
from tests.tools.server.serving import LIMITS, PATH, as_events, ask, served, small_predictor
from tests.watching import wait_until


@pytest.fixture(scope="module")
def predictor(tiny):
    return small_predictor(tiny)


@pytest.fixture(scope="module")
def port(predictor):
    with served(Engine(predictor, LIMITS), access=Access(hosts=LOCAL)) as port:
        yield port


def test_answers_are_those_of_predict_whoever_asks_at_the_same_time(port, predictor):
    texts = [letter * (1 + i % 9) + " " + letter for i in range(15) for letter in "abcdefgh"]
    expected = [outputs[0].text for outputs in predictor.generate(texts)]
    assert len(set(expected)) > 20
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda text: ask(port, body={"inputs": [text]}), texts))
    assert [status for status, _ in answers] == [200] * len(texts)
    assert [content["answers"][0]["outputs"][0]["text"] for _, content in answers] == expected


@pytest.mark.slow
def test_an_answer_has_all_outputs_with_their_numbers_and_keeps_the_order(port, predictor):
    inputs = ["abc", {"source": "hg", "prefix": "ab"}, "", {"source": "cab", "constraints": ["d"]}]
    status, content = ask(port, body={"inputs": inputs})
    assert status == 200
    outputs = [answer["outputs"] for answer in content["answers"]]
    assert [len(each) for each in outputs] == [2, 2, 1, 2]
    assert outputs[0][0].keys() == {"text", "score"}
    assert outputs[1][0]["text"].startswith("ab")
    assert outputs[2][0]["text"] == ""
    assert "d" in outputs[3][0]["text"]
    first = predictor.generate([Request("abc")])[0][0]
    assert outputs[0][0] == {"text": first.text, "score": pytest.approx(first.score, abs=1e-4)}


def test_a_request_names_the_adapter_that_answers_it(tiny, predictor):
    other = small_predictor(tiny)
    other.params = jax.tree.map(lambda leaf: -leaf, predictor.params)
    assert other.predict(["abc"]) != predictor.predict(["abc"])
    with served(Engine(predictor, LIMITS), adapters={"other": Engine(other, LIMITS)}) as port:
        for model, name in ((predictor, None), (other, "other")):
            assert ask(port, body={"inputs": ["abc"], "adapter": name})[1] == {
                "answers": [{"outputs": [{"text": o.text, "score": pytest.approx(o.score, abs=1e-4)}
                                         for o in model.generate(["abc"])[0]]}]
            }  # fmt: skip
            body = {"pairs": [{"source": "abc", "target": "cab"}], "adapter": name}
            score = ask(port, "/v1/score", body)[1]["scores"][0]["log_prob"]
            assert score == pytest.approx(model.score([("abc", "cab")])[0].log_prob, abs=1e-4)
            looked = ask(port, "/v1/attention", {"source": "abc", "adapter": name})[1]
            assert looked["target"] == model.predict(["abc"])[0]
            streamed = as_events(ask(port, body={"inputs": ["abc"], "adapter": name, "stream": True})[1])
            assert streamed[-1][1]["outputs"][0]["text"] == model.predict(["abc"])[0]
        unknown = {"detail": "adapter 'third' is not served; there are: 'other'"}
        assert ask(port, body={"inputs": ["abc"], "adapter": "third"}) == (404, unknown)
        assert ask(port, "/v1/health")[1]["adapters"] == ["other"]


def test_targets_are_scored(port, predictor):
    status, content = ask(port, "/v1/score", {"pairs": [{"source": "abc", "target": "cab"}]})
    expected = predictor.score([("abc", "cab")])[0]
    (found,) = content["scores"]
    assert (status, found["length"], found["tokens"]) == (200, 4, list(expected.tokens))
    assert found["log_prob"] == pytest.approx(expected.log_prob, abs=1e-4)


def test_a_language_model_refuses_a_source_that_it_would_not_read(tiny, monkeypatch):
    engine = Engine(small_predictor(tiny), LIMITS)
    monkeypatch.setattr(engine.predictor.inputs, "continues", True)
    with pytest.raises(UserError, match=r"source='2 \+ 2 =': a language model reads none, send the whole"):
        engine.pairs(schema.PairsBody(pairs=[{"source": "2 + 2 =", "target": "4"}]))
    assert engine.pairs(schema.PairsBody(pairs=[{"source": "", "target": "4"}]))[0].target == "4"


def test_an_answer_is_looked_into(port):
    status, content = ask(port, "/v1/attention", {"source": "abc", "target": "cab"})
    assert (status, content["target"]) == (200, "cab")
    assert [token["token"] for token in content["tokens"]][:3] == ["c", "a", "b"]
    assert [len(token["likeliest"]) for token in content["tokens"]] == [5] * 4
    assert all(sum(row) == pytest.approx(1, abs=0.01) for row in content["attention"])
    assert len(content["attention"][0]) == len(content["source_tokens"])
    for place, (token, prefixes) in enumerate(zip(content["tokens"], content["prefixes"], strict=True)):
        names = [name for name, _ in token["likeliest"]]
        assert prefixes == [None if name.startswith("<") else "cab"[:place] + name for name in names]
    assert None in content["prefixes"][3]  # the end begins nothing


def test_a_byte_that_completes_no_character_begins_nothing():
    letters = ByteTokenizer("identity")
    numbers = {token: number for number, token in enumerate(letters.tokens)}
    predictor = SimpleNamespace(tokenizers=(letters, letters))
    engine = SimpleNamespace(route=ROUTES["text"], predictor=predictor, _numbers=numbers)
    choices = [
        Choice(f"<0x{byte:02X}>", 0.5, (("<0xC3>", 0.5), ("<0xA9>", 0.1), ("<0x61>", 0.1))) for byte in "aé".encode()
    ]
    asked = Attended("", "aé", choices=tuple(choices))
    assert Engine._prefixes(engine, asked) == [[None, None, "a"], [None, None, "aa"], [None, "aé", None]]


def test_only_tokens_of_no_text_begin_nothing_in_an_imported_vocabulary(tmp_path, monkeypatch):
    engine = Engine(load(small_runs.marian(tmp_path / "run")), LIMITS)  # "!" has id 2, "<pad>" the last one
    likeliest = [(token, 0.1) for token in ("!", ",", "</s>", "<unk>", "<pad>", "<81>")]
    choices = tuple(Choice(token, 0.1, tuple(likeliest)) for token in ("&", "!"))
    monkeypatch.setattr(engine.predictor, "attend", lambda pairs: [Attended("the cat", "&!", choices=choices)])
    (looked,) = engine.look_into([("the cat", "&!")])
    assert looked[0]["prefixes"] == [["!", ",", *[None] * 4], ["&!", "&,", *[None] * 4]]


@pytest.mark.slow
def test_warming_up_tells_nothing_of_how_long_outputs_are(predictor):
    predictor._search._learn(short=True, tried=100, unfinished=100)
    assert not predictor._search.outputs_are_short
    Engine(predictor, LIMITS).warm_up()
    assert (predictor._search.outputs_are_short, dict(predictor.counts)) == (True, {})


def test_a_vocabulary_of_bytes_is_warmed_up_with_texts(predictor, monkeypatch):
    warmed = []
    monkeypatch.setattr(predictor, "tokenizers", (ByteTokenizer("identity"),) * 2)
    monkeypatch.setattr(predictor, "generate", lambda texts: warmed.extend(check_texts(texts, "", one_line=True)))
    Engine(predictor, LIMITS).warm_up()
    assert max(map(len, warmed)) > 20


def test_health_says_what_is_served(port):
    status, content = ask(port, "/v1/health")
    assert (status, content["status"], content["route"], content["waiting"]) == (200, "ok", PATH, 0)


def test_the_description_names_every_path(port):
    _, content = ask(port, "/openapi.json")
    assert content["paths"].keys() == {PATH, "/v1/score", "/v1/attention", "/v1/health", "/metrics"}


def test_figures_count_requests_and_texts(port):
    def figure(name):
        lines = ask(port, "/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    answered = f'jformer_requests_total{{path="{PATH}",status="200"}}'
    before = figure(answered), figure("jformer_batch_texts_sum")
    ask(port, body={"inputs": ["a", "b", "c"]})
    assert (figure(answered), figure("jformer_batch_texts_sum")) == (before[0] + 1, before[1] + 3)
    ask(port, "/no/such/path")
    assert figure('jformer_requests_total{path="other",status="404"}') >= 1


MISTAKES = {
    "no JSON": (b"{", 422),
    "no object": ([1], 422),
    "nothing": ({}, 422),
    "no text": ({"inputs": [1]}, 422),
    "no list": ({"inputs": "abc"}, 422),
    "an empty list": ({"inputs": []}, 422),
    "an unknown field": ({"inputs": ["a"], "beam_size": 9}, 422),
    "an unknown field of a text": ({"inputs": [{"source": "a", "n": 1}]}, 422),
    "too many texts": ({"inputs": ["a"] * 21}, 422),
    "too long a text": ({"inputs": ["a" * 61]}, 422),
    "too long a prefix": ({"inputs": [{"source": "a", "prefix": "a" * 61}]}, 422),
    "too many phrases": ({"inputs": [{"source": "a", "constraints": ["b"] * 9}]}, 422),
    "too long a phrase": ({"inputs": [{"source": "a", "constraints": ["b" * 101]}]}, 422),
    "a line break": ({"inputs": ["a\nb"]}, 422),
    "a NUL": ({"inputs": ["a\0"]}, 422),
    "lone surrogate": (b'{"inputs": ["\\ud800"]}', 422),
    "bytes that are no UTF-8": (b'{"inputs": ["\xff"]}', 400),
    "a number that is none": (b'{"inputs": NaN}', 422),
    "a phrase that cannot be written": ({"inputs": [{"source": "a", "constraints": ["z"]}]}, 422),
    "deep nesting": (b'{"inputs": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", None),
    "too large a body": (b" " * 20_001, 413),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_a_line_and_neither_path_nor_trace(port, name):
    body, expected = MISTAKES[name]
    status, content = ask(port, body=body)
    assert status == expected or (expected is None and 400 <= status < 500)
    assert content.keys() == {"detail"}
    assert isinstance(content["detail"], str)
    assert not any(word in content["detail"] for word in ("Traceback", ".py", "/home", "/work", "/tmp"))


@pytest.mark.parametrize(
    ("path", "method", "body", "status"),
    [
        ("/v1/nothing", "GET", None, 404),
        (PATH, "GET", None, 405),
        (PATH, "PUT", b"{}", 405),
        ("/../../etc/passwd", "GET", None, 404),
        ("/page.css/../page.html", "GET", None, 404),
    ],
)
def test_what_is_not_there_is_refused(port, path, method, body, status):
    assert ask(port, path, body, method)[0] == status


def test_a_body_that_is_not_declared_as_json_is_refused(port):
    # A form of another site can send such a body without asking this server first.
    status, answer = ask(port, body={"inputs": ["a"]}, headers={"Content-Type": "text/plain"})[:2]
    assert status == 422
    assert "with the header Content-Type: application/json" in str(answer)


def test_a_server_of_this_machine_has_no_other_name(port):
    for host, status in (("localhost", 200), (f"127.0.0.1:{port}", 200), ("evil.example", 421), ("", 421)):
        assert ask(port, "/v1/health", headers={"Host": host})[0] == status, host


def test_a_mistake_in_one_request_spoils_no_other(port):
    bad, good = {"source": "a", "constraints": ["z"]}, "abc"
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(lambda i: ask(port, body={"inputs": [bad if i % 2 else good]})[0], range(8))
    assert list(answers) == [200, 422] * 4


def test_clients_that_vanish_or_are_slow_hold_up_nobody(port):
    body = json.dumps({"inputs": ["abc"] * 20}).encode()
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(body)}
    head = "\r\n".join((f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""))
    for sent in (body, body[:5]):  # a whole request, and half of one
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(head.encode() + sent)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(head.encode() + body[:5])
        assert ask(port, body={"inputs": ["abc"]})[0] == 200
        slow.settimeout(10)
        assert b" 408 " in slow.recv(1_000).partition(b"\r\n")[0]
    wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 0)


def slowly(engine, monkeypatch, seconds):
    answer = engine.answer
    monkeypatch.setattr(engine, "answer", lambda requests: [time.sleep(seconds), answer(requests)][1])
    return engine


@pytest.mark.slow
def test_more_than_may_wait_is_told_to_come_back(predictor, monkeypatch):
    limits = LIMITS._replace(waiting=4)
    with served(slowly(Engine(predictor, limits), monkeypatch, 1.0), limits) as port, ThreadPoolExecutor(4) as clients:
        statuses = clients.map(lambda _: ask(port, body={"inputs": ["a", "b"]})[0], range(4))
        assert sorted(statuses) == [200, 200, 429, 429]
        assert ask(port, body={"inputs": ["a"]})[0] == 200


def test_an_answer_that_takes_too_long_is_given_up(predictor, monkeypatch):
    limits = LIMITS._replace(answer_seconds=0.2)
    with served(slowly(Engine(predictor, limits), monkeypatch, 1.0), limits) as port:
        assert ask(port, body={"inputs": ["a"]}) == (503, {"detail": "no answer within 0.2 s"})


@pytest.mark.parametrize("kind", [OSError, ValueError, KeyError, BrokenRunError])
def test_a_failure_of_ours_tells_nothing_of_the_inside(predictor, monkeypatch, kind):
    engine = Engine(predictor, LIMITS)

    def fail(requests):
        raise kind("/secret/path")

    monkeypatch.setattr(engine, "answer", fail)
    with served(engine) as port:
        assert ask(port, body={"inputs": ["a"]}) == (500, {"detail": "the server failed"})
        assert ask(port, "/v1/health")[0] == 200


def test_only_who_sends_the_token_is_answered(predictor):
    with served(Engine(predictor, LIMITS), access=Access(token="open sesame")) as port:
        for given, status in (("", 401), ("Bearer x", 401), ("open sesame", 401), ("Bearer open sesame", 200)):
            assert ask(port, body={"inputs": ["a"]}, headers={"Authorization": given})[0] == status, given
        assert ask(port, "/metrics")[0] == 401
        assert ask(port, "/")[0] == ask(port, "/v1/health")[0] == 200


def test_what_was_begun_is_answered_before_the_server_stops(predictor, monkeypatch):
    with ThreadPoolExecutor(1) as clients:
        with served(slowly(Engine(predictor, LIMITS), monkeypatch, 1.0)) as port:
            answer = clients.submit(ask, port, body={"inputs": ["abc"]})
            wait_until(lambda: ask(port, "/v1/health")[1]["waiting"] == 1)
        assert answer.result()[0] == 200


def test_a_port_that_is_taken_is_one_line(port):
    with pytest.raises(UserError, match=rf"cannot listen on --host=127\.0\.0\.1 --port={port} \(Address already"):
        opened("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot listen on"):
        opened("no.such.host.invalid", 0)


def test_what_the_server_warns_of_has_no_colours_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    make_server(None, LIMITS)
    (handler,) = logging.getLogger("uvicorn").handlers
    warning = logging.LogRecord(
        "uvicorn.error", logging.WARNING, __file__, 1, "Invalid HTTP request received.", (), None
    )
    assert handler.format(warning).split() == ["WARNING:", "Invalid", "HTTP", "request", "received."]
