"""What a training run tells: rows of numbers to its files, a bar and plain lines to the person at the terminal.

Of several processes the first one tells it for all.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax
from etils.epath import Path
from tqdm import tqdm

from jformer import hosts
from jformer.config import Config
from jformer.data.sources import Pair
from jformer.errors import UserError
from jformer.flops import Work, total
from jformer.metrics import summarize
from jformer.optim import Schedule
from jformer.writers import JsonlWriter, TensorBoardWriter

T = TypeVar("T")
AHEAD = 2  # updates dispatched before the devices are done: they never idle, and a request to stop is soon met


class Cost(NamedTuple):
    """What turns work into shares of what the devices can do."""

    flops: Callable[[Work], int]  # of an update
    peak: float  # FLOPs a second of all devices


class Report:
    """Collects what every update says, fetches it when a row is due, and shows where the run is."""

    def __init__(self, workdir: Path, config: Config, start: int, schedule: Schedule, cost: Cost) -> None:
        """Open the files, dropping rows of updates after `start` that a killed run wrote and its restart repeats."""
        self._writers: list[JsonlWriter | TensorBoardWriter] = []
        if hosts.first():
            path = workdir / "metrics.jsonl"
            JsonlWriter.truncate_after(path, start)
            self._writers = [JsonlWriter(path), TensorBoardWriter(workdir / "tensorboard", start + 1)]
        self._config, self._schedule, self._cost = config, schedule, cost
        self._pending: list[dict[str, Any]] = []  # on the devices
        self._work: list[tuple[Work, Work]] = []  # of their texts and of their rows
        self._waited = 0.0
        hidden = not (hosts.first() and sys.stderr.isatty())
        self._bar = tqdm(total=config.train.num_steps, initial=start, unit="update", disable=hidden, leave=False)
        self._best = ""
        self.restart_clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        for writer in self._writers:
            writer.close()

    def keep(self) -> None:
        """Make sure that all rows outlive this process."""
        for writer in self._writers:
            writer.keep()

    def restart_clock(self) -> None:
        """Begin a new window for speeds: what lies between two windows is not training."""
        self._since = time.monotonic()

    def waiting(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and count the time they keep the training waiting."""
        while True:
            began = time.monotonic()
            item = next(items)
            self._waited += time.monotonic() - began
            yield item

    def collect(self, metrics: dict[str, Any], work: tuple[Work, Work]) -> None:
        """Take an update's numbers, still on the devices, and the work of its texts and of its rows."""
        self._pending.append(metrics)
        if len(self._pending) > AHEAD:
            jax.block_until_ready(self._pending[-1 - AHEAD])
        self._work.append(work)
        self._bar.update()

    def flush(self, step: int) -> None:
        """Wait for the devices and write one row for all updates since the last."""
        fetched = jax.device_get(self._pending)
        seconds = time.monotonic() - self._since
        totals = [update["sums"] for update in fetched]
        sums = {name: (_total(totals, name, 0), _total(totals, name, 1)) for name in totals[0]}
        last = fetched[-1]
        hosts.took(seconds / len(fetched))
        row = {
            "step": step,
            "split": "train",
            **summarize(sums),
            "grad_norm": max(float(update["grad_norm"]) for update in fetched),
            "learning_rate": float(self._schedule(step - 1 - int(last["skipped"]))),
            **self._speed(seconds),
            "data_wait": self._waited / seconds,
            "seconds_per_update": seconds / len(fetched),
            "skipped": int(last["skipped"]),
        }
        self._pending, self._work, self._waited = [], [], 0.0
        self.write(row)
        self.restart_clock()
        in_row = int(last["skipped_in_row"])
        if in_row >= self._config.train.max_skipped:
            raise UserError(
                f"update {step}: the last {in_row} updates were not finite and changed nothing "
                f"(train.max_skipped={self._config.train.max_skipped}); lower optim.learning_rate or raise the warmup"
            )

    def _speed(self, seconds: float) -> dict[str, float]:
        """Return what all did in so many seconds, in tokens and in FLOPs, and how much of it was not padding."""
        own = [total(works) for works in zip(*self._work, strict=True)]
        texts, rows = (Work(*sums) for sums in hosts.agree(own, _add_up))
        flops, peak = self._cost.flops(texts), self._cost.peak
        return {
            "tokens_per_second": texts.tokens / seconds,
            "source_tokens_per_second": texts.source / seconds,
            "target_tokens_per_second": texts.target / seconds,
            "padding_efficiency": texts.tokens / rows.tokens,
            "model_flops_per_second": flops / seconds,
            "mfu": flops / seconds / peak,
            "peak_flops_per_second": peak,
            "flops_efficiency": flops / self._cost.flops(rows),
        }

    def write(self, row: dict[str, Any]) -> None:
        """Send one flat row to every file and a line or the bar to the person."""
        for writer in self._writers:
            writer.write(row)
        if row["split"] == "train":
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            self._bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed}{self._best}")
            if self._bar.disable:
                total = self._config.train.num_steps
                left = (total - row["step"]) * row["seconds_per_update"]
                self.say(f"update {row['step']}/{total}: loss {row['loss']:.3f}, {speed}, {_clock(left)} left")
        else:
            self._best = f", {row['split']} loss {row['loss']:.3f}"
            names = ("loss", "perplexity", "accuracy")
            numbers = ", ".join(f"{name} {row[name]:.3f}" for name in names)
            self.say(f"update {row['step']}: {row['split']} {numbers}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if hosts.first():
            self._bar.write(text, file=sys.stderr)
            sys.stderr.flush()

    def show_config(self) -> None:
        """Print the resolved config, a line for each section."""
        for name, section in dataclasses.asdict(self._config).items():
            values = section if isinstance(section, dict) else {name: section}
            self.say(f"{name}: " + ", ".join(f"{key}={value!r}" for key, value in values.items()))

    def show_samples(self, pairs: Sequence[Pair], outputs: Sequence[str]) -> None:
        """Print what the model makes of some validation texts; without a target there is nothing to compare with."""
        for pair, output in zip(pairs, outputs, strict=True):
            mark = "exact" if output == pair.target else f"should be: {pair.target}"
            self.say(f"    {pair.source}\n      → {output}" + (f"   ({mark})" if pair.target else ""))


def _add_up(processes: Sequence[Sequence[Work]]) -> list[Work]:
    return [total(works) for works in zip(*processes, strict=True)]


def _total(sums: Sequence[dict[str, Any]], name: str, part: int) -> float:
    return sum(float(update[name][part]) for update in sums)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
