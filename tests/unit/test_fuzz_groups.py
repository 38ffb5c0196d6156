"""Groups with a member or a leader that says anything: none, or one of valid members that can hold a round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
import torch
from hivemind.p2p import P2PHandlerError, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import ValueWithExpiration, get_dht_time
from hostile import anything, play
from hypothesis import given, settings
from hypothesis import strategies as st

from dht_config.identity import Identity, load_or_create_identity
from dht_config.records import MAX_SPANS, RoundAnnouncement, _announcement_message, seal
from peers.clock import passed_seconds
from peers.closing import Reliability
from peers.grouping import FragmentMatchmaking, GroupSearch, _member
from peers.lineage import Claim, has_quorum
from peers.messages import AveragedPart
from peers.reducer import MAX_ABSOLUTE_AVERAGE, PartReducer, Rules
from peers.round_plan import GroupMember, element_samples, plan_round, receipt_for
from peers.weighting import WEIGHTING_NAMES, get_weighting

RUN_ID = "tiny-0123456789abcdef"
SIZE = 5000
CLAIM = Claim(version=3, digest=bytes(range(32)), total_samples=10)
FIELDS: dict[str, Any] = RoundAnnouncement(
    fragment=1,
    tick=42,
    version=CLAIM.version,
    digest=CLAIM.digest,
    samples_total=1000,
    steps_total=125,
    spans=((0, SIZE, 80, 10),),
).model_dump()
POSSIBLE_SAMPLES = 2.0**50
SEARCH_SECONDS = 0.4


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    directory: Path = tmp_path_factory.mktemp("identities")
    return [load_or_create_identity(directory / str(number)) for number in range(3)]


def signed(identity: Identity, fields: Any, run_id: str = RUN_ID) -> bytes:
    payload = msgpack.packb(fields, use_bin_type=True)
    return seal(identity, payload, _announcement_message(run_id, payload))


class Nothing:
    """A DHT in which one leader looks for followers."""

    def __init__(self, peer_id: PeerID, leader: PeerID, expiration: float) -> None:
        self.peer_id = peer_id
        self._found = ValueWithExpiration(
            {leader.to_bytes(): ValueWithExpiration(value=True, expiration_time=expiration)}, expiration
        )

    def begin(self, *arguments: Any) -> None:
        """The leader is there from the beginning."""

    async def store(self, *arguments: Any, **named: Any) -> bool:
        return True

    async def get(self, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0.02)
        return self._found


@dataclass
class OnlyId:
    peer_id: PeerID


@dataclass(frozen=True)
class Leader(ServicerBase):  # type: ignore[misc]
    """Answers every request to join with the messages that it was given for the asker's number."""

    answers: ClassVar[dict[str, list[Any]]] = {}
    asked: ClassVar[list[str]] = []
    number: str = ""

    @classmethod
    def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: str | None = None) -> Any:
        return Leader(number=namespace or "")

    async def rpc_join_group(self, request: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        async def stream() -> AsyncIterator[Any]:
            self.asked.append(self.number)
            for answer in self.answers[self.number]:
                if isinstance(answer, Exception):
                    raise answer
                await asyncio.sleep(0)
                yield answer

        return stream()


@dataclass
class Follower:
    """A peer in a search of its own."""

    identity: Identity
    leader: Identity
    number: str
    silent: Reliability = field(default_factory=lambda: Reliability(10.0, doublings=2))

    async def find(self) -> tuple[bytes, tuple[GroupMember, ...]] | None:
        now = get_dht_time()
        search = GroupSearch(
            scheduled_time=now + SEARCH_SECONDS / 2,
            deadline=now + SEARCH_SECONDS,
            data_for_gather=signed(self.identity, FIELDS),
            now=get_dht_time,
            fragment=1,
            tick=42,
            attempt=0,
            claim=CLAIM,
        )
        matchmaking = FragmentMatchmaking(
            OnlyId(self.identity.peer_id),  # type: ignore[arg-type]
            Nothing(self.identity.peer_id, self.leader.peer_id, search.scheduled_time - 0.01),  # type: ignore[arg-type]
            run_id=RUN_ID,
            prefix=self.number,
            servicer_type=Leader,
            matchmaking_seconds=SEARCH_SECONDS,
            size=SIZE,
            is_quorum=lambda members: has_quorum(members, {str(self.leader.peer_id)}),
            possible_samples=lambda: POSSIBLE_SAMPLES,
            silent_leaders=self.silent,
        )
        return await matchmaking.find(search)


def find_all(
    identities: list[Identity], answers: list[list[Any]]
) -> tuple[list[tuple[bytes, tuple[GroupMember, ...]] | None], list[Follower]]:
    """What so many followers make of what their leaders answer, all of them at once."""
    followers = [Follower(identities[0], identities[1], f"f{number}") for number in range(len(answers))]
    Leader.answers.clear()
    Leader.asked.clear()
    Leader.answers.update({follower.number: answer for follower, answer in zip(followers, answers, strict=True)})

    async def scene() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*(follower.find() for follower in followers)), 30)

    return asyncio.run(scene()), followers


