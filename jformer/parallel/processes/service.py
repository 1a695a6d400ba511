"""The processes of a run among themselves, on JAX's coordination service: they agree, beat, and end together.

This module alone uses the service's client, which is private in JAX: a test checks its methods on every supported JAX.
Process 0 holds the service, a store of keys that all can reach: `agree/TURN/PROCESS` has what a process gives, `beat/`
the last Status of each, `end` the first word that ends them all; `freeze`, `frozen/` and `stop_at` let them stop after
the same update. JAX itself ends a process with exit code 134, by a C++ abort that nobody can catch, once the service is
gone or its own heartbeat stays away.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeVar

from jformer.errors import LOST, MISTAKE, STUCK
from jformer.parallel.processes.coordinates import Coordinates, is_loopback
from jformer.parallel.processes.meeting import AbsentError
from jformer.parallel.processes.stall import Pace, Status, Watch

Value = TypeVar("Value")
Joined = TypeVar("Joined")
BEAT_SECONDS = 1.0
BEATS_PER_SECOND = 500  # of all processes together, to spare process 0: 1,000 processes beat every two seconds
SILENT_SECONDS = 6.0  # and a beat, after which a process is dead: before JAX, which tells no phase and takes 10 to 20 s
SILENT_BEATS = 3  # the same, once a process failed
HEARTBEAT_SECONDS = 20  # of JAX's own heartbeat, where ours does not decide
CONNECT_SECONDS = 60  # for JAX to connect processes that have met already
LINGER_SECONDS = 2.0  # for which process 0 stays, so that the others hear why
WAIT_MILLISECONDS = 24 * 3600 * 1000  # of one request for a key, which is made again: JAX asks for some end


class Service:
    """The other processes of the run, from this one."""

    def __init__(self, own: Coordinates, machines: Sequence[str]) -> None:
        """Start JAX's service in process 0, connect to it, and watch the others from now on."""
        self.process, self.count, self.machines = own.process, own.processes, machines
        self.pace, self.stall_seconds = Pace(), 0.0  # 0: ten updates, at least a minute
        self._client = _connect(own)
        self._every = max(BEAT_SECONDS, own.processes / BEATS_PER_SECOND)
        self._turn = 0
        self._failed = self._asked = self._frozen = False
        self._update = 0  # the last one done
        self._stop_at: int | None = None  # the one after which all stop
        self._news = threading.Condition()
        self._beaten = time.monotonic()
        self._closing = threading.Event()
        self._ending = threading.Lock()
        work = (self._beat, self._judge, self._hear, self._freeze)
        self._threads = [threading.Thread(target=each, daemon=True, name=each.__name__) for each in work]
        for thread in self._threads:
            thread.start()

    def name(self, process: int) -> str:
        """Return what a process is called in messages."""
        return f"process {process} ({self.machines[process]})"

    def enter_phase(self, phase: str, kind: Hashable) -> None:
        """Say what this process begins to do; see `stall.Pace`."""
        self.pace.enter(phase, kind, self.pace.limit(self.stall_seconds))

    def agree(self, value: Value, join: Callable[[list[Value]], Joined]) -> Joined:
        """Return what process 0 makes of everybody's value, as plain JSON; all call this in the same order."""
        self._turn += 1
        turn = f"agree/{self._turn}"
        self._client.key_value_set(f"{turn}/{self.process}", json.dumps(value))
        if self.process == 0:
            values = [self._wait_for(f"{turn}/{i}") for i in range(self.count)]
            self._client.key_value_set(f"{turn}/all", json.dumps(join([json.loads(each) for each in values])))
            self._client.key_value_delete(f"agree/{self._turn - 1}")  # who gave a value has read the result before
        return json.loads(self._wait_for(f"{turn}/all"))

    def should_stop(self, update: int, asked: bool) -> bool:
        """Tell whether to stop after this update, which is the same one in all processes; see `_freeze`."""
        if asked and not self._asked:
            self._asked = True
            self._client.key_value_set("freeze", "", allow_overwrite=True)
        with self._news:
            self._update = update
            self._news.wait_for(lambda: not self._frozen or self._stop_at is not None)
        return self._stop_at is not None and update >= self._stop_at

    def end(self, code: int, line: str = "", stacks: bool = False) -> NoReturn:
        """End this process and all others, each saying the line if there is one."""
        self._ending.acquire()  # never released: the first word is the last
        told = f"{self.name(self.process)}: {line}" if code == MISTAKE else line
        self._tell({"code": code, "line": told, "stacks": stacks})
        self._exit(code, line, stacks)

    def wait_for_cause(self) -> None:
        """Wait for word of another process that is dead: an error here is often but the echo of that."""
        self._failed = True
        time.sleep((SILENT_BEATS + 3) * self._every)  # in which process 0 finds it

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error."""
        self._ending.acquire()  # from here on nobody else's word ends this process
        kind = f"{type(error).__name__}: {' '.join(str(error).split())}"
        line = f"{self.name(self.process)} failed at {self.pace.status().phase}: {kind[:300]}"
        self._tell({"code": LOST, "line": line, "stacks": False})
        if self.process == 0:
            time.sleep(LINGER_SECONDS)

    def leave(self) -> None:
        """Let go of the others, who have come to the end too."""
        import jax

        self.agree(None, len)
        self._closing.set()
        beat, judge, *waiting = self._threads
        beat.join()  # a beat after the shutdown would be an error
        judge.join()
        jax.distributed.shutdown()
        for thread in waiting:  # which that cancels; C++ must not be waiting when Python ends
            thread.join()

    def _wait_for(self, key: str) -> str:
        """Return the value of a key, once there is one, however long that takes; any error says the service is gone."""
        while True:
            try:
                return str(self._client.blocking_key_value_get(key, WAIT_MILLISECONDS))
            except Exception as error:  # of C++
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise

    def _hear(self) -> None:
        """Wait for the word that ends all."""
        try:
            word = json.loads(self._wait_for("end"))
        except Exception as error:  # of C++: the service is gone
            if self._closing.is_set():
                return
            kind = str(error).partition("\n")[0]
            line = f"{self.name(0)} died: its coordination service does not answer ({kind[:100]})"
            word = {"code": LOST, "line": line, "stacks": False}
        self._ending.acquire()
        self._exit(**word)

    def _freeze(self) -> None:
        """Once a process is asked to stop: tell how far this one is, and hear after which update all stop.

        None begins another update until process 0 has named the one after the furthest: so nobody is past it, and
        nobody waits in an update for a process that has stopped.
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
        """Say how this process is, again and again, in a thread of its own."""
        beat = 0
        while not self._closing.wait(self._every):
            beat += 1
            status = self.pace.status()._replace(beat=beat, failed=self._failed)
            try:
                self._client.key_value_set(f"beat/{self.process}", json.dumps(status), allow_overwrite=True)
            except Exception:  # of C++: `_hear` has it, too
                return
            self._beaten = time.monotonic()

    def _judge(self) -> None:
        """End all if one is dead or stuck, as process 0; end this process if process 0 does not answer."""
        watch = Watch([self.name(i) for i in range(self.count)])
        while not self._closing.wait(self._every):
            silent = time.monotonic() - self._beaten
            if silent > (SILENT_BEATS * self._every if self._failed else SILENT_SECONDS + self._every):
                self._ending.acquire()
                line = f"{self.name(0)} is frozen, or the way to it is cut: no answer for {silent:.0f} s"
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
                _say(line)

    def _tell(self, word: dict[str, Any]) -> None:
        """Write the word that ends all, unless there is one; a service that does not answer is not waited for."""

        def write() -> None:
            with contextlib.suppress(Exception):  # of C++: another was first
                self._client.key_value_set("end", json.dumps(word))

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(LINGER_SECONDS)

    def _exit(self, code: int, line: str, stacks: bool = False) -> NoReturn:
        """End the process, without what Python and JAX do at their end: it waits for the others. `_ending` is held."""
        try:
            with contextlib.suppress(Exception):  # nobody may be reading, or standard error is closed
                if stacks:
                    faulthandler.dump_traceback(all_threads=True)
                if line:
                    os.write(2, f"jformer: {line}\n".encode())
            if self.process == 0:
                time.sleep(LINGER_SECONDS)
        finally:
            os._exit(code)


def _connect(own: Coordinates) -> Any:
    """Start JAX's service in process 0 and return the client of this process; raises AbsentError if that fails."""
    import jax
    from jax._src.distributed import global_state

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    address = f"[{own.host}]" if ":" in own.host else own.host
    try:
        jax.distributed.initialize(
            f"{address}:{own.port}", own.processes, own.process, local_device_ids=own.local_devices,
            coordinator_bind_address=f"{address if is_loopback(own.host) else '[::]'}:{own.port}",
            cluster_detection_method="deactivate", initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=CONNECT_SECONDS,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:  # of C++; JAX's own RuntimeError, such as "called twice", is our defect
        kind = str(error).partition("\n")[0]
        raise AbsentError(
            f"coordinator {own.host}:{own.port}: JAX's coordination service did not start ({kind[:100]}): another "
            "program may have taken the port since the processes met; start the command for each again"
        ) from error
    return global_state.client


def _say(line: str) -> None:
    """Print a line above a progress bar, if there is one."""
    from tqdm import tqdm

    with contextlib.suppress(OSError):  # nobody may be reading
        tqdm.write(line, file=sys.stderr)
