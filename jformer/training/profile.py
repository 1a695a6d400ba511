"""A trace of a few updates, for TensorBoard or Perfetto. docs/performance.md explains how to read it."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from etils.epath import Path
from jaxtyping import PyTree

from jformer.errors import UserError
from jformer.storage import in_bucket


class Profile:
    """Traces the updates of train.profile_steps."""

    def __init__(self, folder: Path, updates: range, show: Callable[[str], None]) -> None:
        """Trace `updates`, counted from 1, if any, into `folder`, which must be on a local disk."""
        if updates and in_bucket(folder):
            raise UserError("train.profile_steps: a trace cannot be written to a bucket; use a --workdir on a disk")
        self._folder, self._updates, self._show = folder, updates, show
        self._traced: list[int] = []  # updates of the trace in progress

    def close(self) -> None:
        """Write the trace if the run ends before its last traced update."""
        if self._traced:
            self._stop()

    @contextlib.contextmanager
    def update(self, number: int, state: Callable[[], PyTree]) -> Iterator[None]:
        """Trace the context if update `number` is to be traced.

        Waits for the devices, using the newest `state()`, before the first and after the last of these updates, so that
        the trace contains all of them and the loop's work in between, such as validation.
        """
        if number not in self._updates:
            yield
            return
        if not self._traced:
            jax.block_until_ready(state())
            self._start()
        self._traced.append(number)
        with jax.profiler.StepTraceAnnotation("update", step_num=number):
            yield
        if number == self._updates[-1]:
            jax.block_until_ready(state())
            self._stop()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls would outnumber device events
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def _stop(self) -> None:
        first, last = self._traced[0], self._traced[-1]
        self._traced = []
        jax.profiler.stop_trace()
        self._show(f"trace of updates {first} to {last}: {self._folder}")
