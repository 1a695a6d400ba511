"""The memory there is is the least of what the machine and the container say."""

from types import SimpleNamespace

import jax
import pytest

from jformer.training import machine

MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"
KIB = 1_024
CPU = SimpleNamespace(platform="cpu", memory_stats=lambda: None)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return a function that writes files of /proc and /sys, by their paths."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)

    def write(**contents):
        for name, text in {"proc/meminfo": MEMINFO, "proc/self/status": "VmRSS:\t  70 kB\n", **contents}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_without_a_container_it_is_the_machines(files):
    files(**{"proc/self/cgroup": "0::/\n"})
    assert machine.available(CPU) == (1_000 * KIB, 600 * KIB, 70 * KIB)


def test_the_narrowest_limit_counts_without_cached_files(files):
    group = "sys/fs/cgroup/user/mine"
    files(
        **{
            "proc/self/cgroup": "0::/user/mine\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "5\n",
            "sys/fs/cgroup/user/memory.max": f"{500 * KIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{300 * KIB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {200 * KIB}\n",
        }
    )
    assert machine.available(CPU) == (500 * KIB, 400 * KIB, 70 * KIB)


def test_the_first_version_of_control_groups_is_read_too(files):
    folder = "sys/fs/cgroup/memory/mine"
    files(
        **{
            "proc/self/cgroup": "4:memory:/mine\n1:cpu:/\n",
            f"{folder}/memory.limit_in_bytes": f"{400 * KIB}\n",
            f"{folder}/memory.usage_in_bytes": f"{390 * KIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        }
    )
    assert machine.available(CPU) == (400 * KIB, 10 * KIB, 70 * KIB)


def test_an_accelerator_says_itself_and_other_systems_do_not(files):
    stats = {"bytes_limit": 100, "bytes_in_use": 30}
    assert machine.available(SimpleNamespace(platform="gpu", memory_stats=lambda: stats)) == (100, 70, 30)
    assert machine.available(CPU) is None  # no /proc


def test_of_this_machine_it_is_known():
    found = machine.available(jax.devices()[0])
    assert 0 < found.held < found.total < 2**50
    assert 0 < found.free < found.total
