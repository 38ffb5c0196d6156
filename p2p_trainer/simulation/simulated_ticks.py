"""Every tick's round in a simulated swarm, from the snapshot to the commit.

Whom a quorum counts, who reduces what, when to try again and whom not to trust is the product's code; the round itself
is played by ``simulated_round.py``. Matchmaking is a model: everybody with the same base finds the one leader, the
first that offers to begin, and it sends every member everybody's announcement over its own line; who has it too late is
not in the round, although the plan counts on it. What it does not show: several leaders at once, and groups of the one
that met while the others still looked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dht_config.records import MAX_SPANS
from p2p_trainer.simulation.simulated_bases import BASE_BYTES_PER_ELEMENT, Bases
from p2p_trainer.simulation.simulated_peer import MadeBase, SimulatedPeer
from p2p_trainer.simulation.simulated_round import Line, MemberFlow, Participant, RoundFlow, play_round
from p2p_trainer.simulation.simulated_world import World
from peers.attempts import ATTEMPTS, LEAST_LEAD, next_attempt, search_times, telling_seconds
from peers.cadence import is_due, pace
from peers.closing import announced_seconds, closing_times
from peers.line import LineRate, LineUse, limiting, line_use
from peers.lineage import Claim, has_quorum
from peers.messages import MAX_GROUP_SIZE, AveragedPart, extend_history
from peers.own_records import RECORD_SECONDS
from peers.round_plan import GroupMember, RoundPlan, element_samples, plan_round, receipt_for

Average = Callable[[RoundPlan, RoundFlow, Sequence[SimulatedPeer]], Any]
"""Makes what ``MadeBase.average`` holds, from the plan, who is in it, and the members in the plan's order."""


ASLEEP = "it slept through the round"
NOBODY_TO_DIAL = "nobody of them can be dialled; bootstrap peers, which would average for them, are not simulated"


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
    held: bool
    """Whether enough peers for a next version take part in it."""
    pace: int
    """In which of its rounds a fragment has so many."""
    waiting: dict[float, list[_Brought]] = field(default_factory=dict)
    """Those that meet again, by when."""


