"""Rounds without a daemon: the peers' Round objects of one group, wired by queues that carry serialised messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from hivemind.p2p import PeerID

from peers.closing import ClosingTimes
from peers.codecs import get_codec
from peers.contribution import Outgoing, SentPart
from peers.ledger import PendingSpan
from peers.line import CodecName
from peers.messages import Average, Part
from peers.reducer import BY_SAMPLES, Rules
from peers.residual import AverageResidual
from peers.round import Round, RoundResult, RoundVoid
from peers.round_plan import GroupMember, RoundPlan, plan_round
from peers.weighting import Weighting

GROUP_ID = b"a group of this test"
PATIENT_SECONDS = 20.0
HASTY_SECONDS = 1.0
Tamper = Callable[[int, int, "Part | Average"], "Part | Average | None"]


def peer(index: int) -> PeerID:
    return PeerID(b"\x12\x20" + bytes([index]) * 32)


def whole(size: int, samples: int, steps: int = 1) -> tuple[PendingSpan, ...]:
    return (PendingSpan(start=0, stop=size, samples=samples, steps=steps if samples else 0),)


def plan_for(
    spans: Sequence[tuple[PendingSpan, ...]],
    size: int,
    part_elements: int = 4,
    target_group_size: int = 64,
    speeds: Sequence[int] = (),
    codecs: Sequence[CodecName] = (),
    behind_nat: Collection[int] = (),
    auxiliary: int = 0,
) -> RoundPlan:
    """:param auxiliary: so many more members that train nothing, the last ones"""
    nothing = [whole(size, 0)] * auxiliary
    return plan_round(
        group_id=GROUP_ID,
        tick=17,
        fragment=0,
        size=size,
        members=[
            GroupMember(
                peer_id=peer(index),
                spans=own,
                samples=100 + max(span.samples for span in own),
                steps=10 + max(span.steps for span in own),
                kilobits_per_second=speeds[index] if speeds else 0,
                codec=codecs[index] if codecs and index < len(codecs) else "int8",
                can_be_dialled=index not in behind_nat,
                auxiliary=index >= len(spans),
            )
            for index, own in enumerate([*spans, *nothing])
        ],
        target_group_size=target_group_size,
        part_elements=part_elements,
    )


@dataclass
class Network:
    """Carries messages between the rounds of one group; what goes wrong is said here.

    :param dead_reducers: members that answer nobody
    :param deaf: members that send everything and take no more than one answer of each reducer
    :param mute_to: (sender, reducer) pairs in which the sender's parts never arrive, from a part number on
    :param tamper: may change or drop a message: (sender, receiver, message)
    """

    plan: RoundPlan
    dead_reducers: set[int] = field(default_factory=set)
    silent_reducers: set[int] = field(default_factory=set)
    deaf: set[int] = field(default_factory=set)
    mute_to: dict[tuple[int, int], int] = field(default_factory=dict)
    tamper: Tamper = lambda sender, receiver, message: message
    wait_seconds: float = PATIENT_SECONDS
    grace_seconds: float | None = None
    codec: str = "float32"
    """Empty if each member has its own."""
    answer_codec: str = "float32"
    weighting: Weighting = BY_SAMPLES
    residuals: dict[int, AverageResidual] = field(default_factory=dict)
    lossy: dict[int, list[SentPart]] = field(default_factory=dict)
    """By member: what a lossy codec made of its contribution."""
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    """By member: what the reducers count of its contribution."""
    rounds: dict[int, Round] = field(default_factory=dict)
    pumps: set[asyncio.Task[None]] = field(default_factory=set)

    def caller(self, sender: int) -> Callable[[PeerID, AsyncIterator[Part]], object]:
        async def call(reducer_id: PeerID, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
            reducer = self.plan.index(reducer_id)
            assert reducer is not None
            if reducer in self.dead_reducers:
                raise ConnectionError("nobody answers")
            return self._exchange(sender, reducer, parts)

        return call

    async def _exchange(self, sender: int, reducer: int, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
        wire: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2)

        async def pump() -> None:
            number = 0
            async for part in parts:
                if part.body and number >= self.mute_to.get((sender, reducer), 2**30):
                    await asyncio.Event().wait()  # frozen: neither a part nor an end
                number += bool(part.body)
                changed = self.tamper(sender, reducer, part)
                if changed is not None:
                    await wire.put(changed.SerializeToString())
            await wire.put(None)

        async def arriving() -> AsyncIterator[Part]:
            while (raw := await wire.get()) is not None:
                message = Part()
                message.ParseFromString(raw)
                yield message

        pumping = asyncio.create_task(pump())
        self.pumps.add(pumping)
        if reducer in self.silent_reducers:
            await asyncio.Event().wait()
        try:
            async with contextlib.aclosing(self.rounds[reducer].answer(arriving(), peer(sender))) as answers:
                async for answer in answers:
                    if sender in self.deaf:
                        await asyncio.Event().wait()  # what came is not read, so the reducer cannot send more
                    changed = self.tamper(reducer, sender, answer)
                    if changed is not None:
                        message = Average()
                        message.ParseFromString(changed.SerializeToString())
                        yield message
        finally:
            pumping.cancel()


def hold(network: Network, contributions: Sequence[torch.Tensor]) -> list[RoundResult | RoundVoid]:
    """One round of everyone; for each member its result or why it has none."""

    async def scene() -> list[RoundResult | RoundVoid]:
        for index, contribution in enumerate(contributions):
            network.rounds[index] = Round(
                network.plan,
                peer(index),
                Outgoing.of(contribution),
                network.caller(index),
                ClosingTimes(
                    grace_seconds=network.wait_seconds if network.grace_seconds is None else network.grace_seconds,
                    deadline_seconds=network.wait_seconds,
                ),
                Rules(
                    codec=get_codec(network.codec) if network.codec else None,
                    answer_codec=get_codec(network.answer_codec),
                    weighting=network.weighting,
                ),
                residual=network.residuals.setdefault(index, AverageResidual()).of,
            )
            network.lossy[index] = network.rounds[index].lossy
        outcomes = await asyncio.gather(*(round_.run() for round_ in network.rounds.values()), return_exceptions=True)
        for pump in network.pumps:
            pump.cancel()
        await asyncio.gather(*network.pumps, return_exceptions=True)
        for index, contribution in enumerate(contributions):
            network.sent[index] = contribution.clone()
            for part in network.lossy[index]:
                network.sent[index][part.start : part.stop] = part.values()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, RoundVoid):
                raise outcome
        return outcomes  # type: ignore[return-value]

    return asyncio.run(asyncio.wait_for(scene(), 60))


def committed(outcomes: Sequence[RoundResult | RoundVoid]) -> list[RoundResult]:
    results = [outcome for outcome in outcomes if isinstance(outcome, RoundResult)]
    assert len(results) == len(outcomes), outcomes
    return results
