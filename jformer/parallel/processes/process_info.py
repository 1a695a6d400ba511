"""This process's number, how many there are, and the address of process 0, from flags or the environment."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from jformer.errors import UnavailableError, UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TASKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES")
DETECTION_SECONDS = 300  # for the name of process 0's machine, which Kubernetes may know only once it runs
JAX_TPU_PORT, OPEN_TPU_PORT = 8482, 8476  # the firewall of a Cloud TPU slice may leave only the second open


class ProcessInfo(NamedTuple):
    """A process's place in its run, and the coordinator's address."""

    host: str  # of process 0
    port: int
    processes: int
    process: int
    local_devices: Sequence[int] | None = None  # None: all of this machine's


def from_flags(
    distributed: bool, coordinator: str | None, processes: int | None, process: int | None
) -> ProcessInfo | None:
    """Return the place that the flags give this process, or None for a run of a single process.

    Raises UserError for flags that are incomplete or inconsistent, or if --distributed finds no cluster;
    UnavailableError if the cluster does not answer.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    if distributed and len(missing) < len(given):
        raise UserError("--distributed replaces --coordinator, --processes and --process: give one or the other")
    if distributed:
        return detect()
    if len(missing) == len(given):
        return None
    if coordinator is None or processes is None or process is None:
        raise UserError(f"--{missing[0]} is missing: --coordinator=HOST:PORT, --processes=N, --process=I go together")
    return _checked(coordinator, processes, process, "--coordinator", "--processes", "--process")


def detect() -> ProcessInfo:
    """Return the place from JAX_COORDINATOR_ADDRESS and its companions, or from a cluster that JAX detects."""
    values = [os.environ.get(name) for name in VARIABLES]
    if all(values):
        address, *numbers = map(str, values)
        if not all(number.isdecimal() for number in numbers):
            raise UserError(f"{VARIABLES[1]}={numbers[0]!r} and {VARIABLES[2]}={numbers[1]!r} must be numbers")
        return _checked(address, int(numbers[0]), int(numbers[1]), *VARIABLES)
    if any(values):
        missing = next(name for name, value in zip(VARIABLES, values, strict=True) if not value)
        raise UserError(f"{missing} is not set, but another of {', '.join(VARIABLES)} is: set all of them")
    # JAX does not report what it found, and we need process 0's address before JAX connects to it: hence this one use
    # of a private module. A public function, or --coordinator alone, will replace it.
    from jax._src.clusters import ClusterEnv

    try:
        found, count, index, local = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, DETECTION_SECONDS
        )
    except Exception as error:  # a cluster's own service may raise anything, for example if it is not up yet
        raise UnavailableError(f"--distributed: this cluster's coordinates cannot be read: {error}") from error
    if found is None or count is None or index is None:
        raise UserError(
            "--distributed found no cluster (Cloud TPU, Slurm, Open MPI, Kubernetes, "
            f"{', '.join(VARIABLES)}): give --coordinator=HOST:PORT --processes=N --process=I"
        )
    own = _checked(found, count, index, "coordinator", "processes", "process")
    moved = own.port == JAX_TPU_PORT and "JAX_COORDINATOR_PORT" not in os.environ
    return own._replace(
        port=OPEN_TPU_PORT if moved else own.port, local_devices=None if _one_task_a_machine() else local
    )


def _one_task_a_machine() -> bool:
    """Return whether Open MPI or Slurm started a single task here, to which JAX would give only the first GPU."""
    here, tasks, machines = map(os.environ.get, TASKS)
    return here == "1" if here else tasks is not None and tasks == machines


def _checked(address: str, processes: int, process: int, *names: str) -> ProcessInfo:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"{names[0]}={address!r} must be HOST:PORT, a free port of process 0's machine")
    if processes < 1:
        raise UserError(f"{names[1]}={processes} must be at least 1")
    if not 0 <= process < processes:
        raise UserError(f"{names[2]}={process} must be 0 to {processes - 1}: {names[1]}={processes} are counted from 0")
    return ProcessInfo(host=host.strip("[]"), port=int(port), processes=processes, process=process)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")
