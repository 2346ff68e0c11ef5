"""How the C library's allocator treats the memory that a step frees: it is kept for the next step."""

from __future__ import annotations

import ctypes
import platform

# mallopt's parameters (malloc.h) and the largest values that glibc takes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = {_M_MMAP_THRESHOLD: 32 * 2**20, _M_TRIM_THRESHOLD: 2**31 - 1}


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, where every step's activations would be mapped from the system and zeroed anew.

    A step on CPU takes 5 to 15 percent less time (benchmarks/speed.py); the peak of memory stays. Other C libraries
    are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for parameter, value in _LARGEST.items():
            library.mallopt(parameter, value)
