"""One side of steps.py, in a process and an environment of its own.

Command:  python -m experiments.speed.steps_worker jformer|floor|flax|torch [keep]    (steps.py starts it)

The first line it reads is JSON that says what to build, and is answered with facts; every further line asks for a step
and is answered with its seconds, its loss, and the CPU time of all threads in the step and since the last one, when it
should be idle. A side is `load` of steps_SIDE, so that each process imports only what its side needs.
With `keep` its memory is held as that of a training run is, see jformer.training.malloc.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from jformer.training.malloc import keep_freed_memory

Told = dict[str, Any]
Step = Callable[[], tuple[float, float]]  # → seconds, loss


def compiled(function: Any, *args: Any) -> tuple[Callable[..., Any], float, int]:
    """Return a jitted function compiled for its arguments, the seconds that took, and the bytes of its temporaries."""
    began = time.perf_counter()
    done = function.lower(*args).compile()
    return done, time.perf_counter() - began, done.memory_analysis().temp_size_in_bytes


def serve(side: str, lines: Iterable[str], out: TextIO) -> None:
    """Answer line by line; an error is an answer, too, so that the table can say what a peer lacks."""
    run: Step | None = None
    before = time.process_time()
    for line in lines:
        try:
            if run is None:
                run, answer = importlib.import_module(f"experiments.speed.steps_{side}").load(json.loads(line))
            else:
                began = time.process_time()
                seconds, loss = run()
                cpu = {"busy": time.process_time() - began, "idle": began - before}
                answer = {"seconds": seconds, "loss": loss, **cpu}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        print(json.dumps(answer), file=out, flush=True)
        before = time.process_time()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not an answer
    if "keep" in sys.argv[2:]:
        keep_freed_memory()
    serve(sys.argv[1], sys.stdin, answers)
