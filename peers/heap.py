"""The C library's heap: what it keeps of freed memory. On another C library than glibc nothing happens here.

A round allocates buffers of a part's size all the time. As it is, glibc gives each back to the kernel, and their page
faults cost more than their copying. What lives longer lies elsewhere (``residual.py``): among them it would keep what
is freed around it from use. Giving everything back after each round (``malloc_trim``) instead took a quarter of a
fragment's worth off the most that was in use, and rounds of 12.6 M parameters 0.84 s where they had taken 0.62; apart
from the heap it took a whole one off, and they took 0.76 (``tests/benchmarks/memory.py --megaparams 100 --codec int8
--tick-seconds 15 --rounds 9``, once each, loopback, nothing else at work).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

KEPT_FREE_BYTES = 32 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Let glibc keep memory for the next part. All threads share it: as it is, each would keep as much for itself."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)  # the highest it takes
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)
