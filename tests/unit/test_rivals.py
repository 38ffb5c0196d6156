"""A reducer that gives each member of a round another average: found out, and nobody takes a base that it made up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_fragment_state import SIZE, Peer, average_of, plan_of

from peers.clock import Schedule
from peers.closing import Reliability
from peers.lineage import MANY_MEMBERS, Claim, choose_base
from peers.messages import AveragedPart
from peers.outer import base_digest
from peers.rivals import judge_rival, same_round, shares_of
from peers.round import RoundVoid
from peers.round_plan import RoundPlan, Share, receipt_for
from peers.rounds import RoundKeeper
from peers.transfer import FetchedBase

LIAR = 4
"""Of five, the one that averages the last third."""
PARTS = ((0, 4), (4, 8), (8, SIZE))
LIARS_SHARE = slice(8, SIZE)


def fetched_from(peer: Peer, *, base: torch.Tensor | None = None) -> FetchedBase:
    """Its base; or one with other parameters, that it made up."""
    frozen, values = peer.state.frozen(), peer.state.base.clone() if base is None else base
    digest = base_digest(
        fragment=0,
        version=frozen.version,
        total_element_samples=frozen.total_element_samples,
        history=frozen.history,
        base=values,
        outer_state=peer.state.outer_state,
    )
    return FetchedBase(
        claim=replace(peer.state.claim, digest=digest),
        total_element_samples=frozen.total_element_samples,
        history=frozen.history,
        history_before=frozen.history_before,
        base=values,
        outer_state=peer.state.outer_state.clone(),
        receipts=frozen.receipts,
        donors=(str(peer.id),),
        bytes_received=1,
        seconds=1.0,
    )


@dataclass
class Deceived:
    """Five peers after a round in which each got another average of the last third."""

    peers: list[Peer] = field(default_factory=lambda: [Peer(index + 1) for index in range(5)])
    made_up: FetchedBase | None = None
    disbelieved: dict[str, set[str]] = field(default_factory=dict)
    reports: dict[str, set[str]] = field(default_factory=dict)

    def hold(self, answers: Collection[int] = (1, 2, 3, 4, 5)) -> None:
        """:param answers: what the liar adds to the average of its share, for each member"""
        for peer in self.peers:
            peer.train(2)
            peer.prepare()
        plan = self.plan()
        parts = [AveragedPart(start=start, stop=stop, included=list(range(5))) for start, stop in PARTS]
        average = average_of(self.peers, parts)
        for peer, answer in zip(self.peers, answers, strict=True):
            peer.state.contributes(plan.tick)
            theirs = average.clone()
            theirs[LIARS_SHARE] += answer
            peer.commit(plan, theirs, parts)

    def plan(self) -> RoundPlan:
        shares = tuple(
            Share(reducers=(reducer,), parts=(part,)) for reducer, part in zip((0, 1, LIAR), PARTS, strict=True)
        )
        return replace(plan_of(self.peers), shares=shares)

    def announced(self, asker: Peer) -> dict[str, Claim]:
        claims = {str(peer.id): peer.state.claim for peer in self.peers if peer is not asker}
        if self.made_up is not None and str(self.peers[LIAR].id) in claims:
            claims[str(self.peers[LIAR].id)] = self.made_up.claim
        distrusted = self.disbelieved.get(str(asker.id), set())
        return {peer: claim for peer, claim in claims.items() if peer not in distrusted}

    def settle(self) -> None:
        """Every honest peer looks at what is announced again and again, as ``BaseKeeper`` does."""
        for _ in range(4):
            for peer in self.peers[:LIAR]:
                self.catch_up(peer)

    def catch_up(self, peer: Peer) -> None:
        claims = self.announced(peer)
        chosen = choose_base(
            peer.state.claim,
            claims,
            possible_versions=100,
            ancestors=peer.state.ancestors,
            round_size=peer.state.round_size,
        )
        if chosen is None:
            return
        announcers = {other for other, claim in claims.items() if claim == chosen}
        if self.made_up is not None and chosen == self.made_up.claim:
            fetched = self.made_up
        else:
            fetched = fetched_from(next(other for other in self.peers if str(other.id) in announcers))
        verdict = peer.state.judge(fetched, announcers, len(self.peers) - 1)
        for reducer in verdict.unfaithful:
            self.reports.setdefault(reducer, set()).add(str(peer.id))
        if verdict.believed:
            peer.state.adopt(fetched, peer.own_id)
        else:
            self.disbelieved.setdefault(str(peer.id), set()).update(announcers)


def made_up_by(peer: Peer, where: slice) -> FetchedBase:
    """One that the order of lines would put first."""
    values, best = peer.state.base.clone(), None
    for salt in range(64):
        values[where] = 1000.0 + salt
        lie = fetched_from(peer, base=values.clone())
        best = lie if best is None or lie.claim.rank > best.claim.rank else best
    assert best is not None
    return best


@pytest.mark.parametrize("where", [LIARS_SHARE, slice(0, SIZE), slice(0, 1)])
def test_nobody_takes_a_base_that_a_reducer_made_up_after_it_gave_everybody_another_average(where: slice) -> None:
    swarm = Deceived()
    swarm.hold()
    honest = swarm.peers[:LIAR]
    assert len({peer.state.digest for peer in honest}) == 4
    made_by_the_round = {peer.state.digest for peer in honest}
    swarm.made_up = made_up_by(swarm.peers[LIAR], where)
    swarm.settle()
    assert len({peer.state.digest for peer in honest}) == 1
    assert honest[0].state.digest in made_by_the_round
    liar = str(swarm.peers[LIAR].id)
    assert set(swarm.reports) == {liar}, "nobody else is accused"
    assert 2 * len(swarm.reports[liar]) > 4, "most have seen it: it averages nothing for a while"


def test_whose_average_a_reducer_takes_to_make_up_another_ones_share_comes_back_to_the_others() -> None:
    """What it announces differs from one member's base in the share of an honest reducer only."""
    swarm = Deceived()
    swarm.hold(answers=(1, 2, 3, 4, 1))
    honest = swarm.peers[:LIAR]
    made_by_the_round = {peer.state.digest for peer in honest}
    swarm.made_up = made_up_by(swarm.peers[LIAR], slice(*PARTS[1]))
    swarm.settle()
    assert len({peer.state.digest for peer in honest}) == 1
    assert honest[0].state.digest in made_by_the_round
    assert all(len(reports) <= 1 for reducer, reports in swarm.reports.items() if reducer != str(swarm.peers[LIAR].id))


