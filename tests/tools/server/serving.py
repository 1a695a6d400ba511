"""A server of a small model on the loopback, and how its tests ask it."""

import contextlib
import http.client
import json

from jformer.tools.server.app import build_app, make_server
from jformer.tools.server.guard import Access
from jformer.tools.server.limits import Limits
from jformer.tools.server.serve import opened, running
from tests.inference import untrained
from tests.inference.untrained import MODEL, ROWS
from tests.watching import wait_until

PATH = "/v1/translate"
LIMITS = Limits(texts=20, characters=60, prefix=50, body=20_000, read_seconds=1.0, answer_seconds=30.0)


def small_predictor(tiny, **options):
    """Return the Predictor of an untrained model, two beams if nothing else is said."""
    options = {"batch_size": 8, "beam_size": 2, "n_best": 2, "max_extra_length": 6, **options}
    return untrained.predictor(*tiny(vocab_size=ROWS, **MODEL), data={"max_source_length": 64}, **options)


@contextlib.contextmanager
def served(engine, limits=LIMITS, access=Access(), adapters=None):  # noqa: B008  # it is a tuple
    """Serve at a free port of the loopback, and yield the port."""
    app = build_app(engine, limits, access, adapters)
    with contextlib.closing(opened("127.0.0.1", 0)) as listener:
        server = make_server(app, limits)
        with running(server, listener) as thread:
            wait_until(lambda: server.started or not thread.is_alive())
            yield listener.getsockname()[1]


def ask(port, path=PATH, body=None, method=None, headers=None):
    """Return (status, content) of a request; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
    answer = connection.getresponse()
    content, kind = answer.read(), answer.headers["content-type"]
    connection.close()
    return answer.status, json.loads(content) if "json" in kind else content.decode()


def as_events(text):
    """Return (name, content) of every server-sent event in a text."""
    found = []
    for event in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found
