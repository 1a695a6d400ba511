"""What does a run of 1,000 processes cost process 0: how long until all have joined, and what do heartbeats take?

The processes are simulated: each is a client of JAX's coordination service with its own connection, but 250 of them are
threads of one real process, and none computes. They meet, connect, beat and wait for the message that ends them, as
`parallel/processes` does; process 0 is this one. Printed: seconds from the first attempt to meet to the last
connection, without imports, and the share of a core that process 0 takes to receive and judge the beats.

Command:  python -m experiments.faults.process_scale [--processes=1000] [--seconds=20] [--smoke]
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from jaxlib import _jax

from experiments.measure import ROOT, smoke_sizes
from jformer.parallel.processes.children import die_with_parent, free_port
from jformer.parallel.processes.handshake import software
from jformer.parallel.processes.meeting import meet
from jformer.parallel.processes.process_info import ProcessInfo
from jformer.parallel.processes.service import BEAT_SECONDS, BEATS_PER_SECOND, HEARTBEAT_SECONDS, WAIT_MILLISECONDS
from jformer.parallel.processes.stall import PeerWatch, Status

PROCESSES = flags.DEFINE_integer("processes", 1_000, "Processes of the run.")
SECONDS = flags.DEFINE_float("seconds", 20.0, "Seconds for which the beats are watched.")
PORT = flags.DEFINE_integer("port", 0, "Port of process 0; if given, simulate processes instead.")
RANGE = flags.DEFINE_list("range", [], "The first process to simulate, and the one after the last.")

EACH = 250  # simulated processes of a real one
PATIENCE = 120.0


def main(_: Sequence[str]) -> None:
    """Print the figures, or simulate processes."""
    smoke_sizes(processes=20, seconds=2.0)
    if PORT.value:
        simulate()
    else:
        measure()


def measure() -> None:
    """Run as process 0."""
    count, port, fields = PROCESSES.value, free_port(), software()
    helpers = [start(port, first, min(first + EACH, count)) for first in range(1, count, EACH)]
    for helper in helpers:
        heard(helper, "ready")
    began = time.perf_counter()
    for helper in helpers:
        tell(helper)
    machines = meet(ProcessInfo("127.0.0.1", port, count, 0), fields, PATIENCE)
    met = time.perf_counter() - began
    address = f"127.0.0.1:{port}"
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=HEARTBEAT_SECONDS)
    client = connected(address, 0)
    for helper in helpers:
        heard(helper, "connected")
    joined = time.perf_counter() - began
    print(f"{count} processes have met after {met:.2f} s and are connected after {joined:.2f} s", flush=True)
    judge(client, machines, SECONDS.value / 2)  # the first beats
    used, began = time.process_time(), time.perf_counter()
    seen = judge(client, machines, SECONDS.value)
    seconds = time.perf_counter() - began
    share = (time.process_time() - used) / seconds
    print(f"beats every {every():.1f} s, {seen} processes seen: {100 * share:.1f} % of a core at process 0", flush=True)
    for helper in helpers:
        helper.kill()
        helper.wait()
    assert service  # is held until here
    sys.stdout.flush()
    os._exit(0)  # JAX's own shutdown would wait for the clients


def judge(client: Any, machines: Sequence[str], seconds: float) -> int:
    """Check the beats as process 0 does; return the number of processes seen."""
    watch, beats, deadline = PeerWatch(machines), [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(every())
        beats = client.key_value_dir_get("beat/")
        watch.update({int(key.rpartition("/")[2]): Status(*json.loads(value)) for key, value in beats})
        watch.dead(PATIENCE, PATIENCE)
        watch.stuck(PATIENCE)
        watch.slow(0.0)
    return len(beats)


def simulate() -> None:
    """Simulate some processes, on a signal from process 0, until killed."""
    fields = software()
    numbers = range(*map(int, RANGE.value))
    here, lock = [], threading.Lock()

    def be(process: int) -> None:
        meet(ProcessInfo("127.0.0.1", PORT.value, PROCESSES.value, process), fields, PATIENCE)
        client = connected(f"127.0.0.1:{PORT.value}", process)
        with lock:
            here.append(process)
            if len(here) == len(numbers):
                print("connected", flush=True)
        threading.Thread(target=client.blocking_key_value_get, args=("end", WAIT_MILLISECONDS), daemon=True).start()
        beat = 0
        while True:
            time.sleep(every())
            beat += 1
            status = Status(beat, beat, f"update {beat}", True)
            client.key_value_set(f"beat/{process}", json.dumps(status), allow_overwrite=True)

    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=be, args=(process,), daemon=True) for process in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def connected(address: str, process: int) -> Any:
    """Return a connected client, as jax.distributed makes it."""
    given = {"init_timeout": 60, "heartbeat_timeout": HEARTBEAT_SECONDS, "use_compression": True}
    client = _jax.get_distributed_runtime_client(address, process, **given)
    client.connect()
    return client


def every() -> float:
    """Return the seconds between two beats of a process."""
    return max(BEAT_SECONDS, PROCESSES.value / BEATS_PER_SECOND)


def start(port: int, first: int, last: int) -> subprocess.Popen[str]:
    """Start a real process for some simulated ones."""
    given = [f"--processes={PROCESSES.value}", f"--port={port}", f"--range={first},{last}"]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.faults.process_scale", *given],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )


def heard(helper: subprocess.Popen[str], word: str) -> None:
    """Wait for a word from a helper."""
    assert helper.stdout
    if (line := helper.stdout.readline().strip()) != word:
        raise SystemExit(f"a helper printed {line!r}, not {word!r}")


def tell(helper: subprocess.Popen[str]) -> None:
    """Let a helper begin."""
    assert helper.stdin
    helper.stdin.write("go\n")
    helper.stdin.flush()


if __name__ == "__main__":
    app.run(main)
