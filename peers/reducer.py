"""One reducer's share of a round: admits parts, averages them, encodes each average once.

Every tensor here comes from a remote peer. It is checked for length, finiteness and magnitude before any counter
moves. Accumulating never waits for anyone to read an answer. What this does not stop: a plausible but false
contribution within the magnitude limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from peers.ledger import PendingSpan
from peers.messages import mask_of

MAX_ABSOLUTE_DIFFERENCE = 1e4
"""No parameter moves this far between two rounds of an honest peer; float32 sums of such values stay finite."""
INLINE_ELEMENTS = 1 << 16
"""Below this size, arithmetic on the event loop costs less than a thread hand-over (about 0.1 ms)."""
FLOAT32 = np.dtype("<f4")


class InvalidPart(ValueError):
    """A contribution that cannot be counted; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """An averaged part: the bytes that everyone gets, and who is in it (indices and as a mask)."""

    payload: bytes
    included: frozenset[int]
    mask: bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a part (positions within the part) in which one member has one weight."""

    start: int
    stop: int
    weight: float


class _OpenPart:
    """A part that is still being added up."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.sum: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.weight = 0.0
        self.included: set[int] = set()
        self.lock = asyncio.Lock()
        self.result: asyncio.Future[Averaged] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        return self.stop - self.start

    def add(self, values: torch.Tensor, pieces: Sequence[_Piece]) -> None:
        """Add ``values`` (float32, ``(size,)``) with the weights that ``pieces`` give each stretch."""
        if self.sum is None:
            self.sum = torch.zeros(self.size)
        everywhere = len(pieces) == 1 and (pieces[0].start, pieces[0].stop) == (0, self.size)
        if everywhere and self.weights is None:
            self.sum.add_(values, alpha=pieces[0].weight)
            self.weight += pieces[0].weight
            return
        if self.weights is None:
            self.weights = torch.full((self.size,), self.weight)
        for piece in pieces:
            stretch = slice(piece.start, piece.stop)
            self.sum[stretch].add_(values[stretch], alpha=piece.weight)
            self.weights[stretch].add_(piece.weight)

    def average(self) -> bytes:
        """Sum over weights, float32 little endian; elements that nobody has weight in stay 0."""
        if self.sum is None:
            return bytes(self.size * FLOAT32.itemsize)
        if self.weights is not None:
            mean = torch.where(self.weights > 0, self.sum / self.weights, 0.0)
        else:
            mean = self.sum / self.weight if self.weight > 0 else self.sum
        return mean.numpy().astype(FLOAT32, copy=False).tobytes()


class PartReducer:
    """Averages the parts that fall to this peer.

    :param ranges: element ranges of the parts within the fragment
    :param spans: for each member of the group, its pending spans as signed in its announcement; a member's weight
        in an element is its samples there. The weight on the wire does not exist.
    :param minimum: a part closed with fewer contributions has no average, which voids the round
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], spans: Sequence[Sequence[PendingSpan]], minimum: int) -> None:
        self._parts = [_OpenPart(start, stop) for start, stop in ranges]
        self._spans = spans
        self._minimum = minimum
        self.expected = set(range(len(spans)))
        self.rejected: dict[int, str] = {}

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def result(self, part: int) -> asyncio.Future[Averaged]:
        """Resolves when the part is closed; fails with InvalidPart if too few contributed."""
        return self._parts[part].result

    def decode(self, part: int, body: bytes | memoryview) -> torch.Tensor:
        """Check a contribution's body and view it as float32 ``(size,)``. :raises InvalidPart: with the reason."""
        if not 0 <= part < len(self._parts):
            raise InvalidPart(f"part {part} of {len(self._parts)}")
        return decode_values(body, self._parts[part].size)

    async def add(self, member: int, part: int, values: torch.Tensor) -> None:
        """Count a member's values in a part, unless the member was left out or the part is closed."""
        # A sender that hangs up in the middle must not leave its values in the sum and its name out of the list.
        await asyncio.shield(asyncio.ensure_future(self._add(member, self._parts[part], values)))

    async def _add(self, member: int, part: _OpenPart, values: torch.Tensor) -> None:
        pieces = self._pieces(member, part)
        async with part.lock:
            if part.result.done() or member not in self.expected or member in part.included:
                return
            if part.size <= INLINE_ELEMENTS:
                part.add(values, pieces)
            else:
                await asyncio.to_thread(part.add, values, pieces)
            part.included.add(member)
        await self._close_if_complete(part)

    async def leave_out(self, member: int, reason: str) -> None:
        """Wait for this member no longer; what it already delivered stays counted."""
        if member in self.expected:
            self.expected.discard(member)
            self.rejected[member] = reason
            for part in self._parts:
                await self._close_if_complete(part)

    async def close(self) -> None:
        """The deadline: every open part is averaged over what it has."""
        for part in self._parts:
            for member in self.expected - part.included:
                self.rejected.setdefault(member, "missed the deadline")
            async with part.lock:
                await self._finish(part)

    async def _close_if_complete(self, part: _OpenPart) -> None:
        async with part.lock:
            if part.included >= self.expected:
                await self._finish(part)

    async def _finish(self, part: _OpenPart) -> None:
        if part.result.done():
            return
        if len(part.included) < self._minimum:
            part.result.set_exception(InvalidPart(f"only {len(part.included)} contribution(s) arrived"))
            part.result.exception()  # read here, so that a part nobody asks for is not reported as unhandled
            return
        try:
            if part.size <= INLINE_ELEMENTS:
                payload = part.average()
            else:
                payload = await asyncio.shield(asyncio.to_thread(part.average))
        except (MemoryError, RuntimeError) as error:
            part.result.set_exception(InvalidPart(f"could not be averaged: {error}"))
            part.result.exception()
            return
        part.sum = part.weights = None
        part.result.set_result(
            Averaged(
                payload=payload,
                included=frozenset(part.included),
                mask=mask_of(part.included, len(self._spans)),
            )
        )

    def _pieces(self, member: int, part: _OpenPart) -> list[_Piece]:
        pieces = []
        for span in self._spans[member]:
            low, high = max(span.start, part.start), min(span.stop, part.stop)
            if low < high:
                pieces.append(_Piece(low - part.start, high - part.start, float(span.samples)))
        return pieces


def decode_values(body: bytes | memoryview, size: int) -> torch.Tensor:
    """Float32 little-endian bytes as a tensor ``(size,)``; not copied, so not to be written to.

    :raises InvalidPart: wrong length, NaN or inf, or a magnitude no honest difference has.
    """
    if len(body) != size * FLOAT32.itemsize:
        raise InvalidPart(f"{len(body)} bytes instead of {size * FLOAT32.itemsize}")
    values = np.frombuffer(body, dtype=FLOAT32)
    check_values(values)
    return torch.from_numpy(values.astype(np.float32, copy=not values.flags.writeable))


def check_values(values: npt.NDArray[np.float32]) -> None:
    """Our own contribution is held to it as well: a model that diverged must not break everyone's base.

    :raises InvalidPart: NaN or inf, or a magnitude no honest difference has.
    """
    largest = max(float(values.max()), -float(values.min())) if values.size else 0.0
    if not largest <= MAX_ABSOLUTE_DIFFERENCE:  # also true for NaN
        raise InvalidPart(f"values up to {largest:g}")
