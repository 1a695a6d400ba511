"""Processes that take steps in turns, for steps.py, and their machine in words. Knows nothing of what they compute."""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from experiments.measure import commit, processor, processor_name, quartiles
from experiments.worker import Worker

LOAD = os.getloadavg()[0]
UNTIMED = 2  # steps before the first timed one
REST = 0.3  # seconds between turns: threads that spin after their work come to rest
FEATURES = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")


class Side(Worker):
    """A worker that takes a step when asked, and what it has reported so far."""

    def __init__(self, kind: str, python: str, told: dict[str, Any], keep: bool) -> None:
        name, _, compiled = kind.partition(" ")
        command = [python, "-m", "experiments.speed.steps_worker", name, *(["keep"] if keep else [])]
        super().__init__(command)
        self.steps: list[dict[str, float]] = []
        began = time.perf_counter()
        self.facts = self.ask({**told, "compiled": bool(compiled)})
        self.step()
        self.ready = time.perf_counter() - began  # seconds to the end of the first step

    def step(self) -> None:
        """Take a step, if it still can."""
        if "error" not in self.facts:
            answer = self.ask({})
            if "error" in answer:
                self.facts |= answer
            else:
                self.steps.append(answer)

    def timed(self, name: str) -> list[float]:
        """Return a figure of every timed step."""
        return [step[name] for step in self.steps[UNTIMED:]]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.timed("seconds"))

    @property
    def spread(self) -> str:
        """Quartiles in milliseconds."""
        return quartiles(self.timed("seconds"))


def race(sides: Sequence[Side], steps: int) -> None:
    """Let every side take its steps, one a turn, and end."""
    for _ in range(UNTIMED - 1 + steps):  # the first was taken at the start
        for side in sides:
            time.sleep(REST)
            side.step()
    for side in sides:
        side.close()


def machine(sides: Sequence[Side]) -> str:
    """Return the machine, the libraries and the commit."""
    having = [name for name in FEATURES if name in processor().get("flags", "").split()]
    versions = {name: text for side in sides for name, text in side.facts.get("versions", {}).items()}
    tunables = os.environ.get("GLIBC_TUNABLES", "by default")  # huge pages save a step its page faults
    return (
        f"{processor_name()}, {len(os.sched_getaffinity(0))} of its cores, "
        f"{' '.join(having)} (amx_bf16, avx512_bf16: those with bfloat16 products), load before {LOAD:.1f}; "
        f"{', '.join(f'{name} {text}' for name, text in versions.items())}; malloc {tunables}; {commit()}"
    )
