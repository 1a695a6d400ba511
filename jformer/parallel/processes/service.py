"""The processes of a run connected by JAX's coordination service: they agree, send statuses, and end together.

This module alone uses the service's client, which is private in JAX: a test checks its methods on every supported JAX.
Process 0 hosts the service, a key–value store: `agree/TURN/PROCESS` holds a process's value, `beat/` the last Status of
each, `end` the first order to end; `freeze`, `frozen/` and `stop_at` let all stop after the same update. JAX itself
ends a process with exit code 134, by a C++ abort that cannot be caught, once the service or its own heartbeat fails.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeVar

from jformer.errors import LOST, MISTAKE, STUCK
from jformer.parallel.processes.ending import leave
from jformer.parallel.processes.meeting import AbsentError
from jformer.parallel.processes.process_info import ProcessInfo, is_loopback
from jformer.parallel.processes.stall import Pace, PeerWatch, Status

Value = TypeVar("Value")
Result = TypeVar("Result")
BEAT_SECONDS = 1.0
BEATS_PER_SECOND = 500  # of all processes together, to spare process 0: 1,000 processes beat every two seconds
SILENT_SECONDS = (
    6.0  # plus a beat, after which a process is dead: before JAX, which knows no phase and takes 10 to 20 s
)
SILENT_BEATS = 3  # the same, once a process failed
PAUSED_BEATS = 2  # between two looks; after more, this process itself was held up by long work in C, or paused
HEARTBEAT_SECONDS = 20  # of JAX's own heartbeat, for the cases that ours does not decide
CONNECT_SECONDS = 60  # for JAX to connect processes that have met already
LINGER_SECONDS = 2.0  # that process 0 stays so that the others can read why
WAIT_MILLISECONDS = 24 * 3600 * 1000  # time limit of a request for a key, which is repeated: JAX requires a limit


class Service:
    """This process's view of the run's other processes."""

    def __init__(self, own: ProcessInfo, machines: Sequence[str]) -> None:
        """Start JAX's service in process 0, connect to it, and start watching the other processes."""
        self.process, self.count, self.machines = own.process, own.processes, machines
        self.pace, self.stall_seconds = Pace(), 0.0  # 0: ten updates, at least a minute
        self._client = _connect(own)
        self._every = max(BEAT_SECONDS, own.processes / BEATS_PER_SECOND)
        self._turn = 0
        self._failed = self._asked = self._frozen = False
        self._update = 0  # the last one completed
        self._stop_at: int | None = None  # the update after which all stop
        self._news = threading.Condition()
        self._beaten = time.monotonic()
        self._closing = threading.Event()
        self._ending = threading.Lock()
        work = (self._beat, self._judge, self._hear, self._freeze)
        self._threads = [threading.Thread(target=each, daemon=True, name=each.__name__) for each in work]
        for thread in self._threads:
            thread.start()

    def name(self, process: int) -> str:
        """Return the name of a process in messages."""
        return f"process {process} ({self.machines[process]})"

    def enter_phase(self, phase: str, kind: Hashable) -> None:
        """Record the start of a phase; see `stall.Pace`."""
        self.pace.enter(phase, kind, self.pace.limit(self.stall_seconds))

    def agree(self, value: Value, combine: Callable[[list[Value]], Result]) -> Result:
        """Return process 0's combination of all values, as plain JSON; all processes call this in the same order."""
        self._turn += 1
        turn = f"agree/{self._turn}"
        self._client.key_value_set(f"{turn}/{self.process}", json.dumps(value))
        if self.process == 0:
            values = [self._wait_for(f"{turn}/{i}") for i in range(self.count)]
            self._client.key_value_set(f"{turn}/all", json.dumps(combine([json.loads(each) for each in values])))
            self._client.key_value_delete(f"agree/{self._turn - 1}")  # its result was read before these values were set
        return json.loads(self._wait_for(f"{turn}/all"))

    def should_stop(self, update: int, asked: bool) -> bool:
        """Return whether to stop after this update, which is the same one in all processes; see `_freeze`."""
        if asked and not self._asked:
            self._asked = True
            self._client.key_value_set("freeze", "", allow_overwrite=True)
        with self._news:
            self._update = update
            self._news.wait_for(lambda: not self._frozen or self._stop_at is not None)
        return self._stop_at is not None and update >= self._stop_at

    def end(self, code: int, line: str = "", stacks: bool = False) -> NoReturn:
        """End this process and all others; each prints the line if there is one."""
        self._ending.acquire()  # never released: the first order counts
        shared = f"{self.name(self.process)}: {line}" if code == MISTAKE else line
        self._send_end({"code": code, "line": shared, "stacks": stacks})
        self._exit(code, line, stacks)

    def wait_for_cause(self) -> None:
        """Wait until process 0 may have found a dead process: an error here is often just a consequence."""
        self._failed = True
        time.sleep((SILENT_BEATS + 3) * self._every)

    def fail(self, error: BaseException) -> None:
        """Report an error to the other processes."""
        self._ending.acquire()  # from here on, no order from others ends this process
        kind = f"{type(error).__name__}: {' '.join(str(error).split())}"
        line = f"{self.name(self.process)} failed at {self.pace.status().phase}: {kind[:300]}"
        self._send_end({"code": LOST, "line": line, "stacks": False})
        if self.process == 0:
            time.sleep(LINGER_SECONDS)

    def leave(self) -> None:
        """Disconnect after all processes have finished."""
        import jax

        self.agree(None, len)
        self._closing.set()
        beat, judge, *waiting = self._threads
        beat.join()  # a beat after the shutdown would be an error
        judge.join()
        jax.distributed.shutdown()
        for thread in waiting:  # cancelled by the shutdown; C++ must not be waiting when Python ends
            thread.join()

    def _wait_for(self, key: str) -> str:
        """Wait for the value of a key for as long as it takes; any error means that the service is gone."""
        while True:
            try:
                return str(self._client.blocking_key_value_get(key, WAIT_MILLISECONDS))
            except Exception as error:  # of C++
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise

    def _hear(self) -> None:
        """Wait for the order to end."""
        try:
            order = json.loads(self._wait_for("end"))
        except Exception as error:  # of C++: the service is gone
            if self._closing.is_set():
                return
            kind = str(error).partition("\n")[0]
            line = f"{self.name(0)} died: its coordination service does not answer ({kind[:100]})"
            order = {"code": LOST, "line": line, "stacks": False}
        self._ending.acquire()
        self._exit(**order)

    def _freeze(self) -> None:
        """Once a process is asked to stop, report how far this one is, and learn the update after which all stop.

        No process begins another update until process 0 has named the update after the furthest one. So none is past
        it, and none waits in an update for a process that has stopped.
        """
        with contextlib.suppress(Exception):  # of C++, at the end
            self._wait_for("freeze")
            with self._news:
                self._frozen, update = True, self._update
            self._client.key_value_set(f"frozen/{self.process}", str(update))
            if self.process == 0:
                updates = [self._wait_for(f"frozen/{i}") for i in range(self.count)]
                self._client.key_value_set("stop_at", str(max(map(int, updates)) + 1))
            stop_at = int(self._wait_for("stop_at"))
            with self._news:
                self._stop_at = stop_at
                self._news.notify_all()

    def _beat(self) -> None:
        """Send this process's status repeatedly, in a thread of its own."""
        beat = 0
        while not self._closing.wait(self._every):
            beat += 1
            status = self.pace.status()._replace(beat=beat, failed=self._failed)
            try:
                self._client.key_value_set(f"beat/{self.process}", json.dumps(status), allow_overwrite=True)
            except Exception:  # of C++: `_hear` handles it
                return
            self._beaten = time.monotonic()

    def _judge(self) -> None:
        """End all processes if one is dead or stuck, as process 0; end this one if process 0 does not answer."""
        watch, looked = PeerWatch([self.name(i) for i in range(self.count)]), time.monotonic()
        while not self._closing.wait(self._every):
            before, looked = looked, time.monotonic()
            if looked - before > PAUSED_BEATS * self._every:  # no thread of this process ran, so none beat
                self._beaten = looked
            silent = looked - self._beaten
            if silent > (SILENT_BEATS * self._every if self._failed else SILENT_SECONDS + self._every):
                self._ending.acquire()
                line = f"{self.name(0)} is frozen or unreachable: no answer for {silent:.0f} s"
                self._exit(LOST, f"{line}; at {self.pace.status().phase}")
            if self.process:
                continue
            try:
                beats = self._client.key_value_dir_get("beat/")
            except Exception:  # of C++, at its end
                return
            watch.update({int(key.rpartition("/")[2]): Status(*json.loads(value)) for key, value in beats})
            if dead := watch.dead(SILENT_SECONDS + self._every, SILENT_BEATS * self._every):
                self.end(LOST, dead)
            if stuck := watch.stuck(self.pace.limit(self.stall_seconds)):
                self.end(STUCK, stuck, stacks=True)
            for line in watch.slow(self.pace.median):
                _log(line)

    def _send_end(self, order: dict[str, Any]) -> None:
        """Send the order to end, unless there is one, without waiting for a service that does not answer."""

        def write() -> None:
            with contextlib.suppress(Exception):  # of C++: another order was first
                self._client.key_value_set("end", json.dumps(order))

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(LINGER_SECONDS)

    def _exit(self, code: int, line: str, stacks: bool = False) -> NoReturn:
        """End the process. `_ending` is held."""
        leave(code, line, stacks, 0.0 if self.process else LINGER_SECONDS)


