"""Limits of a server, checked before any work is done: no client can exhaust memory or delay others for long."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits on the size of requests and on the time they may take."""

    texts: int = 256  # of a request
    characters: int = 10_000  # of a text
    prefix: int = 500  # characters of a prefix of an answer
    constraints: int = 8  # phrases in an answer: what a search keeps grows with the square of the longest
    phrase: int = 100  # characters of a phrase
    body: int = 1 << 20  # bytes of a request
    waiting: int = 4_096  # texts that are not answered yet, of a model and a kind of request; further requests get 429
    streams: int = 64  # texts of a model that are streamed at a time, of all clients
    read_seconds: float = 30.0  # for the body of a request to arrive
    answer_seconds: float = 60.0  # until it is answered
    stop_seconds: float = 30.0  # for requests in progress when the server is asked to stop
    gather_seconds: float = 0.005  # that the first text of a batch waits for others