def message(code: int, **fields: Any) -> averaging_pb2.MessageFromLeader:
    return averaging_pb2.MessageFromLeader(code=code, **fields)


def begin(identities: list[Identity], **changed: Any) -> list[averaging_pb2.MessageFromLeader]:
    """Accepted, and a group of the first two; or what is changed about it."""
    group = {
        "group_id": b"a group of this test",
        "ordered_peer_ids": [identity.peer_id.to_bytes() for identity in identities[:2]],
        "gathered": [signed(identity, FIELDS) for identity in identities[:2]],
    }
    return [message(averaging_pb2.ACCEPTED), message(averaging_pb2.BEGIN_ALLREDUCE, **(group | changed))]


def test_a_leaders_valid_group_is_found(identities: list[Identity]) -> None:
    (found,), (follower,) = find_all(identities, [begin(identities)])
    assert found is not None and [member.peer_id for member in found[1]] == [one.peer_id for one in identities[:2]]
    assert not follower.silent.distrusted(passed_seconds())


@pytest.mark.parametrize("what", ["group id", "strangers", "lengths", "twice", "old", "other run", "code", "too many"])
def test_a_leader_of_nonsense_has_no_group_and_is_not_followed_for_a_while(
    identities: list[Identity], what: str
) -> None:
    one, two, three = identities
    nonsense: dict[str, Callable[[], list[averaging_pb2.MessageFromLeader]]] = {
        "group id": lambda: begin(identities, group_id=b""),
        "strangers": lambda: begin(identities, ordered_peer_ids=[two.peer_id.to_bytes(), three.peer_id.to_bytes()]),
        "lengths": lambda: begin(identities, gathered=[signed(one, FIELDS)]),
        "twice": lambda: begin(identities, ordered_peer_ids=[one.peer_id.to_bytes()] * 2),
        "old": lambda: begin(identities, gathered=[signed(one, FIELDS), signed(two, FIELDS | {"tick": 41})]),
        "other run": lambda: begin(identities, gathered=[signed(one, FIELDS), signed(two, FIELDS, "other-run")]),
        "code": lambda: [message(99)],
        "too many": lambda: begin(identities, ordered_peer_ids=[bytes([n % 256]) * 34 for n in range(300)]),
    }
    (found,), (follower,) = find_all(identities, [nonsense[what]()])
    assert found is None
    assert follower.silent.distrusted(passed_seconds()) == (two.peer_id.to_bytes(),)
    assert Leader.asked == [follower.number]


def test_leaders_that_send_us_to_each_other_are_not_followed_for_ever(identities: list[Identity]) -> None:
    elsewhere = message(averaging_pb2.GROUP_DISBANDED, suggested_leader=identities[2].peer_id.to_bytes())
    (found,), _ = find_all(identities, [[message(averaging_pb2.ACCEPTED), elsewhere]])
    assert found is None
    assert 2 <= len(Leader.asked) < 20


@st.composite
def leaders_answers(draw: st.DrawFn, identities: list[Identity]) -> list[Any]:
    ids = [identity.peer_id.to_bytes() for identity in identities]
    blobs = [signed(identity, FIELDS) for identity in identities]
    odd = signed(identities[1], FIELDS | {draw(st.sampled_from(sorted(FIELDS))): draw(anything)})
    fields = {
        "group_id": draw(st.sampled_from([b"a group of this test"] * 3) | st.binary(max_size=100)),
        "ordered_peer_ids": draw(
            st.just(ids[:2]) | st.lists(st.sampled_from(ids) | st.binary(max_size=40), max_size=5)
        ),
        "gathered": draw(
            st.just(blobs[:2]) | st.lists(st.sampled_from([*blobs, odd]) | st.binary(max_size=60), max_size=5)
        ),
        "suggested_leader": draw(st.just(b"") | st.sampled_from(ids) | st.binary(max_size=40)),
    }
    usual = st.sampled_from([averaging_pb2.BEGIN_ALLREDUCE, averaging_pb2.GROUP_DISBANDED])
    codes = usual | st.integers(-(2**31), 2**31 - 1)
    first = draw(st.just(averaging_pb2.ACCEPTED) | codes)
    answers: list[Any] = [message(first), message(draw(codes), **fields)]
    if draw(st.booleans()):
        answers.insert(draw(st.integers(0, 2)), draw(st.sampled_from([P2PHandlerError("no"), OSError(), EOFError()])))
    return answers[: draw(st.integers(0, 3))]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_whatever_a_leader_answers_there_is_a_valid_group_or_none(
    identities: list[Identity], data: st.DataObject
) -> None:
    answers = [data.draw(leaders_answers(identities)) for _ in range(12)]
    found, _ = find_all(identities, answers)
    known = {identity.peer_id for identity in identities}
    for group in found:
        if group is not None:
            ids = [member.peer_id for member in group[1]]
            assert len(ids) == len(set(ids)) >= 2 and set(ids) <= known and identities[0].peer_id in ids
            assert 8 <= len(group[0]) <= 64


