"""Keeping up: newcomers' way in, from which donors, and what becomes of a fetch when the swarm moves on meanwhile.

Peers are ``BaseKeeper`` objects that call each other in memory; records are what the test says they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID

from dht_config.manifest import AveragingSection
from peers import bases
from peers.arena import SharedArena
from peers.bases import BaseKeeper
from peers.cadence import Cadence
from peers.clock import Schedule
from peers.fragment_state import FragmentState
from peers.fragments import FragmentLayout
from peers.ledger import Counts, Ledger
from peers.line import LineRate, LinkRate
from peers.lineage import Claim
from peers.messages import BaseAnswer, BasePieceHeader, BaseRequest
from peers.outer import NO_HISTORY, base_digest
from peers.pipe import FragmentMeta, Synced, Syncing, Waiting
from peers.transport import Handler

SIZE = 300_000  # a fragment of 2.4 MB: four donors at once
LAYOUT = FragmentLayout(names=("a",), shapes=((2 * SIZE,),), bounds=(0, SIZE, 2 * SIZE))
Tamper = Callable[[str, str, BaseAnswer], BaseAnswer | None]


class Line:
    """Carries calls between the peers of a swarm.

    :param tamper: may change an answer (donor, asker, answer), or drop the line by returning None
    """

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.swarm, self.name = swarm, name
        self.handler: Handler[BaseRequest] | None = None

    async def serve(self, name: str, handler: Handler[Any], request_type: type[Any]) -> None:
        self.handler = handler

    async def call(self, peer: PeerID, name: str, requests: AsyncIterator[Any], answer_type: type[Any]) -> Any:
        donor = next(other for other in self.swarm.peers.values() if other.id == peer)
        self.swarm.calls.append((self.name, donor.name))
        assert donor.line.handler is not None
        served = donor.line.handler(requests, PeerID.from_base58(str(self.swarm.peers[self.name].id)))

        async def answers() -> AsyncGenerator[BaseAnswer, None]:
            async for answer in served:
                await asyncio.sleep(0)
                changed = self.swarm.tamper(donor.name, self.name, answer)
                if changed is None:
                    raise ConnectionResetError("the line failed")
                yield changed

        return answers()


class Peer:
    """One peer, with what it tells its training process."""

    def __init__(self, swarm: Swarm, name: str, version: int) -> None:
        self.name, self.id = name, PeerID(b"\x12\x20" + name.encode().ljust(32, b"-"))
        self.told: list[Any] = []
        self.line = Line(swarm, name)
        arena = SharedArena.create(2 * SIZE)
        self.fragments = tuple(FragmentState(index, LAYOUT, arena) for index in range(2))
        run = SimpleNamespace(
            fragments=self.fragments,
            clock=SimpleNamespace(now=lambda: swarm.now, passed=lambda: swarm.now, round_trip_seconds=0.0),
            node=SimpleNamespace(protocol=SimpleNamespace(wait_timeout=3.0)),
            settings=SimpleNamespace(role="training"),
            signed_manifest=SimpleNamespace(initial_digests=(bytes(32), bytes(32))),
            manifest=SimpleNamespace(averaging=AveragingSection()),
            schedule=swarm.schedule,
            training=SimpleNamespace(send=self.told.append, begun=None),
            own_id=self.id.to_bytes(),
            link_rate=LinkRate(),
            allowance=SimpleNamespace(is_used_up=False, rate=LineRate()),
        )
        presence = SimpleNamespace(
            view=SimpleNamespace(
                claims=lambda fragment: swarm.claims(fragment, self.name),
                cadences=lambda: {str(peer.id): swarm.cadence_of(peer.name) for peer in swarm.peers.values()},
            ),
            present=swarm.training,
            leaving=lambda: swarm.leaving,
            can_meet=lambda peer: peer not in swarm.out_of_reach,
            may_lag=False,
            auxiliary=name == "door",
            refresh=swarm.refresh,
            caught_up=False,
            changed=asyncio.Event(),
            cadence=Cadence(swarm.schedule),
        )
        self.presence, self.allowance, self.link_rate = presence, run.allowance, run.link_rate
        self.keeper = BaseKeeper(run, presence, self.line)  # type: ignore[arg-type]
        if version >= 0:
            self.be_at(version)

    def be_at(self, version: int, *, samples: int = 0) -> None:
        """Hold the base of a version, which is the same for everyone; what is being fetched is kept as it was."""
        for snapshot in self.keeper._server._snapshots.values():
            snapshot.frozen = snapshot.frozen.copied()
        for state in self.fragments:
            values = torch.rand(2, SIZE, generator=torch.Generator().manual_seed(100 * version + state.index + samples))
            total = (samples or version) * SIZE
            digest = base_digest(
                fragment=state.index,
                version=version,
                total_element_samples=total,
                history=NO_HISTORY,
                base=values[0],
                outer_state=values[1:],
            )
            state.base.copy_(values[0])
            state.outer_state.copy_(values[1:])
            state.restore(
                FragmentMeta(
                    version=version,
                    digest=digest,
                    total_element_samples=total,
                    history=NO_HISTORY,
                    ledger=Ledger.open(SIZE).to_json(),
                )
            )

    @property
    def versions(self) -> list[int]:
        return [state.version for state in self.fragments]

    async def sync(self) -> None:
        nothing: Any = SimpleNamespace(samples=0, steps=0, counts=(Counts(),) * 2, contributed=(Counts(),) * 2)
        await self.keeper.sync(nothing)
        assert isinstance(self.told[-1], Synced)


class Swarm:
    """Peers that hold bases, and those that come."""

    def __init__(self, *, cycle_seconds: float = 1e9) -> None:
        self.schedule = Schedule(start_seconds=-1000 * cycle_seconds, tick_seconds=cycle_seconds / 2, fragments=2)
        self.leaving: frozenset[str] = frozenset()
        self.out_of_reach: frozenset[str] = frozenset()
        self.peers: dict[str, Peer] = {}
        self.calls: list[tuple[str, str]] = []
        self.tamper: Tamper = lambda donor, asker, answer: answer
        self.on_refresh: Callable[[], None] = lambda: None
        self.cadence_of: Callable[[str], int] = lambda name: 1
        self.now = 0.0

    async def add(self, name: str, version: int = -1) -> Peer:
        peer = self.peers[name] = Peer(self, name, version)
        await peer.keeper.serve()
        return peer

    def claims(self, fragment: int, asker: str) -> dict[str, Claim]:
        return {
            str(peer.id): peer.fragments[fragment].claim
            for peer in self.peers.values()
            if peer.name != asker and min(peer.versions) >= 0
        }

    def training(self) -> frozenset[str]:
        return frozenset(str(peer.id) for peer in self.peers.values() if peer.name.startswith("donor"))

    async def refresh(self) -> None:
        self.on_refresh()


def assert_same_bases(peer: Peer, other: Peer) -> None:
    for ours, theirs in zip(peer.fragments, other.fragments, strict=True):
        assert ours.digest == theirs.digest
        assert torch.equal(ours.base, theirs.base) and torch.equal(ours.outer_state, theirs.outer_state)


def test_a_newcomer_fetches_from_several_donors_and_says_how_far_it_is() -> None:
    async def scene() -> None:
        swarm = Swarm()
        donors = [await swarm.add(f"donor-{number}", 3) for number in range(4)]
        newcomer = await swarm.add("new")
        await newcomer.sync()
        assert_same_bases(newcomer, donors[0])
        assert newcomer.presence.caught_up and newcomer.link_rate.rate.is_known
        assert {donor for _, donor in swarm.calls} == {donor.name for donor in donors}
        progress = [told for told in newcomer.told if isinstance(told, Syncing)]
        assert progress[0] == Syncing(0, 16 * SIZE) and progress[-1] == Syncing(16 * SIZE, 16 * SIZE)
        assert progress == sorted(progress, key=lambda told: told.bytes_received)
        assert len(progress) > 64

    asyncio.run(scene())


def test_donors_that_neither_side_can_dial_are_not_asked() -> None:
    async def scene() -> None:
        swarm = Swarm()
        donors = [await swarm.add(f"donor-{number}", 3) for number in range(4)]
        newcomer = await swarm.add("new")
        swarm.out_of_reach = frozenset(str(donor.id) for donor in donors[1:])
        await newcomer.sync()
        assert_same_bases(newcomer, donors[0])
        assert {donor for _, donor in swarm.calls} == {"donor-0"}

    asyncio.run(scene())


def test_a_newcomer_that_is_passed_each_time_begins_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the door can serve it, and the one peer that trains makes a base in the time that it takes to fetch two."""
    monkeypatch.setattr(bases, "HURRIED_ATTEMPTS", 3)

    async def scene() -> None:
        swarm = Swarm()
        one = await swarm.add("donor-one", 3)
        door = await swarm.add("door", 3)
        swarm.out_of_reach = frozenset({str(one.id)})

        def go_on() -> None:
            behind = door.versions < one.versions
            (door if behind else one).be_at(one.versions[0] + (not behind))

        swarm.on_refresh = go_on
        newcomer = await swarm.add("new")
        await asyncio.wait_for(newcomer.sync(), 30)
        assert min(newcomer.versions) >= 3 and not newcomer.presence.caught_up

    asyncio.run(scene())


