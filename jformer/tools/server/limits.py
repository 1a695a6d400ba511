"""What a server takes on at most. All of it is refused at the door, so that nobody can take the memory of others."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of requests and of the time that they may take."""

    texts: int = 256  # of a request
    characters: int = 10_000  # of a text
    prefix: int = 500  # characters of what an answer begins with
    constraints: int = 8  # phrases in an answer: what a search keeps grows with the square of their lengths
    phrase: int = 100  # characters of a phrase
    body: int = 1 << 20  # bytes of a request
    waiting: int = 4_096  # texts that are not answered yet, of all clients; further requests are told to come back
    streams: int = 64  # texts whose answers are being sent while they grow, of all clients
    read_seconds: float = 30.0  # until a request has arrived, and until a client takes on what is sent to it
    answer_seconds: float = 60.0  # until it is answered
    stop_seconds: float = 30.0  # for requests that are being answered when the server is to stop
    gather_seconds: float = 0.005  # that the first text waits for others, to be answered together
