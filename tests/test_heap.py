"""Memory that is freed is there again at once."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
from jformer.heap import keep_freed_memory

c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(c.malloc(2**26))
    c.memset(block, 1, 2**26)
    c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {kept}:
    keep_freed_memory()
print(faults(), faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets options of glibc, which Linux has; .ci/run tests them there")
def test_the_second_large_block_takes_no_new_pages():
    def count(kept):
        program = PROGRAM.format(kept=kept)
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return [int(word) for word in answer.stdout.split()]

    first, second = count(kept=True)
    assert first > 1_000 and second < first / 100
    assert min(count(kept=False)) > 1_000  # or there would be nothing to mend
