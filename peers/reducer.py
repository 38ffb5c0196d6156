"""One reducer's share of a round: admits parts, averages them, encodes each average once.

Every tensor here comes from a remote peer. It is decoded and checked for magnitude before any counter moves.
Accumulating never waits for anyone to read an answer. What this does not stop: a plausible but false contribution
within the magnitude limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from peers.codecs import Codec, Float32, MalformedBody
from peers.ledger import PendingSpan
from peers.messages import mask_of
from peers.residual import pack
from peers.weighting import Weighting, get_weighting

MAX_ABSOLUTE_DIFFERENCE = 1e4
"""No parameter moves this far between two rounds of an honest peer; float32 sums of such values stay finite."""
INLINE_ELEMENTS = 1 << 16
"""Below this size, arithmetic on the event loop costs less than a thread hand-over (about 0.1 ms)."""
FLOAT32 = np.dtype("<f4")
PLAIN = Float32()
BY_SAMPLES = get_weighting("samples")
MAX_BATCH = 2**40

Result = TypeVar("Result")


class InvalidPart(ValueError):
    """A contribution that cannot be counted; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """An averaged part: the bytes that everyone gets, what they decode to, who is in it (indices and as a mask)."""

    payload: bytes
    values: torch.Tensor
    """Float32 ``(size,)``."""
    included: frozenset[int]
    mask: bytes


class _OpenPart:
    """A part that is still being added up."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.sum: torch.Tensor | None = None
        self.included: set[int] = set()
        self.lock = asyncio.Lock()
        self.result: asyncio.Future[Averaged] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        return self.stop - self.start

    def stretch(self, span: PendingSpan) -> slice:
        """Where a member's span lies in this part; empty if it does not."""
        low, high = max(span.start, self.start), min(span.stop, self.stop)
        return slice(low - self.start, max(low, high) - self.start) if low < high else slice(0, 0)

    def add(self, values: torch.Tensor, weighted: Sequence[tuple[slice, float]]) -> None:
        """Add ``values`` (float32, ``(size,)``) with a weight for each stretch."""
        if self.sum is None:
            self.sum = torch.zeros(self.size)
        for where, weight in weighted:
            self.sum[where].add_(values[where], alpha=weight)

    def average(self, normalisers: Sequence[tuple[slice, float]]) -> torch.Tensor:
        """Sum over normalisers, float32 ``(size,)``; where that is 0, nobody has weight and the average is 0."""
        if self.sum is None:
            return torch.zeros(self.size)
        for where, normaliser in normalisers:
            if normaliser > 0:
                self.sum[where].div_(normaliser)
            else:
                self.sum[where].zero_()
        return self.sum


