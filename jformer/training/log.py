"""The log of a training run: rows of numbers for its files, a progress bar and plain lines for the terminal.

`record` writes the files, `heartbeat` reports long phases. Of several processes only the main one logs.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax
from etils.epath import Path
from tqdm import tqdm

from jformer.config.options import Config, changed
from jformer.data.progress import sparkline
from jformer.errors import UserError
from jformer.models.flops import Work, total
from jformer.parallel import processes
from jformer.tasks.sums import Sum, Sums, add_up, summarize
from jformer.training.heartbeat import UPDATING, Heartbeat
from jformer.training.malloc import give_back_freed_memory
from jformer.training.optim import Schedule
from jformer.training.profile import Profile
from jformer.training.record import Record
from jformer.training.rows import Sample
from jformer.training.state import Progress, TrainState
from jformer.training.step import Metrics

T = TypeVar("T")
AHEAD = 2  # updates dispatched in advance: the devices never idle, and a run stops soon when asked to


class Works(NamedTuple):
    """The work of a batch."""

    texts: Work
    rows: Work  # with all their padding


class Cost(NamedTuple):
    """Converts work into FLOPs and utilization."""

    flops: Callable[[Work], int]  # of an update
    peak: float  # FLOPs a second of all devices


class TrainingLog:
    """Collects the metrics of updates, fetches them when a row is due, and shows the progress of the run."""

    def __init__(
        self,
        workdir: Path,
        config: Config,
        progress: Progress,
        schedule: Schedule,
        cost: Cost,
        explain: Callable[[TrainState, int], str],
    ) -> None:
        """Open the files, dropping rows of later updates that a killed run wrote and its restart repeats.

        Args:
            workdir: of the run.
            config: the limits on updates, minutes and consecutive skipped updates.
            progress: of the run before this process.
            schedule: the learning rate of every update.
            cost: converts work into FLOPs and utilization.
            explain: (newest state, number of a skipped update) → what was not finite in the update.
        """
        start = progress.step
        traced = config.train.profiled() if processes.is_main_process() else range(0)
        self.profile = Profile(workdir / "profile", traced, self.show)
        self._record = Record(workdir, config, start, self.show) if processes.is_main_process() else None
        self._config, self._schedule, self._cost = config, schedule, cost
        limit = 60 * config.train.max_minutes
        self._ends = time.monotonic() + limit - progress.seconds if limit else math.inf
        self._pending: list[Metrics] = []  # on the devices
        self._work: list[Works] = []
        self._state: TrainState | None = None  # the newest
        self._waited = 0.0
        self._rows = progress.rows  # rows expected in metrics.jsonl at the start
        self._start, self._aside = start, 0.0  # seconds of validating and saving since update `start`
        self._compiled: set[Hashable] = set()  # shapes of batches
        self.skipped_in_row = 0  # updates, at the newest row
        self._explain = explain
        self._shown: set[str] = set()  # lines that are shown once
        self._explained, self._reason = 0, ""  # a skipped update, and its first non-finite part
        hidden = not (processes.is_main_process() and sys.stderr.isatty())
        self._bar = tqdm(total=config.train.num_steps, initial=start, unit="update", disable=hidden, leave=False)
        self._losses: list[float] = []  # of the rows, which the bar draws
        self._valid_loss = ""  # of the newest validation, as the bar shows it
        path, total = workdir / "heartbeat.json", config.train.num_steps
        self.heartbeat = Heartbeat(path, start, total, self._show_phase, terminal=not hidden)
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        self.heartbeat.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.profile.close()
        finally:
            self.heartbeat.stop()
            self._bar.close()
            self._state, self._pending = None, []  # this object is in cycles: arrays would stay until a collection
            if self._record:
                self._record.close(failed=kind is not None)

    @property
    def rows(self) -> int:
        """The number of rows in metrics.jsonl; 0 in all processes but the main one."""
        return self._record.rows if self._record else 0

    def keep(self) -> None:
        """Flush all rows and lines."""
        if self._record:
            self._record.keep()

    def restart_clock(self) -> None:
        """Start a new window for speeds and the time left; time between windows is not training time."""
        now = time.monotonic()
        self._aside += now - self._since
        self._since = now
        self._bar.unpause()

    def waiting(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and count how long they keep training waiting, which begins with the first."""
        self._since = time.monotonic()
        self._bar.unpause()
        while True:
            began = time.monotonic()
            item = next(items)
            self._waited += time.monotonic() - began
            yield item

    @contextlib.contextmanager
    def timing(self, step: int, shapes: Hashable) -> Iterator[bool]:
        """Dispatch update `step` inside; yields whether it is the first of its shapes, which compiles.

        Compiling does not count as training, and the memory it leaves behind is given back.
        """
        if shapes in self._compiled:
            yield False
            return
        self._compiled.add(shapes)
        jax.block_until_ready(self._pending)
        began = time.monotonic()
        self.heartbeat.enter(f"compiling update {step}, shape {len(self._compiled)}")
        yield True
        give_back_freed_memory()
        self.heartbeat.enter(UPDATING)
        self._since += time.monotonic() - began
        self._bar.unpause()

    def collect(self, step: int, state: TrainState, metrics: Metrics, work: Works) -> None:
        """Take an update's state and metrics, still on the devices, and its work.

        Raises UserError, after a row of its own, if too many updates in a row were skipped.
        """
        self._state = state
        self._pending.append(metrics)
        self._work.append(work)
        if len(self._pending) > AHEAD:
            in_row = int(self._pending[-1 - AHEAD].skipped_in_row)  # waits for that update
            self.heartbeat.step = step - AHEAD
            if in_row and not self._explained:
                self._explain_skip(step - AHEAD)
            if in_row >= self._config.train.max_skipped:
                self.flush(step)  # raises
        self._bar.update()

    def _explain_skip(self, update: int) -> None:
        """Log the first non-finite part of a skipped update; the time does not count as training."""
        assert self._state is not None
        began = time.monotonic()
        self.heartbeat.enter(f"looking for non-finite values in update {update}")
        self._explained, self._reason = update, self._explain(self._state, update)
        self.show(f"update {update} was skipped: {self._reason}")
        self.heartbeat.enter(UPDATING)
        self._since += time.monotonic() - began

    def flush(self, step: int) -> None:
        """Wait for the devices and write one row for all updates since the last; skipped ones do not count.

        Raises UserError if too many updates in a row were skipped, even if a finite one followed.
        """
        fetched: list[Metrics] = jax.device_get(self._pending)
        seconds = time.monotonic() - self._since
        processes.record_step_time(seconds / len(fetched))
        applied = [update for update in fetched if update.skipped_in_row == 0]
        nothing: Sums = dict.fromkeys(fetched[0].sums, Sum(0.0, 0.0))
        last = fetched[-1]
        row: dict[str, Any] = {
            "step": step,
            "split": "train",
            **summarize(add_up([nothing, *(update.sums for update in applied)])),
            "grad_norm": max((float(update.grad_norm) for update in applied), default=math.nan),
            "learning_rate": float(self._schedule(max(0, step - 1 - int(last.skipped)))),
            **self._speed(seconds),
            "data_wait": self._waited / seconds,
            "seconds_per_update": seconds / len(fetched),
            "skipped": int(last.skipped),
        }
        self._pending, self._work, self._waited = [], [], 0.0
        self.write(row)
        self._since = time.monotonic()
        self.heartbeat.step, self.heartbeat.loss = step, row["loss"]
        self.skipped_in_row = int(last.skipped_in_row)
        most, at = max((int(update.skipped_in_row), at) for at, update in enumerate(fetched, step + 1 - len(fetched)))
        too_many = most >= self._config.train.max_skipped
        if most and (not self._explained or (too_many and self._explained <= at - most)):  # or of an earlier row
            self._explain_skip(at - most + 1)
        if too_many:
            raise UserError(
                f"update {at}: {most} updates in a row were not finite and were skipped "
                f"(train.max_skipped={self._config.train.max_skipped}): {self._reason}; "
                "use a new --workdir with a lower optim.learning_rate or a longer optim.warmup"
            )

    def _speed(self, seconds: float) -> dict[str, float]:
        """Return the throughput of all processes in tokens and FLOPs, and the share that was not padding."""
        texts, rows = (Work(*sums) for sums in processes.agree(_add_up(self._work), _add_up))
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
        """Write a row to every file, and show it as a line or in the bar."""
        if self._record:
            self._record.write(row)
        if row["split"] == "train":
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            if self._bar.disable:
                total = self._config.train.num_steps
                aside = self._aside / (row["step"] - self._start)
                left = (total - row["step"]) * (row["seconds_per_update"] + aside)
                left = min(left, self._ends - time.monotonic())
                self.show(f"update {row['step']}/{total}: loss {row['loss']:.3f}, {speed}, {_clock(max(0, left))} left")
            else:
                self._losses.append(row["loss"])
                curve = sparkline(self._losses)
                self._bar.set_postfix_str(f"loss {curve} {row['loss']:.3f}, {speed}{self._valid_loss}")
        else:
            if row["split"] == "valid":
                self._valid_loss = f", valid loss {row['loss']:.3f}"
            names = dict.fromkeys(("loss", "perplexity", "accuracy", *self._config.evaluate.during))
            numbers = ", ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
            self.show(f"update {row['step']}: {row['split']} {numbers}")

    def show(self, lines: str | Iterable[str]) -> None:
        """Print a line, or each of several, above the bar, and append it to training.log."""
        for line in [lines] if isinstance(lines, str) else lines:
            if processes.is_main_process():
                self.heartbeat.note_output()
                self._bar.write(line, file=sys.stderr)
                sys.stderr.flush()
                if self._record:
                    self._record.write_line(line)

    def show_once(self, lines: Iterable[str]) -> None:
        """Show the lines that this method has not shown before."""
        new = [line for line in dict.fromkeys(lines) if line not in self._shown]
        self._shown.update(new)
        self.show(new)

    def _show_phase(self, text: str) -> None:
        """Show the current phase, "" for none; called by the heartbeat, from its thread and the main one."""
        if not self._bar.disable:
            self._bar.set_description_str(text)
        elif text:
            self.show(text)

    def show_start(self) -> None:
        """Print the options that are not the default, a line for each section, and warnings about the start."""
        sections: dict[str, list[str]] = {}
        for key, (value, _) in changed(self._config).items():
            section, _, option = key.rpartition(".")
            sections.setdefault(section, []).append(f"{option}={value!r}")
        for section, options in sections.items():
            self.show(f"{section}: {', '.join(options)}" if section else ", ".join(options))
        self.show(self._record.missing if self._record else [])
        if self.rows != self._rows:
            self.show(
                f"metrics.jsonl is damaged: {self._rows} rows were written before this update, {self.rows} are left"
            )
        train = self._config.train
        if train.profile_steps and train.profiled()[-1] <= self._start:
            self.show(f"train.profile_steps={train.profile_steps!r} have passed: no update is traced")

    def show_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print and record answers to validation examples."""
        for number, sample in enumerate(samples, start=1):
            if self._record:
                self._record.write_sample(step, number, sample)
            mark = "exact" if sample.answer == sample.reference else f"should be: {sample.reference}"
            source, answer = (" ".join(text.split("\n")) for text in (sample.source, sample.answer))
            self.show(f"    {source}\n      → {answer}" + (f"   ({mark})" if sample.reference else ""))


def _add_up(parts: Sequence[Sequence[Work]]) -> list[Work]:
    return [total(works) for works in zip(*parts, strict=True)]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
