"""The run that faults happen to, how far it is when they do, and one way to judge what became of it.

A run that is trained to a step has learned and told what an undisturbed run has at this step, to the last bit, or ends
with exit code 2 and one line that names the file. Anything else is a defect.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from jformer import main
from jformer.evaluation import records
from tests.faults.children import Child, End, run
from tests.faults.verdicts import Verdict, ending

ROOT = Path(__file__).parents[2]
EVERY = 2  # updates between validations, each with a checkpoint
SAVED, LONG = 4, 60  # updates: of the run that is damaged, and of runs that are killed
UPDATING = 4.0  # seconds in which updates are killed or stopped
FURTHER = SAVED + EVERY  # to which a damaged run goes on: one more save
OPTIONS = {
    "data.num_pairs": 200, "data.tokens_per_update": 512, "train.log_every": 1, "train.eval_every": EVERY,
    "train.checkpoint_every": EVERY, "train.peak_flops": 1e9, "data.tokenizer": "bpe", "data.vocab_size": 40,
}  # fmt: skip
CLOCKS = ("per_second", "seconds", "data_wait", "mfu")


class Trace(NamedTuple):
    """What a run has learned and told when it is trained to a step: digests of every array, and rows without clocks."""

    arrays: dict[str, Any]
    rows: list[dict[str, Any]]


class Runs:
    """A folder with an undisturbed run, and with one that is trained half and scored."""

    def __init__(self, folder: Path) -> None:
        """Train them, unless that is done."""
        self.folder, self.base, self.unbroken = folder, folder / "base", folder / "unbroken"
        self.cache, self.facts = folder / "cache", folder / "facts.json"
        if not self.facts.exists():
            self._begin()
        known = json.loads(self.facts.read_text())
        self.seconds, self.seconds_of_command = known["seconds"], known["seconds_of_command"]

    def _begin(self) -> None:
        """Train them, the second one by the real command, and note how long it took and what they score."""
        for workdir in (self.base, self.unbroken):
            shutil.rmtree(workdir, ignore_errors=True)
        real = self._do(self.arguments(self.base, SAVED), real=True)
        plain = self._do([*self.training(self.unbroken, LONG), "--config.train.keep_last=100"])
        self.facts.write_text(json.dumps({"seconds": plain.seconds, "seconds_of_command": real.seconds}))

    def arguments(self, workdir: Path, steps: int, *more: str) -> list[str]:
        """Return the arguments of jformer.main that train a run to a step."""
        options = {**OPTIONS, "train.num_steps": steps, "data.cache_dir": self.cache}
        flags = [f"--config.{key}={value}" for key, value in options.items()]
        return [f"--config={ROOT / 'tests' / 'small_run.py'}", f"--workdir={workdir}", *flags, *more]

    def training(self, workdir: Path, steps: int) -> list[str]:
        """Return the arguments that train a run to a step and do not score it."""
        return self.arguments(workdir, steps, "--config.data.test=()")

    def expected(self, step: int) -> Trace:
        """Return what an undisturbed run has learned and told at a step."""
        found = trace(self.unbroken, step)
        return Trace(found.arrays, [row for row in found.rows if row["step"] <= step])

    def copy(self, target: Path, source: Path) -> Path:
        """Return a copy of a run, in the place of what was there."""
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(source, target))

    def judge(self, end: End, workdir: Path, step: int) -> Verdict:
        """Tell what became of a run that should be trained to a step now."""
        if end.code or "Traceback" in end.said:
            return ending(end, ())
        return Verdict("unharmed", "") if trace(workdir, step) == self.expected(step) else Verdict("other bits", "")

    def _do(self, arguments: list[str], real: bool = False) -> End:
        """Do something that must succeed."""
        end = run(arguments if real else command(arguments), self.folder / "logs" / "begin.txt")
        if end.code:
            raise SystemExit(f"{' '.join(arguments)}: {end.said}")
        return end


def command(arguments: Sequence[str]) -> Callable[[], int]:
    """Return the command as a function, for a child that need not import anything."""
    return lambda: main.main(["jformer", *arguments])


def trace(workdir: Path, step: int) -> Trace:
    """Return what a run has learned and told that is trained to a step."""
    manifest = json.loads((workdir / "checkpoints" / str(step) / "manifest" / "metadata").read_bytes())
    rows = records.rows(workdir)
    return Trace(
        manifest["arrays"],
        [{key: row[key] for key in row if not any(word in key for word in CLOCKS)} for row in rows],
    )


def rows_until(workdir: Path) -> int:
    """Return the newest update that has a row."""
    rows = records.rows(workdir)
    return int(rows[-1]["step"]) if rows else 0


def reached(workdir: Path) -> str:
    """Return how far a run is: its newest update with a row, and whether that is validated just now."""
    rows = records.rows(workdir)
    step, split = (rows[-1]["step"], rows[-1]["split"]) if rows else (0, "")
    return f"at {step} of {LONG} updates" + (", validating" if split == "train" and step % EVERY == 0 else "")


def wait_for_moment(draw: Random, workdir: Path, child: Child, start: float) -> str:
    """Wait for a moment that is drawn: of the start, which takes so many seconds, or of the updates."""
    share, until = draw.random(), rows_until(workdir)
    if draw.random() < 1 / 3:
        time.sleep(share * start)
        return f"after {share * start:.1f} s"
    while child.lives() and rows_until(workdir) <= until:
        time.sleep(0.005)
    time.sleep(share * UPDATING)
    return f"{share * UPDATING:.2f} s after its first update, {reached(workdir)}"


def saved_steps(workdir: Path) -> list[int]:
    """Return the steps that lie there under their own names."""
    return sorted(int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdecimal())
