"""What a reducer's lossy averages left out, kept for the next averages of the same elements (error feedback).

Private to one peer: nothing depends on its bits, so it is kept as int4, half a byte an element of this peer's own
share. What that rounds off of it, at most a fourteenth, is lost.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from peers.codecs import get_codec

_CODEC = get_codec("int4")


def pack(left_out: torch.Tensor) -> bytes:
    """:param left_out: float32 ``(size,)``"""
    return bytes(_CODEC.encode(left_out))


class AverageResidual:
    """Of one fragment; element ranges to packed values. Elements without an entry have left nothing out."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], memoryview] = {}

    def replace(self, packed: Mapping[tuple[int, int], bytes]) -> None:
        """After a round that was committed. What an earlier share left out is given up.

        It lies apart from the heap: among the buffers of a round it would keep what is freed around it from use.
        """
        memory = memoryview(mmap.mmap(-1, max(1, sum(map(len, packed.values())))))
        kept, begin = {}, 0
        for where, values in packed.items():
            kept[where] = memory[begin : begin + len(values)]
            kept[where][:] = values
            begin += len(values)
        self._kept = kept  # whole: an earlier attempt's averages may be made in a thread at this moment

    def of(self, start: int, stop: int) -> torch.Tensor | None:
        """For elements ``[start, stop)``: float32 ``(stop - start,)``, or None if there is nothing."""
        found: torch.Tensor | None = None
        for (low, high), packed in self._kept.items():
            first, last = max(low, start), min(high, stop)
            if first < last:
                found = torch.zeros(stop - start) if found is None else found
                found[first - start : last - start] = _CODEC.decode(packed, high - low)[first - low : last - low]
        return found