# Announcements


@st.composite
def spans(draw: st.DrawFn) -> list[list[int]]:
    count = draw(st.sampled_from([1, 2, 7, MAX_SPANS]))
    borders = [*range(count), SIZE] if draw(st.booleans()) else [n * SIZE // count for n in range(count + 1)]
    most, step = draw(st.sampled_from([0, 1, 1000, 2**50])), draw(st.integers(0, 400))
    rows = []
    for number, (start, stop) in enumerate(pairwise(borders)):
        samples = most and 1 + number * step % most
        rows.append([start, stop, samples, min(samples, 1 + number * step % 900)])
    return rows


@settings(max_examples=40, deadline=None)
@given(
    changes=st.lists(
        st.fixed_dictionaries(
            {"samples_total": st.just(2**50), "steps_total": st.just(2**60), "spans": spans()},
            optional={
                "megabits_per_second": st.none() | st.floats(0, 1e6),
                "distrusted": st.lists(st.binary(min_size=34, max_size=34), max_size=64),
                "codec": st.sampled_from(["int8", "int4", "sparse", "float32", ""]),
                "can_be_dialled": st.booleans(),
                "cadence": st.integers(0, 5),
                "auxiliary": st.booleans(),
            },
        )
        | st.dictionaries(st.sampled_from([*FIELDS, "", "weight"]), anything, max_size=2),
        min_size=2,
        max_size=3,
    ),
    weighting=st.sampled_from(WEIGHTING_NAMES),
    part_elements=st.sampled_from([1000, SIZE]),
    target_group_size=st.sampled_from([2, 64]),
)
def test_any_announcement_is_refused_or_makes_a_round_that_can_be_held(
    identities: list[Identity],
    changes: list[dict[str, Any]],
    weighting: str,
    part_elements: int,
    target_group_size: int,
) -> None:
    search = GroupSearch(
        scheduled_time=0, deadline=0, data_for_gather=b"", now=lambda: 0.0, fragment=1, tick=42, attempt=0, claim=CLAIM
    )
    judge = FragmentMatchmaking.__new__(FragmentMatchmaking)
    judge._run_id, judge._size, judge._possible_samples = RUN_ID, SIZE, lambda: POSSIBLE_SAMPLES
    blobs = [signed(one, FIELDS | change) for one, change in zip(identities, changes, strict=False)]
    members = []
    for identity, blob in zip(identities, blobs, strict=False):
        for other in identities:
            if other is not identity:
                assert judge._valid_announcement(other.peer_id, blob, search) is None, "it is another's"
        announcement = judge._valid_announcement(identity.peer_id, blob, search)
        if announcement is not None:
            members.append(_member(identity.peer_id, announcement))
    if not members:
        return
    plan = plan_round(
        group_id=b"a group of this test",
        tick=42,
        fragment=1,
        size=SIZE,
        members=members,
        target_group_size=target_group_size,
        part_elements=part_elements,
    )

    async def scene() -> None:
        rules = Rules(weighting=get_weighting(weighting), batch_size=32)
        for index in range(len(members)):
            reducer = PartReducer(plan, index, rules, torch.zeros(SIZE))
            for number, part in enumerate(reducer.parts):
                for source in sorted(part.waiting_for & set(plan.groups[plan.group_of(index)])):
                    await reducer.add(source, number, torch.full((part.size,), 1e4))
                if part.at_root and len(plan.groups) == 1 and len(members) > 1 and plan.training:
                    averaged = await reducer.result(number)
                    assert 0 <= float(averaged.values.min()) <= float(averaged.values.max()) <= MAX_ABSOLUTE_AVERAGE

    play(scene())
    all_in = list(range(len(members)))
    everyone = [AveragedPart(start=a, stop=b, included=all_in) for share in plan.shares for a, b in share.parts]
    assert element_samples(plan, everyone) == sum((s.stop - s.start) * s.samples for m in members for s in m.spans)
    receipt_for(plan, everyone, version=4)
