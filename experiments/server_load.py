"""How many requests does --mode=serve answer, how soon, and are they the answers of predict? All on the loopback.

Command:  python -m experiments.server_load --workdir=RUN --source=FILE
          python -m experiments.server_load --smoke

The lines of the file are answered by Predictor.predict alone first, in one call. Then the same run is served, by a
process of its own, to clients that each send a line, wait for its answer and send the next one. At last come requests
that are none, clients that leave in the middle, and the memory that the server holds before and after. Clients take
part of the same cores. With --smoke, or without a run, a model of letters is trained for some updates.
"""

import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags, logging

import jformer
from experiments.measure import ROOT, commit, processor_name, smoke_sizes

WORKDIR = flags.DEFINE_string("workdir", None, "A trained run that translates.")
SOURCE = flags.DEFINE_string("source", None, "A text file, an input a line.")
REQUESTS = flags.DEFINE_integer("requests", 10_000, "Requests, at most ten of a client.")
CLIENTS = flags.DEFINE_list(
    "clients", ["1024", "256", "16", "1"], "How many clients there are at a time, the most first."
)
MALFORMED = flags.DEFINE_integer("malformed", 1_000, "Requests that are none.")
VANISHING = flags.DEFINE_integer("vanishing", 200, "Clients that leave before their answer, half of them amid asking.")
OPTIONS = flags.DEFINE_multi_string("option", [], "An option of decoding, such as beam_size=1.")


class Asked(NamedTuple):
    """What became of a request."""

    status: int
    content: Any
    seconds: float


class Client:
    """A connection that is kept, over which one request follows the other."""

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


