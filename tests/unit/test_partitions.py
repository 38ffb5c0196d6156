"""A swarm that breaks into parts and heals, any number of times: one line, every sample once, nobody to and fro.

Peers are real in what they decide and account for (``lineage``, ``company``, ``fragment_state`` with its ledger and
receipts); records, fetches and rounds within a part arrive, between parts nothing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from test_fragment_state import SIZE, Peer, hold

from peers.company import Company
from peers.lineage import Claim, choose_base, has_quorum
from peers.own_records import RECORD_SECONDS

TICK_SECONDS = RECORD_SECONDS / 3
TOGETHER_TICKS = 2
HEALED_TICKS = 3
"""After so many all are on one base."""
QUIET_TICKS = 4
"""For so many more nobody fetches anything any more."""
PEERS = 5
PLENTY = 2**40

Parts = tuple[int, ...]
"""Of each peer, in which part of the swarm it is."""
TOGETHER: Parts = (0,) * PEERS


@dataclass
class Seen:
    """What one peer knows of another."""

    claim: Claim
    expires: float


@dataclass
class Participant:
    """One peer, and what it knows of the others."""

    peer: Peer
    rate: int
    seen: dict[str, Seen] = field(default_factory=dict)
    company: Company = field(default_factory=lambda: Company(float("-inf")))
    fetched: int = 0

    @property
    def name(self) -> str:
        return str(self.peer.id)

    @property
    def claim(self) -> Claim:
        return self.peer.state.claim

    def standing(self, now: float) -> dict[str, Claim]:
        return {name: seen.claim for name, seen in self.seen.items() if seen.expires > now}

    def may_make_a_version(self, members: set[str], now: float) -> bool:
        """As ``Presence`` decides it."""
        if not has_quorum(members, {self.name, *self.standing(now)}):
            return False
        return len(members) > 1 or not self.company.lost(())


class BrokenSwarm:
    """Five peers, one fragment, and a network that may be in parts."""

    def __init__(self, rates: Sequence[int]) -> None:
        self.everybody = [Participant(peer=Peer(index + 1), rate=rate) for index, rate in enumerate(rates)]
        self.now = 0.0
        self.lone_versions = 0

    def tick(self, parts: Parts, absent: int | None = None) -> None:
        """Everybody trains, records are read, bases fetched, and every part tries to hold a round.

        :param absent: who contributes to its round, and gets no answer
        """
        self.now += TICK_SECONDS
        for one in self.everybody:
            one.peer.train(one.rate)
        groups = [[self.everybody[index] for index in range(PEERS) if parts[index] == part] for part in set(parts)]
        for part in groups:
            self._read_records(part)
        for part in groups:
            self._fetch(part)
        for part in groups:
            self._hold_rounds(part, absent)
        for one in self.everybody:
            one.peer.check()

    def _read_records(self, part: Sequence[Participant]) -> None:
        for one in part:
            others = [other for other in part if other is not one]
            for other in others:
                one.seen[other.name] = Seen(claim=other.claim, expires=self.now + RECORD_SECONDS)
            if others:
                profile: Any = SimpleNamespace(profile=SimpleNamespace(status="training"))
                one.company.news(dict.fromkeys(one.standing(self.now), profile), self.now)

    def _fetch(self, part: Sequence[Participant]) -> None:
        """All decide on what they have read; a donor serves what it announced."""
        wanted = []
        for one in part:
            state = one.peer.state
            claim = choose_base(
                one.claim,
                one.standing(self.now),
                possible_versions=PLENTY,
                groupmates=state.unresolved_mates,
                ancestors=state.ancestors,
                backers=state.backers if self.now < state.backed_until else (),
            )
            donors = [other for other in part if other.claim == claim]
            if claim is not None and donors:
                wanted.append((one, _copy_of(donors[0].peer)))
        for one, donor in wanted:
            one.peer.snapshot()
            one.peer.adopt(donor)
            one.fetched += 1

    def _hold_rounds(self, part: Sequence[Participant], absent: int | None) -> None:
        for claim in {one.claim for one in part}:
            group = [one for one in part if one.claim == claim]
            members = {one.name for one in group}
            if not all(one.may_make_a_version(members, self.now) for one in group):
                continue
            self.lone_versions += len(group) == 1
            everybody = list(range(len(group)))
            committing = [index for index in everybody if self.everybody.index(group[index]) != absent]
            if not committing:
                continue
            for one in group:
                one.peer.state.unresolved_mates |= members - {one.name}
            hold([one.peer for one in group], [everybody], committing)
            for index in committing:
                group[index].peer.state.backed_until = self.now + RECORD_SECONDS


def _copy_of(donor: Peer) -> Any:
    """A donor as it is now: it may move on itself while others fetch from it."""
    frozen, claim = donor.state.frozen(), donor.state.claim
    state = SimpleNamespace(
        claim=claim,
        frozen=lambda: frozen,
        base=donor.state.base.clone(),
        outer_state=donor.state.outer_state.clone(),
    )
    return SimpleNamespace(state=state)


def assert_every_credit_is_in_the_base_once(swarm: BrokenSwarm) -> None:
    credited = sum(one.peer.counts[0] for one in swarm.everybody)
    totals = {one.peer.state.total_element_samples for one in swarm.everybody}
    assert totals == {credited}
    for one in swarm.everybody:
        assert sum(one.peer.counts) == one.peer.samples * SIZE


stretches = st.lists(
    st.tuples(
        st.tuples(*[st.integers(0, 2)] * PEERS),
        st.integers(1, 8),
        st.none() | st.integers(0, PEERS - 1),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(stretches=stretches, rates=st.tuples(*[st.integers(1, 9)] * PEERS))
def test_whatever_parts_a_swarm_breaks_into_it_heals_to_one_line_with_every_sample_once(
    stretches: list[tuple[Parts, int, int | None]], rates: tuple[int, ...]
) -> None:
    swarm = BrokenSwarm(rates)
    for _ in range(TOGETHER_TICKS):
        swarm.tick(TOGETHER)
    for parts, ticks, absent in stretches:
        for number in range(ticks):
            swarm.tick(parts, absent if number == 0 else None)
    assert swarm.lone_versions == 0, "nobody who is cut off makes versions alone"
    before = [one.claim for one in swarm.everybody]
    common = max(set(before), key=before.count)
    supporters = [one for one in swarm.everybody if one.claim == common]
    versions = common.version

    for _ in range(HEALED_TICKS):
        swarm.tick(TOGETHER)
    assert len({one.claim for one in swarm.everybody}) == 1
    fetched = [one.fetched for one in swarm.everybody]
    for _ in range(QUIET_TICKS):
        versions = swarm.everybody[0].claim.version
        swarm.tick(TOGETHER)
        assert len({one.claim for one in swarm.everybody}) == 1
        assert swarm.everybody[0].claim.version == versions + 1, "they make versions together"
    assert fetched == [one.fetched for one in swarm.everybody], "nobody goes to and fro"
    if 2 * len(supporters) > PEERS:
        assert all(common.digest in one.peer.state.ancestors for one in swarm.everybody), "most peers' line went on"
    assert_every_credit_is_in_the_base_once(swarm)
