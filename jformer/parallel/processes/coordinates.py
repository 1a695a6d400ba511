"""Which process of how many is this, and where is process 0? From flags, or from what the machine knows of itself."""

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from jformer.errors import UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
DETECTING = 60  # seconds


class Coordinates(NamedTuple):
    """The place of a process among those of a run."""

    host: str  # of process 0
    port: int
    processes: int
    process: int
    local_devices: Sequence[int] | None = None  # None: all of this machine's


def from_flags(
    distributed: bool, coordinator: str | None, processes: int | None, process: int | None
) -> Coordinates | None:
    """Return the coordinates that the flags ask for, or None where they ask for a single process.

    Raises UserError for flags that are half given, do not fit each other or find nothing.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    if distributed and len(missing) < len(given):
        raise UserError("--distributed finds out what --coordinator, --processes and --process say: leave one or other")
    if distributed:
        return detect()
    if len(missing) == len(given):
        return None
    if missing:
        raise UserError(f"--{missing[0]} is missing: --coordinator=HOST:PORT, --processes=N, --process=I go together")
    assert coordinator is not None
    assert processes is not None
    assert process is not None
    return _checked(coordinator, processes, process, "--coordinator", "--processes", "--process")


def detect() -> Coordinates:
    """Return what the environment says: JAX_COORDINATOR_ADDRESS and its like, or a cluster that JAX knows."""
    values = [os.environ.get(name) for name in VARIABLES]
    if all(values):
        address, *numbers = map(str, values)
        if not all(number.isdecimal() for number in numbers):
            raise UserError(f"{VARIABLES[1]}={numbers[0]!r} and {VARIABLES[2]}={numbers[1]!r} must be numbers")
        return _checked(address, int(numbers[0]), int(numbers[1]), *VARIABLES)
    if any(values):
        missing = next(name for name, value in zip(VARIABLES, values, strict=True) if not value)
        raise UserError(f"{missing} is not set, but another of {', '.join(VARIABLES)} is: set all of them")
    found, count, index, local = _cluster()
    if found is None or count is None or index is None:
        raise UserError(
            "--distributed found no cluster (Cloud TPU, Slurm, Open MPI, Kubernetes, "
            f"{', '.join(VARIABLES)}): say --coordinator=HOST:PORT --processes=N --process=I"
        )
    return _checked(found, count, index, "coordinator", "processes", "process")._replace(local_devices=local)


def _cluster() -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Return address, processes, process and local devices as jax.distributed.initialize() would find them.

    JAX tells nobody what it found, and process 0 must be known before JAX connects to it; so this is the one place
    that asks a private module of JAX.
    """
    from jax._src.clusters import ClusterEnv

    try:
        return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, DETECTING)
    except Exception as error:  # whatever a cluster's own service may raise
        raise UserError(f"--distributed: this cluster's coordinates cannot be read: {error}") from error


def _checked(address: str, processes: int, process: int, *names: str) -> Coordinates:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"{names[0]}={address!r} must be HOST:PORT, a free port of process 0's machine")
    if processes < 1:
        raise UserError(f"{names[1]}={processes} must be at least 1")
    if not 0 <= process < processes:
        raise UserError(f"{names[2]}={process} must be 0 to {processes - 1}: {names[1]}={processes} are counted from 0")
    return Coordinates(host=host.strip("[]"), port=int(port), processes=processes, process=process)


def is_loopback(host: str) -> bool:
    """Tell whether an address can be reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def here() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
