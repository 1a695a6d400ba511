"""The processes of a run among themselves: they agree on values, say where they are, and end together.

Process 0 is in the middle; every other process has one connection to it, and a thread that watches it. Nothing here
knows JAX: it works where JAX is stuck, and before JAX is started.
"""

import contextlib
import faulthandler
import json
import os
import selectors
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jformer.hosts.link import Link, LostError, Message, part
from jformer.hosts.stall import LEAST, Pace, Standing, waited_for

LOST = 75  # exit code: another process died or stands still; the same command on all of them goes on
BEAT = 0.5  # seconds
ECHO = 2.0  # seconds in which the death of another process is heard of
SLOW = 2.0  # seconds after which one says for whom all are waiting
FEW = 8  # numbers listed


class Peers:
    """The other processes of the run, from this one."""

    def __init__(self, process: int, names: Sequence[str], links: dict[int, Link]) -> None:
        """Watch the links from now on: to everybody from process 0, to process 0 from the others."""
        self.process, self.names = process, names
        self.seconds = 0.0  # that a process may stand still; 0 = the default
        self.stop_at: int | None = None  # the update after which all stop
        self._links = links
        self._pace = Pace()
        self._standings = {i: (Standing(), time.monotonic()) for i in range(len(names))}
        self._waiting: dict[int, tuple[float, Standing]] = {}  # process → since when others wait for it, and where
        self._turn = 0
        self._values: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # turn → what each process gave
        self._results: dict[int, Any] = {}
        self._news = threading.Condition()
        self._update = 0
        self._frozen: dict[int, int] = {}  # process → the update it is at, while they agree on where to stop
        self._ending = threading.Lock()
        self._limit = LEAST  # as process 0 says
        self._left: set[int] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peers")
        self._thread.start()

    def name(self, process: int) -> str:
        """Return what a process is called in messages."""
        return f"process {process} ({self.names[process]})"

    def reach(self, place: str, like: Hashable = None) -> None:
        """Say where this process is; see `stall.Pace`. All processes pass the same places in the same order."""
        self._pace.reach(place, like, self._pace.limit(self.seconds))

    def took(self, seconds: float) -> None:
        """Say how long an update takes."""
        self._pace.took(seconds)

    def agree(self, value: Any, join: Callable[[list[Any]], Any]) -> Any:
        """Return what process 0 makes of everybody's value, as plain JSON; all call this in the same order."""
        self._turn += 1
        turn = self._turn
        if self.process:
            self._send(0, {"kind": "value", "turn": turn, "value": value})
            with self._news:
                self._news.wait_for(lambda: turn in self._results)
                return self._results.pop(turn)
        with self._news:
            self._values[turn][0] = _as_json(value)
            self._news.wait_for(lambda: len(self._values[turn]) == len(self.names))
            values = self._values.pop(turn)
        result = _as_json(join([values[i] for i in range(len(self.names))]))
        self._send_all({"kind": "result", "turn": turn, "value": result})
        return result

    def stopping(self, update: int, asked: bool) -> bool:
        """Tell whether all stop after this update, which is the same one everywhere once one of them is asked to.

        Whoever is asked tells process 0, which asks all how far they are. They do not begin another update until it has
        named the one after the furthest: nobody is past that, and nobody waits for whom it has not heard.
        """
        if asked and not self._frozen and self.stop_at is None:
            self._tell_first({"kind": "stop"})
        with self._news:
            self._update = update
            self._news.wait_for(lambda: not self._frozen or self.stop_at is not None)
        return self.stop_at is not None and update >= self.stop_at

    def end(self, code: int, line: str = "", stacks: bool = False) -> None:
        """End this process and all others, each saying the line if there is one; does not return."""
        told = f"{self.name(self.process)}: {line}" if line and not stacks else line
        self._exit(code, line, stacks, {"kind": "end", "code": code, "line": told, "stacks": stacks})

    def fail(self, error: BaseException) -> None:
        """Wait for word that `error` is but the echo of another process's death; if there is none, tell the others."""
        time.sleep(ECHO)
        self._ending.acquire()  # from here on nobody else's word ends this process
        kind = f"{type(error).__name__}: {' '.join(str(error).split())}"
        line = f"{self.name(self.process)} failed at {self._pace.standing().place}: {kind[:300]}"
        self._send_all({"kind": "end", "code": LOST, "line": line, "stacks": False})
        part(self._links.values())

    def leave(self) -> None:
        """Let go of the others, who have come to the end too."""
        self._send_all({"kind": "left"})
        self._closing.set()
        self._thread.join()
        part(self._links.values())

    def _watch(self) -> None:
        """Read, beat and judge, in a thread of its own that nothing else can hold up."""
        selector = selectors.DefaultSelector()
        for process, link in self._links.items():
            selector.register(link, selectors.EVENT_READ, process)
        beaten = 0.0
        while not self._closing.is_set():
            for key, _ in selector.select(timeout=BEAT / 2):
                try:
                    for message in self._links[key.data].receive():
                        self._take(key.data, message)
                except LostError:
                    if key.data not in self._left:
                        self._lost(key.data)
                    selector.unregister(key.fileobj)
            if time.monotonic() - beaten > BEAT:
                beaten = time.monotonic()
                self._beat()

    def _take(self, process: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "beat":
            self._standings[process] = (Standing(*message["standing"]), time.monotonic())
            self._limit = message["limit"]
        elif kind == "end":
            self._ended(message)
        elif kind == "left":
            self._left.add(process)
        else:
            with self._news:
                if kind == "value":
                    self._values[message["turn"]][process] = message["value"]
                elif kind == "result":
                    self._results[message["turn"]] = message["value"]
                else:
                    self._take_stop(process, message)
                self._news.notify_all()

    def _take_stop(self, process: int, message: Message) -> None:
        """Take a step of the agreement on the last update; the lock is held."""
        kind = message["kind"]
        if kind == "stop" and not self._frozen:  # to process 0
            self._frozen[0] = self._update
            self._send_all({"kind": "freeze"})
        elif kind == "freeze":
            self._frozen[self.process] = self._update
            self._send(0, {"kind": "frozen", "update": self._update})
        elif kind == "frozen":
            self._frozen[process] = message["update"]
            if len(self._frozen) == len(self.names):
                self.stop_at = max(self._frozen.values()) + 1
                self._send_all({"kind": "stop_at", "update": self.stop_at})
        elif kind == "stop_at":
            self.stop_at = message["update"]

    def _beat(self) -> None:
        """Say where this process is; process 0 also looks where the others are."""
        standing = self._pace.standing()
        self._standings[self.process] = (standing, time.monotonic())
        limit = self._pace.limit(self.seconds)
        if self.process == 0:
            self._judge(limit)
        elif self._silent(0) > self._limit:  # it would judge, and says nothing, though its machine is there
            self._ended({"code": LOST, "line": self._stuck([0], self._now(0)), "stacks": True})
        self._send_all({"kind": "beat", "standing": standing, "limit": limit})

    def _now(self, process: int) -> Standing:
        """Return where a process is, as far as is known."""
        standing = self._standings[process][0]
        return standing._replace(idle=standing.idle + self._silent(process))

    def _silent(self, process: int) -> float:
        """Return the seconds since a process was heard of, if it is where silence cannot be work that holds up all."""
        standing, heard = self._standings[process]
        return time.monotonic() - heard if standing.steady else 0.0

    def _judge(self, limit: float) -> None:
        standings = [self._now(i) for i in range(len(self.names))]
        if stuck := waited_for(standings, limit):
            self.end(LOST, self._stuck(stuck, standings[stuck[0]]), stacks=True)
        for i, (since, before) in list(self._waiting.items()):
            if standings[i].passed > before.passed:
                del self._waiting[i]
                seconds = time.monotonic() - since
                self.say(f"all waited {seconds:.0f} s for {self.name(i)} at {before.place}")
        slow = waited_for(standings, max(SLOW, 3 * self._pace.median))
        if len(slow) < len(standings):
            for i in slow:
                self._waiting.setdefault(i, (time.monotonic() - standings[i].idle, standings[i]))

    def _stuck(self, stuck: Sequence[int], standing: Standing) -> str:
        where = f"at {standing.place} for {standing.idle:.0f} s (train.stall_seconds); the stacks are above"
        if len(stuck) == len(self.names):
            return f"all processes stand still {where}"
        listed = ", ".join(map(self.name, stuck[:FEW])) + (", …" if len(stuck) > FEW else "")
        return f"{listed} stands still {where}"

    def say(self, line: str) -> None:
        """Print a line above a progress bar, if there is one."""
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr)

    def _lost(self, process: int) -> None:
        """End because the connection to a process closed without a word."""
        place = self._standings[process][0].place
        self._ended({"code": LOST, "line": f"{self.name(process)} died at {place}", "stacks": False})

    def _ended(self, message: Message) -> None:
        """End because a process did; process 0 tells those who cannot know."""
        self._exit(message["code"], message["line"], message["stacks"], {**message, "kind": "end"})

    def _exit(self, code: int, line: str, stacks: bool, message: Message) -> None:
        """Pass a message on and end the process, without what Python and JAX do at their end: it waits for others."""
        self._ending.acquire()  # never released: the first word is the last
        self._send_all(message)
        if stacks:
            faulthandler.dump_traceback(all_threads=True)
        if line:
            os.write(2, f"jformer: {line}\n".encode())
        part(self._links.values())
        os._exit(code)

    def _send(self, process: int, message: Message) -> None:
        try:
            self._links[process].send(message)
        except LostError:
            self._lost(process)

    def _send_all(self, message: Message) -> None:
        """Send to whoever is there; who is not is noticed where it is listened to."""
        for link in self._links.values():
            with contextlib.suppress(LostError):
                link.send(message)

    def _tell_first(self, message: Message) -> None:
        if self.process:
            self._send(0, message)
        else:
            self._take(0, message)


def _as_json(value: Any) -> Any:
    """Return a value as it arrives elsewhere."""
    return json.loads(json.dumps(value))
