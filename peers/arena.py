"""Memory that the training process and the averaging process both see, without copies and without /dev/shm.

Anonymous memory (memfd) is not bounded by the size of /dev/shm, which is 64 MB in a default container; the file
descriptor travels over the processes' own pipe. Where the kernel has no memfd, an unlinked temporary file serves.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

BYTES_PER_ELEMENT = 4
REGIONS = 3


class SharedArena:
    """Three float32 vectors of ``(num_elements,)``: the bases, their outer momentum, and snapshots.

    The averaging process writes ``base`` and ``momentum``; the training process writes a fragment of ``snapshot``
    when asked to. Who may touch what, when, follows from the order of messages in ``pipe.py``.
    """

    def __init__(self, descriptor: int, num_elements: int) -> None:
        self.descriptor = descriptor
        self.num_elements = num_elements
        size_bytes = REGIONS * num_elements * BYTES_PER_ELEMENT
        self._map = mmap.mmap(descriptor, size_bytes)
        everything = torch.frombuffer(self._map, dtype=torch.float32)
        self.base, self.momentum, self.snapshot = everything.view(REGIONS, num_elements).unbind()

    @classmethod
    def create(cls, num_elements: int) -> SharedArena:
        """A zeroed arena. :raises OSError: if memory (or, without memfd, disk) does not suffice."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("p2p-trainer")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, REGIONS * num_elements * BYTES_PER_ELEMENT)
        return cls(descriptor, num_elements)
