"""One reducer's share of a round: admits parts, averages them, encodes each average once.

Every tensor here comes from a remote peer. It is decoded and checked for magnitude before any counter moves.
Accumulating never waits for anyone to read an answer. What this does not stop: a plausible but false contribution
within the magnitude limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from peers.closing import enough
from peers.codecs import Codec, Float32, MalformedBody, get_codec
from peers.contribution import Outgoing
from peers.ledger import PendingSpan
from peers.messages import mask_of
from peers.residual import pack
from peers.round_plan import GroupMember, RoundPlan
from peers.weighting import Weighting, get_weighting

MAX_ABSOLUTE_DIFFERENCE = 1e4
"""No parameter moves this far between two rounds of an honest peer; float32 sums of such values stay finite."""
MAX_ABSOLUTE_AVERAGE = 1.01 * MAX_ABSOLUTE_DIFFERENCE
"""Averages are cut off at the limit for differences; a lossy codec may round them a little beyond it."""
INLINE_ELEMENTS = 1 << 16
"""Below this size, arithmetic on the event loop costs less than a thread hand-over (about 0.1 ms)."""
CHECKED_ELEMENTS = 1 << 18
"""At a time: what lies between two operations stays in the cache."""
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

    payload: bytes | memoryview
    values: torch.Tensor
    """Float32 ``(size,)``."""
    included: frozenset[int]
    mask: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a run averages: what its manifest says, as objects."""

    codec: Codec | None = PLAIN
    """How contributions travel; None if each member says so in its announcement."""
    answer_codec: Codec = PLAIN
    """How averages travel."""
    weighting: Weighting = BY_SAMPLES
    batch_size: int = MAX_BATCH
    """No inner step holds more samples."""

    def at(self, plan: RoundPlan, element: int) -> Rules:
        """The rules for a part that begins there: running statistics travel as they are, and their mean is a mean.

        A codec's blocks would measure small ones by the largest, and a variance must not become negative.
        """
        if element < plan.parameters:
            return self
        return replace(self, codec=PLAIN, answer_codec=PLAIN, weighting=BY_SAMPLES)

    def codec_of(self, member: GroupMember) -> Codec:
        """How a member's contribution travels."""
        return self.codec or get_codec(member.codec)

    def transfer_bytes(self, member: GroupMember, size: int) -> int:
        """What a round of ``size`` elements moves over a member's line, both ways together."""
        return self.codec_of(member).encoded_bytes(size) + self.answer_codec.encoded_bytes(size)

    def steps(self, span: PendingSpan) -> int:
        """Inner steps, as many as can be: understating or, with fednova, overstating them would raise a weight."""
        return min(max(span.steps, -(-span.samples // self.batch_size)), max(1, span.samples))

    def value_weight(self, member: GroupMember, span: PendingSpan) -> float:
        return staleness_factor(member) * self.weighting.value_weight(span.samples, self.steps(span))

    def normaliser_terms(self, member: GroupMember, span: PendingSpan) -> tuple[float, ...]:
        factor = staleness_factor(member)
        return tuple(factor * term for term in self.weighting.normaliser_terms(span.samples, self.steps(span)))

    def total_weight(self, member: GroupMember, start: int, stop: int) -> float:
        """A member's weight, summed over elements ``[start, stop)``."""
        return math.fsum(
            (min(span.stop, stop) - max(span.start, start)) * self.value_weight(member, span)
            for span in member.spans_in(start, stop)
        )


def staleness_factor(member: GroupMember) -> float:
    """What a member's work weighs less because most of it was made on bases of the past: 1 / (1 + rounds skipped).

    The polynomial of FedAsync (Xie, Koyejo, Gupta 2019, arXiv:1903.03934) with exponent 1. Measured with ``learning.py
    --quick --rounds 400 --compare staleness``, 8 peers, three of them, with half of the samples, in every fourth round,
    three seeds: loss 0.934 ± 0.012 (standard error) of that without it; with exponent 0.5, 0.955 ± 0.020. The samples
    are credited as they are: it is their weight that falls.
    """
    return 1 / member.cadence


class _OpenPart:
    """A part that is still being added up.

    :param sum: zeros, float32 ``(stop - start,)``: where to add up
    :param at_root: whether it is averaged here
    :param sources: members whose bytes are waited for
    :param weights: of every member that may be in it
    """

    def __init__(
        self,
        start: int,
        stop: int,
        sum: torch.Tensor,
        at_root: bool,
        sources: set[int],
        weights: dict[int, float],
        rules: Rules,
    ) -> None:
        self.rules = rules
        self.start, self.stop, self.sum, self.at_root = start, stop, sum, at_root
        self.waiting_for = sources
        self.weights = weights
        self.included: set[int] = set()
        self.lock = asyncio.Lock()
        self.closed = False
        self.summed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.result: asyncio.Future[Averaged] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        return self.stop - self.start

    def stretch(self, span: PendingSpan) -> slice:
        """Where a span that reaches into this part lies in it."""
        return slice(max(span.start, self.start) - self.start, min(span.stop, self.stop) - self.start)

    def add(self, values: torch.Tensor, weighted: Sequence[tuple[slice, float]]) -> None:
        """Add ``values`` (float32, ``(size,)``) with a weight for each stretch."""
        for where, weight in weighted:
            self.sum[where].add_(values[where], alpha=weight)

    def add_sum(self, values: torch.Tensor) -> None:
        """Add another group's weighted sum, float32 ``(size,)``."""
        self.sum.add_(values)

    def average(self, normalisers: Sequence[tuple[slice, float]]) -> torch.Tensor:
        """Sum over normalisers, in place; where that is 0, nobody has weight and the average is 0."""
        for where, normaliser in normalisers:
            if normaliser > 0:
                self.sum[where].div_(normaliser)
            else:
                self.sum[where].zero_()
        return self.sum

    def enough(self) -> bool:
        """Whether what is missing is a small part of the weight that is expected."""
        there = math.fsum(self.weights[member] for member in self.included)
        return enough(there, math.fsum(self.weights.values()))

    def fail(self, reason: str) -> None:
        """There will be no average: everybody who waits for it must hear of it."""
        self.closed = True
        _refuse(self.summed, reason)
        _refuse(self.result, reason)


def _refuse(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(InvalidPart(reason))
        future.exception()  # read here, so that a part nobody asks for is not reported as unhandled


class PartReducer:
    """Averages the parts that fall to this peer, or adds up its group's for the part's root (``round_plan.py``).

    A member's weight in an element follows from the samples and steps of its pending spans, as signed in its
    announcement. A weight on the wire does not exist.

    :param own_index: this peer among the plan's members
    :param out: float32 ``(plan.size,)``, zeros in this peer's own share, which is added up and averaged there
    :param residual: what earlier averages of these elements left out, or None; it goes into this one
    """

    def __init__(
        self,
        plan: RoundPlan,
        own_index: int,
        rules: Rules,
        out: torch.Tensor,
        residual: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
    ) -> None:
        self._plan, self._own_index, self._residual = plan, own_index, residual
        self._minimum = max(1, min(2, len(plan.training)))
        self._group = set(plan.groups[plan.group_of(own_index)])
        contributors = {index for index in self._group if not plan.members[index].auxiliary}
        share = plan.share_of(own_index)
        self._counterparts = {} if share is None else {index: plan.group_of(index) for index in share.reducers}
        self._counterparts.pop(own_index, None)
        self._hurried = False
        self.left_out: dict[tuple[int, int], bytes] = {}
        """What this round's averages left out, packed, by element range."""
        self.rejected: dict[int, str] = {}
        self.parts: list[_OpenPart] = []
        self.rooted: dict[int, list[int]] = {index: [] for index in (own_index, *self._counterparts)}
        """For each reducer of this share, the parts whose root it is."""
        for number, (start, stop) in enumerate(share.parts if share is not None else ()):
            root = share.root(number) if share is not None else own_index
            self.rooted[root].append(number)
            at_root = root == own_index
            rules_here = rules.at(plan, start)
            scope = range(len(plan.members)) if at_root else self._group
            self.parts.append(
                _OpenPart(
                    start,
                    stop,
                    out[start:stop],
                    at_root,
                    contributors | (set(self._counterparts) if at_root else set()),
                    {member: rules_here.total_weight(plan.members[member], start, stop) for member in scope},
                    rules_here,
                )
            )

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    def expected_from(self, source: int) -> Sequence[int]:
        """The parts that a member sends to this peer, in order; none if there is no reason for it to."""
        if source in self._group:
            return range(self.num_parts)
        return self.rooted[self._own_index] if source in self._counterparts else ()

    def result(self, part: int) -> asyncio.Future[Averaged]:
        """Resolves when the average is there; fails with InvalidPart if there will be none."""
        return self.part(part).result

    def summed(self, part: int) -> asyncio.Future[None]:
        """Resolves when a part whose root is another is added up; fails with InvalidPart if nobody is in it."""
        return self.part(part).summed

    def part(self, number: int) -> _OpenPart:
        """:raises InvalidPart: there is none, or none any more"""
        if not 0 <= number < len(self.parts):
            raise InvalidPart(f"part {number} of {len(self.parts)}")
        return self.parts[number]

    def end(self) -> None:
        """The round is over: whoever still waits for a part hears of it, and their memory is given back."""
        for part in self.parts:
            part.fail("the round is over")
        self.parts = []

    def decode(self, source: int, part: int, body: bytes | memoryview) -> torch.Tensor:
        """Check a body and decode it to float32 ``(size,)``. :raises InvalidPart: with the reason."""
        open_part = self.part(part)
        if source in self._group:
            if not body and not self._weight(source, open_part):
                return torch.zeros(open_part.size)  # whatever it had sent would count for nothing
            return decode_values(open_part.rules.codec_of(self._plan.members[source]), body, open_part.size)
        heaviest = max((self._weight(member, open_part) for member in self._members_of(source)), default=0.0)
        limit = MAX_ABSOLUTE_DIFFERENCE * max(1.0, heaviest) * len(self._members_of(source))
        return decode_values(PLAIN, body, open_part.size, limit)

    def _members_of(self, counterpart: int) -> tuple[int, ...]:
        return self._plan.groups[self._counterparts[counterpart]]

    def _weight(self, member: int, part: _OpenPart) -> float:
        """A member's highest weight in any element of a part."""
        return max(
            (
                part.rules.value_weight(self._plan.members[member], span)
                for span in self._plan.members[member].spans_in(part.start, part.stop)
            ),
            default=0.0,
        )

    async def add(self, source: int, part: int, values: torch.Tensor, included: Collection[int] | None = None) -> None:
        """Count a member's values in a part, unless the member was left out or the part is closed.

        :param included: whose contributions a counterpart's sum holds
        :raises InvalidPart: a counterpart names members of other groups
        """
        if included is not None and not (included and set(included) <= set(self._members_of(source))):
            raise InvalidPart("a sum over nobody, or over members of another group")
        # A sender that hangs up in the middle must not leave its values in the sum and its name out of the list.
        await asyncio.shield(asyncio.ensure_future(self._add(source, self.part(part), values, included)))

    async def _add(self, source: int, part: _OpenPart, values: torch.Tensor, included: Collection[int] | None) -> None:
        weighted = self._weighted(source, part)
        async with part.lock:
            if part.closed or source not in part.waiting_for:
                return
            if included is None:
                await off_loop(part.size, part.add, values, weighted)
                part.included.add(source)
            else:
                await off_loop(part.size, part.add_sum, values)
                part.included |= set(included)
            part.waiting_for.discard(source)
        await self._close_if_complete(part)

    async def leave_out(self, source: int, reason: str) -> None:
        """Wait for this member no longer; what it already delivered stays counted."""
        # Whoever calls may be cancelled, as when the member hangs up: a part that is being closed must become so.
        await asyncio.shield(asyncio.ensure_future(self._leave_out(source, reason)))

    async def _leave_out(self, source: int, reason: str) -> None:
        for part in self.parts:
            if source in part.waiting_for and not part.closed:
                part.waiting_for.discard(source)
                self.rejected.setdefault(source, reason)
                await self._close_if_complete(part)

    async def hurry(self) -> None:
        """The grace is over: what is missing is waited for only where it is more than a small part of the weight."""
        self._hurried = True
        for part in self.parts:
            await self._close_if_complete(part)

    async def close_group(self) -> None:
        """The deadline for this group's members; counterparts, which wait as long for theirs, may take longer."""
        for member in self._group:
            await self.leave_out(member, "missed the deadline")

    async def close(self) -> None:
        """The deadline for everybody: every open part is averaged over what it has."""
        await self.close_group()
        for counterpart in self._counterparts:
            await self.leave_out(counterpart, "missed the deadline")

    async def _close_if_complete(self, part: _OpenPart) -> None:
        if part.waiting_for and not (self._hurried and part.enough()):
            return
        async with part.lock:
            if not part.closed:
                await self._finish(part)

    async def _finish(self, part: _OpenPart) -> None:
        for member in part.waiting_for:
            self.rejected.setdefault(member, "was late; the others had nearly all of the weight")
        if not part.at_root:
            if part.included:
                part.closed = True
                part.summed.set_result(None)
            else:
                part.fail("no contribution arrived")
            return
        if len(part.included) < self._minimum:
            part.fail(f"only {len(part.included)} contribution(s) arrived")
            return
        part.closed = True
        try:
            payload = await off_loop(part.size, self._encode, part)
        except Exception as error:
            part.fail(f"could not be averaged: {error}")
            return
        if not part.result.done():  # the round was not over meanwhile
            part.result.set_result(self._averaged(part, payload, part.included))

    def _averaged(self, part: _OpenPart, payload: bytes | memoryview, included: Collection[int]) -> Averaged:
        return Averaged(
            payload=payload,
            values=part.sum,
            included=frozenset(included),
            mask=mask_of(set(included), len(self._plan.members)),
        )

    async def relayed(
        self, part: int, payload: bytes | memoryview, values: torch.Tensor, included: Collection[int]
    ) -> None:
        """The root has answered: what its average decodes to, and the bytes to pass on.

        It may not have waited for our sum. Nothing is added from now on: it would be added to the average.
        """
        open_part = self.part(part)
        async with open_part.lock:
            open_part.closed = True
            _refuse(open_part.summed, "its root did not wait")
            open_part.sum.copy_(values)
        if not open_part.result.done():
            open_part.result.set_result(self._averaged(open_part, payload, included))

    def void(self, parts: Sequence[int], reason: str) -> None:
        """The root of these parts will not answer."""
        for number in parts if self.parts else ():
            if not self.parts[number].result.done():
                self.parts[number].fail(reason)

    def _encode(self, part: _OpenPart) -> bytes | memoryview:
        """Average and encode a part, once for everyone; ``part.sum`` becomes what they decode it to."""
        mean = part.average(self._normalisers(part))
        codec = part.rules.answer_codec
        before = None if codec.lossless else self._residual(part.start, part.stop)
        if before is not None:
            mean.add_(before)
        # An average of allowed differences may lie beyond their limit: it is rounded, fednova makes more of unequal
        # steps, a lossy codec brings what earlier averages left out. Nobody would take it, so one member could void
        # every round.
        mean.clamp_(-MAX_ABSOLUTE_DIFFERENCE, MAX_ABSOLUTE_DIFFERENCE)
        check_values(mean)
        if codec.lossless:
            return codec.encode(mean)
        payload = codec.encode(mean)
        decoded = codec.decode(payload, part.size)
        self.left_out[part.start, part.stop] = pack(mean.sub_(decoded))
        mean.copy_(decoded)
        return payload

    def _weighted(self, member: int, part: _OpenPart) -> list[tuple[slice, float]]:
        """A member's weight in each stretch of a part."""
        spans = self._plan.members[member].spans_in(part.start, part.stop)
        return [(part.stretch(span), part.rules.value_weight(self._plan.members[member], span)) for span in spans]

    def _normalisers(self, part: _OpenPart) -> list[tuple[slice, float]]:
        """What to divide by in each stretch in which no included member's counts change."""
        nothing = part.rules.weighting.normaliser_terms(0, 0)
        changes: dict[int, dict[int, tuple[float, ...]]] = {part.start: {}}
        for member in part.included:
            for span in self._plan.members[member].spans_in(part.start, part.stop):
                begin, end = max(span.start, part.start), span.stop
                changes.setdefault(begin, {})[member] = part.rules.normaliser_terms(self._plan.members[member], span)
                if end < part.stop:
                    changes.setdefault(end, {})[member] = nothing  # until its next span, perhaps right here
        there: dict[int, tuple[float, ...]] = {}
        found = []
        for low, high in pairwise([*sorted(changes), part.stop]):
            there |= changes[low]
            total = tuple(math.fsum(column) for column in zip(*there.values(), strict=True))
            normaliser = part.rules.weighting.normaliser(total) if total else 0.0
            found.append((slice(low - part.start, high - part.start), normaliser))
        return found


async def off_loop(elements: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Do arithmetic on so many elements: in a thread, unless the hand-over would cost more. Finished in any case."""
    if elements <= INLINE_ELEMENTS:
        return work(*arguments)
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    # Read here: of whoever hangs up while its nonsense is decoded, nobody is left to ask what became of it.
    working.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(working)


def decode_values(
    codec: Codec, body: bytes | memoryview, size: int, limit: float = MAX_ABSOLUTE_DIFFERENCE
) -> torch.Tensor:
    """A remote peer's bytes as float32 ``(size,)``; possibly a view of them, so not to be written to.

    :raises InvalidPart: not an encoding of so many values, or a magnitude no honest difference has.
    """
    try:
        values = codec.decode(body, size)
    except MalformedBody as error:
        raise InvalidPart(str(error)) from error
    check_values(values, limit)
    return values


def check_outgoing(contribution: Outgoing) -> None:
    """Our own contribution is held to the limit as well, in pieces. :raises InvalidPart:"""
    for start in range(0, contribution.size, CHECKED_ELEMENTS):
        check_values(contribution.part(start, min(start + CHECKED_ELEMENTS, contribution.size)))


def check_values(values: torch.Tensor, limit: float = MAX_ABSOLUTE_DIFFERENCE) -> None:
    """Our own contribution is held to it as well: a model that diverged must not break everyone's base.

    :raises InvalidPart: NaN or inf, or a magnitude no honest difference has.
    """
    largest = max(float(values.max()), -float(values.min())) if values.numel() else 0.0
    if not largest <= limit:  # also true for NaN
        raise InvalidPart(f"values up to {largest:g}")
