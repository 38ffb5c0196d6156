"""Which base a simulated swarm has, and how peers that are behind come by it.

The choice is the product's (``peers/lineage.py``). A fetch takes as long as its bytes over the slower of the fetcher's
line and all its donors' together. What it does not show: donors that are asked by many at once, or that fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from p2p_trainer.simulation.simulated_peer import SimulatedPeer
from p2p_trainer.simulation.simulated_round import Line
from p2p_trainer.simulation.simulated_world import World
from peers.bases import FETCHES_AT_ONCE
from peers.lineage import Claim, choose_base, in_step

DONORS_AT_ONCE = 4
BASE_BYTES_PER_ELEMENT = 8
"""A base and its outer momentum."""


class Bases:
    """What everybody announces, as far as everybody has read it.

    :param on_fetched: told of a peer that has put a fetched base in place
    """

    def __init__(self, world: World, on_fetched: Callable[[SimulatedPeer], None]) -> None:
        self._world, self._on_fetched = world, on_fetched
        fragments = len(world.model.sizes)
        self._seen: list[dict[str, Claim]] = [{} for _ in range(fragments)]
        self._choices: list[dict[object, Claim | None]] = [{} for _ in range(fragments)]
        self._looks_at: float | None = None
        self.cadences: dict[str, int] = {}
        """What everybody announces. Known to all at once."""

    def announce(self, peer: SimulatedPeer) -> None:
        """All its claims, and its cadence, are known to all."""
        self.cadences[peer.id_text] = peer.cadence.announced
        for fragment, holding in enumerate(peer.work.holdings):
            self._see(peer, fragment, holding.claim)

    def announce_cadence(self, peer: SimulatedPeer) -> None:
        self.cadences[peer.id_text] = peer.cadence.announced
        for choices in self._choices:
            choices.clear()

    def forget(self, peer: SimulatedPeer) -> None:
        self.cadences.pop(peer.id_text, None)
        for seen, choices in zip(self._seen, self._choices, strict=True):
            seen.pop(peer.id_text, None)
            choices.clear()

    def _see(self, peer: SimulatedPeer, fragment: int, claim: Claim) -> None:
        self._seen[fragment][peer.id_text] = claim
        self._choices[fragment].clear()

    def moved_on(self, peer: SimulatedPeer, fragment: int) -> None:
        """A peer has another base: the others read of it after a while, and those behind begin to fetch it."""
        claim = peer.work.holdings[fragment].claim

        def read() -> None:
            if peer.announced and peer.work.holdings[fragment].claim == claim:
                self._see(peer, fragment, claim)
                if self._looks_at is None:
                    self._looks_at = self._world.now
                    # Of many peers with the same news, all are read before anybody decides.
                    self._world.at(self._world.now + self._world.news_seconds / 4, self._look)

        self._world.at(self._world.now + self._world.news_seconds, read)

    def _look(self) -> None:
        self._looks_at = None
        for peer in self._world.peers:
            self.catch_up(peer)

    def better_claim(self, peer: SimulatedPeer, fragment: int) -> Claim | None:
        """What the product would have this peer fetch. Peers whose situation is the same decide the same, once."""
        world = self._world
        if not world.model.records_are_readable:
            return None
        holding, seen = peer.work.holdings[fragment], self._seen[fragment]
        possible = world.schedule.possible_versions(world.now)
        mates = holding.unresolved_mates
        backers = holding.backers if world.now < holding.backed_until else frozenset[str]()
        own_seen, own_cadence = seen.get(peer.id_text), self.cadences.get(peer.id_text)
        situation = (holding.claim, possible, bool(mates), bool(backers), own_seen, own_cadence)
        choices = self._choices[fragment]
        if situation not in choices:
            claims = {other: claim for other, claim in seen.items() if other != peer.id_text}
            votes = in_step(claims, {other: self.cadences[other] for other in claims})
            choices[situation] = choose_base(
                holding.claim,
                votes,
                possible_versions=possible,
                groupmates=mates,
                backers=backers - (claims.keys() - votes.keys()),
                ancestors=holding.ancestors,
            )
        return choices[situation]

    def catch_up(self, peer: SimulatedPeer) -> None:
        """Begin to fetch what the swarm has and this peer has not, a few fragments at once."""
        if not peer.awake:
            return
        for fragment in range(len(self._world.model.sizes)):
            if len(peer.fetching) < FETCHES_AT_ONCE and fragment not in peer.busy:
                claim = self.better_claim(peer, fragment)
                if claim is not None and self._is_time_for(peer, fragment, claim):
                    self._fetch(peer, fragment, claim)

    def _is_time_for(self, peer: SimulatedPeer, fragment: int, claim: Claim) -> bool:
        """Whether to fetch a better base now. Who skips rounds waits for the base that its next round starts from."""
        now = self._world.now
        if peer.heard_of.get(fragment, (None, now))[0] != claim:
            peer.heard_of[fragment] = (claim, now)
        return not peer.trains or peer.cadence.wants_base(fragment, peer.heard_of[fragment][1], now)

    def _fetch(self, peer: SimulatedPeer, fragment: int, claim: Claim) -> None:
        world = self._world
        donors = [
            other
            for other in world.peers
            if other.announced
            and other.awake
            and other.work.holdings[fragment].claim == claim
            and not (peer.emulated.behind_nat and other.emulated.behind_nat)  # neither can dial the other
        ]
        if not donors:
            return
        chosen = world.chance.sample(donors, min(DONORS_AT_ONCE, len(donors)))
        size_bytes = BASE_BYTES_PER_ELEMENT * world.model.sizes[fragment]
        own, theirs = Line.of(peer.emulated.link), [Line.of(donor.emulated.link) for donor in chosen]
        rate = min(own.down_bytes_per_second, sum(line.up_bytes_per_second for line in theirs))
        crossing_seconds = own.crossing_seconds + max(line.crossing_seconds for line in theirs)
        fetched = chosen[0].work.holdings[fragment].frozen()
        peer.busy.add(fragment)
        peer.fetching.add(fragment)
        # Once there and back for what belongs to the base, once for its bytes.
        world.at(
            world.now + 4 * crossing_seconds + size_bytes / rate,
            partial(self._fetched, peer, peer.starts, fragment, fetched, size_bytes),
        )

    def _fetched(self, peer: SimulatedPeer, start: int, fragment: int, fetched: Any, size_bytes: int) -> None:
        world = self._world
        if not peer.present or peer.starts != start:
            return
        if peer.frozen:  # it goes on when it thaws
            world.at(world.now + 1.0, partial(self._fetched, peer, start, fragment, fetched, size_bytes))
            return
        peer.advance(world.now)
        holding = peer.work.holdings[fragment]
        before = holding.claim.version
        holding.adopt(fetched)
        peer.busy.discard(fragment)
        peer.fetching.discard(fragment)
        peer.tally.bytes_fetched += size_bytes
        world.tell(
            peer,
            "rebase",
            fragment=fragment,
            from_version=before,
            to_version=holding.claim.version,
            digest=holding.claim.digest.hex(),
            bytes_received=size_bytes,
        )
        if peer.announced:
            self.moved_on(peer, fragment)
        self.catch_up(peer)
        self._on_fetched(peer)
