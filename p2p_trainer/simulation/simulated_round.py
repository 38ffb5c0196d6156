"""How long one round takes over given lines, who is in it and who has its average: without a network (pure).

Both simulations use it, with and without tensors. Who reduces what is the product's plan, when a reducer closes without
somebody its closing rules; only the transfers are a model: bytes over rate, plus latency. A contribution takes as long
as the busier of two lines, the sender's with all that it sends or the reducer's with all that it gets; an average goes
back the same way, and of a share of P parts the two overlap but for one P-th.

What it does not show: time to compute, encode and answer; losses, jitter and TCP finding its rate; the several parts of
a share closing apart from each other, with others in them; a reducer that answers wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2p_trainer.rehearsal.links import LinkSpec
from peers.closing import ClosingTimes, enough, last_seconds, longest_seconds
from peers.codecs import Codec
from peers.line import MEASURABLE_BYTES, MEASURABLE_UP_BYTES, LineRate
from peers.reducer import PLAIN, Rules
from peers.round_plan import RoundPlan, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a peer's line has left for one more transfer."""

    up_bytes_per_second: float = math.inf
    down_bytes_per_second: float = math.inf
    crossing_seconds: float = 0.0
    """What a packet takes over this line, one way; between two peers both lines' values add up."""

    @classmethod
    def of(cls, link: LinkSpec | None, transfers: int = 1) -> Line:
        """:param transfers: that share the line evenly; a peer without a line is on one without limits"""
        link = link or LinkSpec()
        return cls(
            up_bytes_per_second=link.up_bits_per_second / 8 / transfers,
            down_bytes_per_second=link.down_bits_per_second / 8 / transfers,
            crossing_seconds=link.round_trip_ms / 2000,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One member of a round as it will behave, all times in seconds since the round's leader began it."""

    line: Line
    times: ClosingTimes
    ready_seconds: float = 0.0
    """When it knows the group; infinite for one that never does."""
    stops_seconds: float = math.inf
    """From then on it does nothing any more."""
    silent: bool = False
    """It stops without a word, as one that is frozen; else the others' connections break at once."""


@dataclass(slots=True, kw_only=True)
class MemberFlow:
    """What a round is to one member."""

    committed: bool = True
    """It has the whole average."""
    ended_seconds: float = 0.0
    """When it has it, or knows that it will not."""
    answered: list[int] = field(default_factory=list)
    """Reducers whose averages came, as indices of members."""
    failed: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """At a reducer, when members' contributions were complete."""
    bytes_sent: int = 0
    sent_seconds: float = 0.0
    """Since the round began, when all of its contribution has gone out."""
    bytes_counted: int = 0
    """Of its contribution, what came in time."""

    def measured(self, line: Line) -> LineRate:
        """What the round tells a member of its line."""
        return LineRate(
            up=line.up_bytes_per_second if self.bytes_counted >= MEASURABLE_UP_BYTES else math.inf,
            down=line.down_bytes_per_second if self.bytes_received >= MEASURABLE_BYTES else math.inf,
        )

    bytes_received: int = 0

    def fail(self, reducer: int | None, at_seconds: float) -> None:
        """:param reducer: whose fault it is; None for nobody else's"""
        self.ended_seconds = at_seconds if self.committed else min(self.ended_seconds, at_seconds)
        self.committed = False
        if reducer is not None:
            self.failed.append(reducer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFlow:
    """What came of a round."""

    members: tuple[MemberFlow, ...]
    included: tuple[frozenset[int], ...]
    """For each share of the plan, whose contributions are in its average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduced:
    """What one reducer has of its group's contributions."""

    reducer: int
    closed_seconds: float
    included: frozenset[int]


def play_round(plan: RoundPlan, participants: Sequence[Participant], rules: Rules) -> RoundFlow:
    """Play a round of ``plan``, whose members the participants are, in the same order."""
    return _Play(plan, participants, rules).run()


class _Play:
    """One round as it is played."""

    def __init__(self, plan: RoundPlan, participants: Sequence[Participant], rules: Rules) -> None:
        self.plan, self.participants, self.rules = plan, participants, rules
        self.flows = tuple(MemberFlow() for _ in plan.members)
        codecs = [rules.codec_of(member) for member in plan.members]
        of_codec = {codec: [_encoded_bytes(plan, share, codec) for share in plan.shares] for codec in set(codecs)}
        self.contribution_bytes = [of_codec[codec] for codec in codecs]
        """Of each member, for each share."""
        self.answer_bytes = [_encoded_bytes(plan, share, rules.answer_codec) for share in plan.shares]
        # A contribution goes out to all reducers at once over one line, and all averages come over one.
        self.sends, self.takes = [0] * len(self.flows), [0] * len(self.flows)
        for number, share in enumerate(plan.shares):
            for group, reducer in zip(plan.groups, share.reducers, strict=True):
                for index in group:
                    if index != reducer:
                        self.sends[index] += self.contribution_bytes[index][number]
                        self.takes[index] += self.answer_bytes[number]

    def run(self) -> RoundFlow:
        for flow, participant, sends in zip(self.flows, self.participants, self.sends, strict=True):
            flow.sent_seconds = participant.ready_seconds + sends / participant.line.up_bytes_per_second
        included = []
        for number, share in enumerate(self.plan.shares):
            members = frozenset[int]()
            if share.parts:
                reduced = [
                    self._collect(number, group, reducer)
                    for group, reducer in zip(self.plan.groups, share.reducers, strict=True)
                ]
                available, members = self._exchange(number, reduced)
                for group, one, at in zip(self.plan.groups, reduced, available, strict=True):
                    self._answer(number, group, one, at)
            included.append(members)
        for flow, participant in zip(self.flows, self.participants, strict=True):
            if max(flow.ended_seconds, participant.ready_seconds) >= participant.stops_seconds:
                flow.committed = False
        return RoundFlow(members=self.flows, included=tuple(included))

    def _collect(self, number: int, group: Sequence[int], reducer: int) -> _Reduced:
        """The contributions of a group's members at their reducer of a share, until it waits for no more of them."""
        there, flow = self.participants[reducer], self.flows[reducer]
        sizes = {index: self.contribution_bytes[index][number] for index in group if index != reducer}
        receiving_seconds = sum(sizes.values()) / there.line.down_bytes_per_second
        arrivals: dict[int, float] = {}
        gone: dict[int, float] = {}
        for index in group:
            member = self.participants[index]
            arrives = member.ready_seconds
            if index != reducer:
                sending_seconds = self.sends[index] / member.line.up_bytes_per_second
                arrives += _crossing_seconds(member, there) + max(sending_seconds, receiving_seconds)
            if arrives <= min(member.stops_seconds, there.stops_seconds) and math.isfinite(arrives):
                arrivals[index] = max(arrives, there.ready_seconds)
                if index != reducer:
                    self.flows[index].bytes_sent += sizes[index]
                    flow.bytes_received += sizes[index]
                    flow.arrivals.append(arrivals[index] - there.ready_seconds)
            elif not member.silent:
                gone[index] = max(member.stops_seconds, there.ready_seconds)
        share = self.plan.shares[number]
        start, stop = share.parts[0][0], share.parts[-1][1]
        weights = {index: self.rules.total_weight(self.plan.members[index], start, stop) for index in group}
        closes = _closes(arrivals, gone, weights, there.ready_seconds, there.times)
        inside = frozenset(index for index, arrives in arrivals.items() if arrives <= closes)
        for index in inside - {reducer}:
            self.flows[index].bytes_counted += sizes[index]
        return _Reduced(reducer=reducer, closed_seconds=closes, included=inside)

    def _exchange(self, number: int, reduced: Sequence[_Reduced]) -> tuple[list[float], frozenset[int]]:
        """When each group's reducer of a share has its average, infinite for never; and who is in it."""
        count, minimum = len(reduced), min(2, len(self.plan.members))
        if count == 1:
            (one,) = reduced
            lives = one.closed_seconds < self.participants[one.reducer].stops_seconds
            whole = lives and len(one.included) >= minimum
            return [one.closed_seconds if whole else math.inf], one.included
        share = self.plan.shares[number]
        # Each of them is the root of its part of the share, and sends its sum of the rest.
        sum_bytes = PLAIN.encoded_bytes(sum(stop - start for start, stop in share.parts)) * (count - 1) // count
        back_bytes = self.answer_bytes[number] * (count - 1) // count
        known = frozenset[int]()
        ready, moments = set[int](), []
        for one in reduced:
            there = self.participants[one.reducer]
            arrives = one.closed_seconds + sum_bytes / there.line.up_bytes_per_second + there.line.crossing_seconds
            patience = there.ready_seconds + last_seconds(there.times.deadline_seconds, count)
            if arrives <= patience and arrives < there.stops_seconds and one.included:
                known |= one.included
                ready.add(one.reducer)
                moments.append(arrives)
                self.flows[one.reducer].bytes_sent += sum_bytes + back_bytes
                self.flows[one.reducer].bytes_received += sum_bytes + back_bytes
            elif there.silent or there.stops_seconds > patience:
                moments.append(patience)
            else:
                moments.append(there.stops_seconds)
        if len(known) < minimum:
            return [math.inf] * count, known
        available = []
        for one in reduced:
            line = self.participants[one.reducer].line
            receiving_seconds = max(sum_bytes, back_bytes) / line.down_bytes_per_second
            there_and_back = receiving_seconds + back_bytes / line.up_bytes_per_second + 2 * line.crossing_seconds
            available.append(max(moments) + there_and_back if one.reducer in ready else math.inf)
        return available, known

    def _answer(self, number: int, group: Sequence[int], reduced: _Reduced, available: float) -> None:
        """An average on its way to the members of one group."""
        there, size = self.participants[reduced.reducer], self.answer_bytes[number]
        sending_seconds = size * (len(group) - 1) / there.line.up_bytes_per_second
        collecting_seconds = reduced.closed_seconds - there.ready_seconds
        parts = len(self.plan.shares[number].parts)
        for index in group:
            member, flow = self.participants[index], self.flows[index]
            if not math.isfinite(member.ready_seconds):
                flow.committed = False
                continue
            patience = longest_seconds(member.times.deadline_seconds, len(self.plan.groups))
            gives_up = member.ready_seconds + patience - (1.0 if len(self.plan.groups) == 1 else 0.0)
            if index == reduced.reducer:
                if math.isfinite(available):
                    flow.ended_seconds = max(flow.ended_seconds, available) if flow.committed else flow.ended_seconds
                else:
                    flow.fail(None, max(reduced.closed_seconds, member.ready_seconds))
                continue
            taking_seconds = max(sending_seconds, self.takes[index] / member.line.down_bytes_per_second)
            overlap = (1 - 1 / parts) * min(collecting_seconds, taking_seconds)
            arrives = max(available + _crossing_seconds(member, there) + taking_seconds - overlap, member.ready_seconds)
            if arrives <= gives_up and arrives < there.stops_seconds:
                flow.answered.append(reduced.reducer)
                flow.bytes_received += size
                self.flows[reduced.reducer].bytes_sent += size
                flow.ended_seconds = max(flow.ended_seconds, arrives) if flow.committed else flow.ended_seconds
            elif there.silent or there.stops_seconds > gives_up:
                known = math.isinf(available) and not there.silent
                flow.fail(reduced.reducer, max(reduced.closed_seconds, member.ready_seconds) if known else gives_up)
            else:
                flow.fail(reduced.reducer, max(there.stops_seconds, member.ready_seconds))


def _encoded_bytes(plan: RoundPlan, share: Share, codec: Codec) -> int:
    return sum((codec if start < plan.parameters else PLAIN).encoded_bytes(stop - start) for start, stop in share.parts)


def _crossing_seconds(one: Participant, other: Participant) -> float:
    return one.line.crossing_seconds + other.line.crossing_seconds


def _closes(
    arrivals: Mapping[int, float],
    gone: Mapping[int, float],
    weights: Mapping[int, float],
    began: float,
    times: ClosingTimes,
) -> float:
    """When a reducer waits no longer: all are there or gone, nearly all weight is and the grace over, or the deadline.

    :param gone: when it heard of members that will never deliver
    """
    total, there = math.fsum(weights.values()), 0.0
    closes = began + times.deadline_seconds
    moments = sorted((at, index) for known in (arrivals, gone) for index, at in known.items())
    for settled, (at, index) in enumerate(moments, start=1):
        if at > closes:
            break
        there += weights[index] if index in arrivals else 0.0
        if settled == len(weights):
            return at
        if enough(there, total):
            closes = min(closes, max(at, began + times.grace_seconds))
    return closes
