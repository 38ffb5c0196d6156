"""Who does what in a round: groups, the share of the elements that each reducer averages, and what a round made.

Every member computes the same plan from the same signed announcements, whatever order the leader names them in. All
arithmetic is on integers and fractions: a linear program in floating point could cut differently on another machine.

**Shares.** A reducer of a share moves as many bytes more as its share is big, so reducers on fast links get bigger
ones: shares are chosen so that the slowest transfer is as short as it can be. With N members in m groups, a fragment
of S bytes and a share f, a member moves ``S * (1 + f * (N - 2) / m)`` bytes each way; with announced rates b the
shares are ``f = (T * b - 1) * m / (N - 2)``, T being the time at which they add up to 1, and 0 where that is negative.

A member that cannot be dialled, as behind NAT, gets no share: all that it sends and gets goes over connections
that it opened itself. Nor does one whose line is too slow for every round, or not measured yet where most others' are.

An *auxiliary* member, such as a bootstrap peer, brings nothing and is in no average. It gets a share only where members
that train can give none. Those are the first of a plan, so that receipts, which name no others, have the same numbers.

**Groups.** Above ``target_group_size`` members there are several groups, all ending on one base. Each group has one
reducer for every share; the reducers of one share in different groups are counterparts. Group members send to their own
group's reducers only. For each part one of the counterparts is the root: the others send it their group's weighted sum,
it averages, encodes once, and the same bytes go back the same way. A member so talks to about ``N / m + m`` others
instead of N.

What this does not stop: announced rates that are not true make rounds slow until deadlines close them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hivemind.p2p import PeerID

from peers.ledger import PendingSpan
from peers.line import CodecName
from peers.messages import AveragedPart, Contributor, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member as its signed announcement describes it."""

    peer_id: PeerID
    spans: tuple[PendingSpan, ...]
    """In order, none in two of them."""
    samples: int
    steps: int
    kilobits_per_second: int = 0
    """What its line was measured to carry each way; 0 if it was not measured."""
    distrusted: tuple[bytes, ...] = ()
    """Peer ids of reducers that failed it lately."""
    can_be_dialled: bool = True
    cadence: int = 1
    """It takes part in one of so many rounds."""
    codec: CodecName = "int8"
    """Of its contribution, where the run leaves that to each peer."""
    auxiliary: bool = False
    """It does not train: it brings nothing, and no quorum counts it."""

    def mean_samples(self, size: int) -> float:
        """Samples that it brings, mean over the fragment's ``size`` elements."""
        return sum((span.stop - span.start) * span.samples for span in self.spans) / size

    def spans_in(self, start: int, stop: int) -> Sequence[PendingSpan]:
        """Those that reach into elements ``[start, stop)``. Found by bisection: anyone may announce a thousand."""
        first = bisect_right(self.spans, start, key=lambda span: span.stop)
        return self.spans[first : bisect_left(self.spans, stop, key=lambda span: span.start)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Neighbouring elements, cut into parts, and the indices of their reducers: one for each group, in order."""

    reducers: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    def root(self, part: int) -> int:
        """The reducer that makes the average of a part."""
        return self.reducers[part % len(self.reducers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What all members of a round know alike before the first byte is sent."""

    group_id: bytes
    tick: int
    fragment: int
    size: int
    parameters: int
    """The first of its elements; the others are running statistics. No part has elements of both."""
    members: tuple[GroupMember, ...]
    groups: tuple[tuple[int, ...], ...]
    shares: tuple[Share, ...]

    @property
    def training(self) -> tuple[GroupMember, ...]:
        """The members that train: the first ones."""
        return tuple(member for member in self.members if not member.auxiliary)

    def index(self, peer_id: PeerID) -> int | None:
        for position, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return position
        return None

    def group_of(self, index: int) -> int:
        """The number of the group that a member is in."""
        return next(number for number, group in enumerate(self.groups) if index in group)

    def share_of(self, index: int) -> Share | None:
        """What a member reduces, if anything."""
        return next((share for share in self.shares if index in share.reducers and share.parts), None)


def plan_round(
    *,
    group_id: bytes,
    tick: int,
    fragment: int,
    size: int,
    members: Sequence[GroupMember],
    target_group_size: int,
    part_elements: int,
    parameters: int | None = None,
) -> RoundPlan:
    """The plan that every member makes.

    :param size: elements of the fragment
    :param parameters: the first of them, without running statistics; all of them if it is not given
    :param part_elements: no part has more
    """
    parameters = size if parameters is None else parameters
    ordered = tuple(sorted(members, key=lambda member: (member.auxiliary, member.peer_id.to_bytes())))
    groups, reducers = _divide(ordered, target_group_size)
    speeds = _speeds(ordered)
    borders = share_borders(size, [min(speeds[index] for index in row) for row in reducers], len(ordered), len(groups))
    return RoundPlan(
        group_id=group_id,
        tick=tick,
        fragment=fragment,
        size=size,
        parameters=parameters,
        members=ordered,
        groups=groups,
        shares=tuple(
            Share(
                reducers=row,
                parts=(
                    *_parts(borders[position], min(borders[position + 1], parameters), part_elements, len(row)),
                    *_parts(max(borders[position], parameters), borders[position + 1], part_elements, len(row)),
                ),
            )
            for position, row in enumerate(reducers)
        ),
    )


def _divide(
    members: Sequence[GroupMember], target_group_size: int
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]:
    """Groups of member indices, and for each share its reducers. Counterparts have links that are about equal."""
    speeds = _speeds(members)
    excluded = _unable(members, target_group_size)
    able = sorted((index for index in range(len(members)) if index not in excluded), key=lambda index: -speeds[index])
    count = max(1, min(-(-len(members) // target_group_size), len(able)))
    reducers = [tuple(able[row : row + count]) for row in range(0, len(able) - count + 1, count)]
    groups = [[row[number] for row in reducers] for number in range(count)]
    for index in [*able[len(reducers) * count :], *sorted(excluded)]:
        min(groups, key=len).append(index)
    return tuple(tuple(sorted(group)) for group in groups), reducers


def _unable(members: Sequence[GroupMember], target_group_size: int) -> set[int]:
    """Who must not reduce; never all of them. That a member cannot be dialled weighs more than that it failed.

    Auxiliary members do where no member that trains can be dialled, or each that can has failed most of the others.

    The slow ones least: given up as a reducer, one of them may complete a round that the others hold again without it.
    """
    failed = unreliable(members, target_group_size)
    undialled = {index for index, member in enumerate(members) if not member.can_be_dialled}
    auxiliary = {index for index, member in enumerate(members) if member.auxiliary}
    slow = {index for index, member in enumerate(members) if member.cadence > min(one.cadence for one in members)}
    unmeasured = {index for index, member in enumerate(members) if not member.kilobits_per_second}
    if 2 * len(unmeasured) < len(members):  # else a few that are, or say so, would reduce everything
        slow |= unmeasured
    choices = (
        failed | undialled | auxiliary | slow,
        failed | undialled | auxiliary,
        failed | undialled,
        undialled | auxiliary,
        undialled,
        failed,
    )
    return next(unable for unable in choices if len(unable) < max(1, len(members)))


def unreliable(members: Sequence[GroupMember], target_group_size: int) -> set[int]:
    """Members that must not reduce: most of a group has lately seen each of them fail.

    Never more than a third, those that failed most peers first: a few liars must not become the only reducers.
    """
    reports = dict.fromkeys(range(len(members)), 0)
    by_id = {member.peer_id.to_bytes(): index for index, member in enumerate(members)}
    for reporter, member in enumerate(members):
        for failed in set(member.distrusted):
            index = by_id.get(failed)
            if index is not None and index != reporter:
                reports[index] += 1
    others = min(len(members), target_group_size) - 1
    convicted = [index for index, count in reports.items() if 2 * count > others]
    convicted.sort(key=lambda index: (-reports[index], index))
    return set(convicted[: max(1, len(members) // 3)]) if len(members) > 1 else set()


def _speeds(members: Sequence[GroupMember]) -> list[int]:
    """Announced rates; the median of them where there is none, 1 if nobody has any."""
    known = sorted(member.kilobits_per_second for member in members if member.kilobits_per_second > 0)
    usual = known[len(known) // 2] if known else 1
    return [member.kilobits_per_second if member.kilobits_per_second > 0 else usual for member in members]


def share_borders(size: int, speeds: Sequence[int], members: int, groups: int = 1) -> list[int]:
    """Cut elements into a share for each reducer: ``len(speeds) + 1`` borders.

    :param speeds: of the reducers' links, above 0, falling
    """
    extra = Fraction(members - 2, groups)
    shares = [Fraction(1, len(speeds))] * len(speeds)
    if extra > 0:
        for active in range(len(speeds), 0, -1):
            seconds = (extra + active) / sum(speeds[:active])
            if seconds * speeds[active - 1] > 1:
                shares = [(seconds * speed - 1) / extra for speed in speeds[:active]]
                break
    borders, total = [0], Fraction(0)
    for share in shares:
        total += share
        borders.append(int(size * total))
    return borders + [size] * (len(speeds) + 1 - len(borders))


def _parts(start: int, stop: int, part_elements: int, groups: int) -> tuple[tuple[int, int], ...]:
    """At least one for each group, if there are so many elements: every counterpart is the root of some."""
    step = max(1, min(part_elements, -(-(stop - start) // groups)))
    return tuple((low, min(low + step, stop)) for low in range(start, stop, step))


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
            for member in plan.training
        ],
        parts=joined,
    )


def element_samples(plan: RoundPlan, parts: Sequence[AveragedPart]) -> int:
    """Sum over elements of the samples that the round adds to the lineage; an exact integer."""
    total = 0
    for part in parts:
        for index in part.included:
            for span in plan.members[index].spans_in(part.start, part.stop):
                total += (min(span.stop, part.stop) - max(span.start, part.start)) * span.samples
    return total
