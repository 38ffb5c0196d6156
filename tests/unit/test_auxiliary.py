"""A peer that does not train, in rounds that others cannot hold by themselves: it averages, and counts for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from hypothesis import given, settings
from hypothesis import strategies as st
from local_rounds import HASTY_SECONDS, Network, committed, hold, plan_for, whole
from pydantic import ValidationError
from test_presence import Records, member
from test_round import expected_average, random_contributions

from dht_config.identity import Identity, load_or_create_identity
from dht_config.records import RoundAnnouncement, sign_announcement
from peers.closing import Reliability
from peers.contribution import Outgoing
from peers.grouping import FragmentMatchmaking, GroupSearch
from peers.lineage import Claim
from peers.membership import Member
from peers.round import RoundResult, RoundVoid
from peers.round_plan import element_samples, receipt_for
from peers.servicer import SwarmServicer

SIZE = 3000
RUN_ID = "tiny-0123456789abcdef"
CLAIM = Claim(version=3, digest=bytes(range(32)), total_samples=10)


# ----------------------------------------------------------------- announcements


def announcement(samples: int = 0, auxiliary: bool = True) -> RoundAnnouncement:
    return RoundAnnouncement(
        fragment=1,
        tick=42,
        version=CLAIM.version,
        digest=CLAIM.digest,
        samples_total=samples,
        steps_total=samples,
        spans=((0, SIZE, samples, samples),),
        auxiliary=auxiliary,
    )


def test_who_announces_samples_is_not_auxiliary() -> None:
    """Else its work would be in a base, and no receipt would name it."""
    assert RoundAnnouncement.from_payload(announcement().to_payload()).auxiliary
    with pytest.raises(ValidationError, match="an auxiliary peer brings no samples"):
        announcement(samples=1)


# ------------------------------------------------------------------------- rounds


def nothing(count: int) -> list[torch.Tensor]:
    return [torch.zeros(SIZE)] * count


@settings(max_examples=25)
@given(
    training=st.integers(2, 5),
    auxiliary=st.integers(1, 2),
    reachable=st.booleans(),
    target=st.integers(2, 8),
    samples=st.lists(st.integers(0, 1000), min_size=5, max_size=5),
    codec=st.sampled_from(["float32", "float16", "int8", "int4", "sparse"]),
    answer_codec=st.sampled_from(["float32", "float16", "int8", "int4"]),
)
def test_everybody_gets_the_average_of_those_who_train(
    training: int, auxiliary: int, reachable: bool, target: int, samples: list[int], codec: str, answer_codec: str
) -> None:
    spans = [whole(SIZE, samples[index]) for index in range(training)]
    behind_nat = range(1 if reachable else 0, training)
    plan = plan_for(spans, SIZE, 700, target, behind_nat=behind_nat, auxiliary=auxiliary)
    network = Network(plan, codec=codec, answer_codec=answer_codec)
    results = committed(hold(network, [*random_contributions(training, SIZE), *nothing(auxiliary)]))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    exact = expected_average(plan, [network.sent[index] for index in range(len(plan.members))])
    bound = {"float32": 1e-5, "float16": 6e-4, "int8": 1 / 250, "int4": 1 / 13}[answer_codec]
    np.testing.assert_allclose(results[0].average.numpy(), exact, atol=bound)
    for result in results:
        assert {index for part in result.parts for index in part.included} == set(range(training))
        assert element_samples(plan, result.parts) == SIZE * sum(samples[:training])
        receipt = receipt_for(plan, result.parts, version=1)
        assert [one.peer_id for one in receipt.contributors] == [one.peer_id.to_bytes() for one in plan.training]


def test_one_contribution_and_an_auxiliary_peer_are_no_average() -> None:
    plan = plan_for([whole(SIZE, 5)] * 2, SIZE, 700, behind_nat=(0, 1), auxiliary=1)
    network = Network(plan, wait_seconds=HASTY_SECONDS, mute_to={(1, 2): 0})
    outcomes = hold(network, [*random_contributions(2, SIZE), *nothing(1)])
    assert all(isinstance(outcome, RoundVoid) for outcome in outcomes), outcomes


def test_where_one_of_two_auxiliary_peers_is_lost_the_other_has_no_half_of_a_base() -> None:
    plan = plan_for([whole(SIZE, 5)] * 3, SIZE, 700, behind_nat=range(3), auxiliary=2)
    outcomes = hold(Network(plan, dead_reducers={4}), [*random_contributions(3, SIZE), *nothing(2)])
    assert all(isinstance(outcome, RoundVoid) for outcome in outcomes[:4])


def test_a_group_of_auxiliary_peers_has_no_average_and_does_not_wait_for_ever() -> None:
    plan = plan_for([], SIZE, 700, auxiliary=2)
    outcomes = hold(Network(plan, wait_seconds=HASTY_SECONDS), nothing(2))
    assert not any(isinstance(outcome, RoundResult) for outcome in outcomes)


def test_nothing_takes_no_memory() -> None:
    brings = Outgoing.of(torch.zeros(1).expand(SIZE))
    brings.hold()
    assert brings.whole().untyped_storage().nbytes() == 4


# ----------------------------------------------------------------------- presence


def home(status: Any = "training") -> Member:
    """Behind NAT: its record names no address."""
    return member(status)


def public(status: Any = "training") -> Member:
    here = member(status)
    return Member(profile=here.profile.model_copy(update={"addresses": ("/ip4/8.8.8.8/tcp/1/p2p/x",)}), expires=1e9)


def test_a_round_waits_for_an_auxiliary_peer_where_nobody_in_it_can_be_dialled() -> None:
    door = Records(role="serving")
    for waits, members in (
        (True, {"one": home(), "two": home()}),
        (True, {"one": home(), "two": home(), "second": public("serving")}),
        (False, {"one": home(), "two": public()}),
        (False, {"one": home()}),
        (False, {"one": home(), "two": home("syncing")}),
        (False, {}),
    ):
        door.others(**members)
        assert door.is_held(0) is waits, members


def test_no_quorum_counts_an_auxiliary_peer() -> None:
    door = Records(role="serving")
    door.others(one=home(), two=home(), three=home())
    assert door.is_quorum({"one", "two"})
    assert not door.is_quorum({"one"}) and not door.is_quorum(set())
    door.others(one=home())
    assert not door.is_quorum({"one"}), "it is alone, and commits alone"


def test_a_door_keeps_up_where_nobody_else_can_serve_a_newcomer() -> None:
    door = Records(role="serving")
    for lags, members in (
        (True, {"one": home()}),
        (False, {"one": home(), "new": home("syncing")}),
        (False, {"one": home(), "two": home()}),
        (True, {"one": home(), "new": public("syncing")}),
        (True, {"one": public(), "two": home()}),
        (False, {"one": public(), "two": home("leaving")}),
    ):
        door.others(**members)
        assert door.may_lag is lags, members
    assert not Records().may_lag


# ------------------------------------------------------------------------- groups


class NoDHT:
    def __init__(self, identity: Identity) -> None:
        self.peer_id = identity.peer_id

    def begin(self, key: str, place: int, seconds: float) -> None:
        pass

    async def store(self, *arguments: Any, **named: Any) -> bool:
        return True

    async def get(self, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("followers", "present", "forms"),
    [
        pytest.param([False, False], 3, True, id="two of three that train"),
        pytest.param([False, True], 3, False, id="one of three, and another that does not train"),
        pytest.param([False, False, True], 3, True, id="two of three, and one that does not train"),
        pytest.param([False], 2, False, id="one of two"),
        pytest.param([True], 1, False, id="nobody that trains"),
    ],
)
def test_an_auxiliary_leader_begins_with_enough_that_train(
    tmp_path: Path, followers: list[bool], present: int, forms: bool
) -> None:
    """:param followers: for each, whether it is auxiliary as well"""
    leader, *others = [load_or_create_identity(tmp_path / str(number)) for number in range(1 + len(followers))]
    trains = [str(one.peer_id) for one, auxiliary in zip(others, followers, strict=True) if not auxiliary]
    everyone = [*trains, *(f"absent {number}" for number in range(present - len(trains)))]
    door = Records(role="serving")
    door.others(**dict.fromkeys(everyone, home()))

    async def follow(matchmaking: FragmentMatchmaking, identity: Identity, auxiliary: bool) -> int:
        blob = sign_announcement(identity, announcement(0 if auxiliary else 8, auxiliary), RUN_ID)
        request = averaging_pb2.JoinRequest(
            schema_hash=matchmaking.schema_hash,
            expiration=get_dht_time() + 1.0,
            client_mode=True,
            gather=blob,
            group_key=matchmaking.group_key_manager.current_key,
        )
        context: Any = SimpleNamespace(remote_id=identity.peer_id)
        answers: AsyncIterator[Any] = matchmaking.rpc_join_group(request, context)
        return [answer.code async for answer in answers][-1]

    async def scene() -> tuple[Any, list[int]]:
        now = get_dht_time()
        matchmaking = FragmentMatchmaking(
            SimpleNamespace(peer_id=leader.peer_id),  # type: ignore[arg-type]
            NoDHT(leader),  # type: ignore[arg-type]
            run_id=RUN_ID,
            prefix="tiny-f1",
            servicer_type=SwarmServicer,
            matchmaking_seconds=0.4,
            size=SIZE,
            is_quorum=door.is_quorum,
            possible_samples=lambda: 1e9,
            silent_leaders=Reliability(10.0, doublings=2),
            auxiliary=True,
        )
        search = GroupSearch(
            scheduled_time=now + 0.5,
            deadline=now + 0.8,
            data_for_gather=sign_announcement(leader, announcement(), RUN_ID),
            now=get_dht_time,
            fragment=1,
            tick=42,
            attempt=0,
            claim=CLAIM,
        )
        finding = asyncio.create_task(matchmaking.find(search))
        while matchmaking.potential_leaders.declared_group_key is None:
            await asyncio.sleep(0.01)
        codes = await asyncio.gather(
            *(follow(matchmaking, one, auxiliary) for one, auxiliary in zip(others, followers, strict=True))
        )
        return await finding, codes

    found, codes = asyncio.run(scene())
    assert (found is not None) is forms
    assert set(codes) == {averaging_pb2.BEGIN_ALLREDUCE if forms else averaging_pb2.GROUP_DISBANDED}
    if found is not None:
        assert sum(not one.auxiliary for one in found[1]) == len(trains)
