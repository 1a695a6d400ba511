"""Memory that is freed is there again at once."""

import subprocess
import sys

import pytest

from jformer.training import malloc
from jformer.training.malloc import computes_on_cpu

needs_glibc = pytest.mark.skipif(
    sys.platform != "linux", reason="sets options of glibc, which Linux has; .ci/run tests them there"
)
FAULTS = """
import ctypes, resource, threading
from jformer.training.malloc import keep_freed_memory

c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(c.malloc(2**26))
    c.memset(block, 1, 2**26)
    c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
KEPT = "keep_freed_memory()\n"
TWICE = "print(faults(), faults())"
IN_TWO_THREADS = """
print(faults())
thread = threading.Thread(target=lambda: print(faults()))
thread.start()
thread.join()
"""


def count(program):
    """Return the pages that the kernel gave for each large block of a program."""
    command = [sys.executable, "-c", FAULTS + program]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@needs_glibc
def test_the_second_large_block_takes_no_new_pages():
    first, second = count(KEPT + TWICE)
    assert first > 1_000
    assert second < first / 100
    assert min(count(TWICE)) > 1_000  # or there would be nothing to mend


@needs_glibc
def test_what_one_thread_freed_another_takes():
    first, second = count(KEPT + IN_TWO_THREADS)
    assert first > 1_000
    assert second < first / 10


COMMAND = """
import sys, tempfile
from jformer import main

def train(options, config, workdir):
    faults()
    for _ in range(4):
        thread = threading.Thread(target=lambda: print(faults()))
        thread.start()
        thread.join()
    return 0

main.MODES["train"] = train
with tempfile.TemporaryDirectory() as workdir:
    sys.exit(main.main(["jformer", "--config=quickstart", f"--workdir={workdir}/run"]))
"""


@needs_glibc
def test_the_command_keeps_memory_before_it_starts_a_thread():
    """Each second thread shared the heap of the one that waits for signals: its blocks were mapped anew every time."""
    assert max(count(COMMAND)) < 160  # of 16,384 pages


COMPILING = """
import ctypes
from jformer.training.malloc import (give_back_freed_memory, keep_freed_memory)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
blocks = [ctypes.c_void_p(c.malloc(2**16)) for _ in range(2**10)]
for block in blocks:
    c.memset(block, 1, 2**16)
last = c.malloc(2**10)
for block in blocks:
    c.free(block)
before = resident()
give_back_freed_memory()
print(before - resident())
"""


@needs_glibc
def test_what_compiling_leaves_is_given_back():
    found = subprocess.run([sys.executable, "-c", COMPILING], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 0.9 * 2**26


@pytest.mark.parametrize(("platforms", "expected"), [("cpu", True), ("cuda,cpu", False), ("tpu", False)])
def test_memory_is_kept_only_where_the_cpu_computes(platforms, expected, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert computes_on_cpu() == expected


def test_a_device_file_tells_of_an_accelerator(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(malloc, "ACCELERATORS", (f"{tmp_path}/nvidia[0-9]*",))
    assert computes_on_cpu()
    (tmp_path / "nvidia0").touch()
    assert not computes_on_cpu()
