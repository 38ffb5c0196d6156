"""A swarm on an event clock: no processes, no network, no waiting.

Every decision is the product's own code: which tick it is, what is pending, who has a quorum, the plan and its shares,
when a reducer closes, who is not trusted, when to try again, which base is the swarm's. Between the decisions stand
models: of transfers (``simulated_round.py``), of matchmaking (everybody with the same base finds one leader, who sends
every member everybody's announcement over its own line) and of records (a change is seen by all after one interval of
reading). The same seed gives the same swarm.

What it does not show: the DHT's delays and failures, lost packets, the time that programs take to start and to compute
anything but inner steps, clocks that disagree, partitions, lies; groups of two minds about who leads. All peers know
the same at the same moment, and a dead one is found out by all at once.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dht_config.manifest import RunManifest
from dht_config.records import MAX_SPANS
from p2p_trainer.scene import EmulatedPeer, Moment
from p2p_trainer.simulated_peer import MadeBase, SimulatedPeer, Work, peer_id_of
from p2p_trainer.simulated_round import Line, MemberFlow, Participant, RoundFlow, play_round
from peers.attempts import ATTEMPTS, next_attempt, search_times
from peers.bases import FETCHES_AT_ONCE
from peers.clock import Schedule
from peers.closing import RateMeter, Reliability, announced_seconds, closing_times
from peers.codecs import get_codec
from peers.lineage import Claim, choose_base, has_quorum
from peers.messages import MAX_GROUP_SIZE, AveragedPart, extend_history
from peers.presence import RECORD_SECONDS, refresh_seconds
from peers.reducer import Rules
from peers.round_plan import GroupMember, RoundPlan, element_samples, plan_round, receipt_for
from peers.rounds import REDUCER_DISTRUST_CYCLES, REDUCER_DISTRUST_DOUBLINGS
from peers.weighting import get_weighting

DONORS_AT_ONCE = 4
BASE_BYTES_PER_ELEMENT = 8
"""A base and its outer momentum."""

EventListener = Callable[[float, SimulatedPeer, str, Mapping[str, Any]], None]
"""Given the time in seconds, the peer, and an event of ``metrics.jsonl`` with its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmModel:
    """What of a manifest a simulation plays."""

    schedule: Schedule
    sizes: tuple[int, ...]
    """Elements of each fragment."""
    rules: Rules
    lead_seconds: float
    target_group_size: int
    part_elements: int
    announcement_bytes: int = 0
    """What a leader sends every member of every member."""
    records_are_readable: bool = True
    """Whether the DHT can give everybody's records to anybody."""

    @classmethod
    def of(cls, manifest: RunManifest, sizes: Sequence[int], **others: Any) -> SwarmModel:
        averaging = manifest.averaging
        return cls(
            schedule=Schedule(
                start_seconds=0.0, tick_seconds=manifest.run.tick_seconds, fragments=manifest.run.fragments
            ),
            sizes=tuple(sizes),
            rules=Rules(
                codec=get_codec(averaging.codec),
                answer_codec=get_codec(averaging.answer_codec),
                weighting=get_weighting(averaging.weighting),
                batch_size=manifest.inner_optimizer.batch_size,
            ),
            lead_seconds=averaging.matchmaking_seconds,
            target_group_size=averaging.target_group_size,
            part_elements=max(1, averaging.part_bytes // 4),
            **others,
        )


@dataclass(slots=True, kw_only=True)
class _Brought:
    """What a peer brings to one tick's round."""

    peer: SimulatedPeer
    start: int
    member: GroupMember
    report: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Tick:
    """One tick's round, through all its attempts."""

    number: int
    fragment: int
    begins: float
    waiting: dict[float, list[_Brought]] = field(default_factory=dict)
    """Those that meet again, by when."""


class SimulatedSwarm:
    """Peers, their rounds, and the queue of what happens next.

    :param work: makes what a peer trains, from its index among the peers and its peer id's bytes
    :param average: makes what ``MadeBase.average`` holds, from the plan, who is in it, and the members' peers
    """

    def __init__(
        self,
        model: SwarmModel,
        peers: Sequence[EmulatedPeer],
        work: Callable[[int, bytes], Work],
        *,
        seed: int = 0,
        average: Callable[[RoundPlan, RoundFlow, Sequence[SimulatedPeer]], Any] | None = None,
        listener: EventListener | None = None,
    ) -> None:
        self.model, self.schedule = model, model.schedule
        self._average, self._listener = average, listener
        self._chance = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.now = 0.0
        self.versions = [0] * len(model.sizes)
        """The newest of each fragment."""
        self.rounds_committed = 0
        """Ticks that made a base."""
        self.group_sizes: list[int] = []
        """Of the rounds that made one."""
        self.round_seconds: list[float] = []
        """From the tick to each member's commit."""
        self.matchmaking_bytes = 0
        self._visible: list[dict[str, Claim]] = [{} for _ in model.sizes]
        self._choices: list[dict[object, Claim | None]] = [{} for _ in model.sizes]
        self._record_until: dict[str, float] = {}
        """Of peers that ended without a goodbye: until when the others count on them."""
        cycle = self.schedule.cycle_seconds
        self.peers: list[SimulatedPeer] = []
        for index, emulated in enumerate(peers):
            peer_id = peer_id_of(seed, emulated.name)
            self.peers.append(
                SimulatedPeer(
                    emulated=emulated,
                    peer_id=peer_id,
                    id_text=str(peer_id),
                    work=work(index, peer_id.to_bytes()),
                    step_seconds=model.rules.batch_size / emulated.samples_per_second,
                    reducers=Reliability(REDUCER_DISTRUST_CYCLES * cycle, REDUCER_DISTRUST_DOUBLINGS),
                    moments=deque(emulated.life.moments()),
                )
            )
        self._by_id = {peer.id_text: peer for peer in self.peers}

    def run(self, seconds: float) -> None:
        """Play the swarm's life from 0, when those that are there from the beginning train, to ``seconds``."""
        for peer in self.peers:
            if peer.emulated.life.begins_with_training:
                peer.present = peer.trains = peer.announced = True
                peer.starts = 1
                for fragment, holding in enumerate(peer.work.holdings):
                    self._visible[fragment][peer.id_text] = holding.claim
                self._tell(peer, "training_started", processed_samples=0)
            self._next_moment(peer)
        # As in the product, the first round is one for which there is time to look for a group.
        self._at(max(0.0, self.schedule.begins(1) - self.model.lead_seconds), partial(self._begin_tick, 1))
        while self._queue and self._queue[0][0] <= seconds:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = seconds
        for peer in self.peers:
            peer.advance(seconds)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (max(when, self.now), self._order, action))

    def _tell(self, peer: SimulatedPeer, event: str, **fields: Any) -> None:
        if self._listener is not None:
            self._listener(self.now, peer, event, fields)

    # ------------------------------------------------------------------ lives

    def _next_moment(self, peer: SimulatedPeer) -> None:
        if peer.moments:
            self._at(peer.moments[0].at_seconds, lambda: self._live(peer, peer.moments.popleft()))

    def _live(self, peer: SimulatedPeer, moment: Moment) -> None:
        peer.advance(self.now)
        if moment.action == "start":
            self._start(peer)
        elif moment.action in ("freeze", "thaw"):
            peer.frozen = moment.action == "freeze"
        else:
            self._end(peer, killed=moment.action == "kill")
        self._next_moment(peer)

    def _start(self, peer: SimulatedPeer) -> None:
        peer.present, peer.starts = True, peer.starts + 1
        self._record_until.pop(peer.id_text, None)
        self._catch_up(peer)
        self._begin_if_synced(peer)

    def _begin_if_synced(self, peer: SimulatedPeer) -> None:
        """A newcomer trains, and says so, once it has everything."""
        if peer.trains or peer.fetching:
            return
        if any(self._better_claim(peer, fragment) is not None for fragment in range(len(self.model.sizes))):
            self._catch_up(peer)
            return
        peer.trains, peer.trained_until = True, self.now
        self._tell(peer, "training_started", processed_samples=peer.samples)
        self._at(self.now + refresh_seconds(self.schedule.tick_seconds), partial(self._announce, peer, peer.starts))

    def _announce(self, peer: SimulatedPeer, start: int) -> None:
        if peer.starts == start and peer.trains:
            peer.announced = True
            for fragment, holding in enumerate(peer.work.holdings):
                self._see(peer, fragment, holding.claim)

    def _end(self, peer: SimulatedPeer, *, killed: bool) -> None:
        if killed:
            # Its last checkpoint is of its last commit, here; what came after is gone with the machine.
            for holding in peer.work.holdings:
                holding.drop(peer.samples, peer.steps)
            self._record_until[peer.id_text] = self.now + RECORD_SECONDS
        else:
            self._tell(peer, "account")
        peer.present = peer.trains = peer.announced = peer.frozen = False
        peer.busy.clear()
        peer.fetching.clear()
        for fragment in range(len(self.model.sizes)):
            self._visible[fragment].pop(peer.id_text, None)
            self._choices[fragment].clear()

    # ----------------------------------------------------------------- rounds

    def _begin_tick(self, number: int) -> None:
        """Snapshots, in time to find a group by the tick's beginning."""
        begins = self.schedule.begins(number)
        tick = _Tick(number=number, fragment=self.schedule.fragment(number), begins=begins)
        brought = []
        for peer in self.peers:
            if peer.announced and peer.awake:
                one = self._bring(peer, tick)
                if one is not None:
                    brought.append(one)
        self._at(begins, lambda: self._meet(tick, 0, begins, brought))
        following = number + 1
        self._at(self.schedule.begins(following) - self.model.lead_seconds, partial(self._begin_tick, following))

    def _bring(self, peer: SimulatedPeer, tick: _Tick) -> _Brought | None:
        holding = peer.work.holdings[tick.fragment]
        report: dict[str, Any] = {
            "tick": tick.number,
            "fragment": tick.fragment,
            "outcome": "skipped",
            "reason": "",
            "group_size": 0,
            "weight": 0.0,
            "seconds": 0.0,
            "attempts": 0,
            "bytes_sent": 0,
            "bytes_received": 0,
        }
        if tick.fragment in peer.busy:
            self._report(peer, holding.claim, report, "the previous round or a fetch is still under way")
            return None
        if self._better_claim(peer, tick.fragment) is not None:
            self._report(peer, holding.claim, report, "the swarm has moved on; fetching its base first")
            return None
        report["outcome"] = "carried"
        peer.advance(self.now)
        spans = holding.ledger.pending(peer.samples, peer.steps)
        if len(spans) > MAX_SPANS:
            holding.drop(peer.samples, peer.steps)
            self._report(peer, holding.claim, report, "pending in too many pieces; dropped")
            return None
        holding.take(peer.samples, peer.steps, spans)
        peer.busy.add(tick.fragment)
        rate = peer.link_rate.megabits_per_second
        member = GroupMember(
            peer_id=peer.peer_id,
            spans=spans,
            samples=peer.samples,
            steps=peer.steps,
            kilobits_per_second=int(1000 * (rate or 0.0)),
            distrusted=peer.reducers.distrusted(self.now),
        )
        return _Brought(peer=peer, start=peer.starts, member=member, report=report)

    def _report(self, peer: SimulatedPeer, claim: Claim, report: dict[str, Any], reason: str) -> None:
        """Count a tick's outcome for a peer, and tell it."""
        report.update(reason=reason, version=claim.version, digest=claim.digest.hex())
        tally, outcome = peer.tally, report["outcome"]
        tally.committed += outcome == "committed"
        tally.carried += outcome == "carried"
        tally.skipped += outcome == "skipped"
        tally.bytes_sent += report["bytes_sent"]
        tally.bytes_received += report["bytes_received"]
        self._tell(peer, "round", **report)

    def _present(self) -> frozenset[str]:
        """Whom quorums count: those that train, and the dead of whom nobody knows yet."""
        there = {peer.id_text for peer in self.peers if peer.announced}
        return frozenset(there | {peer for peer, until in self._record_until.items() if until > self.now})

    def _meet(self, tick: _Tick, attempt: int, begins: float, brought: Sequence[_Brought]) -> None:
        """Those with the same base find each other, and the group begins its round."""
        by_claim: dict[Claim, list[_Brought]] = {}
        for one in brought:
            if one.peer.awake and one.peer.starts == one.start:
                one.report["attempts"] = attempt + 1
                by_claim.setdefault(one.peer.work.holdings[tick.fragment].claim, []).append(one)
        for candidates in by_claim.values():
            if not self.model.records_are_readable:
                self._give_up(tick, candidates, "nobody's records can be read")
            elif attempt and any(self._better_claim(one.peer, tick.fragment) is not None for one in candidates):
                self._give_up(tick, candidates, "others have made the next base, which is fetched")
            else:
                self._form_group(tick, attempt, begins, candidates)

    def _form_group(self, tick: _Tick, attempt: int, begins: float, candidates: list[_Brought]) -> None:
        averaging = self.model
        self._chance.shuffle(candidates)
        members, turned_away = candidates[:MAX_GROUP_SIZE], candidates[MAX_GROUP_SIZE:]
        self._give_up(tick, turned_away, "every group is full")
        times = [
            search_times(
                begins,
                averaging.lead_seconds,
                self.schedule.cycle_seconds,
                found_nobody=one.peer.found_nobody,
            )
            for one in members
        ]
        # Who offers to begin first leads.
        leader = min(range(len(members)), key=lambda index: times[index].scheduled)
        present = self._present()
        if not has_quorum({one.peer.id_text for one in members}, present) and len(present) > 1:
            self._record_until.clear()  # who ended refuses connections, which is noticed now
            self._lost(tick, attempt, members, self.now, "no group of enough of the training peers came together")
            return
        plan = plan_round(
            group_id=b"simulated" + self._chance.randbytes(8),
            tick=tick.number,
            fragment=tick.fragment,
            size=averaging.sizes[tick.fragment],
            members=[one.member for one in members],
            target_group_size=averaging.target_group_size,
            part_elements=averaging.part_elements,
        )
        led = [members[leader], *members[:leader], *members[leader + 1 :]]
        knows = self._gathered(led, times[leader].scheduled, times[leader].deadline)
        by_id = {one.member.peer_id: one for one in members}
        ordered = [by_id[member.peer_id] for member in plan.members]
        self._hold(tick, attempt, plan, ordered, [knows[one.peer.id_text] for one in ordered])

    def _gathered(self, led: Sequence[_Brought], scheduled: float, deadline: float) -> dict[str, float]:
        """When each member knows the group, infinite for one that gave up before; the leader comes first in ``led``."""
        leader = led[0].peer
        line = Line.of(leader.emulated.link)
        message_bytes = self.model.announcement_bytes * len(led)
        self.matchmaking_bytes += message_bytes * (len(led) - 1)
        knows = {leader.id_text: scheduled}
        sending_seconds = (len(led) - 1) * message_bytes / line.up_bytes_per_second
        for one in led[1:]:
            own = Line.of(one.peer.emulated.link)
            taking_seconds = max(sending_seconds, message_bytes / own.down_bytes_per_second)
            at = scheduled + taking_seconds + line.crossing_seconds + own.crossing_seconds
            one.peer.found_nobody = at > deadline
            knows[one.peer.id_text] = at if at <= deadline else math.inf
        leader.found_nobody = False
        return knows

    def _hold(
        self, tick: _Tick, attempt: int, plan: RoundPlan, ordered: Sequence[_Brought], knows: Sequence[float]
    ) -> None:
        """Play the round from the moment its members know each other, and plan what it ends in."""
        weights = [member.mean_samples(plan.size) for member in plan.members]
        if not sum(weights):
            self._give_up(tick, ordered, "nobody in the group has samples to contribute")
            return
        rules, began = self.model.rules, min(knows)
        transfer_bytes = 2 * rules.codec.encoded_bytes(plan.size)
        slowest_seconds = announced_seconds((member.kilobits_per_second for member in plan.members), transfer_bytes)
        participants = []
        for one, at in zip(ordered, knows, strict=True):
            stops, silent = one.peer.stops_after(self.now)
            times = closing_times(
                one.peer.arrival_times.expected_seconds(transfer_bytes),
                one.peer.round_times.expected_seconds(transfer_bytes),
                slowest_seconds,
                self.schedule.cycle_seconds,
            )
            participants.append(
                Participant(
                    line=Line.of(one.peer.emulated.link, max(1, len(one.peer.busy))),
                    times=times,
                    ready_seconds=at - began,
                    stops_seconds=stops - began,
                    silent=silent or at == math.inf,
                )
            )
        flow = play_round(plan, participants, rules)
        for one in ordered:
            one.peer.work.holdings[tick.fragment].contributes(plan)
        made = self._made(tick, plan, flow, ordered) if any(member.committed for member in flow.members) else None
        for index, (one, result) in enumerate(zip(ordered, flow.members, strict=True)):
            one.report.update(group_size=len(ordered), groups=len(plan.groups), weight=weights[index])
            one.report["weight_share"] = weights[index] / sum(weights)
            if participants[index].ready_seconds == math.inf:
                self._lost(tick, attempt, [one], self.now, "the leader's message came too late")
                continue
            self._at(
                began + result.ended_seconds,
                partial(self._round_over, tick, attempt, plan, one, index, result, made, began + 0.0, transfer_bytes),
            )

    def _made(self, tick: _Tick, plan: RoundPlan, flow: RoundFlow, ordered: Sequence[_Brought]) -> MadeBase:
        """The base that those members make whose answers are whole."""
        parts = tuple(
            AveragedPart(start=start, stop=stop, included=sorted(included))
            for share, included in zip(plan.shares, flow.included, strict=True)
            for start, stop in share.parts
        )
        before = ordered[0].peer.work.holdings[tick.fragment]
        version = before.claim.version + 1
        receipt = receipt_for(plan, parts, version)
        total = before.total_element_samples + element_samples(plan, parts)
        peers = [one.peer for one in ordered]
        return MadeBase(
            plan=plan,
            parts=parts,
            claim=Claim(
                version=version,
                digest=extend_history(before.claim.digest, receipt),
                total_samples=total // plan.size,
            ),
            total_element_samples=total,
            receipt=receipt,
            average=self._average(plan, flow, peers) if self._average is not None else None,
        )

    def _round_over(
        self,
        tick: _Tick,
        attempt: int,
        plan: RoundPlan,
        one: _Brought,
        index: int,
        flow: MemberFlow,
        made: MadeBase | None,
        began: float,
        transfer_bytes: int,
    ) -> None:
        """A member has the average, or knows that it will not."""
        peer, holding = one.peer, one.peer.work.holdings[tick.fragment]
        if not peer.awake or peer.starts != one.start:
            return
        peer.advance(self.now)
        one.report["bytes_sent"] += flow.bytes_sent
        one.report["bytes_received"] += flow.bytes_received
        peer.round_times.note(transfer_bytes, self.now - began)
        for arrived in flow.arrivals:
            peer.arrival_times.note(transfer_bytes, arrived)
        meter = RateMeter(began)
        meter.note(self.now, up=flow.bytes_sent, down=flow.bytes_received)
        peer.link_rate.note(meter.bytes_per_second)
        ids = [member.peer_id.to_bytes() for member in plan.members]
        peer.reducers.judge([ids[other] for other in flow.answered], [ids[other] for other in flow.failed], self.now)
        if not flow.committed or made is None:
            for other in flow.failed:  # whose machine refuses connections is found to have ended
                self._record_until.pop(str(plan.members[other].peer_id), None)
            self._lost(tick, attempt, [one], self.now, "a reducer was lost, or too few came")
            return
        holding.commit(made, index)
        peer.busy.discard(tick.fragment)
        one.report.update(outcome="committed", seconds=self.now - began)
        inside = all(index in part.included for part in made.parts)
        self._report(peer, holding.claim, one.report, "" if inside else "closed without us; carried on")
        if holding.claim.version > self.versions[tick.fragment]:
            self.versions[tick.fragment] = holding.claim.version
            self.rounds_committed += 1
            self.group_sizes.append(len(plan.members))
        self.round_seconds.append(self.now - tick.begins)
        self._tell_of_base(peer, tick.fragment)

    def _lost(self, tick: _Tick, attempt: int, brought: Sequence[_Brought], now: float, reason: str) -> None:
        """An attempt came to nothing for these; another one may do better."""
        for one in brought:
            one.report["reason"] = reason
            again = next_attempt(
                tick.begins,
                now,
                self.model.lead_seconds,
                self.schedule.cycle_seconds,
                one.peer.round_times.expected_seconds(1) or 0.0,
            )
            if again is None or attempt == ATTEMPTS - 1:
                self._give_up(tick, [one], reason)
            elif again in tick.waiting:
                tick.waiting[again].append(one)
            else:
                tick.waiting[again] = [one]
                self._at(again, partial(self._meet_again, tick, attempt + 1, again))

    def _meet_again(self, tick: _Tick, attempt: int, again: float) -> None:
        self._meet(tick, attempt, again, tick.waiting.pop(again))

    def _give_up(self, tick: _Tick, brought: Sequence[_Brought], reason: str) -> None:
        for one in brought:
            if one.peer.starts == one.start and one.peer.present:
                one.peer.busy.discard(tick.fragment)
                self._report(one.peer, one.peer.work.holdings[tick.fragment].claim, one.report, reason)
                self._catch_up(one.peer)

    # ------------------------------------------------------------------ bases

    def _tell_of_base(self, peer: SimulatedPeer, fragment: int) -> None:
        """The others read of a peer's new base after a while, and those behind begin to fetch it."""
        claim = peer.work.holdings[fragment].claim
        delay = refresh_seconds(self.schedule.tick_seconds)
        self._at(self.now + delay, partial(self._see_and_catch_up, peer, fragment, claim))

    def _see(self, peer: SimulatedPeer, fragment: int, claim: Claim) -> None:
        self._visible[fragment][peer.id_text] = claim
        self._choices[fragment].clear()

    def _see_and_catch_up(self, peer: SimulatedPeer, fragment: int, claim: Claim) -> None:
        if not peer.announced or peer.work.holdings[fragment].claim != claim:
            return
        self._see(peer, fragment, claim)
        for other in self.peers:
            if other.present and other.work.holdings[fragment].claim.version < claim.version:
                self._catch_up(other)

    def _better_claim(self, peer: SimulatedPeer, fragment: int) -> Claim | None:
        """What the product would have this peer fetch. Peers whose situation is the same decide the same."""
        if not self.model.records_are_readable:
            return None
        holding = peer.work.holdings[fragment]
        possible = self.schedule.possible_versions(self.now)
        mates, backers = holding.unresolved_mates, holding.backers
        situation = (holding.claim, possible, bool(mates), bool(backers), self._visible[fragment].get(peer.id_text))
        choices = self._choices[fragment]
        if situation not in choices:
            choices[situation] = choose_base(
                holding.claim,
                {other: claim for other, claim in self._visible[fragment].items() if other != peer.id_text},
                possible_versions=possible,
                groupmates=mates,
                backers=backers,
                ancestors=holding.ancestors,
            )
        return choices[situation]

    def _catch_up(self, peer: SimulatedPeer) -> None:
        """Begin to fetch what the swarm has that this peer has not, a few fragments at once."""
        if not peer.awake:
            return
        for fragment in range(len(self.model.sizes)):
            if len(peer.fetching) >= FETCHES_AT_ONCE or fragment in peer.busy:
                continue
            claim = self._better_claim(peer, fragment)
            if claim is None:
                continue
            donors = [
                other
                for other in self.peers
                if other.announced and other.awake and other.work.holdings[fragment].claim == claim
            ]
            if not donors:
                continue
            chosen = self._chance.sample(donors, min(DONORS_AT_ONCE, len(donors)))
            size_bytes = BASE_BYTES_PER_ELEMENT * self.model.sizes[fragment]
            own, theirs = Line.of(peer.emulated.link), [Line.of(donor.emulated.link) for donor in chosen]
            rate = min(own.down_bytes_per_second, sum(line.up_bytes_per_second for line in theirs))
            crossing_seconds = own.crossing_seconds + max(line.crossing_seconds for line in theirs)
            fetched = chosen[0].work.holdings[fragment].frozen()
            peer.busy.add(fragment)
            peer.fetching.add(fragment)
            # Once there and back for what belongs to the base, once for its bytes.
            self._at(
                self.now + 4 * crossing_seconds + size_bytes / rate,
                partial(self._fetched, peer, peer.starts, fragment, fetched, size_bytes),
            )

    def _fetched(self, peer: SimulatedPeer, start: int, fragment: int, fetched: Any, size_bytes: int) -> None:
        if not peer.present or peer.starts != start:
            return
        if peer.frozen:  # it goes on when it thaws
            self._at(self.now + 1.0, partial(self._fetched, peer, start, fragment, fetched, size_bytes))
            return
        peer.advance(self.now)
        holding = peer.work.holdings[fragment]
        before = holding.claim.version
        holding.adopt(fetched)
        peer.busy.discard(fragment)
        peer.fetching.discard(fragment)
        peer.tally.bytes_fetched += size_bytes
        self._tell(
            peer,
            "rebase",
            fragment=fragment,
            from_version=before,
            to_version=holding.claim.version,
            digest=holding.claim.digest.hex(),
            bytes_received=size_bytes,
        )
        if peer.announced:
            self._tell_of_base(peer, fragment)
        self._catch_up(peer)
        self._begin_if_synced(peer)
