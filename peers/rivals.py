"""Two bases that one round made: whose answers they differ by, and whether to believe the other one (pure).

All members of a round commit the same base if every reducer gives them the same bytes. One that does not leaves them
on bases that differ in its share, and only there. So a member that fetches another one's base of the same round knows
who it was; and a base that differs elsewhere was made up by those who announce it.

What this does not stop: a reducer that gives everybody the same wrong average; in its own share, one that gives a
wrong average to somebody whose base the others then take.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from peers.messages import Receipt
from peers.round_plan import RoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedShare:
    """Elements ``[start, stop)`` of a round, and the base58 ids of those who averaged them: one of each group."""

    start: int
    stop: int
    reducers: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rival base says."""

    believed: bool
    unfaithful: frozenset[str]
    """The reducer that gave different members different answers, if it is known."""


BELIEVED = Verdict(believed=True, unfaithful=frozenset())


def shares_of(plan: RoundPlan) -> tuple[ReducedShare, ...]:
    """Who averages what in a round."""
    return tuple(
        ReducedShare(
            start=share.parts[0][0],
            stop=share.parts[-1][1],
            reducers=frozenset(str(plan.members[index].peer_id) for index in share.reducers),
        )
        for share in plan.shares
        if share.parts
    )


def same_round(ours: Sequence[Receipt], theirs: Sequence[Receipt]) -> bool:
    """Whether the last version of both is of one round: the same members with the same work."""
    if not ours or not theirs:
        return False
    mine, other = ours[-1], theirs[-1]
    return (mine.version, mine.tick, mine.contributors) == (other.version, other.tick, other.contributors)


def judge_rival(
    shares: Sequence[ReducedShare],
    ours: tuple[Sequence[torch.Tensor], Receipt],
    theirs: tuple[Sequence[torch.Tensor], Receipt],
    announcers: Collection[str],
) -> Verdict:
    """Whether to take another base of the round that made ours.

    :param shares: of the round
    :param ours: parameters and vectors of outer state, float32 ``(size,)`` each, and their receipt
    :param theirs: of the other base
    :param announcers: who says that it holds the other one
    """
    differing = [
        share
        for share in shares
        if _included(ours[1], share) != _included(theirs[1], share)
        or not all(
            torch.equal(mine[share.start : share.stop], other[share.start : share.stop])
            for mine, other in zip(ours[0], theirs[0], strict=True)
        )
    ]
    if len(differing) != 1:
        return Verdict(believed=not differing, unfaithful=frozenset())
    reducers = differing[0].reducers
    return Verdict(
        believed=not reducers.issuperset(announcers), unfaithful=reducers if len(reducers) == 1 else frozenset()
    )


def _included(receipt: Receipt, share: ReducedShare) -> list[tuple[int, int, tuple[int, ...]]]:
    """Whose work is in which of a share's elements."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for part in sorted(receipt.parts, key=lambda part: part.start):
        start, stop = max(part.start, share.start), min(part.stop, share.stop)
        if start < stop:
            who = tuple(sorted(part.included))
            if found and found[-1][1:] == (start, who):
                start = found.pop()[0]
            found.append((start, stop, who))
    return found
