"""The C library's heap: what it keeps of freed memory while a round goes on, and gives back when it is over.

A round allocates buffers of a part's size all the time. As it is, glibc gives each back to the kernel, and their page
faults cost more than their copying. Kept for ever they cost memory: what lives on (``residual.py``) lies between them,
and keeps the rest from being given back. On another C library nothing happens here.
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


def give_back_freed_memory() -> None:
    """Give all of it back to the kernel, also what lies between memory in use. Some milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(ctypes.c_size_t(0))
