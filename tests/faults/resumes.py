"""A run of three epochs is gone on with from every one of its 60 updates, and must end as if it never stopped.

Dropout is on, rows are packed or in buckets, in float32 or bfloat16. What goes on is the training loop itself, on a
checkpoint as it lies on disk, in one process whose compiled update all share. Which examples an update learns from is
noted where their tokens are put into its arrays, and when the update is made.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from etils import epath

from jformer.config import resolve
from jformer.config.config_files import run_config_file
from jformer.config.options import Config
from jformer.data.pipeline import Arrays, Batches, Rows
from jformer.errors import UserError
from jformer.trainer import train
from jformer.training.feed import Feed, make_feed
from jformer.training.loop import loop
from jformer.training.state import TrainState
from tests.faults.runs import ROOT, Runs, Trace, trace
from tests.faults.verdicts import Verdict

EPOCHS, STEPS = 3, 60
VARIANTS = tuple(itertools.product(("packed", "buckets"), ("float32", "bfloat16")))
PAIRS = {"packed": 144, "buckets": 110}  # that make 20 updates an epoch
OPTIONS = {
    "data.tokens_per_update": 200, "data.packed_length": 40, "data.num_buckets": 2, "data.row_multiple": 4,
    "data.test": (), "train.num_steps": STEPS, "train.log_every": 1, "train.eval_every": 20,
    "train.keep_last": STEPS, "train.peak_flops": 1e9,
}  # fmt: skip
LINE = b'{"step": 61, "split": "tra'  # half-written


class Course(NamedTuple):
    """What a run did: the examples of every update that it made, and what it has learned and told in the end."""

    start: int  # the update it went on from
    examples: list[tuple[int, list[int]]]  # updates, from 0, in the order in which they were made
    leaves: list[np.ndarray]
    told: Trace


class Resumes:
    """A run that was not interrupted, with many checkpoints, and what goes on from them."""

    def __init__(self, folder: Path, batching: str, dtype: str, every: int = 1) -> None:
        """Train it, with a checkpoint at every so many updates."""
        self._folder, self._base = folder, folder / "base"
        config = run_config_file(ROOT / "tests" / "small_run.py")
        options = {"data.batching": batching, "data.num_pairs": PAIRS[batching], "model.dtype": dtype}
        options |= {"data.cache_dir": str(folder / "cache"), "train.checkpoint_every": every}
        config.update_from_flattened_dict({**OPTIONS, **options})
        self._config = resolve(config)
        shutil.rmtree(self._base, ignore_errors=True)
        self._whole = self._train(self._config, self._base)
        if any(count_examples(self._whole.examples, PAIRS[batching])):
            raise SystemExit(f"{STEPS} updates are not {EPOCHS} epochs")

    def resume(self, step: int, draw: Random) -> tuple[str, Verdict]:
        """Go on from an update, with what a run that was killed later left of its rows."""
        workdir = self._folder / "resumed"
        left = self._begin(workdir, step, draw)
        seldom = dataclasses.replace(self._config.train, checkpoint_every=STEPS // EPOCHS)  # fewer saves take less time
        config = dataclasses.replace(self._config, train=seldom)
        if line := self._refuses_damage(config, workdir, step, draw):
            return left, Verdict("damage to a row unseen", line)
        course = self._train(config, workdir)
        if course.start != step:
            return left, Verdict(f"gone on from {course.start}", left)
        return self._judge(step, left, course)

    def _begin(self, workdir: Path, step: int, draw: Random) -> str:
        """Leave a run as one that was killed after the save of an update; return what is left of its rows."""
        shutil.rmtree(workdir, ignore_errors=True)
        ignored = shutil.ignore_patterns("checkpoints", "tensorboard", "training.log")
        shutil.copytree(self._base, workdir, ignore=ignored)
        if step:
            shutil.copytree(self._base / "checkpoints" / str(step), workdir / "checkpoints" / str(step))
        rows = (self._base / "metrics.jsonl").read_bytes()
        cut = draw.randint(_end_of(rows, step), len(rows))
        kept = rows[:cut] + (LINE if draw.random() < 0.5 and rows[:cut].endswith(b"\n") else b"")
        (workdir / "metrics.jsonl").write_bytes(kept)
        *whole, half = kept.split(b"\n")
        return f"from update {step}, with {len(whole)} rows and {len(half)} bytes of another"

    def _refuses_damage(self, config: Config, workdir: Path, step: int, draw: Random) -> str:
        """Damage a row that stays; return "" if that is refused by file and line."""
        path = workdir / "metrics.jsonl"
        before = path.read_bytes()
        if not (end := _end_of(before, step)):
            return ""
        at, damaged = 0, before
        while same_rows(before[:end], damaged[:end]):  # another last digit may be of the same number
            at = draw.randrange(end - 1)
            damaged = before[:at] + bytes([before[at] ^ 1 << draw.randrange(7)]) + before[at + 1 :]
        path.write_bytes(damaged)
        try:
            train(config, epath.Path(workdir), lambda **given: given["state"])
        except UserError as error:
            return "" if f"{path}:" in str(error) and "\n" not in str(error) else str(error)
        else:
            return f"a flipped bit at {at} of {end}"
        finally:
            path.write_bytes(before)

    def _train(self, config: Config, workdir: Path) -> Course:
        """Train a run to its end, noting the examples of every update that is made."""
        put: dict[int, list[int]] = {}
        made: list[int] = []
        found: dict[str, Any] = {}

        def noting_feed(batches: Batches, *others: Any) -> Feed:
            features = batches.features

            def arrays(rows: Rows, *others: Any) -> Arrays:
                put[others[-1][1]] = rows.examples.tolist()  # by the number of the batch
                return features.arrays(rows, *others)

            noting = dataclasses.replace(batches, features=features._replace(arrays=arrays))
            return make_feed(noting, *others)

        def noting_loop(**given: Any) -> TrainState:
            def noted(state: Any, batch: Any) -> Any:
                made.append(int(state.step))
                return given["update"](state, batch)

            start = given["progress"].step
            found.update(start=start, state=loop(**{**given, "update": noted}))
            return found["state"]

        silent = contextlib.redirect_stderr(io.StringIO())
        with silent, mock.patch("jformer.trainer.make_feed", noting_feed):
            train(config, epath.Path(workdir), noting_loop)
        examples = [(step, put[step]) for step in made]
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found["state"])]
        return Course(found["start"], examples, leaves, trace(workdir, STEPS))

    def _judge(self, step: int, left: str, course: Course) -> tuple[str, Verdict]:
        """Compare what went on with the run that was not interrupted, and count examples epoch by epoch."""
        count = PAIRS[self._config.data.batching]
        repeated, missed = count_examples([*self._whole.examples[:step], *course.examples], count)
        fault = f"{left}: {repeated} examples repeated, {missed} missed of {EPOCHS} x {count}"
        pairs = zip(course.leaves, self._whole.leaves, strict=True)
        same = [a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs]
        found = {
            f"{repeated} examples repeated, {missed} missed": not repeated and not missed,
            "other bits": all(same) and course.told.arrays == self._whole.told.arrays,
            "other rows": course.told.rows == self._whole.told.rows,
        }
        wrong = [name for name, good in found.items() if not good]
        return fault, Verdict(", ".join(wrong) or "unharmed", "")


def count_examples(updates: Sequence[tuple[int, Sequence[int]]], count: int) -> tuple[int, int]:
    """Return how many examples of all epochs came more than once in theirs, and how many never."""
    epochs = [Counter[int]() for _ in range(EPOCHS)]
    for step, examples in updates:
        epochs[step * EPOCHS // STEPS].update(examples)
    return sum(epoch.total() - len(epoch) for epoch in epochs), sum(count - len(epoch) for epoch in epochs)


def resume(runs: Runs, draw: Random, number: int) -> tuple[str, Verdict] | None:
    """Go on from one update of one variant; None where there is none left."""
    if number >= STEPS * len(VARIANTS):
        return None
    batching, dtype = VARIANTS[number // STEPS]
    fault, verdict = resumes(runs.folder / "resumes", batching, dtype).resume(number % STEPS, draw)
    return f"{batching}, {dtype}: {fault}", verdict


@functools.cache
def resumes(folder: Path, batching: str, dtype: str) -> Resumes:
    """Return the run of a variant, trained once."""
    return Resumes(folder / f"{batching}-{dtype}", batching, dtype)


def same_rows(rows: bytes, others: bytes) -> bool:
    """Return whether two contents of metrics.jsonl say the same."""
    try:
        return [json.loads(line) for line in rows.splitlines()] == [json.loads(line) for line in others.splitlines()]
    except ValueError:
        return False


def _end_of(rows: bytes, step: int) -> int:
    """Return the bytes of the rows up to an update."""
    lines = rows.split(b"\n")[:-1]
    return sum(len(line) + 1 for line in lines if json.loads(line)["step"] <= step)
