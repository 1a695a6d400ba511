"""Settings of glibc's malloc for processes that compute on the CPU."""

import ctypes
import glob
import os
import sys

# Of glibc's <malloc.h>.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")  # NVIDIA, AMD, TPU, newer TPU


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next update; call this before any thread starts.

    XLA:CPU allocates all temporaries of an update at once and frees them after it. By default, blocks of this size go
    back to the operating system and come back as untouched pages, hundreds of thousands per update; faulting them in
    took a quarter of its time. The price: the process keeps its peak size until `give_back_freed_memory`. Does nothing
    if an accelerator computes, or without glibc.

    A thread that has already started has its own heap. glibc lets later threads share it, XLA's among them, and blocks
    over 64 MB that these allocate go back every time.
    """
    set_option = _glibc("mallopt")
    if set_option and computes_on_cpu():
        set_option(MMAP_MAX, 0)  # large blocks come from the heap,
        set_option(TRIM_THRESHOLD, -1)  # whose end is never given back,
        set_option(ARENA_MAX, 1)  # and all later threads share it: other heaps end at 64 MB


def give_back_freed_memory() -> None:
    """Return free memory to the operating system: compiling leaves more of it than updates reuse."""
    trim = _glibc("malloc_trim")
    if trim:
        trim(0)


def computes_on_cpu() -> bool:
    """Return, without starting JAX, whether it will compute on the CPU: by JAX_PLATFORMS, or if no device is found."""
    named = os.environ.get("JAX_PLATFORMS", "")
    return named.split(",")[0] == "cpu" if named else not any(map(glob.glob, ACCELERATORS))


def _glibc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