def test_a_door_and_a_newcomer_do_not_keep_each_other_behind_a_peer_that_only_the_door_can_meet() -> None:
    async def scene() -> None:
        swarm = Swarm()
        one = await swarm.add("donor-one", 4)
        two = await swarm.add("donor-two", 3)
        door = await swarm.add("door", 3)
        assert door.keeper.better_claim(door.fragments[0]) == one.fragments[0].claim
        assert two.keeper.better_claim(two.fragments[0]) == one.fragments[0].claim
        await swarm.add("donor-three", 3)
        assert door.keeper.better_claim(door.fragments[0]) is None, "most are there"
        for name in ("donor-one", "donor-three"):
            del swarm.peers[name]
        door.be_at(9)
        assert door.keeper.better_claim(door.fragments[0]) is None, "one that comes back does not set it back"

    asyncio.run(scene())


def test_a_round_that_only_the_auxiliary_peer_has_whole_is_fetched_from_it() -> None:
    """Else it would be a version ahead of all others, who need it to hold their rounds."""

    async def scene() -> None:
        swarm = Swarm()
        peers = [await swarm.add(f"donor-{number}", 3) for number in range(2)]
        door = await swarm.add("door", 4)
        (state, _) = peers[0].fragments
        assert peers[0].keeper.better_claim(state) is None, "a door that did not average for us may say anything"
        for peer in peers:
            peer.fragments[0].unresolved_mates = frozenset(str(other.id) for other in (*peers, door))
        assert peers[0].keeper.better_claim(state) == door.fragments[0].claim

    asyncio.run(scene())