def test_where_a_reducer_deceives_some_they_go_over_to_the_others_and_say_so() -> None:
    swarm = Deceived()
    swarm.hold(answers=(1, 1, 1, 2, 1))
    swarm.settle()
    assert len({peer.state.digest for peer in swarm.peers[:LIAR]}) == 1
    assert swarm.reports == {str(swarm.peers[LIAR].id): {str(swarm.peers[3].id)}}


def test_who_deceives_nobody_is_not_accused() -> None:
    swarm = Deceived()
    swarm.hold(answers=(0,) * 5)
    swarm.settle()
    assert not swarm.reports and not swarm.disbelieved


def test_other_lists_of_who_is_in_an_average_are_another_average() -> None:
    swarm = Deceived()
    swarm.hold(answers=(0,) * 5)
    for peer in swarm.peers:
        peer.snapshot()
    first, plan = swarm.peers[0], swarm.plan()
    rows = (first.state.base, *first.state.outer_state)
    everybody = receipt_for(plan, [AveragedPart(start=0, stop=SIZE, included=[0, 1, 2, 3, 4])], 1)
    cut = [AveragedPart(start=low, stop=low + 2, included=[0, 1, 2, 3, 4]) for low in range(0, SIZE, 2)]
    shares, reducer = shares_of(plan), str(swarm.peers[LIAR].id)
    alike = everybody.model_copy(update={"parts": cut})
    assert judge_rival(shares, (rows, everybody), (rows, alike), {"x"}).unfaithful == frozenset()
    fewer = everybody.model_copy(update={"parts": [*cut[:-1], AveragedPart(start=10, stop=SIZE, included=[0])]})
    verdict = judge_rival(shares, (rows, everybody), (rows, fewer), {reducer})
    assert (verdict.believed, verdict.unfaithful) == (False, {reducer})


def test_a_base_of_another_round_needs_a_second_witness() -> None:
    swarm, elsewhere = Deceived(), Deceived()
    swarm.hold(answers=(0,) * 5)
    elsewhere.hold(answers=(0,) * 5)
    first, other = swarm.peers[0].state, fetched_from(elsewhere.peers[1])
    assert not same_round(first.receipts, other.receipts)
    assert not first.judge(other, {"one"}, 4).believed
    assert first.judge(other, {"one", "two"}, 4).believed
    assert first.judge(other, {"one"}, MANY_MEMBERS - 2).believed, "few are left"
    fresh: Any = Peer(9).state
    assert fresh.judge(other, {"one"}, 4).believed, "it made no base itself"


def test_that_a_reducer_answers_does_not_speak_for_one_that_gave_others_something_else() -> None:
    reducer = Peer(1).id
    keeper: Any = RoundKeeper.__new__(RoundKeeper)
    keeper._run = SimpleNamespace(clock=SimpleNamespace(passed=lambda: 5.0))
    keeper._presence = SimpleNamespace(view=SimpleNamespace(members={str(reducer): None}))
    keeper._reducers, keeper._unfaithful, keeper._silent_leaders = (Reliability(10.0, doublings=2) for _ in range(3))
    keeper._note_unfaithful(str(reducer))
    keeper._judge(SimpleNamespace(answered={reducer}, failed={}), 5.0)
    assert keeper._distrusted() == (reducer.to_bytes(),)


@pytest.mark.parametrize(("claiming", "commits"), [(0, True), (1, True), (2, False)])
def test_one_liar_does_not_void_a_long_round_for_everybody(claiming: int, commits: bool) -> None:
    """It only has to announce a base that nobody made."""
    mates = [Peer(number).id for number in range(5)]
    lie = Claim(version=8, digest=b"l" * 32, total_samples=2**50)
    honest = Claim(version=7, digest=b"h" * 32, total_samples=100)
    claims = {str(mate): lie if number < claiming else honest for number, mate in enumerate(mates[1:])}

    async def refresh(asked: Collection[str]) -> None:
        assert set(asked) >= claims.keys()

    keeper: Any = RoundKeeper.__new__(RoundKeeper)
    keeper._run = SimpleNamespace(
        clock=SimpleNamespace(now=lambda: 1000.0),
        schedule=Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=2),
    )
    keeper._presence = SimpleNamespace(refresh=refresh, view=SimpleNamespace(claims=lambda fragment: claims))
    state: Any = SimpleNamespace(index=0, size=1, version=7, total_element_samples=100)
    plan: Any = SimpleNamespace(members=[SimpleNamespace(peer_id=mate) for mate in mates])
    looking = keeper._look_for_a_rival(state, plan, ())
    if commits:
        asyncio.run(looking)
    else:
        with pytest.raises(RoundVoid, match="held the round again"):
            asyncio.run(looking)
