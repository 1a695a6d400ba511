"""This process among those of its run, for all other rooms; a run of one process agrees with itself and never waits.

Which processes there are is a fact of the whole process, as it is in JAX; so it is kept here, not passed around.
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

from jformer.errors import DONE, FAILED, LOST, UserError
from jformer.parallel.processes.alone import Alone
from jformer.parallel.processes.coordinates import Coordinates
from jformer.parallel.processes.handshake import refuse_differences, software
from jformer.parallel.processes.meeting import meet
from jformer.parallel.processes.service import Service

if TYPE_CHECKING:
    import jax

Value = TypeVar("Value")
Joined = TypeVar("Joined")
MEETING_SECONDS = 300.0  # in which all processes must have been started
SHARED_SECONDS = 5.0  # until what one process wrote must be there for others

_service: Service | None = None
_alone = Alone()


@contextlib.contextmanager
def joined(own: Coordinates | None, seconds: float = MEETING_SECONDS) -> Iterator[None]:
    """Be one of the processes of a run while this lasts; None is a run of one process, which needs nothing.

    However it ends, it ends for all: a UserError in one process is told by all with its exit code, one whose
    output nobody reads any longer ends all without a word, and any other error ends the others with 75. Raises
    AbsentError and UserError if the processes do not come together.
    """
    global _service
    if own is None or own.processes == 1:
        yield
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # of JAX's aborts
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
    except BrokenPipeError:  # who read the answers has left, as head does
        service.end(DONE)
    except BaseException as error:
        try:
            service.wait_for_cause()
            service.fail(error)
            traceback.print_exc()
            sys.stderr.flush()
        finally:  # nobody may be reading the traceback
            os._exit(FAILED)  # not by way of Python's end, where JAX waits for the others
    finally:
        _service = None


def process_count() -> int:
    """Return how many processes the run has."""
    return 1 if _service is None else _service.count


def is_main_process() -> bool:
    """Tell whether this process writes and speaks for all."""
    return _service is None or _service.process == 0


def process_index() -> int:
    """Return the number of this process."""
    return 0 if _service is None else _service.process


def enter_phase(phase: str, kind: Hashable = None) -> None:
    """Say what this process begins to do, so that the others can tell whether it is slow, stuck or dead; never waits.

    All processes enter the same phases in the same order. A phase of the same kind as one before takes about as long:
    a process that is stuck there is noticed soon, even if its processor is busy.
    """
    (_service or _alone).enter_phase(phase, kind)


def set_stall_limit(seconds: float) -> None:
    """Set how long a process may stand still; 0 is ten times as long as an update takes, at least a minute."""
    (_service or _alone).stall_seconds = seconds


def record_step_time(seconds: float) -> None:
    """Say how long an update takes: the limit for a stuck process follows from it."""
    (_service or _alone).pace.record_step_time(seconds)


def watched() -> contextlib.AbstractContextManager[None]:
    """End a process that is alone if it stands still in an update while this lasts; several watch each other anyway."""
    return _alone.watched() if _service is None else contextlib.nullcontext()


def agree(value: Value, join: Callable[[list[Value]], Joined]) -> Joined:
    """Return what process 0 makes of the values of all processes, as plain JSON. All call it in the same order."""
    return join([value]) if _service is None else _service.agree(value, join)


def barrier() -> None:
    """Wait until all processes are here."""
    agree(None, len)


def compile_together(program: Callable[..., object], *arguments: object) -> None:
    """Compile a jitted program in all processes before one of them runs it; one process alone compiles as it runs.

    The devices of several processes wait for each other in a program, on CPUs for no more than Gloo's 30 seconds. One
    process may well compile that much longer than another; it takes what is compiled here from JAX's cache.
    """
    if _service is not None:
        cast("jax.stages.Wrapped", program).lower(*arguments).compile()
        barrier()


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Let process 0 do something before all others do it: they find what it left."""
    if not is_main_process():
        barrier()
    yield
    if is_main_process():
        barrier()


def should_stop(update: int, asked: bool) -> bool:
    """Tell whether to stop after this update: the same one in all processes, once one of them is asked to.

    All processes call it after every update. `asked` says that this process is to stop, whatever told it so.
    """
    return asked if _service is None else _service.should_stop(update, asked)


def end_all(code: int, line: str) -> NoReturn:
    """End this process, and all others of its run, at once: with one line and an exit code."""
    if _service is not None:
        _service.end(code, line)
    with contextlib.suppress(OSError):  # nobody may be reading
        os.write(2, f"jformer: {line}\n".encode())
    os._exit(code)


def check_same(fields: Mapping[str, object]) -> None:
    """Raise UserError, in process 0, if a field is not the same in all; `joined` ends the others with its message."""
    if _service is not None:
        names = _service.machines
        agree(fields, lambda everybody: refuse_differences(everybody, names))


def refuse_unshared(folder: Path) -> None:
    """Raise UserError, in all processes, if one of them does not see what process 0 writes into a folder."""
    if _service is None:
        return
    service, path = _service, folder / "processes.token"
    token = agree(secrets.token_hex(8), lambda tokens: tokens[0])
    if is_main_process():
        path.write_text(token)
    barrier()
    seen = agree(_appears(path, token), list)
    if is_main_process():
        path.unlink()
    if not all(seen):
        blind = ", ".join(service.name(i) for i, sees in enumerate(seen) if not sees)
        raise UserError(f"--workdir={folder}: {blind} does not see what process 0 writes there: it must be shared")


def _appears(path: Path, text: str) -> bool:
    """Tell whether a file holds a text, which on a network's file system may take a moment."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not (found := path.exists() and path.read_text() == text) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _from_jax(error: BaseException | None) -> bool:
    """Tell whether an error comes from what the devices of all processes do together, such as a part of a save."""
    import jax

    while error and not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)):
        error = error.__cause__
    return error is not None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let what C++ prints on standard output go nowhere: it is for answers, and Gloo greets every process there."""
    before, answers = sys.stdout, os.dup(1)
    before.flush()
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    with os.fdopen(answers, "w", buffering=1, encoding=before.encoding) as sys.stdout:
        yield
        sys.stdout.flush()
        os.dup2(answers, 1)
    sys.stdout = before