@contextlib.contextmanager
def served(workdir: Path, options: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Serve a run in a process of its own; yield its port and its number."""
    command = [sys.executable, "-m", "jformer.main", f"--workdir={workdir}", "--mode=serve", "--port=0"]
    command += [f"--config.decode.{option}" for option in options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        said = next(line for line in server.stderr if line.startswith("serving"))
        try:
            yield int(re.findall(r":(\d+): ", said)[0]), server.pid
        finally:
            server.terminate()
            print(f"the server ended with {server.wait()}: {server.stderr.read().strip()}")


async def load(port: int, texts: Sequence[str], clients: int) -> list[Asked]:
    """Let clients ask for all texts, each as soon as its last one is answered; return what became of each, in order."""
    found: list[Asked | None] = [None] * len(texts)
    turns = iter(range(len(texts)))

    async def work() -> None:
        client = Client(port)
        for i in turns:
            found[i] = await client.ask(json.dumps({"inputs": [texts[i]]}).encode())
        client.leave()

    await asyncio.gather(*(work() for _ in range(clients)))
    return [asked for asked in found if asked]


def malformed(chance: random.Random) -> bytes:
    """Return a body that is no request."""
    whole = json.dumps({"inputs": ["a b c"]}).encode()
    kinds = (
        lambda: whole[: chance.randrange(len(whole))],
        lambda: bytes(chance.randrange(128, 256) for _ in range(chance.randrange(1, 200))),
        lambda: json.dumps({"inputs": chance.choice([1, None, [], [[]], [None], {"a": 1}, [1.5], True])}).encode(),
        lambda: json.dumps({"inputs": ["a"], chance.choice(["beam_size", "x", ""]): 1}).encode(),
        lambda: json.dumps({"inputs": ["a" * chance.randrange(10_001, 20_000)]}).encode(),
        lambda: json.dumps({"inputs": ["a"] * chance.randrange(257, 2_000)}).encode(),
        lambda: b"[" * chance.randrange(1, 100_000),
        lambda: b'{"inputs": ["\\ud800"]}',
    )
    return chance.choice(kinds)()


async def misuse(port: int) -> Counter[int]:
    """Send what is no request, and leave amid asking and before the answer; return the statuses of the former."""
    chance, client, statuses = random.Random(0), Client(port), Counter[int]()
    for _ in range(MALFORMED.value):
        statuses[(await client.ask(malformed(chance))).status] += 1
    client.leave()
    body = json.dumps({"inputs": ["a b c"]}).encode()
    for i in range(VANISHING.value):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body[: len(body) // (1 + i % 2)])
        await writer.drain()
        writer.close()
    return statuses


def resident(process: int) -> float:
    """Return the MiB that a process holds."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def tell(name: str, asked: Sequence[Asked], wanted: Sequence[str], seconds: float, plain: float) -> None:
    """Print how many were answered, how soon, and whether as predict answers."""
    right = [each for each in asked if each.status == 200]
    other = sum(
        each.status == 200 and each.content["answers"][0]["outputs"][0]["text"] != text
        for each, text in zip(asked, wanted, strict=True)
    )
    cuts = statistics.quantiles([each.seconds for each in asked], n=100)
    times = ", ".join(f"p{at} {1e3 * cuts[at - 1]:,.0f} ms" for at in (50, 95, 99))
    rate = len(asked) / seconds
    print(
        f"{name:>11}: {len(right):,} of {len(wanted):,} answered, {other} not as predict; "
        f"{rate:,.0f} a second ({rate / plain:.0%} of predict), {times}",
        flush=True,
    )


def measure(workdir: Path, texts: list[str]) -> None:
    """Print all of it for one run."""
    values = {key: type_of(value) for key, _, value in (option.partition("=") for option in OPTIONS.value)}
    predictor = jformer.load(workdir, **values)
    predictor.predict(texts)  # compiles
    began = time.perf_counter()
    answers = predictor.predict(texts)
    plain = len(texts) / (time.perf_counter() - began)
    print(f"{commit()}; {processor_name()}; {predictor!r}\n    predict: {plain:,.0f} lines a second", flush=True)
    del predictor
    with served(workdir, OPTIONS.value) as (port, process):
        counts = [int(number) for number in CLIENTS.value]
        for clients in counts:  # what is compiled on the way is not timed
            asyncio.run(load(port, texts[: 2 * clients], clients))
        held = resident(process)
        for clients in counts:
            count = min(REQUESTS.value, max(100, 10 * clients))
            some, wanted = ([each[i % len(texts)] for i in range(count)] for each in (texts, answers))
            began = time.perf_counter()
            asked = asyncio.run(load(port, some, clients))
            tell(f"{clients} clients", asked, wanted, time.perf_counter() - began, plain)
        print(f"  malformed: {dict(asyncio.run(misuse(port)))}; {VANISHING.value} clients left")
        health = asyncio.run(Client(port).ask(b"", "/v1/health", "GET"))
        asked = asyncio.run(load(port, texts[:100], 16))
        tell("afterwards", asked, answers[:100], sum(each.seconds for each in asked) / 16, plain)
        print(f"     memory: {held:,.0f} MiB before, {resident(process):,.0f} MiB after; health {health.content}")


def type_of(value: str) -> Any:
    """Return an option's value as JSON reads it, or as a text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def letters(folder: Path) -> tuple[Path, list[str]]:
    """Train a model of letters for some updates; return its directory and inputs for it."""
    command = [sys.executable, "-m", "jformer.main", "--config=configs/letters.py", f"--workdir={folder}"]
    small = {"train.num_steps": 20, "train.log_every": 20, "train.eval_every": 20, "train.checkpoint_every": 20}
    small |= {"optim.warmup": 1, "decode.beam_size": 2}
    subprocess.run([*command, *(f"--config.{key}={value}" for key, value in small.items())], cwd=ROOT, check=True)
    chance = random.Random(0)
    return folder, [" ".join(chance.choices("abcdefgh", k=chance.randrange(2, 12))) for _ in range(200)]


def main(argv: list[str]) -> None:
    """Measure a run, or a small one."""
    logging.set_verbosity(logging.ERROR)
    smoke_sizes(requests=200, clients=["8", "1"], malformed=50, vanishing=10)
    with tempfile.TemporaryDirectory() as folder:
        if WORKDIR.value and SOURCE.value:
            lines = Path(SOURCE.value).read_text(encoding="utf-8").split("\n")
            measure(Path(WORKDIR.value), [line for line in lines if line.strip()])
        else:
            measure(*letters(Path(folder, "run")))


if __name__ == "__main__":
    app.run(main)
