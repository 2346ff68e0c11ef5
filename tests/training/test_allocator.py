from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import ctypes, resource, sys
from mutransformer.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    blocks = [bytearray(4 * 2**20) for _ in range(8)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator is left alone")
def test_memory_that_a_step_frees_is_not_mapped_anew_by_the_next():
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, check=True).stdout)

    assert faults("keep") * 10 < faults("leave")