def _connect(own: ProcessInfo) -> Any:
    """Start JAX's service in process 0 and return the client of this process; raise AbsentError if that fails."""
    import jax

    # The client has no public name; one of `jax.distributed` will replace this. test_parts.py checks the calls we make.
    from jax._src.distributed import global_state

    jax.config.update("jax_enable_preemption_service", False)  # it would take over SIGTERM
    address = f"[{own.host}]" if ":" in own.host else own.host
    try:
        jax.distributed.initialize(
            f"{address}:{own.port}", own.processes, own.process, local_device_ids=own.local_devices,
            coordinator_bind_address=f"{address if is_loopback(own.host) else '[::]'}:{own.port}",
            cluster_detection_method="deactivate", initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=CONNECT_SECONDS,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:  # of C++; a RuntimeError from JAX's Python would be our bug
        kind = str(error).partition("\n")[0]
        raise AbsentError(
            f"coordinator {own.host}:{own.port}: JAX's coordination service did not start ({kind[:100]}): another "
            "program may have taken the port since the processes met; start every process again"
        ) from error
    return global_state.client


def _log(line: str) -> None:
    """Print a line above a progress bar, if there is one."""
    from tqdm import tqdm

    with contextlib.suppress(OSError):  # standard error may be closed
        tqdm.write(line, file=sys.stderr)
