"""The memory of a device, which for a CPU is the machine's: in total, free, and held by this process.

Limits of containers (Linux control groups, versions 1 and 2) count. Where nothing reports memory, it is None.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jformer.errors import UserError

ROOT = Path("/")  # of /proc and /sys


class Available(NamedTuple):
    """Bytes of one device, or of the machine."""

    total: int
    free: int
    held: int  # by this process


def available(device: jax.Device) -> Available | None:
    """Return the memory of a device, or of the machine for a CPU; None if nothing reports it."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        held = stats.get("bytes_in_use", 0)
        return Available(stats["bytes_limit"], stats["bytes_limit"] - held, held)
    sizes = _sizes(ROOT / "proc" / "meminfo")
    if device.platform != "cpu" or not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return None
    held = _sizes(ROOT / "proc" / "self" / "status").get("VmRSS", 0)
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    for limit, used in _limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Available(total, free, held)


def in_one_memory(size: int, mesh: Mesh) -> int:
    """Return the bytes that `size` on each device takes of what `available` measures: CPU devices share one memory."""
    return size * (len(mesh.local_devices) if mesh.local_devices[0].platform == "cpu" else 1)


def refuse_state(size: int, mesh: Mesh) -> None:
    """Raise UserError if a state of `size` bytes on each device exceeds the memory; call it before making the state."""
    whole, there = in_one_memory(size, mesh), available(mesh.local_devices[0])
    if there and whole > there.total:
        raise UserError(
            f"model: parameters and optimizer alone need {whole / 2**20:,.1f} of {there.total / 2**20:,.1f} MiB of "
            "memory: use a smaller model, or more devices and mesh.fsdp"
        )


def _sizes(path: Path) -> dict[str, int]:
    """Return name → bytes of the lines `Name:  123 kB` of a file, if there is one."""
    text = path.read_text() if path.exists() else ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limits of this process's control groups, and how much of each is used, without caches."""
    groups = ROOT / "proc" / "self" / "cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            new = not controllers
            mount = ROOT / "sys" / "fs" / "cgroup" / controllers
            folders = [mount / name.strip("/"), *(mount / name.strip("/")).parents]
            for folder in folders[: folders.index(mount) + 1]:
                names = ("memory.max", "memory.current") if new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
                limit, used = (_number(folder / each) for each in names)
                if limit is not None:
                    yield limit, max(0, (used or 0) - _file_caches(folder / "memory.stat", new))


def _number(path: Path) -> int | None:
    """Return the number in a file; None for a missing file and for "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _file_caches(path: Path, new: bool) -> int:
    """Return the bytes of the page cache that the kernel can reclaim."""
    text = path.read_text() if path.is_file() else ""
    found = re.search(rf"^{'' if new else 'total_'}inactive_file (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
