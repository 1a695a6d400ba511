"""Clients of a server on the loopback: quick ones that keep a connection, ones that stream, slow and silent ones."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """The outcome of a request."""

    status: int
    content: Any
    seconds: float


class Client:
    """A persistent connection, for one request after another."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes, path: str = "/v1/translate", method: str = "POST") -> Asked:
        """Send a request and wait for its answer."""
        began = time.perf_counter()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", lines)
        content = await reader.readexactly(int(length[1]) if length else 0)
        if "connection: close" in lines:
            self.leave()
        seconds = time.perf_counter() - began
        return Asked(int(lines.split()[1]), json.loads(content) if b"{" in content[:1] else content.decode(), seconds)

    def leave(self) -> None:
        """Close the connection."""
        if self._streams:
            self._streams[1].close()
        self._streams = None


async def load(port: int, texts: Sequence[str], clients: int) -> list[Asked]:
    """Let clients request all texts, each as soon as its last one is answered; return the outcomes, in order."""
    found: list[Asked | None] = [None] * len(texts)
    turns = iter(range(len(texts)))

    async def work() -> None:
        client = Client(port)
        for i in turns:
            found[i] = await client.ask(json.dumps({"inputs": [texts[i]]}).encode())
        client.leave()

    await asyncio.gather(*(work() for _ in range(clients)))
    return [asked for asked in found if asked]


async def streamed(port: int, texts: Sequence[str], clients: int) -> tuple[list[str], list[float], list[float]]:
    """Let clients stream the answers to texts; return them, the seconds until each began, and until each was whole.

    Raises AssertionError for an answer whose parts do not add up to the whole.
    """
    found, begins, ends = [""] * len(texts), [0.0] * len(texts), [0.0] * len(texts)
    turns = iter(range(len(texts)))

    async def work() -> None:
        for i in turns:
            began, parts = time.perf_counter(), list[str]()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(json.dumps({"inputs": [texts[i]], "stream": True}).encode()))
            while not ends[i]:
                line = (await reader.readline()).decode()
                if not line.startswith("data: "):
                    assert line, "the server closed the connection"
                    continue
                begins[i] = begins[i] or time.perf_counter() - began
                content = json.loads(line.removeprefix("data: "))
                if "outputs" in content:
                    found[i], ends[i] = content["outputs"][0]["text"], time.perf_counter() - began
                else:
                    parts.append(content["text"])
            assert "".join(parts) == found[i], (parts, found[i])
            writer.close()

    await asyncio.gather(*(work() for _ in range(clients)))
    return found, begins, ends


async def slowly(port: int, text: str, answer: str, clients: int) -> Counter[str]:
    """Ask as clients that send or read a byte at a time, or connect and send nothing for 30 s; count what happens."""
    body = request(json.dumps({"inputs": [text]}).encode())

    async def one(kind: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(len(body)) if kind == 0 else ():
            writer.write(body[at : at + 1])
            await asyncio.sleep(0.03)
        if kind == 1:
            writer.write(body)
        if kind == 2:
            await asyncio.sleep(30)
            writer.close()
            return "silent"
        read = b""
        while byte := await reader.read(1):
            read += byte
            await asyncio.sleep(0.01)
            if read.endswith(b"]}]}"):
                break
        writer.close()
        said = json.loads(read.partition(b"\r\n\r\n")[2])["answers"][0]["outputs"][0]["text"]
        return f"{('sending', 'reading')[kind]} slowly, {'answered' if said == answer else 'NOT answered'}"

    return Counter(await asyncio.gather(*(one(i % 3) for i in range(clients))))


def request(body: bytes) -> bytes:
    """Return a whole request to translate."""
    head = "POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