def test_many_newcomers_spread_over_the_donors_and_a_stale_one_is_never_believed_or_asked() -> None:
    async def scene() -> None:
        swarm = Swarm()
        donors = [await swarm.add(f"donor-{number}", 3) for number in range(6)]
        await swarm.add("donor-stale", 2)
        newcomers = [await swarm.add(f"new-{number}") for number in range(8)]
        await asyncio.gather(*(newcomer.sync() for newcomer in newcomers))
        for newcomer in newcomers:
            assert_same_bases(newcomer, donors[0])
        asked = [donor for _, donor in swarm.calls]
        assert "donor-stale" not in asked
        assert set(asked) >= {donor.name for donor in donors}

    asyncio.run(scene())


def test_a_peer_that_needs_nothing_shows_no_download() -> None:
    async def scene() -> None:
        swarm = Swarm()
        await swarm.add("donor", 3)
        back = await swarm.add("back", 3)
        await back.sync()
        assert [type(told) for told in back.told] == [Synced]
        assert not swarm.calls

    asyncio.run(scene())


def test_whose_day_is_used_up_trains_on_what_it_has_and_a_newcomer_waits_for_another_day() -> None:
    async def scene() -> None:
        swarm = Swarm()
        await swarm.add("donor", 3)
        back, newcomer = await swarm.add("back", 2), await swarm.add("newcomer")
        for peer in (back, newcomer):
            peer.allowance.is_used_up = True
        await back.sync()
        assert any(isinstance(told, Synced) for told in back.told) and not back.presence.caught_up
        assert not back.link_rate.rate.is_known, "nothing came: that says nothing of its line"
        waiting = asyncio.create_task(newcomer.sync())
        while not any(isinstance(told, Waiting) and "midnight" in told.text for told in newcomer.told):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not swarm.calls

    asyncio.run(scene())


def test_a_liar_with_a_better_claim_keeps_nobody_out() -> None:
    """It is found out as soon as what it sends does not have the digest that it announces."""

    async def scene() -> None:
        swarm = Swarm()
        honest, liar = await swarm.add("donor-honest", 3), await swarm.add("donor-liar", 3)
        liar.be_at(3, samples=1000)

        def falsify(donor: str, asker: str, answer: BaseAnswer) -> BaseAnswer:
            if donor == "donor-liar" and isinstance(answer.header, BasePieceHeader):
                return BaseAnswer(answer.header, bytes(len(answer.body)))
            return answer

        swarm.tamper = falsify
        newcomer = await swarm.add("new")
        await newcomer.sync()
        assert_same_bases(newcomer, honest)

    asyncio.run(scene())


