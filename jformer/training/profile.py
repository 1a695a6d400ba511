"""A trace of a few updates, for TensorBoard or Perfetto. docs/performance.md explains how to read it."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from etils.epath import Path
from jaxtyping import PyTree

from jformer.errors import UserError
from jformer.storage import in_bucket


class Profile:
    """Traces the updates it is asked for."""

    def __init__(self, folder: Path, updates: range, say: Callable[[str], None]) -> None:
        """Trace `updates`, which are counted from 1 and may be none, into `folder`, which must lie on a disk."""
        if updates and in_bucket(folder):
            raise UserError("train.profile_steps: a trace cannot be written to a bucket; take a --workdir on a disk")
        self._folder, self._updates, self._say = folder, updates, say
        self._traced: list[int] = []  # updates of the trace that is being made

    def close(self) -> None:
        """Write the trace of a run that ends before the last of its traced updates."""
        if self._traced:
            self._stop()

    @contextlib.contextmanager
    def update(self, number: int, state: Callable[[], PyTree]) -> Iterator[None]:
        """Trace what is done here if update `number` is one of those asked for.

        The devices are waited for, by way of the newest `state()`, before the first of them and after the last, so a
        trace holds the whole of them; and whatever the loop does between them, such as validation.
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
        options.python_tracer_level = 0  # every call of Python would drown what the devices do
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def _stop(self) -> None:
        first, last = self._traced[0], self._traced[-1]
        self._traced = []
        jax.profiler.stop_trace()
        self._say(f"trace of updates {first} to {last}: {self._folder}")
