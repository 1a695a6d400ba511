"""This process's membership in its run, for all other rooms; a run of one process never waits.

Membership in a run is global state of the process, as in JAX, so it is kept here instead of being passed around.
"""

import contextlib
import os
import resource
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from jformer import errors
from jformer.errors import DONE, FAILED, LOST, UserError
from jformer.parallel.processes.ending import leave
from jformer.parallel.processes.handshake import refuse_differences, software
from jformer.parallel.processes.meeting import meet
from jformer.parallel.processes.process_info import ProcessInfo
from jformer.parallel.processes.service import Service
from jformer.parallel.processes.watchdog import Watchdog

if TYPE_CHECKING:
    import jax

Value = TypeVar("Value")
Result = TypeVar("Result")
MEETING_SECONDS = 300.0  # within which all processes must be started
SHARED_SECONDS = 5.0  # within which the others must see a file that one process wrote

_service: Service | None = None
_watchdog = Watchdog()


@contextlib.contextmanager
def join_run(own: ProcessInfo | None, seconds: float = MEETING_SECONDS) -> Iterator[None]:
    """Join the multi-process run for the duration of the context; None = a run of one process.

    All processes end together: a UserError in one is printed by all, with its exit code; a closed output ends all
    silently; any other error ends the others with 75. Raises AbsentError and UserError if the processes do not meet.
    """
    global _service
    if own is None or own.processes == 1:
        yield
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # JAX's aborts dump core
    _service = service = Service(own, meet(own, software(), seconds))
    try:
        with _quiet():
            yield
        enter_phase("the end")
        service.leave()
    except UserError as error:
        line = " ".join(str(error).split())
        if _from_jax(error):
            service.wait_for_cause()
            service.end(LOST, line)
        service.end(error.code, line)
    except BrokenPipeError:  # the reader of the answers has closed the pipe, as head does
        service.end(DONE)
    except BaseException as error:
        try:
            service.wait_for_cause()
            service.fail(error)
            traceback.print_exc()
            sys.stderr.flush()
        finally:  # standard error may be closed
            os._exit(FAILED)  # without Python's cleanup, where JAX waits for the others
    finally:
        _service = None


def process_count() -> int:
    """Return how many processes the run has."""
    return 1 if _service is None else _service.count


def is_main_process() -> bool:
    """Return whether this process writes files and logs for all."""
    return _service is None or _service.process == 0


def enter_phase(phase: str, kind: Hashable = None) -> None:
    """Record the start of a phase, for detecting slow, stuck and dead processes; never waits.

    All processes enter the same phases in the same order. Phases of one kind take about equally long: a process that is
    stuck in one is noticed soon, even if its processor is busy.
    """
    (_service or _watchdog).enter_phase(phase, kind)


def set_stall_limit(seconds: float) -> None:
    """Set how long a process may make no progress; 0 = ten updates, at least a minute."""
    (_service or _watchdog).stall_seconds = seconds


def record_step_time(seconds: float) -> None:
    """Record how long an update took, which determines the limit for a stuck process."""
    (_service or _watchdog).pace.record_step_time(seconds)


def working_elsewhere() -> contextlib.AbstractContextManager[None]:
    """Inside the context, another program works for this process, which is not stuck even if it seems idle."""
    return (_service or _watchdog).pace.working_elsewhere()


def watched() -> contextlib.AbstractContextManager[None]:
    """Inside the context, end a process that runs alone if an update is stuck; several watch each other anyway."""
    return _watchdog.watched() if _service is None else contextlib.nullcontext()


def agree(value: Value, combine: Callable[[list[Value]], Result]) -> Result:
    """Return the values of all processes, as combined by process 0, as plain JSON; all call this in the same order."""
    return combine([value]) if _service is None else _service.agree(value, combine)


def from_main_process(find: Callable[[], Result]) -> Result:
    """Return in all processes what process 0 finds, as plain JSON, or raise its UserError in all of them.

    Where the error is of a kind that jformer.errors has, so is the one that is raised.
    """
    found: list[Result] = []
    refusal: list[str] = []
    if is_main_process():
        try:
            found = [find()]
        except UserError as error:
            refusal = [type(error).__name__, str(error)]
    agreed, refused = agree((found, refusal), lambda values: values[0])
    if refused:
        kind, text = refused
        raise getattr(errors, kind, UserError)(text)
    return agreed[0]


def barrier() -> None:
    """Wait until all processes have called this."""
    agree(None, len)


def compile_together(program: Callable[..., object], *arguments: object) -> None:
    """Compile a jitted program in all processes before any runs it; a single process compiles when it runs.

    Inside a program, devices of several processes wait for each other, on CPUs for at most Gloo's 30 seconds, but
    compiling may take one process that much longer than another. The later run takes the program from JAX's cache.
    """
    if _service is not None:
        cast("jax.stages.Wrapped", program).lower(*arguments).compile()
        barrier()


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Run the context in process 0 first; the others then find its results."""
    if not is_main_process():
        barrier()
    yield
    if is_main_process():
        barrier()


def should_stop(update: int, asked: bool) -> bool:
    """Return whether to stop after this update, the same one in all processes, once one of them was asked to.

    All processes call this after every update; `asked` is true once this process should stop.
    """
    return asked if _service is None else _service.should_stop(update, asked)


def end_all(code: int, line: str) -> NoReturn:
    """End this process and all others of its run at once, with a line and an exit code."""
    if _service is not None:
        _service.end(code, line)
    leave(code, line)


def check_same(fields: Mapping[str, object]) -> None:
    """Raise UserError, in process 0, if a field is not the same in all; `join_run` ends the others with its message."""
    if _service is not None:
        names = _service.machines
        agree(fields, lambda everybody: refuse_differences(everybody, names))


def refuse_unshared(folder: Path) -> None:
    """Raise UserError, in all processes, if one of them does not see a file that process 0 writes into a folder."""
    if blind := _blind_to(folder):
        raise UserError(
            f"--workdir={folder}: {', '.join(blind)} does not see what process 0 writes there: it must be shared"
        )


def is_shared(folder: Path) -> bool:
    """Return whether all processes see what process 0 writes into a folder, which it creates; False if that fails."""
    return not _blind_to(folder, Exception)  # buckets also raise errors other than OSError


def _blind_to(folder: Path, *ignored: type[Exception]) -> list[str]:
    """Return the names of the processes that do not see a file that process 0 writes into a folder."""
    if _service is None:
        return []
    service, sees = _service, False
    path = folder / f"processes-{agree(secrets.token_hex(8), lambda tokens: tokens[0])}"
    if is_main_process():
        with contextlib.suppress(*ignored):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(path.name)
    barrier()
    with contextlib.suppress(*ignored):
        sees = _appears(path)
    seen = agree(sees, list)
    if is_main_process():
        with contextlib.suppress(*ignored):
            path.unlink(missing_ok=True)
    return [service.name(i) for i, sees in enumerate(seen) if not sees]


def _appears(path: Path) -> bool:
    """Return whether a file exists, which may take a moment on a network file system."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not (found := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _from_jax(error: BaseException | None) -> bool:
    """Return whether an error comes from a collective operation, such as a part of a save."""
    import jax

    while error and not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)):
        error = error.__cause__
    return error is not None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard what C++ prints on standard output, where Gloo logs every process: standard output is for answers."""
    before, answers = sys.stdout, os.dup(1)
    before.flush()
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = os.fdopen(answers, "w", buffering=1, encoding=before.encoding)
    yield  # an error ends the process; closing would fail again on a full disk, and hide it
    sys.stdout.flush()
    os.dup2(answers, 1)
    sys.stdout.close()
    sys.stdout = before
