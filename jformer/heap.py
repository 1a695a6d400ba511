"""How this process holds the memory it computes in."""

import ctypes
import sys

# Of glibc's <malloc.h>.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, for the next update; to be called before threads begin.

    XLA:CPU asks for all temporaries of an update at once and frees them after it. By default such large blocks go back
    to the operating system and come again as untouched pages, hundreds of thousands an update, which took a quarter
    of its time. The price: the process stays as large as it ever was. Without glibc this does nothing.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option:
        set_option(MMAP_MAX, 0)  # large blocks come from the heap,
        set_option(TRIM_THRESHOLD, -1)  # whose end is never given back,
        set_option(ARENA_MAX, 1)  # and all threads share it: other heaps end at 64 MB