class Ticks:
    """Holds the rounds.

    :param known: the training peers that everybody knows of, with their cadences: what a quorum is counted against
    :param find_dead: somebody failed: whose machine refuses connections is known to have ended from now on
    """

    def __init__(
        self,
        world: World,
        bases: Bases,
        known: Callable[[], dict[str, int]],
        find_dead: Callable[[], None],
        average: Average | None,
    ) -> None:
        self._world, self._bases = world, bases
        self._known, self._find_dead = known, find_dead
        self._average = average
        self.group_sizes: list[int] = []
        """Of the rounds that made a base."""
        self.groups = 0
        """That came together, whatever became of their rounds."""
        self.matchmaking_bytes = 0
        """That their leaders sent."""
        self.reasons: Counter[str] = Counter()
        """Why rounds were not committed."""
        self._versions = [0] * len(world.model.sizes)

    def begin_tick(self, number: int) -> None:
        """Snapshots, in time to find a group by the tick's beginning."""
        begins = self._world.schedule.begins(number)
        known = self._known()
        due = {peer for peer, every in known.items() if is_due(self._world.schedule, number, every)}
        tick = _Tick(
            number=number,
            fragment=self._world.schedule.fragment(number),
            begins=begins,
            held=has_quorum(due, known),
            pace=pace(known.values()),
        )
        brought: list[_Brought] = []
        for peer in self._world.peers:
            if peer.announced and peer.awake:
                self._come(peer, tick, brought)
        self._world.at(begins, lambda: self._meet(tick, 0, begins, brought))
        following = number + 1
        lead_seconds = self._world.model.lead_seconds
        self._world.at(self._world.schedule.begins(following) - lead_seconds, partial(self.begin_tick, following))

    def _come(self, peer: SimulatedPeer, tick: _Tick, brought: list[_Brought]) -> None:
        """A peer comes to a tick's round, or says why not; if a base is on its way to it, as late as it can."""
        holding = peer.work.holdings[tick.fragment]
        if peer.cadence.probe(tick.number):
            self._bases.announce_cadence(peer)
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
            "cadence": max(peer.cadence.announced, tick.pace),
            "late_share": 0.0,
            "due": peer.cadence.take_turn(tick.number),
        }
        if not report["due"]:
            self._report(peer, holding.claim, report, "its line is too slow for every round")
        elif not tick.held:
            report["due"] = False
            self._report(peer, holding.claim, report, "most lines are too slow for every round")
        elif tick.fragment in peer.fetching:
            latest = tick.begins - LEAST_LEAD * self._world.model.lead_seconds
            self._world.at(max(self._world.now, latest), partial(self._bring, peer, peer.starts, tick, report, brought))
        else:
            self._bring(peer, peer.starts, tick, report, brought)

    def _bring(
        self, peer: SimulatedPeer, start: int, tick: _Tick, report: dict[str, Any], brought: list[_Brought]
    ) -> None:
        """Its snapshot is taken, and it looks for the others."""
        holding = peer.work.holdings[tick.fragment]
        if not peer.awake or peer.starts != start:
            if peer.starts == start and peer.present:
                self._report(peer, holding.claim, report, ASLEEP)
            return
        if tick.fragment in peer.busy:
            self._report(peer, holding.claim, report, "the previous round or a fetch is still under way")
            if self._world.now < peer.sending.get(tick.fragment, math.inf):  # else others hold it open
                self._missed(peer, tick)
            return
        if self._bases.better_claim(peer, tick.fragment) is not None:
            self._report(peer, holding.claim, report, "the swarm has moved on; fetching its base first")
            self._missed(peer, tick)
            return
        report["outcome"] = "carried"
        peer.advance(self._world.now)
        spans = holding.ledger.pending(peer.samples, peer.steps)
        if len(spans) > MAX_SPANS:
            holding.drop(peer.samples, peer.steps)
            self._report(peer, holding.claim, report, "pending in too many pieces; dropped")
            return
        if not holding.take(peer.samples, peer.steps, spans):
            self._report(peer, holding.claim, report, "the local parameters had diverged; they were set back")
            return
        peer.busy.add(tick.fragment)
        rate = peer.link_rate.megabits_per_second
        member = GroupMember(
            peer_id=peer.peer_id,
            spans=spans,
            samples=peer.samples,
            steps=peer.steps,
            kilobits_per_second=int(1000 * (rate or 0.0)),
            distrusted=peer.reducers.distrusted(self._world.now),
            cadence=peer.cadence.announced,
            codec=peer.cadence.chosen_codec,
            can_be_dialled=not peer.emulated.behind_nat,
        )
        brought.append(_Brought(peer=peer, start=start, member=member, report=report))

    def _report(self, peer: SimulatedPeer, claim: Claim, report: dict[str, Any], reason: str) -> None:
        """Count a tick's outcome for a peer, and tell it."""
        report.update(reason=reason, version=claim.version, digest=claim.digest.hex())
        tally, outcome = peer.tally, report["outcome"]
        if outcome != "committed":
            self.reasons[reason] += 1
        tally.committed += outcome == "committed"
        tally.carried += outcome == "carried"
        tally.skipped += outcome == "skipped"
        tally.bytes_sent += report["bytes_sent"]
        tally.bytes_received += report["bytes_received"]
        self._world.tell(peer, "round", **report)

    def _meet(self, tick: _Tick, attempt: int, begins: float, brought: Sequence[_Brought]) -> None:
        """Those with the same base find each other, and the group begins its round."""
        by_claim: dict[Claim, list[_Brought]] = {}
        for one in brought:
            if not one.peer.awake:
                self._give_up(tick, [one], ASLEEP)
            elif one.peer.starts == one.start:
                one.report["attempts"] = attempt + 1
                by_claim.setdefault(one.peer.work.holdings[tick.fragment].claim, []).append(one)
        for candidates in by_claim.values():
            if not self._world.model.records_are_readable:
                self._give_up(tick, candidates, "nobody's records can be read")
            elif attempt and any(self._bases.better_claim(one.peer, tick.fragment) is not None for one in candidates):
                self._give_up(tick, candidates, "others have made the next base, which is fetched")
            else:
                self._form_group(tick, attempt, begins, candidates)

    def _form_group(self, tick: _Tick, attempt: int, begins: float, candidates: list[_Brought]) -> None:
        averaging = self._world.model
        self._world.chance.shuffle(candidates)
        members, turned_away = candidates[:MAX_GROUP_SIZE], candidates[MAX_GROUP_SIZE:]
        self._give_up(tick, turned_away, "every group is full")
        times = [
            search_times(
                begins,
                averaging.lead_seconds,
                self._world.schedule.cycle_seconds,
                found_nobody=one.peer.found_nobody,
                can_be_dialled=one.member.can_be_dialled,
                telling_seconds=telling_seconds(len(members), one.peer.link_rate.rate.up),
            )
            for one in members
        ]
        # Who offers to begin first leads.
        leader = min(range(len(members)), key=lambda index: times[index].scheduled)
        ids = {one.peer.id_text for one in members}
        if not has_quorum(ids, self._known()):
            self._find_dead()
            if len(ids) > 1 or not has_quorum(ids, self._known()):
                self._lost(
                    tick, attempt, members, self._world.now, "no group of enough of the training peers came together"
                )
                return
        if len(members) > 1 and not any(one.member.can_be_dialled for one in members):
            self._give_up(tick, members, NOBODY_TO_DIAL)
            return
        plan = plan_round(
            group_id=b"simulated" + self._world.chance.randbytes(8),
            tick=tick.number,
            fragment=tick.fragment,
            size=averaging.sizes[tick.fragment],
            parameters=averaging.parameters[tick.fragment],
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
        message_bytes = self._world.model.announcement_bytes * len(led)
        self.groups += 1
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
        rules, began = self._world.model.rules, min(knows)
        moved = [rules.transfer_bytes(member, plan.size) for member in plan.members]
        transfer_bytes = max(moved)
        kilobits = (member.kilobits_per_second for member in plan.members)
        slowest_seconds = announced_seconds(zip(moved, kilobits, strict=True))
        participants = []
        for one, at in zip(ordered, knows, strict=True):
            stops, silent = one.peer.stops_after(self._world.now)
            one.peer.sending[tick.fragment] = math.inf
            times = closing_times(
                one.peer.arrival_times.expected_seconds(transfer_bytes),
                one.peer.round_times.expected_seconds(transfer_bytes),
                slowest_seconds,
                self._world.schedule.cycle_seconds,
            )
            participants.append(
                Participant(
                    line=Line.of(one.peer.emulated.link, len(one.peer.sending)),
                    times=times,
                    ready_seconds=at - began,
                    stops_seconds=stops - began,
                    silent=silent or at == math.inf,
                )
            )
        flow = play_round(plan, participants, rules)
        for one, member in zip(ordered, flow.members, strict=True):
            one.peer.sending[tick.fragment] = began + member.sent_seconds
        mates = frozenset(one.peer.id_text for one in ordered)
        for one in ordered:
            one.peer.work.holdings[tick.fragment].contributes(tick.number, mates)
        some = any(member.committed for member in flow.members)
        made = self._made(tick, plan, flow, ordered, mates) if some else None
        for index, (one, result) in enumerate(zip(ordered, flow.members, strict=True)):
            one.report.update(group_size=len(ordered), groups=len(plan.groups), weight=weights[index])
            one.report["weight_share"] = weights[index] / sum(weights)
            if participants[index].ready_seconds == math.inf:
                self._lost(tick, attempt, [one], self._world.now, "the leader's message came too late")
                continue
            self._world.at(
                began + result.ended_seconds,
                partial(self._round_over, tick, attempt, plan, one, index, result, made, began, transfer_bytes),
            )

    def _made(
        self, tick: _Tick, plan: RoundPlan, flow: RoundFlow, ordered: Sequence[_Brought], mates: frozenset[str]
    ) -> MadeBase:
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
            mates=mates,
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
            self._give_up(tick, [one], ASLEEP)
            return
        peer.advance(self._world.now)
        peer.sending.pop(tick.fragment, None)
        one.report["bytes_sent"] += flow.bytes_sent
        one.report["bytes_received"] += flow.bytes_received
        peer.round_times.note(transfer_bytes, self._world.now - began)
        for arrived in flow.arrivals:
            peer.arrival_times.note(transfer_bytes, arrived)
        measured = flow.measured(Line.of(peer.emulated.link, 1))
        peer.link_rate.note(measured)
        self._judge_line(peer, plan, measured)
        ids = [member.peer_id.to_bytes() for member in plan.members]
        peer.reducers.judge(
            [ids[other] for other in flow.answered], [ids[other] for other in flow.failed], self._world.now
        )
        if not flow.committed or made is None:
            if flow.failed:
                self._find_dead()
            self._lost(tick, attempt, [one], self._world.now, "a reducer was lost, or too few came")
            return
        holding.commit(made, index)
        holding.backed_until = self._world.now + RECORD_SECONDS
        peer.busy.discard(tick.fragment)
        one.report.update(outcome="committed", seconds=self._world.now - began)
        late = sum(part.stop - part.start for part in made.parts if index not in part.included)
        one.report["late_share"] = late / plan.size
        if len(plan.members) > 1:
            self._took_part(peer, tick, late=late > 0)
        self._report(peer, holding.claim, one.report, "closed without us; carried on" if late else "")
        if holding.claim.version > self._versions[tick.fragment]:
            self._versions[tick.fragment] = holding.claim.version
            self.group_sizes.append(len(plan.members))
        self._bases.moved_on(peer, tick.fragment)

    def _judge_line(self, peer: SimulatedPeer, plan: RoundPlan, measured: LineRate) -> None:
        """How to encode and how often to take part from now on, as the product decides it."""
        model = self._world.model
        others_kilobits = sum(one.kilobits_per_second for one in plan.members if one.peer_id != peer.peer_id)
        rate = limiting(measured, peer.link_rate.rate, others_kilobits)

        def use(codec: str) -> LineUse:
            return line_use(
                model.averaging,
                model.schedule,
                codec=codec,
                size=plan.size,
                base_bytes=BASE_BYTES_PER_ELEMENT * plan.size,
            )

        if peer.cadence.after_round(plan.tick, rate, use):
            self._bases.announce_cadence(peer)

    def _took_part(self, peer: SimulatedPeer, tick: _Tick, *, late: bool) -> None:
        if peer.cadence.took_part(tick.number, late=late):
            self._bases.announce_cadence(peer)

    def _missed(self, peer: SimulatedPeer, tick: _Tick) -> None:
        if peer.cadence.missed(tick.number):
            self._bases.announce_cadence(peer)

    def _lost(self, tick: _Tick, attempt: int, brought: Sequence[_Brought], now: float, reason: str) -> None:
        """An attempt came to nothing for these; another one may do better."""
        for one in brought:
            one.peer.sending.pop(tick.fragment, None)
            one.report["reason"] = reason
            again = next_attempt(
                tick.begins,
                now,
                self._world.model.lead_seconds,
                self._world.schedule.cycle_seconds,
                one.peer.round_times.expected_seconds(1) or 0.0,
            )
            if again is None or attempt == ATTEMPTS - 1:
                self._give_up(tick, [one], reason)
            elif again in tick.waiting:
                tick.waiting[again].append(one)
            else:
                tick.waiting[again] = [one]
                self._world.at(again, partial(self._meet_again, tick, attempt + 1, again))

    def _meet_again(self, tick: _Tick, attempt: int, again: float) -> None:
        self._meet(tick, attempt, again, tick.waiting.pop(again))

    def _give_up(self, tick: _Tick, brought: Sequence[_Brought], reason: str) -> None:
        for one in brought:
            if one.peer.starts == one.start and one.peer.present:
                one.peer.busy.discard(tick.fragment)
                one.peer.sending.pop(tick.fragment, None)
                self._report(one.peer, one.peer.work.holdings[tick.fragment].claim, one.report, reason)
                self._bases.catch_up(one.peer)
