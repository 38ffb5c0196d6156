"""Freed memory: kept for the next part, given back when the round is over."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

SCENE = """
import numpy as np
import psutil

from peers.heap import give_back_freed_memory, keep_freed_memory

MEGABYTE = 1 << 20


def resident():
    return psutil.Process().memory_info().rss / MEGABYTE


keep_freed_memory()
buffers = [np.ones(MEGABYTE, dtype=np.uint8) for _ in range(128)]
lives_on = buffers[::8]  # as what averages leave out does, between the buffers of a round
full = resident()
del buffers
kept = resident()
give_back_freed_memory()
print(full - kept, kept - resident(), sum(int(one.sum()) for one in lives_on) == 16 * MEGABYTE)
"""


def test_what_lies_between_memory_in_use_is_kept_and_then_given_back() -> None:
    """In a process of its own: it is the whole process's heap."""
    done = subprocess.run([sys.executable, "-c", SCENE], capture_output=True, text=True, timeout=120, check=True)
    at_once, afterwards, unharmed = done.stdout.split()
    assert float(at_once) < 16 and float(afterwards) > 96 and unharmed == "True"
