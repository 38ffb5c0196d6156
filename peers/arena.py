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


class SharedArena:
    """float32 vectors of ``(num_elements,)``: the bases, ``states`` of the outer optimizer's, and snapshots.

    The averaging process writes ``base`` and ``outer_state`` (of shape ``(states, num_elements)``); the training
    process writes a fragment of ``snapshot`` when asked to. Who may touch what, when, follows from the order of
    messages in ``pipe.py``.
    """

    def __init__(self, descriptor: int, num_elements: int, states: int) -> None:
        self.descriptor = descriptor
        self.num_elements = num_elements
        self.states = states
        regions = 2 + states
        self._map = mmap.mmap(descriptor, regions * num_elements * BYTES_PER_ELEMENT)
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