class PartReducer:
    """Averages the parts that fall to this peer.

    :param ranges: element ranges of the parts within the fragment
    :param spans: for each member of the group, its pending spans as signed in its announcement; a member's weight
        in an element follows from its samples and steps there. A weight on the wire does not exist.
    :param minimum: a part closed with fewer contributions has no average, which voids the round
    :param codec: how contributions come
    :param answer_codec: how averages go out
    :param residual: what earlier averages of these elements left out, or None; it goes into this one
    :param weighting: how a member's samples and steps count
    :param batch_size: no inner step holds more samples
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        spans: Sequence[Sequence[PendingSpan]],
        minimum: int,
        codec: Codec = PLAIN,
        answer_codec: Codec = PLAIN,
        residual: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
        weighting: Weighting = BY_SAMPLES,
        batch_size: int = MAX_BATCH,
    ) -> None:
        self._codec, self._answer_codec, self._residual = codec, answer_codec, residual
        self._weighting, self._batch_size = weighting, batch_size
        self.left_out: dict[tuple[int, int], bytes] = {}
        """What this round's averages left out, packed, by element range."""
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
        """Check a contribution's body and decode it to float32 ``(size,)``. :raises InvalidPart: with the reason."""
        if not 0 <= part < len(self._parts):
            raise InvalidPart(f"part {part} of {len(self._parts)}")
        return decode_values(self._codec, body, self._parts[part].size)

    async def add(self, member: int, part: int, values: torch.Tensor) -> None:
        """Count a member's values in a part, unless the member was left out or the part is closed."""
        # A sender that hangs up in the middle must not leave its values in the sum and its name out of the list.
        await asyncio.shield(asyncio.ensure_future(self._add(member, self._parts[part], values)))

    async def _add(self, member: int, part: _OpenPart, values: torch.Tensor) -> None:
        weighted = self._weighted(member, part)
        async with part.lock:
            if part.result.done() or member not in self.expected or member in part.included:
                return
            await off_loop(part.size, part.add, values, weighted)
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
            values, payload = await off_loop(part.size, self._encode, part)
        except Exception as error:  # whatever it is, everybody who waits for this part must hear of it
            part.result.set_exception(InvalidPart(f"could not be averaged: {error}"))
            part.result.exception()
            return
        part.sum = None
        part.result.set_result(
            Averaged(
                payload=payload,
                values=values,
                included=frozenset(part.included),
                mask=mask_of(part.included, len(self._spans)),
            )
        )

    def _encode(self, part: _OpenPart) -> tuple[torch.Tensor, bytes]:
        """Average and encode a part, once for everyone: what they decode it to, and the bytes."""
        mean = part.average(self._normalisers(part))
        check_values(mean)  # nobody would take another
        if self._answer_codec.lossless:
            return mean, self._answer_codec.encode(mean)
        before = self._residual(part.start, part.stop)
        if before is not None:
            mean.add_(before)
        payload = self._answer_codec.encode(mean)
        decoded = self._answer_codec.decode(payload, part.size)
        self.left_out[part.start, part.stop] = pack(mean.sub_(decoded))
        return decoded, payload

    def _weighted(self, member: int, part: _OpenPart) -> list[tuple[slice, float]]:
        """A member's weight in each stretch of a part."""
        return [
            (part.stretch(span), self._weighting.value_weight(span.samples, self._steps(span)))
            for span in self._spans[member]
        ]

    def _normalisers(self, part: _OpenPart) -> list[tuple[slice, float]]:
        """What to divide by in each stretch in which no included member's counts change."""
        spans = [self._spans[member] for member in sorted(part.included)]
        cuts = {part.start, part.stop}
        for own in spans:
            cuts |= {cut for span in own for cut in (span.start, span.stop) if part.start < cut < part.stop}
        found = []
        for low, high in pairwise(sorted(cuts)):
            there = [span for own in spans for span in own if span.start <= low and high <= span.stop]
            terms = [self._weighting.normaliser_terms(span.samples, self._steps(span)) for span in there]
            total = tuple(math.fsum(column) for column in zip(*terms, strict=True))
            normaliser = self._weighting.normaliser(total) if total else 0.0
            found.append((slice(low - part.start, high - part.start), normaliser))
        return found

    def _steps(self, span: PendingSpan) -> int:
        """Inner steps, as many as can be: understating or, with fednova, overstating them would raise a weight."""
        return min(max(span.steps, -(-span.samples // self._batch_size)), max(1, span.samples))


async def off_loop(elements: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do arithmetic on so many elements: in a thread, unless the hand-over would cost more. Finished in any case."""
    if elements <= INLINE_ELEMENTS:
        return work(*arguments)
    return await asyncio.shield(asyncio.to_thread(work, *arguments))


def decode_values(codec: Codec, body: bytes | memoryview, size: int) -> torch.Tensor:
    """A remote peer's bytes as float32 ``(size,)``; possibly a view of them, so not to be written to.

    :raises InvalidPart: not an encoding of so many values, or a magnitude no honest difference has.
    """
    if codec.lossless:
        if len(body) != size * FLOAT32.itemsize:
            raise InvalidPart(f"{len(body)} bytes instead of {size * FLOAT32.itemsize}")
        raw = np.frombuffer(body, dtype=FLOAT32)
        values = torch.from_numpy(raw.astype(np.float32, copy=not raw.flags.writeable))
        check_values(values)
        return values
    try:
        values = codec.decode(body, size)
    except MalformedBody as error:
        raise InvalidPart(str(error)) from error
    check_values(values)
    return values


def check_values(values: torch.Tensor) -> None:
    """Our own contribution is held to it as well: a model that diverged must not break everyone's base.

    :raises InvalidPart: NaN or inf, or a magnitude no honest difference has.
    """
    largest = max(float(values.max()), -float(values.min())) if values.numel() else 0.0
    if not largest <= MAX_ABSOLUTE_DIFFERENCE:  # also true for NaN
        raise InvalidPart(f"values up to {largest:g}")
