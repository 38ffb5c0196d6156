"""Who reduces what: every element once, the same plan on every member, bigger shares on faster links, groups."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from peers.ledger import PendingSpan
from peers.round_plan import GroupMember, RoundPlan, plan_round, share_borders, unreliable

SPANS = (PendingSpan(start=0, stop=1, samples=1, steps=1),)
NOTHING = (PendingSpan(start=0, stop=1, samples=0, steps=0),)


def name(index: int) -> bytes:
    return b"\x12\x20" + index.to_bytes(2, "big") * 16


def member(
    index: int,
    kilobits: int = 0,
    distrusted: Sequence[int] = (),
    can_be_dialled: bool = True,
    auxiliary: bool = False,
) -> GroupMember:
    return GroupMember(
        peer_id=PeerID(name(index)),
        spans=NOTHING if auxiliary else SPANS,
        samples=0 if auxiliary else 1,
        steps=0 if auxiliary else 1,
        kilobits_per_second=kilobits,
        distrusted=tuple(name(other) for other in distrusted),
        can_be_dialled=can_be_dialled,
        auxiliary=auxiliary,
    )


def plan(members: Sequence[GroupMember], size: int = 1000, target: int = 64, part_elements: int = 100) -> RoundPlan:
    return plan_round(
        group_id=b"group of a test",
        tick=0,
        fragment=0,
        size=size,
        members=members,
        target_group_size=target,
        part_elements=part_elements,
    )


@given(
    size=st.integers(1, 3000),
    speeds=st.lists(st.integers(0, 2_000_000), min_size=1, max_size=40),
    target=st.integers(2, 12),
    part_elements=st.integers(1, 400),
    distrusted=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=80),
    behind_nat=st.sets(st.integers(0, 39)) | st.just(set(range(40))),
    auxiliary=st.sets(st.integers(0, 39), max_size=3),
    seed=st.integers(0, 99),
)
def test_every_plan_gives_each_element_to_one_part_and_each_member_to_one_group(
    size: int,
    speeds: list[int],
    target: int,
    part_elements: int,
    distrusted: list[tuple[int, int]],
    behind_nat: set[int],
    auxiliary: set[int],
    seed: int,
) -> None:
    members = [
        member(
            index,
            speed,
            [other for reporter, other in distrusted if reporter == index],
            can_be_dialled=index in auxiliary or index not in behind_nat,
            auxiliary=index in auxiliary,
        )
        for index, speed in enumerate(speeds)
    ]
    made = plan(members, size, target, part_elements)
    shuffled = list(members)
    random.Random(seed).shuffle(shuffled)
    assert plan(shuffled, size, target, part_elements) == made, "the leader's order must not matter"

    flat = [part for share in made.shares for part in share.parts]
    assert [start for start, _ in flat] == [0, *(stop for _, stop in flat)][:-1] and flat[-1][1] == size
    assert all(0 < stop - start <= part_elements for start, stop in flat)
    assert sorted(index for group in made.groups for index in group) == list(range(len(members)))
    if not behind_nat and not auxiliary:
        assert max(map(len, made.groups)) - min(map(len, made.groups)) <= max(1, len(members) // 3)
    reducers = [index for share in made.shares for index in share.reducers]
    assert len(reducers) == len(set(reducers))
    assert made.training == made.members[: len(made.training)], "receipts know them by these numbers"
    helping = [index for index in reducers if made.members[index].auxiliary]
    failed = unreliable(made.members, target)
    able = [index for index, one in enumerate(made.training) if one.can_be_dialled and index not in failed]
    assert not (helping and able), "nobody has to help"
    if any(one.can_be_dialled for one in made.members):
        assert all(made.members[index].can_be_dialled for index in reducers)
    for share in made.shares:
        assert [made.group_of(index) for index in share.reducers] == list(range(len(made.groups)))
        assert {share.root(number) for number in range(len(share.parts))} <= set(share.reducers)


@given(size=st.integers(1, 500), reducers=st.integers(1, 40))
def test_without_measured_rates_shares_are_equal(size: int, reducers: int) -> None:
    borders = share_borders(size, [1] * reducers, reducers)
    shares = [high - low for low, high in itertools.pairwise(borders)]
    assert sum(shares) == size and max(shares) - min(shares) <= 1


@given(
    speeds=st.lists(st.integers(1, 1_000_000), min_size=1, max_size=20),
    senders=st.integers(0, 5),
    groups=st.integers(1, 4),
)
def test_no_other_cut_makes_the_slowest_transfer_shorter(speeds: list[int], senders: int, groups: int) -> None:
    """At the optimum everybody with a share finishes together, and nobody without one would finish earlier with it."""
    size = 10**9
    speeds.sort(reverse=True)
    members = len(speeds) * groups + senders
    borders = share_borders(size, speeds, members, groups)
    shares = [Fraction(high - low, size) for low, high in itertools.pairwise(borders)]
    extra = Fraction(members - 2, groups)
    seconds = [(1 + share * extra) / speed for share, speed in zip(shares, speeds, strict=True)]
    if extra <= 0:
        return
    used = [second for second, share in zip(seconds, shares, strict=True) if share > Fraction(2, size)]
    slack = 1 + Fraction(members * 4, 10**6)
    assert max(used) <= min(used) * slack
    for second, share in zip(seconds, shares, strict=True):
        if share <= Fraction(2, size):
            assert second * slack >= max(used), "a faster link without a share would be idle"


def test_a_slow_link_reduces_little_or_nothing() -> None:
    made = plan(
        [member(0, 100_000), member(1, 100_000), member(2, 100_000), member(3, 10_000)], 9000, part_elements=9000
    )
    sizes = {share.reducers[0]: sum(stop - start for start, stop in share.parts) for share in made.shares}
    assert sizes == {0: 3000, 1: 3000, 2: 3000, 3: 0}
    assert made.share_of(3) is None


def test_a_link_that_was_not_measured_reduces_nothing_where_others_are() -> None:
    """A newcomer may be on a line of 2 Mbit/s; its contribution will tell."""
    assert reducers(plan([member(0, 80_000), member(1), member(2, 80_000)])) == {0, 2}
    assert reducers(plan([member(0), member(1), member(2)])) == {0, 1, 2}
    assert reducers(plan([member(0, 1), member(1), member(2)])) == {0, 1, 2}, "one that says a rate does not get it all"
    home = member(0, 80_000, can_be_dialled=False)
    made = plan([home, member(1), member(2)], 9000, part_elements=9000)
    sizes = {share.reducers[0]: sum(stop - start for start, stop in share.parts) for share in made.shares}
    assert sizes == {1: 4500, 2: 4500}, "there is nobody else, and they count as usual ones"


def test_twelve_peers_in_groups_of_four_have_counterparts_of_equal_speed() -> None:
    made = plan([member(index, 1000 * (10 + index // 3)) for index in range(12)], target=4)
    assert [len(group) for group in made.groups] == [4, 4, 4]
    for share in made.shares:
        assert len({made.members[index].kilobits_per_second for index in share.reducers}) == 1
        assert {share.root(part) for part in range(len(share.parts))} == set(share.reducers)


def test_a_reducer_that_failed_most_of_a_group_only_sends() -> None:
    accused = [member(0, distrusted=[3]), member(1, distrusted=[3]), member(2), member(3, distrusted=[0, 1, 2])]
    assert unreliable(accused, 16) == {3}
    assert plan(accused).share_of(3) is None
    assert {index for group in plan(accused).groups for index in group} == {0, 1, 2, 3}, "it still contributes"


def test_a_minority_cannot_make_itself_the_only_reducers() -> None:
    liars = [member(0), member(1), member(2), member(3), *(member(4 + i, distrusted=range(4)) for i in range(3))]
    assert len(unreliable(liars, 16)) == 0
    assert len(unreliable([*liars, member(9, distrusted=range(4))], 16)) <= 2
    assert unreliable([member(0, distrusted=[0])], 16) == set()


def reducers(made: RoundPlan) -> set[int]:
    return {index for share in made.shares if share.parts for index in share.reducers}


def test_who_takes_part_less_often_reduces_nothing_unless_all_do() -> None:
    slow = [replace(member(index), cadence=4) for index in (0, 2)]
    assert reducers(plan([slow[0], member(1), slow[1]])) == {1}
    assert reducers(plan([*slow, replace(member(1), cadence=2)])) == {1}
    assert reducers(plan(slow)) == {0, 1}
    home = member(1, can_be_dialled=False)
    assert reducers(plan([slow[0], home, slow[1]])) == {0, 2}, "rather a slow one than one that nobody reaches"


def test_who_cannot_be_dialled_reduces_nothing_unless_nobody_can() -> None:
    homes = [member(index, can_be_dialled=False) for index in (0, 2, 3)]
    assert reducers(plan([homes[0], member(1), *homes[1:]])) == {1}
    assert reducers(plan([homes[0], member(1), *homes[1:], member(4)])) == {1, 4}
    # Most of the group has seen 1 fail, but those behind NAT would fail each other for certain.
    accused = [member(index, distrusted=[1], can_be_dialled=False) for index in (0, 2, 3)]
    assert reducers(plan([accused[0], member(1), *accused[1:]])) == {1}
    assert reducers(plan(homes)) == {0, 1, 2}
    door = member(9, auxiliary=True)
    assert reducers(plan([*homes, door])) == {3}, "the last of the members"
    assert reducers(plan([*homes, door, member(8, auxiliary=True)])) == {3, 4}
    assert reducers(plan([*homes, door, member(1)])) == {1}
    assert reducers(plan([accused[0], member(1), *accused[1:], door])) == {4}, "it does what nobody else does well"
    assert len(plan([member(index, can_be_dialled=index > 8) for index in range(12)], target=4).groups) == 3
