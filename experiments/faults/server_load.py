"""How many requests does --mode=serve answer, how soon, and are they the answers of predict? All on the loopback.

Command:  python -m experiments.faults.server_load --workdir=RUN --source=FILE
          python -m experiments.faults.server_load --smoke

A run is served, by a process of its own, to clients that each send a line, wait for its answer and send the next one.
Before and after each count of clients, Predictor.predict answers the lines of the file alone, in one call, so that
other load affects both. Then clients stream, others are slow or silent, some send malformed requests, and some
disconnect halfway; --again repeats the first load, to see whether the server's memory keeps growing. Clients share the
same cores. With --smoke, or without a run, a model of letters is trained for some updates.
"""

import asyncio
import contextlib
import json
import math
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
from typing import Any

from absl import app, flags, logging

import jformer
from experiments.faults.server_clients import Asked, Client, load, slowly, streamed
from experiments.measure import ROOT, commit, processor_name, resident, smoke_sizes
from jformer.inference.predict import Predictor

WORKDIR = flags.DEFINE_string("workdir", None, "A trained run that translates.")
SOURCE = flags.DEFINE_string("source", None, "A text file, an input a line.")
REQUESTS = flags.DEFINE_integer("requests", 10_000, "Requests, at most ten from each client.")
CLIENTS = flags.DEFINE_list(
    "clients", ["1024", "256", "16", "1"], "How many clients there are at a time, the most first."
)
MALFORMED = flags.DEFINE_integer("malformed", 1_000, "Malformed requests.")
VANISHING = flags.DEFINE_integer("vanishing", 200, "Clients that leave before their answer, half of them mid-request.")
SLOW_CLIENTS = flags.DEFINE_integer("slow", 60, "Slow clients, a third of each kind.")
AGAIN = flags.DEFINE_integer("again", 1, "How often to repeat the first load; memory is printed after each.")
OPTIONS = flags.DEFINE_multi_string("option", [], "An option of decoding, such as beam_size=1.")


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


def malformed(chance: random.Random) -> bytes:
    """Return a malformed body."""
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
    """Send malformed requests, and leave halfway and before the answer; return the statuses of the former."""
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


def tell(name: str, asked: Sequence[Asked], wanted: Sequence[str], seconds: float, plain: float = 0.0) -> None:
    """Print how many were answered, how soon, and how many answers differ from predict's."""
    right = [each for each in asked if each.status == 200]
    other = sum(
        each.status == 200 and each.content["answers"][0]["outputs"][0]["text"] != text
        for each, text in zip(asked, wanted, strict=True)
    )
    cuts = statistics.quantiles([each.seconds for each in right], n=100) if len(right) > 1 else [math.nan] * 99
    times = ", ".join(f"p{at} {1e3 * cuts[at - 1]:,.0f} ms" for at in (50, 95, 99))
    rate = len(right) / seconds
    share = f" ({rate / plain:.0%} of predict, {plain:,.0f})" if plain else ""
    print(
        f"{name:>14}: {len(right):,} of {len(wanted):,} answered, {other} not as predict; "
        f"{rate:,.0f} a second{share}, {times}",
        flush=True,
    )


def load_beside_predict(
    port: int, clients: int, count: int, texts: Sequence[str], answers: Sequence[str], predictor: Predictor
) -> None:
    """Let clients send `count` requests, and print their rate beside that of predict before and after."""
    paces = [pace(predictor, texts)]
    some, wanted = ([each[i % len(texts)] for i in range(count)] for each in (texts, answers))
    began = time.perf_counter()
    asked = asyncio.run(load(port, some, clients))
    seconds = time.perf_counter() - began
    paces.append(pace(predictor, texts))
    tell(f"{clients} clients", asked, wanted, seconds, statistics.mean(paces))


def pace(predictor: Predictor, texts: Sequence[str]) -> float:
    """Return how many lines predict answers a second."""
    began = time.perf_counter()
    predictor.predict(texts)
    return len(texts) / (time.perf_counter() - began)


def measure(workdir: Path, texts: list[str]) -> None:
    """Print all of it for one run."""
    values = {key: type_of(value) for key, _, value in (option.partition("=") for option in OPTIONS.value)}
    predictor = jformer.load(workdir, **values)
    answers = predictor.predict(texts)  # compiles
    print(f"{commit()}; {processor_name()}; {predictor!r}", flush=True)
    with served(workdir, OPTIONS.value) as (port, process):
        counts = [int(number) for number in CLIENTS.value]
        for clients in counts:  # compilation is not timed
            asyncio.run(load(port, texts[: 2 * clients], clients))
        print(f"        memory: {resident(process):,.0f} MiB", flush=True)
        for turn in range(AGAIN.value + 1):
            for clients in counts[: 1 if turn else None]:
                count = min(REQUESTS.value, max(100, 10 * clients))
                load_beside_predict(port, clients, count, texts, answers, predictor)
            print(f"        memory: {resident(process):,.0f} MiB", flush=True)
        some, begins, ends = asyncio.run(streamed(port, texts[:100], 8))
        other = sum(one != another for one, another in zip(some, answers, strict=False))
        print(
            f"     8 streams: {len(some)} answered, {other} not as predict; begun after "
            f"{1e3 * statistics.median(begins):,.0f} ms, whole after {1e3 * statistics.median(ends):,.0f} ms (medians)"
        )
        asyncio.run(beside_slow_ones(port, texts, answers))
        print(f"     malformed: {dict(asyncio.run(misuse(port)))}; {VANISHING.value} clients left")
        health = asyncio.run(Client(port).ask(b"", "/v1/health", "GET"))
        print(f"         after: {resident(process):,.0f} MiB; health {health.content}")


async def beside_slow_ones(port: int, texts: Sequence[str], answers: Sequence[str]) -> None:
    """Print the rate of 16 quick clients without and beside slow ones, and the outcomes of the slow ones."""
    for name in ("16, alone", "16 beside slow"):
        slow = asyncio.create_task(slowly(port, texts[0], answers[0], SLOW_CLIENTS.value)) if "slow" in name else None
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        asked = await load(port, texts[:100], 16)
        tell(name, asked, answers[:100], time.perf_counter() - began)
        if slow:
            print(f"  slow clients: {dict(await slow)}", flush=True)


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
    smoke_sizes(requests=200, clients=["8", "1"], malformed=50, vanishing=10, slow=2)
    if bool(WORKDIR.value) != bool(SOURCE.value):
        raise app.UsageError("--workdir and --source: name both, a run and its inputs, or neither")
    with tempfile.TemporaryDirectory() as folder:
        if WORKDIR.value and SOURCE.value:
            lines = Path(SOURCE.value).read_text(encoding="utf-8").split("\n")
            measure(Path(WORKDIR.value), [line for line in lines if line.strip()])
        else:
            measure(*letters(Path(folder, "run")))


if __name__ == "__main__":
    app.run(main)
