"""Shared by the commands here: small sizes for --smoke, sides timed in turns, a description of the machine."""

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

ROOT = Path(__file__).parents[1]
Name = TypeVar("Name", bound=Hashable)

flags.DEFINE_bool("smoke", False, "Only check that the command works, in seconds; the figures mean nothing.")


def smoke_sizes(**sizes: Any) -> bool:
    """With --smoke, give flags that are not on the command line these values; return whether --smoke is on."""
    found: bool = flags.FLAGS.smoke
    for name, size in sizes.items():
        if found and not flags.FLAGS[name].present:
            setattr(flags.FLAGS, name, size)
    return found


def mean_seconds(
    function: Callable[..., Any],
    *arguments: Any,
    least: float = 0.0,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of a call by a clock, over at least `least` seconds and `calls` calls."""
    import jax

    done, began = 0, clock()
    while done < calls or clock() - began < least:
        jax.block_until_ready(function(*arguments))
        done += 1
    return (clock() - began) / done


def resident(process: int | str = "self", field: str = "VmRSS") -> float:
    """Return the resident MiB of a process, or with VmHWM their peak, as Linux counts them."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def quartiles(seconds: Sequence[float]) -> str:
    """Return milliseconds, such as `11.9 to 13.0`."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{1e3 * low:,.1f} to {1e3 * high:,.1f}"


def processor() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the last core; none without such a file."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in info.splitlines())}


def processor_name() -> str:
    """Return the name of the processor."""
    return processor().get("model name", platform.machine())


def commit() -> str:
    """Return the commit, and whether the package differs from it."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        return "a copy without its history"
    git: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True}
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **git).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "jformer"], **git).stdout
    return f"commit {name}{' and changes to it' if changed else ''}"
