"""What do an update and a save cost two processes, here and at another commit? The same run by each, in turns.

Command:  python -m experiments.process_steps --other=CHECKOUT --other_flags=--config.optim.warmup_steps=10
          python -m experiments.process_steps --smoke

Two processes of one virtual CPU device train the quickstart's model. Timed is what lies between two lines of process 0,
those of update --first and of the last one: once with a save after every tenth update, once with none. The difference,
shared out over the saves, is what training waits for one; writing goes on beside it. --other_flags are for the other
commit, whose options may have other names. With --smoke, or without another checkout, only this one is timed.
"""

import os
import re
import socket
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

OTHER = flags.DEFINE_string("other", "", "A folder with another commit, checked out.")
FLAGS = flags.DEFINE_list("flags", ["--config.optim.warmup=10"], "Flags of jformer.main here.")
OTHER_FLAGS = flags.DEFINE_list("other_flags", ["--config.optim.warmup=10"], "Flags of jformer.main there.")
UPDATES = flags.DEFINE_integer("updates", 160, "Updates of a run.")
FIRST = flags.DEFINE_integer("first", 40, "The update at which timing begins, when all is compiled.")
TURNS = flags.DEFINE_integer("turns", 3, "Runs of each kind.")
SAVE_EVERY = 10


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def seconds(root: Path, given: Sequence[str], saving: bool, folder: Path) -> float:
    """Train with two processes; return the seconds from the line of the first timed update to that of the last."""
    updates, first = UPDATES.value, FIRST.value
    options = {"log_every": first, "eval_every": 0, "checkpoint_every": SAVE_EVERY if saving else updates + 1}
    options["num_steps"] = updates + 1  # so that the line of the last timed update comes before the end of the run
    command = [sys.executable, "-m", "jformer.main", "--config=configs/quickstart.py", f"--workdir={folder}/run"]
    command += [f"--config.data.cache_dir={folder}/cache", *given]
    command += [f"--config.train.{key}={value}" for key, value in options.items()]
    command += [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    where: dict[str, Any] = {"cwd": root, "env": os.environ | {"PYTHONPATH": str(root)}, "stdout": subprocess.DEVNULL}
    times, said = {}, []
    with (
        subprocess.Popen([*command, "--process=1"], stderr=subprocess.DEVNULL, **where),
        subprocess.Popen([*command, "--process=0"], stderr=subprocess.PIPE, text=True, **where) as run,
    ):
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
