"""One round of one fragment: an all-reduce that a peer commits whole or not at all (invariant 3).

Who reduces what is said in ``round_plan.py``. A member streams its contribution to the reducers of its group part by
part and gets back, for each part, the average (the same bytes for everyone) and who is in it. With several groups, a
part's reducers exchange their groups' sums before (``_relay``). A member whose answers are incomplete at the deadline
returns no result: nothing has changed for it, and it learns from a receipt later whether the others counted it. It
goes on reducing for the others all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from hivemind.p2p import PeerID

from peers.closing import ClosingTimes, last_seconds, longest_seconds
from peers.codecs import Codec
from peers.contribution import Outgoing, SentPart
from peers.line import RateMeter
from peers.messages import (
    Average,
    AveragedPart,
    AverageHeader,
    Part,
    PartHeader,
    indices_of,
    mask_of,
)
from peers.reducer import (
    FLOAT32,
    MAX_ABSOLUTE_AVERAGE,
    InvalidPart,
    PartReducer,
    Rules,
    check_values,
    decode_values,
    off_loop,
)
from peers.round_plan import RoundPlan, Share
from peers.transport import TRANSPORT_ERRORS

CallReducer = Callable[[PeerID, AsyncIterator[Part]], Awaitable[AsyncIterator[Average]]]
TakeAverage = Callable[[int, "bytes | memoryview", torch.Tensor, "set[int]"], Awaitable[None]]
"""Is given a part's number, its average's bytes, what they decode to, and who is in it."""
OVER = "it was over before this peer was done: it slept, or was very slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """A complete average, float32 ``(size,)``, and which members are in which elements."""

    average: torch.Tensor
    parts: tuple[AveragedPart, ...]
    bytes_sent: int
    bytes_received: int


class RoundVoid(Exception):
    """This peer has no complete average; the text says why. The contribution is carried on."""


class _EndedEarly(InvalidPart):
    """A reducer has given up on a part."""


class Round:
    """This peer's side of one round: sender to its group's reducers, and perhaps a reducer itself.

    :param contribution: local parameters minus base, float32 ``(plan.size,)``; held as soon as the round is void
    :param times: when this reducer closes what is not complete
    :param residual: what earlier averages of a range left out, for ``PartReducer``
    :param on_arrival: told, for each member whose contribution is complete here, the seconds since the round began
    """

    def __init__(
        self,
        plan: RoundPlan,
        own_id: PeerID,
        contribution: Outgoing,
        call_reducer: CallReducer,
        times: ClosingTimes,
        rules: Rules,
        *,
        residual: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
        on_arrival: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        own_index = plan.index(own_id)
        if own_index is None:
            raise RoundVoid("the group does not contain this peer")
        self.plan = plan
        self.own_index: int = own_index
        self._group = plan.group_of(own_index)
        self._contribution = contribution
        self._call_reducer = call_reducer
        self._times, self._rules, self._on_arrival = times, rules, on_arrival
        self._brings_nothing = plan.members[own_index].auxiliary
        self._last_seconds = last_seconds(times.deadline_seconds, len(plan.groups))
        self.lossy: list[SentPart] = []
        """What a lossy codec made of the contribution where it has been sent; grows until the last duty is done.

        After that only whoever took the list has it."""
        self._average = torch.zeros(plan.size)
        self.reducer = PartReducer(plan, own_index, rules, self._average, residual)
        self._included: dict[tuple[int, int], list[int]] = {}
        self._sent: dict[tuple[int, int], int] = {}
        """Bytes of what has gone out, by element range."""
        self._handing_over = 0
        self._streaming: set[int] = set()
        self._began = asyncio.get_running_loop().time()
        self.meter = RateMeter()
        self._came: dict[int, dict[int, int]] = {}
        """By sender: milliseconds until each of its parts had come."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.answered: set[PeerID] = set()
        """Reducers whose averages all came."""
        self.failed: dict[PeerID, str] = {}
        self._duties: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        senders = {index for index in range(len(plan.members)) if self.reducer.expected_from(index)}
        self._owed = senders - {own_index}
        """Members that have not had all our averages yet."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolves when nobody waits for anything of this round, and its memory has been given back."""

    @property
    def waits_for_others(self) -> bool:
        """Whether all that we contribute has gone out; what is still to come is not up to us."""
        return self._handing_over == 0

    @property
    def longest_seconds(self) -> float:
        """After this nobody can want anything of this round."""
        return longest_seconds(self._times.deadline_seconds, len(self.plan.groups))

    def _seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    async def run(self) -> RoundResult:
        """Take part until every answer is here.

        :raises RoundVoid: as soon as one answer will not come, with the reason. What this peer owes the others, its
            contribution to their parts and their averages of its own, goes on in the background until the deadline.
        """
        average = self._average
        exchanges = [asyncio.create_task(self._exchange(share)) for share in self.plan.shares if share.parts]
        relays = [
            asyncio.create_task(self._relay(root, parts))
            for root, parts in self.reducer.rooted.items()
            if parts and root != self.own_index
        ]
        self._closing = asyncio.create_task(self._close_in_time())
        self._duties = {*exchanges, *relays, self._closing}
        for duty in [*self._duties]:
            duty.add_done_callback(self._duty_done)
        await asyncio.wait(exchanges, return_when=asyncio.FIRST_EXCEPTION)
        reasons: list[BaseException] = []
        for task in exchanges:
            if task.cancelled():
                reasons.append(RoundVoid(OVER))
            elif task.done() and (error := task.exception()) is not None:
                reasons.append(error)
        for error in sorted(reasons, key=lambda error: isinstance(error, RoundVoid)):  # an unexpected one first
            if not self.over.done():
                await off_loop(self.plan.size, self._contribution.hold)
            raise error
        self._closing.cancel()
        parts = tuple(
            AveragedPart(start=start, stop=stop, included=included)
            for (start, stop), included in sorted(self._included.items())
        )
        return RoundResult(
            average=average,
            parts=parts,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
        )

    async def answer(self, stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
        """Serve one sender: count its parts as they come, send each average as soon as it exists."""
        sender = self.plan.index(remote_id)
        if sender is None or sender == self.own_index or sender in self._streaming or self.over.done():
            return
        expected = self.reducer.expected_from(sender)
        if not expected:
            return
        self._streaming.add(sender)
        counting = asyncio.create_task(self._count(stream, sender, expected))
        came = self._came[sender] = {}
        try:
            for part in expected:
                if self.over.done():
                    return
                averaged = await asyncio.shield(self.reducer.result(part))
                self.bytes_sent += len(averaged.payload)
                header = AverageHeader(part=part, included=averaged.mask, received_ms=came.get(part, 0))
                yield Average(header, averaged.payload)
            # The daemon resets a stream that we close before the sender's end mark has come, and drops our answers.
            await asyncio.wait({counting}, timeout=self._last_seconds)
        except InvalidPart:
            return
        finally:
            if not counting.done():
                counting.cancel()
                await self.reducer.leave_out(sender, "closed its stream")
            self._owed.discard(sender)
            self._end_if_nothing_is_left()

    def _duty_done(self, duty: asyncio.Task[None]) -> None:
        if not duty.cancelled():
            duty.exception()  # looked at, so that it is not reported as forgotten when the round is over
        self._duties.discard(duty)
        self._end_if_nothing_is_left()

    def _end_if_nothing_is_left(self) -> None:
        closed = all(part.closed for part in self.reducer.parts)
        if not self._owed and closed and all(duty is self._closing for duty in self._duties):
            self.end()

    def end(self) -> None:
        """Whoever still wants something of this round is too late. Gives its memory back, which cycles would hold."""
        if not self.over.done():
            self.over.set_result(None)
            for duty in self._duties:
                duty.cancel()
            self._average = torch.empty(0)
            self._contribution = Outgoing.of(self._average)
            self.lossy = []
            self.reducer.end()

    async def _count(self, stream: AsyncIterator[Part], sender: int, expected: Sequence[int]) -> None:
        """Parts of a member's contribution, or of a counterpart's sum of its group."""
        received, arrived_bytes, began, first = 0, 0, self._seconds(), True
        counterpart = sender not in self.plan.groups[self._group]
        try:
            async for message in stream:
                header = message.header
                if header is None or header.group_id != self.plan.group_id:
                    raise InvalidPart("a malformed part")
                if first and not message.body:
                    first = False
                    continue
                first = False
                if received >= len(expected) or header.part != expected[received]:
                    raise InvalidPart("a part out of order, or more parts than there are")
                included = indices_of(header.included, len(self.plan.members)) if counterpart else None
                if counterpart and not included:
                    raise InvalidPart("a sum over nobody")
                if self.over.done():
                    return
                self._came[sender][header.part] = max(1, round(1000 * (self._seconds() - began)))
                part = self.reducer.part(header.part)
                values = await off_loop(part.size, self.reducer.decode, sender, header.part, message.body)
                arrived_bytes += len(message.body)
                self.bytes_received += len(message.body)
                self.meter.came(asyncio.get_running_loop().time(), len(message.body))
                if self.over.done():
                    return  # while it was decoded
                await self.reducer.add(sender, header.part, values, included)
                received += 1
            if received < len(expected):
                raise InvalidPart(f"sent {received} of {len(expected)} parts")
            if not counterpart and arrived_bytes:
                self._on_arrival(self._seconds())
        except (InvalidPart, *TRANSPORT_ERRORS) as error:
            await self.reducer.leave_out(sender, str(error))

    async def _close_in_time(self) -> None:
        await asyncio.sleep(self._times.grace_seconds)
        await self.reducer.hurry()
        await asyncio.sleep(self._times.deadline_seconds - self._times.grace_seconds)
        await self.reducer.close_group()
        await asyncio.sleep(self._last_seconds - self._times.deadline_seconds)
        await self.reducer.close()

    async def _exchange(self, share: Share) -> None:
        """Send this peer's contribution to its group's reducer of a share and take the averages."""
        index = share.reducers[self._group]
        if index == self.own_index:
            await self._reduce_own(share)
            return

        async def take(number: int, payload: memoryview | bytes, values: torch.Tensor, included: set[int]) -> None:
            if self.over.done():
                raise RoundVoid(OVER)  # a peer wakes: the end of its round and an answer to it are there at once
            start, stop = share.parts[number]
            self._average[start:stop] = values
            self._included[start, stop] = sorted(included)

        reason = await self._talk_to(index, self._parts_for(share), range(len(share.parts)), share, take)
        if reason:
            raise RoundVoid(f"reducer {str(self.plan.members[index].peer_id)[-6:]} {reason}")

    async def _relay(self, root: int, parts: Sequence[int]) -> None:
        """Send our group's sums of these parts to their root, and pass its averages on."""
        share = self.plan.share_of(self.own_index)
        if share is None:
            return

        reason = await self._talk_to(root, self._sums_for(parts), parts, share, self.reducer.relayed)
        if reason:
            self.reducer.void(parts, f"their root {str(self.plan.members[root].peer_id)[-6:]} {reason}")

    async def _talk_to(
        self, index: int, requests: AsyncIterator[Part], expected: Sequence[int], share: Share, take: TakeAverage
    ) -> str:
        """One exchange with a reducer; why it failed, or nothing."""
        reducer = self.plan.members[index].peer_id
        at_root = len(self.plan.groups) == 1 or index not in self.plan.groups[self._group]
        # Longer than the other side may wait for others; who waits for a relay, longer than that waits for its root.
        patience_seconds = self.longest_seconds - (1.0 if at_root else 0.0)
        try:
            await asyncio.wait_for(
                self._receive(reducer, self._introduced(requests), expected, share, take), patience_seconds
            )
        except TRANSPORT_ERRORS as error:
            reason = "did not answer in time" if isinstance(error, asyncio.TimeoutError) else "was lost"
            if reason == "was lost" and index not in self._streaming:
                await self.reducer.leave_out(index, reason)  # nothing will come from it: the others need not wait
        except _EndedEarly as error:
            reason = f"answered only {error}"
            if not at_root:
                return reason  # not its fault: the root of a part was lost
        except InvalidPart as error:
            reason = f"answered wrongly: {error}"
        else:
            self.answered.add(reducer)
            return ""
        self.failed[reducer] = reason
        return reason

    async def _introduced(self, requests: AsyncIterator[Part]) -> AsyncIterator[Part]:
        """A message without a body goes first: the reducer knows our stream before a slow line has carried a part.

        It can answer at once where it has closed without us, and sees how long our parts take.
        """
        yield Part(PartHeader(group_id=self.plan.group_id, part=0), b"")
        async for part in requests:
            yield part

    async def _parts_for(self, share: Share) -> AsyncIterator[Part]:
        own = self.plan.members[self.own_index]
        self._handing_over += 1
        try:
            for part, (start, stop) in enumerate(share.parts):
                rules = self._rules.at(self.plan, start)
                codec = rules.codec_of(own)
                if not rules.total_weight(own, start, stop):
                    yield Part(PartHeader(group_id=self.plan.group_id, part=part), b"")  # known to be zeros
                    continue
                try:
                    body = await off_loop(stop - start, self._encode, codec, start, stop)
                except ValueError:
                    return  # not finite: the reducer goes on without us, and still gives us its averages
                if not codec.lossless:
                    self.lossy.append(SentPart(start, stop, body, codec))
                self.bytes_sent += len(body)
                self._sent[start, stop] = len(body)
                yield Part(PartHeader(group_id=self.plan.group_id, part=part), body)
        finally:
            self._handing_over -= 1

    def _encode(self, codec: Codec, start: int, stop: int) -> bytes | memoryview:
        return codec.encode(self._contribution.part(start, stop))

    async def _sums_for(self, parts: Sequence[int]) -> AsyncIterator[Part]:
        for number in parts:
            try:
                await asyncio.shield(self.reducer.summed(number))
                part = self.reducer.part(number)
            except InvalidPart:
                return  # nobody of our group is in it, or the root did not wait: it goes on without us
            body = part.sum.numpy().astype(FLOAT32, copy=False).data.cast("B")
            self.bytes_sent += len(body)
            included = mask_of(part.included, len(self.plan.members))
            yield Part(PartHeader(group_id=self.plan.group_id, part=number, included=included), body)

    async def _receive(
        self, reducer: PeerID, requests: AsyncIterator[Part], expected: Sequence[int], share: Share, take: TakeAverage
    ) -> None:
        answers = await self._call_reducer(reducer, requests)
        received = sent_bytes = 0
        async for message in answers:
            header = message.header
            if header is None or header.part != expected[received]:
                raise InvalidPart("a malformed average or one out of order")
            included = indices_of(header.included, len(self.plan.members))
            if not included:
                raise InvalidPart("an average of nobody")
            start, stop = share.parts[header.part]
            codec, size = self._rules.at(self.plan, start).answer_codec, stop - start
            values = await off_loop(size, decode_values, codec, message.body, size, MAX_ABSOLUTE_AVERAGE)
            self.bytes_received += len(message.body)
            self.meter.came(asyncio.get_running_loop().time(), len(message.body))
            sent_bytes += self._sent.get((start, stop), 0)
            seconds = header.received_ms / 1000
            # A root of another group also counts how long we waited for our own.
            own_group = self.plan.index(reducer) in self.plan.groups[self._group]
            if own_group and self.own_index in included and seconds <= self._seconds():
                self.meter.arrived(reducer, sent_bytes, seconds)
            await take(header.part, message.body, values, included)
            received += 1
            if received == len(expected):
                with suppress(RuntimeError):
                    await answers.aclose()  # type: ignore[attr-defined]  # it is an async generator
                return
        raise _EndedEarly(f"{received} of {len(expected)} averages")

    def _own_part(self, start: int, stop: int) -> torch.Tensor:
        """:raises InvalidPart: our model has diverged there"""
        values = self._contribution.part(start, stop)
        check_values(values)
        return values

    async def _reduce_own(self, share: Share) -> None:
        try:
            for part, (start, stop) in enumerate(() if self._brings_nothing else share.parts):
                values = await off_loop(stop - start, self._own_part, start, stop)
                await self.reducer.add(self.own_index, part, values)
        except InvalidPart as error:
            await self.reducer.leave_out(self.own_index, str(error))
        for part, (start, stop) in enumerate(share.parts):
            try:
                averaged = await asyncio.shield(self.reducer.result(part))
            except InvalidPart as error:
                raise RoundVoid(str(error)) from error
            self._included[start, stop] = sorted(averaged.included)