def test_newcomers_that_come_at_once_go_on_with_the_peer_they_have_their_base_from() -> None:
    async def scene() -> None:
        swarm = Swarm()
        lone = await swarm.add("donor-lone", 3)
        newcomers = [await swarm.add("new-one"), await swarm.add("new-two")]
        await asyncio.gather(*(newcomer.sync() for newcomer in newcomers))
        for newcomer in newcomers:
            newcomer.name = f"donor-{newcomer.name}"  # it trains
        lone.be_at(4)
        for newcomer in newcomers:
            assert newcomer.keeper.better_claim(newcomer.fragments[0]) == lone.fragments[0].claim
        assert lone.keeper.better_claim(lone.fragments[0]) is None

    asyncio.run(scene())


def test_a_rival_that_one_peer_announces_of_a_round_of_many_is_not_taken_and_its_peer_not_believed() -> None:
    async def scene() -> None:
        swarm = Swarm()
        deceived = [await swarm.add(f"donor-{number}", 3) for number in range(4)]
        liar = await swarm.add("donor-liar", 3)
        for samples, peer in enumerate((*deceived, liar), start=10):
            peer.be_at(3, samples=samples)
        (state, _) = deceived[0].fragments
        state.round_size = len(swarm.peers)
        before = state.claim
        assert deceived[0].keeper.better_claim(state) == liar.fragments[0].claim
        assert not await deceived[0].keeper._replace_locked(state)
        assert state.claim == before
        assert not deceived[0].keeper._donors.believed(str(liar.id))

    asyncio.run(scene())


def test_versions_that_cannot_be_yet_silence_nobody() -> None:
    """Peers that skip rounds have no vote while others are ahead: not because those say so of what cannot be."""

    async def scene() -> None:
        swarm = Swarm()
        swarm.cadence_of = lambda name: 4 if name == "donor-slow" else 1
        slow = await swarm.add("donor-slow", 3)
        for name in ("donor-liar-1", "donor-liar-2"):
            await swarm.add(name, 10**6)
        assert 3 < swarm.schedule.possible_versions(0.0) < 10**6
        newcomer = await swarm.add("new")
        await newcomer.sync()
        assert_same_bases(newcomer, slow)

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_on_a_line_that_needs_longer_than_a_cycle_a_newcomer_gets_in_with_what_was_frozen_for_it() -> None:
    async def scene() -> None:
        swarm = Swarm(cycle_seconds=1e-9)
        donor = await swarm.add("donor", 3)
        newcomer = await swarm.add("new")

        def move_on(name: str, asker: str, answer: BaseAnswer) -> BaseAnswer:
            if isinstance(answer.header, BasePieceHeader) and answer.header.start > SIZE:
                donor.be_at(min(donor.versions) + 1)
            return answer

        swarm.tamper = move_on
        await newcomer.sync()
        assert all(3 <= version < donor.versions[0] for version in newcomer.versions)
        assert len(swarm.calls) == 2, "each fragment once"
        assert not newcomer.presence.caught_up, "no round may count on it yet"
        assert "until it has caught up" in newcomer.told[-2].text

    asyncio.run(scene())


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_when_the_line_fails_and_the_swarm_moves_on_most_of_a_base_is_completed_and_a_little_is_not(
    share: float,
) -> None:
    async def scene() -> None:
        swarm = Swarm(cycle_seconds=1e-9)
        donor = await swarm.add("donor", 3)
        newcomer = await swarm.add("new")
        failed: set[int] = set()
        arrived: list[int] = []

        def fail(name: str, asker: str, answer: BaseAnswer) -> BaseAnswer | None:
            if isinstance(answer.header, BasePieceHeader):
                arrived.append(answer.header.start)
                if len(failed) < 2 and answer.header.start > share * 8 * SIZE:
                    failed.add(len(failed))
                    return None
            return answer

        def moved_on() -> None:
            swarm.now += 4.0  # at first it is too early to ask the donor again
            if donor.versions == [3, 3]:
                donor.be_at(4)

        swarm.tamper, swarm.on_refresh = fail, moved_on
        await newcomer.sync()
        assert newcomer.versions == ([3, 3] if share > 0.5 else [4, 4])
        pieces = len(set(arrived))
        assert len(arrived) == (2 * pieces + 2 if share > 0.5 else len(arrived))
        assert not newcomer.keeper._partial

    asyncio.run(scene())
