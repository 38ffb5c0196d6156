"""One round of one fragment: an all-reduce that a peer commits whole or not at all (invariant 3).

Every member is a reducer for an equal share of the fragment, cut into parts. It streams its contribution to the
other reducers part by part and gets back, for each part, the average (the same bytes for everyone) and who is in
it. A member whose answers are incomplete at the deadline returns no result: nothing has changed for it, and it
learns from a receipt later whether the others counted it. A member goes on reducing for the others all the same.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from peers.codecs import Codec
from peers.contribution import Decoded
from peers.ledger import PendingSpan
from peers.messages import (
    Average,
    AveragedPart,
    AverageHeader,
    Contributor,
    Part,
    PartHeader,
    Receipt,
    indices_of,
)
from peers.reducer import (
    BY_SAMPLES,
    FLOAT32,
    MAX_BATCH,
    PLAIN,
    InvalidPart,
    PartReducer,
    check_values,
    decode_values,
    off_loop,
)
from peers.weighting import Weighting

CallReducer = Callable[[PeerID, AsyncIterator[Part]], Awaitable[AsyncIterator[Average]]]
TRANSPORT_ERRORS = (
    P2PDaemonError,
    P2PHandlerError,
    ControlFailure,
    OSError,
    EOFError,
    asyncio.TimeoutError,
    TypeError,  # hivemind's word for an unknown message marker
    DecodeError,
)
"""What a call to another peer can end in, its answer being no answer at all included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member as its signed announcement describes it."""

    peer_id: PeerID
    spans: tuple[PendingSpan, ...]
    samples: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What all members of a group know alike before the first byte is sent."""

    group_id: bytes
    tick: int
    fragment: int
    size: int
    members: tuple[GroupMember, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    """For each reducer, the element ranges of its parts."""

    def index(self, peer_id: PeerID) -> int | None:
        for position, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return position
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """A complete average, float32 ``(size,)``, and which members are in which elements."""

    average: torch.Tensor
    parts: tuple[AveragedPart, ...]
    bytes_sent: int
    bytes_received: int


class RoundVoid(Exception):
    """This peer has no complete average; the text says why. The contribution is carried on."""


def split_fragment(size: int, reducers: int, part_elements: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Equal shares for the reducers, each cut into parts of at most ``part_elements``; integers only."""
    borders = [size * index // reducers for index in range(reducers + 1)]
    return tuple(
        tuple(
            (start, min(start + part_elements, borders[index + 1]))
            for start in range(borders[index], borders[index + 1], part_elements)
        )
        for index in range(reducers)
    )


def deadline_seconds(recent_seconds: Sequence[float], cycle_seconds: float) -> float:
    """How long a reducer waits for senders: from the transfers measured so far, within a share of the cycle.

    Median plus three median absolute deviations, doubled, since a round that took longer was not seen yet; before
    any measurement half a cycle. Never under 0.5 s, which a busy machine needs, never over one cycle.
    """
    if not recent_seconds:
        return max(0.5, cycle_seconds / 2)
    median = statistics.median(recent_seconds)
    spread = statistics.median(abs(value - median) for value in recent_seconds)
    return min(max(0.5, 2 * (median + 3 * spread) + 0.5), max(0.5, cycle_seconds))


def receipt_for(plan: RoundPlan, parts: Sequence[AveragedPart], version: int) -> Receipt:
    """The receipt that goes with the base of ``version`` this round makes; neighbours that hold the same are one."""
    joined: list[AveragedPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.included) == (part.start, part.included):
            joined[-1] = AveragedPart(start=last.start, stop=part.stop, included=part.included)
        else:
            joined.append(part)
    return Receipt(
        version=version,
        tick=plan.tick,
        contributors=[
            Contributor(peer_id=member.peer_id.to_bytes(), samples=member.samples, steps=member.steps)
            for member in plan.members
        ],
        parts=joined,
    )


def element_samples(plan: RoundPlan, parts: Sequence[AveragedPart]) -> int:
    """Sum over elements of the samples that the round adds to the lineage; an exact integer."""
    total = 0
    for part in parts:
        for index in part.included:
            for span in plan.members[index].spans:
                overlap = min(span.stop, part.stop) - max(span.start, part.start)
                total += max(0, overlap) * span.samples
    return total


class Round:
    """This peer's side of one round: sender to every reducer, and reducer of its own share.

    :param contribution: local parameters minus base, float32 ``(plan.size,)``; not changed
    :param wait_seconds: how long this reducer waits for senders
    :param codec: how contributions travel
    :param answer_codec: how averages travel
    :param residual: what earlier averages of a range left out, for ``PartReducer``
    :param weighting: how samples and steps count, ``batch_size`` samples a step at most
    """

    def __init__(
        self,
        plan: RoundPlan,
        own_id: PeerID,
        contribution: torch.Tensor,
        call_reducer: CallReducer,
        wait_seconds: float,
        *,
        codec: Codec = PLAIN,
        answer_codec: Codec = PLAIN,
        residual: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
        weighting: Weighting = BY_SAMPLES,
        batch_size: int = MAX_BATCH,
    ) -> None:
        own_index = plan.index(own_id)
        if own_index is None:
            raise RoundVoid("the group does not contain this peer")
        self.plan = plan
        self.own_index: int = own_index
        self._contribution = contribution
        self._call_reducer = call_reducer
        self._wait_seconds = wait_seconds
        self._codec, self._answer_codec = codec, answer_codec
        self.decoded: list[Decoded] = []
        """What a lossy codec made of the contribution where it has been sent; grows until the last duty is done."""
        self.reducer = PartReducer(
            plan.ranges[own_index],
            [member.spans for member in plan.members],
            minimum=min(2, len(plan.members)),
            codec=codec,
            answer_codec=answer_codec,
            residual=residual,
            weighting=weighting,
            batch_size=batch_size,
        )
        self._average = torch.empty(plan.size)
        self._included: dict[tuple[int, int], list[int]] = {}
        self._streaming: set[int] = set()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.failed: dict[PeerID, str] = {}
        self._duties: list[asyncio.Task[None]] = []

    async def run(self) -> RoundResult:
        """Take part until every answer is here.

        :raises RoundVoid: as soon as one answer will not come, with the reason. What this peer owes the others, its
            contribution to their parts and their averages of its own, goes on in the background until the deadline.
        """
        exchanges = [
            asyncio.create_task(self._exchange(index))
            for index in range(len(self.plan.members))
            if self.plan.ranges[index]
        ]
        closing = asyncio.create_task(self._close_at_deadline())
        self._duties = [*exchanges, closing]
        for duty in self._duties:
            duty.add_done_callback(_retrieve)
        await asyncio.wait(exchanges, return_when=asyncio.FIRST_EXCEPTION)
        reasons = [error for task in exchanges if task.done() and (error := task.exception()) is not None]
        for error in sorted(reasons, key=lambda error: isinstance(error, RoundVoid)):  # an unexpected one first
            raise error
        closing.cancel()
        parts = tuple(
            AveragedPart(start=start, stop=stop, included=included)
            for (start, stop), included in sorted(self._included.items())
        )
        return RoundResult(
            average=self._average,
            parts=parts,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
        )

    async def answer(self, stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncIterator[Average]:
        """Serve one sender: count its parts as they come, send each average as soon as it exists."""
        sender = self.plan.index(remote_id)
        if sender is None or sender == self.own_index or sender in self._streaming:
            return
        self._streaming.add(sender)
        counting = asyncio.create_task(self._count(stream, sender))
        try:
            for part in range(self.reducer.num_parts):
                averaged = await asyncio.shield(self.reducer.result(part))
                self.bytes_sent += len(averaged.payload)
                yield Average(AverageHeader(part=part, included=averaged.mask), averaged.payload)
            # The daemon resets a stream that we close before the sender's end mark has come, and drops our answers.
            await asyncio.wait({counting}, timeout=self._wait_seconds)
        except InvalidPart:
            return
        finally:
            if not counting.done():
                counting.cancel()
                await self.reducer.leave_out(sender, "closed its stream")

    async def _count(self, stream: AsyncIterator[Part], sender: int) -> None:
        expected = 0
        try:
            async for message in stream:
                header = message.header
                if header is None or header.part != expected or header.group_id != self.plan.group_id:
                    raise InvalidPart("a malformed part or one out of order")
                if expected >= self.reducer.num_parts:
                    raise InvalidPart("more parts than there are")
                start, stop = self.plan.ranges[self.own_index][expected]
                values = await off_loop(stop - start, self.reducer.decode, expected, message.body)
                self.bytes_received += len(message.body)
                await self.reducer.add(sender, expected, values)
                expected += 1
            if expected < self.reducer.num_parts:
                raise InvalidPart(f"sent {expected} of {self.reducer.num_parts} parts")
        except (InvalidPart, *TRANSPORT_ERRORS) as error:
            await self.reducer.leave_out(sender, str(error))

    async def _close_at_deadline(self) -> None:
        await asyncio.sleep(self._wait_seconds)
        await self.reducer.close()

    async def _exchange(self, index: int) -> None:
        """Send this peer's contribution to one reducer and take its averages."""
        if index == self.own_index:
            await self._reduce_own()
            return
        reducer = self.plan.members[index].peer_id
        try:
            await asyncio.wait_for(self._talk_to(index, reducer), self._wait_seconds * 1.5 + 1.0)
        except TRANSPORT_ERRORS as error:
            reason = "did not answer in time" if isinstance(error, asyncio.TimeoutError) else "was lost"
            self.failed[reducer] = reason
            if reason == "was lost" and index not in self._streaming:
                await self.reducer.leave_out(index, reason)  # nothing will come from it: the others need not wait
            raise RoundVoid(f"reducer {str(reducer)[-6:]} {reason}") from error
        except InvalidPart as error:
            self.failed[reducer] = str(error)
            raise RoundVoid(f"reducer {str(reducer)[-6:]} answered wrongly: {error}") from error

    async def _talk_to(self, index: int, reducer: PeerID) -> None:
        answers = await self._call_reducer(reducer, self._parts_for(index))
        await self._receive(index, answers)

    async def _parts_for(self, index: int) -> AsyncIterator[Part]:
        for part, (start, stop) in enumerate(self.plan.ranges[index]):
            body, decoded = await off_loop(stop - start, self._encode, start, stop)
            if decoded is not None:
                self.decoded.append((start, stop, decoded))
            self.bytes_sent += len(body)
            yield Part(PartHeader(group_id=self.plan.group_id, part=part), body)

    def _encode(self, start: int, stop: int) -> tuple[bytes | memoryview, torch.Tensor | None]:
        """A part's body, and what it decodes to if that is something else."""
        values = self._contribution[start:stop]
        if self._codec.lossless:
            return values.numpy().astype(FLOAT32, copy=False).data.cast("B"), None  # sent from where it lies
        body = self._codec.encode(values)
        return body, self._codec.decode(body, stop - start)

    async def _receive(self, index: int, answers: AsyncIterator[Average]) -> None:
        ranges = self.plan.ranges[index]
        received = 0
        async for message in answers:
            header = message.header
            if header is None or header.part != received or received >= len(ranges):
                raise InvalidPart("a malformed average or one out of order")
            included = indices_of(header.included, len(self.plan.members))
            if not included:
                raise InvalidPart("an average of nobody")
            start, stop = ranges[received]
            values = await off_loop(stop - start, decode_values, self._answer_codec, message.body, stop - start)
            self.bytes_received += len(message.body)
            self._average[start:stop] = values
            self._included[start, stop] = sorted(included)
            received += 1
            if received == len(ranges):
                with suppress(RuntimeError):
                    await answers.aclose()  # type: ignore[attr-defined]  # hivemind returns an async generator
                return
        raise InvalidPart(f"{received} of {len(ranges)} averages")

    async def _reduce_own(self) -> None:
        try:
            for part, (start, stop) in enumerate(self.plan.ranges[self.own_index]):
                check_values(self._contribution[start:stop])
                await self.reducer.add(self.own_index, part, self._contribution[start:stop])
        except InvalidPart as error:
            await self.reducer.leave_out(self.own_index, str(error))
        for part, (start, stop) in enumerate(self.plan.ranges[self.own_index]):
            try:
                averaged = await asyncio.shield(self.reducer.result(part))
            except InvalidPart as error:
                raise RoundVoid(str(error)) from error
            self._average[start:stop] = averaged.values
            self._included[start, stop] = sorted(averaged.included)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Look at the outcome of a duty whose round is over, so that it is not reported as forgotten."""
    if not task.cancelled():
        task.exception()
