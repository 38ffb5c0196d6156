"""Memory that the training process and the averaging process both see, without copies and without /dev/shm.

Anonymous memory (memfd) is not bounded by the size of /dev/shm, which is 64 MB in a default container; the file
descriptor travels over the processes' own pipe. Where the kernel has no memfd, an unlinked temporary file serves.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress

import torch

BYTES_PER_ELEMENT = 4


class SharedArena:
    """float32 vectors of ``(num_elements,)``: the bases, ``states`` of the outer optimizer's, and snapshots.

    Snapshots take memory only from when they are written until they are released. The averaging process writes ``base``
    and ``outer_state`` (of shape ``(states, num_elements)``); the training process writes a fragment of ``snapshot``
    when asked to. Who may touch what, when, follows from the order of messages in ``pipe.py``.
    """

    def __init__(self, descriptor: int, num_elements: int, states: int) -> None:
        self.descriptor = descriptor
        self.num_elements = num_elements
        self.states = states
        regions = 2 + states
        self._map = mmap.mmap(descriptor, regions * num_elements * BYTES_PER_ELEMENT)
        self._snapshot_begins = (1 + states) * num_elements * BYTES_PER_ELEMENT
        everything = torch.frombuffer(self._map, dtype=torch.float32).view(regions, num_elements)
        self.base, self.outer_state, self.snapshot = everything[0], everything[1:-1], everything[-1]

    @classmethod
    def create(cls, num_elements: int, states: int = 1) -> SharedArena:
        """A zeroed arena. :raises OSError: if memory (or, without memfd, disk) does not suffice."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("p2p-trainer")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, (2 + states) * num_elements * BYTES_PER_ELEMENT)
        return cls(descriptor, num_elements, states)

    def release_snapshot(self, where: slice) -> None:
        """Give the memory of these elements' snapshot back; they are zero afterwards, or anything, at the edges.

        Whole pages only: what shares a page with a neighbour stays. A kernel that cannot do it keeps the memory.
        """
        first = self._snapshot_begins + where.start * BYTES_PER_ELEMENT
        last = self._snapshot_begins + where.stop * BYTES_PER_ELEMENT
        first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, first, last - first)

    @property
    def resident_bytes(self) -> int:
        """What it takes of the machine's memory, for all processes together."""
        return os.fstat(self.descriptor).st_blocks * 512
