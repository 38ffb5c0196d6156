"""A round on paper: the bytes are the plan's, who is in it follows from lines, lives and closing times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from p2p_trainer.rehearsal.links import LinkSpec
from p2p_trainer.simulation.simulated_peer import peer_id_of
from p2p_trainer.simulation.simulated_round import Line, Participant, RoundFlow, play_round
from peers.closing import ClosingTimes
from peers.codecs import get_codec
from peers.ledger import PendingSpan
from peers.reducer import Rules
from peers.round_plan import GroupMember, RoundPlan, plan_round

SIZE = 120_000
RULES = Rules(batch_size=8)
TIMES = ClosingTimes(grace_seconds=1.0, deadline_seconds=3.0)


def plan_of(count: int, *, samples: Sequence[int] = (), target_group_size: int = 16) -> RoundPlan:
    """Members with about equal work; in the plan they are in the order of their peer ids."""
    ids = sorted((peer_id_of(0, str(number)) for number in range(count)), key=lambda peer_id: peer_id.to_bytes())
    members = []
    for number, peer_id in enumerate(ids):
        count_of = samples[number] if samples else 80
        span = PendingSpan(start=0, stop=SIZE, samples=count_of, steps=-(-count_of // 8))
        members.append(GroupMember(peer_id=peer_id, spans=(span,), samples=count_of, steps=span.steps))
    return plan_round(
        group_id=b"on paper",
        tick=4,
        fragment=0,
        size=SIZE,
        members=members,
        target_group_size=target_group_size,
        part_elements=1 << 19,
    )


def played(plan: RoundPlan, rules: Rules = RULES, **others: Participant) -> RoundFlow:
    """Everybody on a line without limits, but for those in ``others`` (m0 is the first member)."""
    usual = Participant(line=Line(), times=TIMES)
    return play_round(plan, [others.get(f"m{number}", usual) for number in range(len(plan.members))], rules)


def everybody(plan: RoundPlan) -> frozenset[int]:
    return frozenset(range(len(plan.members)))


@pytest.mark.parametrize("count", [2, 4, 9])
def test_a_member_moves_the_bytes_that_the_plan_reckons_with(count: int) -> None:
    plan = plan_of(count)
    flow = played(plan)
    assert set(flow.included) == {everybody(plan)}
    for index, member in enumerate(flow.members):
        share = plan.share_of(index)
        part = sum(stop - start for start, stop in share.parts) / SIZE if share is not None else 0.0
        assert member.committed
        assert member.bytes_sent == member.bytes_received == pytest.approx(4 * SIZE * (1 + part * (count - 2)))


def test_what_is_sent_is_what_the_codecs_make_of_it() -> None:
    int8 = get_codec("int8")
    dense, packed = played(plan_of(4)), played(plan_of(4), Rules(codec=int8, answer_codec=int8, batch_size=8))
    assert packed.members[0].bytes_sent < 0.3 * dense.members[0].bytes_sent


def test_a_line_takes_its_time() -> None:
    plan = plan_of(2)
    slow = Line.of(LinkSpec.parse("8M/4M/100ms"))
    flow = played(plan, m0=Participant(line=slow, times=TIMES))
    # Each sends the half that the other reduces, and then the average of its own: 240 kB at 0.5 MB/s up and 1 MB/s
    # down, and every way is 50 ms.
    assert [member.ended_seconds for member in flow.members] == pytest.approx([0.48 + 0.24 + 0.1] * 2)


@pytest.mark.parametrize(("samples", "waited_for"), [(8, False), (4000, True)])
def test_after_the_grace_who_has_little_weight_is_left_out(samples: int, waited_for: bool) -> None:
    plan = plan_of(4, samples=(samples, 400, 400, 400))
    flow = played(plan, m0=Participant(line=Line(), times=TIMES, ready_seconds=2.0))
    for share, included in zip(plan.shares, flow.included, strict=True):
        if 0 not in share.reducers:
            assert (0 in included) is waited_for


def test_a_member_that_is_killed_before_it_delivered_is_left_out_at_once() -> None:
    plan = plan_of(4)
    dead = next(index for index in range(4) if plan.share_of(index) is not None)
    gone = Participant(line=Line(), times=TIMES, ready_seconds=0.2, stops_seconds=0.1)
    flow = played(plan, **{f"m{dead}": gone})
    others = [member for index, member in enumerate(flow.members) if index != dead]
    # It was a reducer as well: without its share nobody has the whole average.
    assert not any(member.committed for member in flow.members)
    assert all(member.failed == [dead] and member.ended_seconds <= 0.2 for member in others)


def test_a_frozen_reducer_costs_the_others_their_patience() -> None:
    plan = plan_of(4)
    frozen = Participant(line=Line(), times=TIMES, stops_seconds=0.0, silent=True)
    flow = played(plan, m0=frozen)
    assert not any(member.committed for member in flow.members)
    assert all(member.ended_seconds > TIMES.deadline_seconds for member in flow.members[1:])


def test_several_groups_end_on_one_average() -> None:
    plan = plan_of(8, target_group_size=4)
    assert len(plan.groups) == 2
    flow = played(plan)
    assert {included for share, included in zip(plan.shares, flow.included, strict=True) if share.parts} == {
        everybody(plan)
    }
    assert all(member.committed for member in flow.members)


def test_who_never_knows_the_group_has_nothing_of_it() -> None:
    plan = plan_of(3)
    never = Participant(line=Line(), times=TIMES, ready_seconds=math.inf, silent=True)
    assert not played(plan, m1=never).members[1].committed
