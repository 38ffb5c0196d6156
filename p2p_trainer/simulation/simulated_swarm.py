"""A swarm on an event clock: no processes, no network, no waiting.

Every decision is the product's own code: which tick it is, what is pending, who has a quorum, the plan and its shares,
when a reducer closes, who is not trusted, when to try again, which base is the swarm's. Between the decisions stand
models: of transfers (``simulated_round.py``), of matchmaking (everybody with the same base finds one leader, who sends
every member everybody's announcement over its own line) and of records (a change is seen by all after one interval of
reading). The same seed gives the same swarm.

A peer behind NAT follows, reduces nothing, and sends no base to another one behind NAT.

What it does not show: bootstrap peers, so that peers behind NAT alone hold no rounds; limits of memory; the DHT's
delays and failures, lost packets, the time that programs take to start and to compute anything but inner steps, clocks
that disagree, partitions, lies; groups of two minds about who leads. All peers know the same at the same moment, and a
dead one is found out by all at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from p2p_trainer.rehearsal.scene import EmulatedPeer, Moment
from p2p_trainer.simulation.simulated_bases import Bases
from p2p_trainer.simulation.simulated_peer import SimulatedPeer, Work, peer_id_of
from p2p_trainer.simulation.simulated_ticks import Average, Ticks
from p2p_trainer.simulation.simulated_world import EventListener, SwarmModel, World
from peers.cadence import Cadence
from peers.closing import Reliability
from peers.own_records import RECORD_SECONDS
from peers.rounds import REDUCER_DISTRUST_CYCLES, REDUCER_DISTRUST_DOUBLINGS


class SimulatedSwarm:
    """Peers and their lives.

    :param work: makes what a peer trains, from its index among the peers and its peer id's bytes
    :param average: for tensors; without it rounds are counted only
    """

    def __init__(
        self,
        model: SwarmModel,
        peers: Sequence[EmulatedPeer],
        work: Callable[[int, bytes], Work],
        *,
        seed: int = 0,
        average: Average | None = None,
        listener: EventListener | None = None,
    ) -> None:
        self.world = World(model, seed, listener)
        self._bases = Bases(self.world, self._begin_if_synced)
        self.ticks = Ticks(self.world, self._bases, self._known, self._find_dead, average)
        self._record_until: dict[str, float] = {}
        """Of peers that ended or froze without a goodbye: until when the others count on them."""
        for index, emulated in enumerate(peers):
            peer_id = peer_id_of(seed, emulated.name)
            self.world.peers.append(
                SimulatedPeer(
                    emulated=emulated,
                    peer_id=peer_id,
                    id_text=str(peer_id),
                    work=work(index, peer_id.to_bytes()),
                    step_seconds=model.rules.batch_size / emulated.samples_per_second,
                    reducers=Reliability(
                        REDUCER_DISTRUST_CYCLES * model.schedule.cycle_seconds, REDUCER_DISTRUST_DOUBLINGS
                    ),
                    moments=deque(emulated.life.moments()),
                    cadence=Cadence(model.schedule, model.averaging.codec),
                )
            )

    @property
    def peers(self) -> Sequence[SimulatedPeer]:
        return self.world.peers

    def run(self, seconds: float) -> None:
        """Play from 0, when those that are there from the beginning train, to ``seconds``."""
        world = self.world
        for peer in world.peers:
            if peer.emulated.life.begins_with_training:
                peer.present = peer.trains = peer.announced = True
                peer.starts = 1
                self._bases.announce(peer)
                world.tell(peer, "join", processed_samples=0)
                world.tell(peer, "training_started", processed_samples=0)
            self._next_moment(peer)
        # As in the product, the first round is one for which there is time to look for a group.
        first = world.schedule.next_tick(model_lead := world.model.lead_seconds)
        world.at(world.schedule.begins(first) - model_lead, partial(self.ticks.begin_tick, first))
        world.run(seconds)
        for peer in world.peers:
            peer.advance(seconds)

    def _next_moment(self, peer: SimulatedPeer) -> None:
        if peer.moments:
            self.world.at(peer.moments[0].at_seconds, lambda: self._live(peer, peer.moments.popleft()))

    def _live(self, peer: SimulatedPeer, moment: Moment) -> None:
        peer.advance(self.world.now)
        if moment.action == "start":
            self._start(peer)
        elif moment.action == "freeze":
            peer.frozen = True
            self._record_until[peer.id_text] = self.world.now + RECORD_SECONDS
        elif moment.action == "thaw":
            peer.frozen = False
            self._record_until.pop(peer.id_text, None)
            self._bases.catch_up(peer)
        else:
            self._end(peer, killed=moment.action == "kill")
        self._next_moment(peer)

    def _start(self, peer: SimulatedPeer) -> None:
        peer.present, peer.starts = True, peer.starts + 1
        peer.trained_until = self.world.now
        self.world.tell(peer, "join", processed_samples=peer.samples)
        self._record_until.pop(peer.id_text, None)
        self._bases.catch_up(peer)
        self._begin_if_synced(peer)

    def _begin_if_synced(self, peer: SimulatedPeer) -> None:
        """A newcomer trains, and says so, once it has everything."""
        world = self.world
        behind = (self._bases.better_claim(peer, fragment) for fragment in range(len(world.model.sizes)))
        if peer.trains or peer.fetching or any(claim is not None for claim in behind):
            return
        peer.trains = True
        world.tell(peer, "training_started", processed_samples=peer.samples)
        world.at(world.now + world.news_seconds, partial(self._announce, peer, peer.starts))

    def _announce(self, peer: SimulatedPeer, start: int) -> None:
        if peer.starts == start and peer.trains:
            peer.announced = True
            self._bases.announce(peer)

    def _end(self, peer: SimulatedPeer, *, killed: bool) -> None:
        now = self.world.now
        self.world.tell(peer, "account" if killed else "leave")
        for holding in peer.work.holdings:
            holding.restarts()
            if killed:  # its last checkpoint is of its last commit, here; what came after is gone with the machine
                holding.drop(peer.samples, peer.steps)
        if killed:
            self._record_until[peer.id_text] = now + RECORD_SECONDS
        peer.present = peer.trains = peer.announced = peer.frozen = False
        peer.busy.clear()
        peer.sending.clear()
        peer.heard_of.clear()
        peer.cadence = Cadence(self.world.schedule, self.world.model.averaging.codec)
        peer.fetching.clear()
        self._bases.forget(peer)

    def _known(self) -> dict[str, int]:
        """The cadences of those that train, as everybody knows of them.

        Without the frozen whose records have run out; with the dead of whom nobody knows yet.
        """
        now = self.world.now
        return {
            peer.id_text: peer.cadence.announced
            for peer in self.world.peers
            if (peer.announced or peer.id_text in self._record_until)
            and self._record_until.get(peer.id_text, math.inf) > now
        }

    def _find_dead(self) -> None:
        dead = {peer.id_text for peer in self.world.peers if not peer.present}
        for peer in dead & set(self._record_until):
            del self._record_until[peer]
