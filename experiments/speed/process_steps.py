"""What do an update and a save cost two processes, or one, here and at another commit? The same run by each, in turns.

Command:  python -m experiments.speed.process_steps --other=CHECKOUT --other_flags=--config.optim.warmup_steps=10
          python -m experiments.speed.process_steps --smoke

Processes of one virtual CPU device each train the quickstart's model. Timed is what lies between two lines of process
0, those of update --first and of the last one: once with a save after every tenth update, once with none. What the
saves add, shared out over them, is what training waits for one; writing goes on beside it. --other_flags are for the
other commit, whose options may have other names. With --processes=1 there is nobody to agree with: what then is slower
than at the other commit is not what the processes do. With --smoke, or without --other, only this one is timed.
"""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from experiments.measure import ROOT, commit, processor_name, smoke_sizes
from experiments.runs import flags_of, small_run
from jformer.parallel.processes.children import free_port

OTHER = flags.DEFINE_string("other", "", "A folder with another commit, checked out.")
FLAGS = flags.DEFINE_list("flags", ["--config.optim.warmup=10"], "Flags of jformer.main here.")
OTHER_FLAGS = flags.DEFINE_list("other_flags", ["--config.optim.warmup=10"], "Flags of jformer.main there.")
PROCESSES = flags.DEFINE_integer("processes", 2, "Processes of a run.", lower_bound=1)
UPDATES = flags.DEFINE_integer("updates", 160, "Updates of a run.")
FIRST = flags.DEFINE_integer("first", 40, "The update at which timing begins, when all is compiled.")
TURNS = flags.DEFINE_integer("turns", 3, "Runs of each kind.")
SAVE_EVERY = 10


def seconds(root: Path, given: Sequence[str], saving: bool, folder: Path) -> float:
    """Train with all processes; return the seconds from the line of the first timed update to that of the last."""
    updates, first = UPDATES.value, FIRST.value
    options = {"log_every": first, "eval_every": 0, "checkpoint_every": SAVE_EVERY if saving else updates + 1}
    options["num_steps"] = updates + 1  # so that the line of the last timed update comes before the end of the run
    command = [sys.executable, "-m", "jformer.main", "--config=configs/quickstart.py", f"--workdir={folder}/run"]
    command += [f"--config.data.cache_dir={folder}/cache", *given]
    command += [f"--config.train.{key}={value}" for key, value in options.items()]
    place = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={PROCESSES.value}"]
    each = [[*command, *place, f"--process={i}"] for i in range(PROCESSES.value)] if PROCESSES.value > 1 else [command]
    where: dict[str, Any] = {"cwd": root, "env": os.environ | {"PYTHONPATH": str(root)}, "stdout": subprocess.DEVNULL}
    times, said = {}, []
    with contextlib.ExitStack() as stack:
        for other in each[1:]:
            stack.enter_context(subprocess.Popen(other, stderr=subprocess.DEVNULL, **where))
        run = stack.enter_context(subprocess.Popen(each[0], stderr=subprocess.PIPE, text=True, **where))
        for line in run.stderr or ():
            said.append(line)
            if found := re.match(r"update (\d+)/", line):
                times[int(found[1])] = time.perf_counter()
            if updates in times:
                run.terminate()
    if not {first, updates} <= times.keys():
        sys.exit("".join(said[-20:]))
    return times[updates] - times[first]


def main(argv: list[str]) -> None:
    """Print the figures of both."""
    smoke = smoke_sizes(updates=8, first=4, turns=1)
    small = {key: value for key, value in small_run(9).items() if smoke and not key.startswith("train.")}
    sides = {"here": (ROOT, [*FLAGS.value, *flags_of(small)])}
    if OTHER.value:
        sides["other"] = (Path(OTHER.value), OTHER_FLAGS.value)
    found: dict[tuple[str, bool], list[float]] = {(name, saving): [] for name in sides for saving in (False, True)}
    print(f"{commit()}; {processor_name()}", flush=True)
    for turn in range(TURNS.value):
        for (name, saving), times in found.items():
            root, given = sides[name]
            with tempfile.TemporaryDirectory() as folder:
                times.append(
                    seconds(root, [*given, f"--config.data.cache_dir={folder}/cache"], saving, Path(folder, "run"))
                )
            print(f"turn {turn + 1}, {name}, {'saving' if saving else 'not saving'}: {times[-1]:.2f} s", flush=True)
    timed = UPDATES.value - FIRST.value
    saves = UPDATES.value // SAVE_EVERY - FIRST.value // SAVE_EVERY
    for name in sides:
        plain, with_saves = (statistics.median(found[name, each]) for each in (False, True))
        cost = f"{1e3 * (with_saves - plain) / saves:.0f} ms a save" if saves else "no save"
        print(f"{name}: {1e3 * plain / timed:.1f} ms an update, {cost}")


if __name__ == "__main__":
    app.run(main)
