"""Taking part: every tick's round, from the snapshot to the commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hivemind.p2p import PeerID

from dht_config.keys import matchmaking_prefix
from dht_config.records import MAX_DISTRUSTED, MAX_SPANS, RoundAnnouncement, sign_announcement
from peers.attempts import ATTEMPTS, LEAST_LEAD, MEET_AGAIN_LEADS, next_attempt, search_times, telling_seconds
from peers.bases import BaseKeeper
from peers.closing import Reliability, TransferTimes, announced_seconds, closing_times
from peers.codecs import get_codec
from peers.context import RunContext
from peers.contributed import note_contributed
from peers.contribution import Outgoing
from peers.fragment_state import FragmentState
from peers.grouping import AWAKE_SECONDS, FragmentMatchmaking, GroupSearch, NodeAsDHT
from peers.known_line import keep_line
from peers.ledger import Counts, PendingSpan
from peers.line import ROUND_TRIPS, CodecName, LineRate, LineUse, announced_megabits, limiting, line_use
from peers.lineage import held_again
from peers.messages import Average, AveragedPart, Part
from peers.outer import build_outer_optimizer
from peers.own_records import RECORD_SECONDS
from peers.pipe import Event, Rebased, SnapshotTaken
from peers.presence import USED_UP, Presence
from peers.reducer import BY_SAMPLES, MAX_BATCH, InvalidPart, Rules, check_outgoing, off_loop
from peers.round import Round, RoundResult, RoundVoid
from peers.round_plan import GroupMember, RoundPlan, element_samples, plan_round
from peers.round_register import RoundRegister
from peers.servicer import SwarmServicer
from peers.transport import TRANSPORT_ERRORS, Transport
from peers.weighting import get_weighting

logger = logging.getLogger(__name__)

AVERAGE = "average"
"""Name of the call that carries a contribution's parts one way and their averages the other."""
ENOUGH = 0.9
"""A step on averaged gradients needs this share of its global batch: rates that peers advertise differ for a moment."""
REDUCER_DISTRUST_CYCLES, REDUCER_DISTRUST_DOUBLINGS = 4.0, 6
"""A reducer without a share still contributes: being careful costs little."""
LEADER_DISTRUST_DOUBLINGS = 2
"""A leader that nobody follows takes part in no round: it may just have been slow."""
CLOCK_LOOK_SECONDS = 1.0
"""Between two looks at the clock while the next tick is waited for: it may be corrected."""
KEPT_SNAPSHOTS = 2
"""Of rounds that brought no result here: if others counted us, what was trained since then can be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Brought:
    """What this peer brings to a tick's round: its snapshot, what is pending in it."""

    tick: int
    taken: SnapshotTaken
    spans: tuple[PendingSpan, ...]
    values: Outgoing
    codec: CodecName
    """How it is encoded, where the run leaves that to us."""


class RoundKeeper:
    """Holds this peer's rounds, one fragment at a tick."""

    def __init__(self, run: RunContext, presence: Presence, bases: BaseKeeper, transport: Transport) -> None:
        self._run, self._presence, self._bases, self._transport = run, presence, bases, transport
        averaging = run.manifest.averaging
        self._outer = build_outer_optimizer(run.manifest.outer_optimizer)
        gradient = averaging.mode == "gradient"
        self._auxiliary = presence.auxiliary
        self._may_skip_rounds = not gradient and not presence.auxiliary  # a step on gradients wants everybody's samples
        self._rules = Rules(
            codec=None if averaging.codec == "auto" else get_codec(averaging.codec),
            answer_codec=get_codec(averaging.answer_codec),
            weighting=BY_SAMPLES if gradient else get_weighting(averaging.weighting),
            batch_size=MAX_BATCH if gradient else run.manifest.inner_optimizer.batch_size,
        )
        self._round_times, self._arrival_times = TransferTimes(), TransferTimes()
        cycle_seconds = run.schedule.cycle_seconds
        self._reducers = Reliability(REDUCER_DISTRUST_CYCLES * cycle_seconds, REDUCER_DISTRUST_DOUBLINGS)
        self._unfaithful = Reliability(REDUCER_DISTRUST_CYCLES * cycle_seconds, REDUCER_DISTRUST_DOUBLINGS)
        """Reducers that gave others something else than us: that they answer does not speak for them."""
        bases.on_unfaithful = self._note_unfaithful
        self._silent_leaders = Reliability(cycle_seconds, LEADER_DISTRUST_DOUBLINGS)
        self._found_nobody = False
        self._needed_samples = ENOUGH * averaging.global_batch
        self._register = RoundRegister()
        self._under_way: dict[int, Round] = {}
        """By fragment."""
        self._looking: set[int] = set()
        """Fragments for whose round a group is being looked for, or those that were not in it."""
        self._matchmaking: dict[str, FragmentMatchmaking] = {}
        dht = NodeAsDHT(run.node, run.clock.now)
        for state in run.fragments:
            matchmaking = FragmentMatchmaking(
                run.p2p,
                dht,
                run_id=run.settings.run_id,
                prefix=matchmaking_prefix(run.settings.run_id, state.index),
                servicer_type=SwarmServicer,
                matchmaking_seconds=averaging.matchmaking_seconds,
                size=state.size,
                is_quorum=presence.is_quorum,
                possible_samples=lambda: run.schedule.possible_samples(run.clock.now()),
                silent_leaders=self._silent_leaders,
                likely_members=presence.likely_leaders,
                auxiliary=presence.auxiliary,
            )
            self._matchmaking[matchmaking.group_key_manager.current_key] = matchmaking

    def matchmaking_for(self, group_key: str) -> FragmentMatchmaking | None:
        """The matchmaking behind one of this run's group keys."""
        return self._matchmaking.get(group_key)

    async def serve(self) -> None:
        """Answer groupmates from now on."""
        await self._transport.serve(AVERAGE, self._register.answer, Part)

    async def keep_ticks(self) -> None:
        """Begin every tick's round in time to find a group by the tick's beginning.

        The clock may be corrected meanwhile, and no sleep counts the time in which a machine is suspended.
        """
        schedule, now = self._run.schedule, self._run.clock.now
        tick = schedule.next_tick(now() + self._lead_seconds())
        while True:
            lead = self._lead_seconds()
            left = schedule.begins(tick) - lead - now()
            if left > 0:
                await asyncio.sleep(min(left, CLOCK_LOOK_SECONDS))
                coming = schedule.next_tick(now() + lead)
                if coming < tick - schedule.fragments:
                    tick = coming  # the clock was far ahead: what it took for ticks has yet to come
                continue
            if self._presence.announced or self._may_help(tick):
                self._run.tasks.spawn(self._hold_round(tick))
            tick = max(tick + 1, schedule.next_tick(now() + lead - 0.01))

    def _may_help(self, tick: int) -> bool:
        return self._auxiliary and self._run.can_be_dialled and self._presence.is_held(tick)

    def _lead_seconds(self) -> float:
        """How long before a tick its round begins: time for a snapshot, where training steps are long, and a group."""
        most = self._run.schedule.cycle_seconds / 2
        return self._run.manifest.averaging.matchmaking_seconds + min(self._run.training.snapshot_seconds, most)

    async def _hold_round(self, tick: int) -> None:
        """One round, from snapshot to commit, and its line in the metrics."""
        state = self._run.fragments[self._run.schedule.fragment(tick)]
        self._tell_cadence(self._presence.cadence.probe(tick))
        report = {
            "tick": tick,
            "fragment": state.index,
            "outcome": "skipped",
            "reason": "",
            "group_size": 0,
            "groups": 0,
            "weight": 0,
            "weight_share": 0.0,
            "late_share": 0.0,
            "seconds": 0.0,
            "attempts": 0,
            "bytes_sent": 0,
            "bytes_received": 0,
            "codec": self._presence.cadence.codec,
            "cadence": self._presence.pace(),
            "due": self._presence.cadence.take_turn(tick),
        }
        # Before whatever may be otherwise by then: a peer may leave, or be cut off, while a base is on its way.
        free = not report["due"] or await self._is_free_in_time(tick, state)
        if not report["due"]:
            report["reason"] = f"on its line this peer takes part in 1 of {self._presence.cadence.announced} rounds"
        elif self._run.allowance.is_used_up:
            report["due"] = False
            report["reason"] = USED_UP
        elif not self._run.life.takes_part:
            report["due"] = False
            report["reason"] = self._run.life.reason
        elif not self._presence.is_held(tick):
            report["due"] = False
            report["reason"] = "most peers skip this round: their lines do not carry more"
        elif not free:
            report["reason"] = "the previous round or a fetch of this fragment is still under way"
            current = self._under_way.get(state.index)
            held_up_by_others = current.waits_for_others if current is not None else state.index in self._looking
            if not held_up_by_others:  # where nobody is to be found, as where our line is down, it is not slow
                self._missed(tick)
        else:
            async with state.busy:
                try:
                    await self._attempt_round(tick, state, report)
                except RoundVoid as error:
                    report["reason"] = str(error)
                except Exception as error:
                    logger.exception("A round failed in an unexpected way; its contribution is carried on")
                    report["reason"] = f"unexpected: {error!r}"
                if state.taken is not None and not state.uncertain:
                    state.forget_snapshot()  # nobody was sent anything of it
        report.update(version=state.version, digest=state.digest.hex())
        self._run.training.send(Event("round", report))

    async def _is_free_in_time(self, tick: int, state: FragmentState) -> bool:
        """Whether a fragment's round can begin. A base that arrives while others still look for each other is in time.

        Else a line on which it always arrives a moment after they begin to would, once a round behind, stay behind.
        """
        fetching = state.index not in self._under_way and state.index not in self._looking
        if state.busy.locked() and fetching:
            needed = self._run.manifest.averaging.matchmaking_seconds * LEAST_LEAD
            left = self._run.schedule.begins(tick) - needed - self._run.clock.now()
            try:
                await asyncio.wait_for(state.busy.acquire(), max(0.0, left))
            except asyncio.TimeoutError:
                return False
            state.busy.release()
        return not state.busy.locked()

    async def _attempt_round(self, tick: int, state: FragmentState, report: dict[str, Any]) -> None:
        begins = self._run.schedule.begins(tick)
        better = self._bases.better_claim(state)
        if better is not None:
            self._missed(tick)
            raise RoundVoid(f"the swarm is at version {better.version}; fetching it first")
        brought = self._nothing(tick, state) if self._auxiliary else await self._bring(tick, state, report)
        before = ""
        for attempt in range(ATTEMPTS):
            report["attempts"] = attempt + 1
            try:
                await self._attempt(attempt, begins, state, brought, report)
                if attempt and not report["reason"]:
                    report["reason"] = f"{before}; the group re-formed"
                return
            except _Lost as lost:
                again = self._next_attempt(tick)
                if again is None or attempt == ATTEMPTS - 1:
                    raise
                begins, before = again, str(lost)

    def _nothing(self, tick: int, state: FragmentState) -> _Brought:
        """What an auxiliary peer brings."""
        return _Brought(
            tick=tick,
            taken=SnapshotTaken(fragment=state.index, samples=0, steps=0),
            spans=(PendingSpan(start=0, stop=state.size, samples=0, steps=0),),
            values=Outgoing.of(torch.zeros(1).expand(state.size)),
            codec=self._presence.cadence.chosen_codec,
        )

    async def _bring(self, tick: int, state: FragmentState, report: dict[str, Any]) -> _Brought:
        """The snapshot that a training peer brings. :raises RoundVoid: it has none to bring"""
        self._forget_snapshots(state)
        begins = self._run.schedule.begins(tick)
        taken = await self._run.training.snapshot(state, max(0.1, begins - self._run.clock.now()))
        if taken is None:
            raise RoundVoid("the training step was too long for a snapshot in time; it serves the next round")
        state.taken = taken
        report["outcome"] = "carried"
        spans = state.ledger.pending(taken.samples, taken.steps)
        if len(spans) > MAX_SPANS:
            await self._discard_progress(state)
            raise RoundVoid("what is pending is in too many pieces to announce; it was dropped")
        values = state.contribution(spans)
        try:
            await off_loop(state.size, check_outgoing, values)
        except InvalidPart as error:
            await self._discard_progress(state)
            raise RoundVoid("the local parameters had diverged; they were set back to the base") from error
        return _Brought(tick=tick, taken=taken, spans=spans, values=values, codec=self._presence.cadence.chosen_codec)

    def _forget_snapshots(self, state: FragmentState) -> None:
        """Of rounds without a result, the oldest first, if there are many: memory is for a few at a time."""
        idle = [other for other in self._run.fragments if (other.taken or other.late) and not other.busy.locked()]
        idle.sort(key=lambda other: (other.index - state.index) % len(self._run.fragments))
        for other in idle[: max(0, len(idle) - KEPT_SNAPSHOTS)]:
            other.forget_snapshot()

    def _next_attempt(self, tick: int) -> float | None:
        """When all that lost a reducer in these moments meet again; None if the fragment's next round is too near."""
        return next_attempt(
            self._run.schedule.begins(tick),
            self._run.clock.now(),
            self._run.manifest.averaging.matchmaking_seconds,
            self._run.schedule.cycle_seconds,
            self._round_times.expected_seconds(1) or 0.0,
        )

    async def _attempt(
        self, attempt: int, begins: float, state: FragmentState, brought: _Brought, report: dict[str, Any]
    ) -> None:
        """:raises _Lost: no group or no whole average, and another attempt may do better :raises RoundVoid:"""
        self._looking.add(state.index)
        try:
            group_id, members = await self._find_group(attempt, begins, state, brought)
        finally:
            self._looking.discard(state.index)
        if attempt:
            # Those who have every answer of an earlier attempt are not in this one, and hold its base: no rival to it.
            failed = {str(PeerID(peer_id)) for peer_id in self._distrusted()}
            asked = {*(str(member.peer_id) for member in members), *(state.unresolved_mates - failed)}
            try:
                await self._presence.refresh(asked)
            except TRANSPORT_ERRORS as error:
                raise RoundVoid("the records of other peers could not be read") from error
        # Whoever is alone has just read the records anew: after a long sleep a serving peer may hold what others made.
        if (attempt or len(members) == 1) and self._bases.better_claim(state) is not None:
            raise RoundVoid("others have made the next base, which is fetched")
        plan = plan_round(
            group_id=group_id,
            tick=brought.tick,
            fragment=state.index,
            size=state.size,
            parameters=state.parameters,
            members=members,
            target_group_size=self._run.manifest.averaging.target_group_size,
            part_elements=max(1, self._run.manifest.averaging.part_bytes // 4),
        )
        report["group_size"], report["groups"] = len(plan.training), len(plan.groups)
        weights = [member.mean_samples(state.size) for member in plan.members]
        own_index = plan.index(self._run.p2p.peer_id) or 0
        report["weight"] = weights[own_index]
        report["weight_share"] = weights[own_index] / sum(weights) if sum(weights) else 0.0
        if not sum(weights):
            raise RoundVoid("nobody in the group has samples to contribute")
        if sum(weights) < self._needed_samples:
            report["outcome"] = "skipped"
            self._presence.step_fell_short = True
            absent = self._presence.present() - {str(member.peer_id) for member in members}
            self._run.tasks.spawn(self._presence.look_for_dead(absent))
            raise RoundVoid(
                f"the group has {sum(weights):.0f} of the {self._needed_samples:.0f} samples that a step needs"
            )
        if not self._auxiliary:
            note_contributed(
                self._run.settings.run_directory,
                state.index,
                Counts(brought.taken.samples, brought.taken.steps),
                len(self._run.fragments),
            )
        began = self._run.clock.passed()
        if len(members) == 1:
            average = await off_loop(state.size, brought.values.whole)
            parts: tuple[AveragedPart, ...] = (AveragedPart(start=0, stop=state.size, included=[0]),)
            left_out: dict[tuple[int, int], bytes] = {}
        else:
            result, left_out = await self._all_reduce(plan, state, brought.values, report)
            average, parts = result.average, result.parts
            if self._run.clock.now() > begins + MEET_AGAIN_LEADS * self._run.manifest.averaging.matchmaking_seconds:
                await self._look_for_a_rival(state, plan, parts)
        rebased = await self._run.tasks.whole(self._commit(state, plan, average, parts))
        self._presence.step_fell_short = False
        state.average_residual.replace(left_out)
        state.backed_until = self._run.clock.passed() + RECORD_SECONDS
        self._presence.changed.set()
        report["outcome"] = "committed"
        report["seconds"] = self._run.clock.passed() - began
        late = 0 if self._auxiliary else sum(part.stop - part.start for part in parts if own_index not in part.included)
        report["late_share"] = late / state.size
        if len(members) > 1:
            self._took_part(brought.tick, late=late > 0)
        if late:
            report["reason"] = "some parts closed without us; their contribution is carried on"
        await self._run.training.rebased(state, True, rebased)
        state.forget_snapshot()

    async def _look_for_a_rival(self, state: FragmentState, plan: RoundPlan, parts: Sequence[AveragedPart]) -> None:
        """:raises RoundVoid: the others lost a reducer of this long round, perhaps us, and held it again"""
        mates = [str(member.peer_id) for member in plan.members]
        try:
            await self._presence.refresh(mates)
        except TRANSPORT_ERRORS as error:
            raise RoundVoid("the records of other peers could not be read") from error
        total = (state.total_element_samples + element_samples(plan, parts)) // state.size
        claims = self._presence.view.claims(state.index)
        if held_again(
            state.version + 1,
            total,
            [claims[peer] for peer in mates if peer in claims],
            possible_versions=self._run.schedule.possible_versions(self._run.clock.now()),
            round_size=len(mates),
        ):
            raise RoundVoid("it took so long that the others held the round again; their base is fetched")

    async def _commit(
        self, state: FragmentState, plan: RoundPlan, average: torch.Tensor, parts: tuple[AveragedPart, ...]
    ) -> asyncio.Future[Rebased] | None:
        async with state.content:
            await self._bases.before_change(state)
            await asyncio.to_thread(state.commit, self._outer, plan, average, parts, self._run.own_id)
            return self._run.training.rebase(state, True)

    async def _discard_progress(self, state: FragmentState) -> None:
        """Set the training process back to the base: what it has is of use to nobody."""
        async with state.content:
            state.give_up()
            rebased = self._run.training.rebase(state, False)
        await self._run.training.rebased(state, False, rebased)

    async def _find_group(
        self, attempt: int, begins: float, state: FragmentState, brought: _Brought
    ) -> tuple[bytes, tuple[GroupMember, ...]]:
        """The group for this round: ourselves if the records show that we are alone. :raises RoundVoid:"""
        expected, taken, spans = self._presence.expected(brought.tick), brought.taken, brought.spans
        me = GroupMember(peer_id=self._run.p2p.peer_id, spans=spans, samples=taken.samples, steps=taken.steps)
        if not expected and self._auxiliary:
            raise RoundVoid("nobody needs help any more")
        if not expected:
            await self._presence.confirm_alone(begins)
            return b"alone", (me,)
        announcement = RoundAnnouncement(
            fragment=state.index,
            tick=brought.tick,
            version=state.version,
            digest=state.digest,
            samples_total=taken.samples,
            steps_total=taken.steps,
            spans=tuple((span.start, span.stop, span.samples, span.steps) for span in spans),
            attempt=attempt,
            megabits_per_second=announced_megabits(self._run.link_rate.rate, self._run.allowance.rate),
            distrusted=self._distrusted()[:MAX_DISTRUSTED],
            can_be_dialled=self._run.can_be_dialled,
            cadence=self._presence.cadence.announced,
            codec=brought.codec,
            auxiliary=self._auxiliary,
        )
        times = search_times(
            begins,
            self._run.manifest.averaging.matchmaking_seconds,
            self._run.schedule.cycle_seconds,
            found_nobody=self._found_nobody,
            can_be_dialled=self._run.can_be_dialled,
            telling_seconds=telling_seconds(len(expected) + 1, self._run.link_rate.rate.up),
        )
        search = GroupSearch(
            scheduled_time=times.scheduled,
            deadline=times.deadline,
            data_for_gather=sign_announcement(self._run.settings.identity, announcement, self._run.settings.run_id),
            now=self._run.clock.now,
            passed=self._run.clock.passed,
            fragment=state.index,
            tick=brought.tick,
            attempt=attempt,
            claim=state.claim,
            follows=times.scheduled > begins,
        )
        key = f"{matchmaking_prefix(self._run.settings.run_id, state.index)}.0b"
        matchmaking = self._matchmaking[key]
        matchmaking.client_mode = not self._run.can_be_dialled  # a router may have opened a port, or shut it
        found = await matchmaking.find(search)
        self._found_nobody = found is None
        if found is None:
            await self._presence.look_for_dead(expected)
            if not self._auxiliary and self._presence.is_quorum({str(me.peer_id)}):
                await self._presence.confirm_alone(begins)
                return b"alone", (me,)
            training = len(expected) + (not self._auxiliary)
            raise _Lost(f"no group of enough of the {training} training peers came together")
        return found

    async def _all_reduce(
        self, plan: RoundPlan, state: FragmentState, contribution: Outgoing, report: dict[str, Any]
    ) -> tuple[RoundResult, dict[tuple[int, int], bytes]]:
        """The average, who is in it, and what our own averages left out of it. :raises _Lost: :raises RoundVoid:"""
        moved = [self._rules.transfer_bytes(member, state.size) for member in plan.members]
        transfer_bytes = max(moved)
        announced = announced_seconds(zip(moved, (member.kilobits_per_second for member in plan.members), strict=True))
        usual = self._round_times.expected_seconds(transfer_bytes)
        if usual is None:  # rounds that were seen had their latency in them
            announced += ROUND_TRIPS * self._run.clock.round_trip_seconds
        times = closing_times(
            self._arrival_times.expected_seconds(transfer_bytes),
            usual,
            announced,
            self._run.schedule.cycle_seconds,
        )

        async def call_reducer(reducer: PeerID, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
            return await self._transport.call(reducer, AVERAGE, parts, Average)

        current = Round(
            plan,
            self._run.p2p.peer_id,
            contribution,
            call_reducer,
            times,
            self._rules,
            residual=state.average_residual.of,
            on_arrival=partial(self._arrival_times.note, transfer_bytes),
        )
        self._register.add(current)
        state.unresolved_mates |= {str(member.peer_id) for member in plan.members}
        if not self._auxiliary:
            state.contributes(plan.tick)
        state.sent = current.lossy
        began = self._run.clock.passed()
        self._under_way[state.index] = current
        try:
            result = await current.run()
        except RoundVoid as error:
            self._run.tasks.spawn(self._presence.look_for_dead([str(peer) for peer in current.failed]))
            raise _Lost(str(error)) from error
        finally:
            del self._under_way[state.index]
            seconds = self._run.clock.passed() - began
            if seconds <= current.longest_seconds + AWAKE_SECONDS:
                # A round that failed for want of time is a measurement as well: the next one waits longer.
                self._round_times.note(transfer_bytes, seconds)
                self._note_rate(plan, current.meter.rate)
                self._judge(current, self._run.clock.passed())
            report.update(
                bytes_sent=report["bytes_sent"] + current.bytes_sent,
                bytes_received=report["bytes_received"] + current.bytes_received,
            )
        return result, current.reducer.left_out

    def _note_rate(self, plan: RoundPlan, measured: LineRate) -> None:
        """What a round's traffic says of our line, and what we make of it."""
        self._run.link_rate.note(measured)
        round_trip = self._run.clock.round_trip_seconds
        if not self._may_skip_rounds:
            return
        own = self._run.p2p.peer_id
        others_kilobits = sum(member.kilobits_per_second for member in plan.members if member.peer_id != own)
        known = self._run.link_rate.rate
        mine = replace(self._run.link_rate.measured, round_trip_seconds=round_trip)
        keep_line(self._run.settings.run_directory, mine, time.time(), known=known)
        rate = limiting(measured, known, others_kilobits).at_most(self._run.allowance.rate)
        rate = replace(rate, round_trip_seconds=round_trip)

        def use(codec: str) -> LineUse:
            return line_use(
                self._run.manifest.averaging,
                self._run.schedule,
                codec=codec,
                size=plan.size,
                base_bytes=self._run.fragments[plan.fragment].num_bytes,
            )

        self._tell_cadence(self._presence.cadence.after_round(plan.tick, rate, use))

    def _took_part(self, tick: int, *, late: bool) -> None:
        if self._may_skip_rounds:
            self._tell_cadence(self._presence.cadence.took_part(tick, late=late))

    def _missed(self, tick: int) -> None:
        if self._may_skip_rounds:
            self._tell_cadence(self._presence.cadence.missed(tick))

    def _tell_cadence(self, changed: bool) -> None:
        if changed:
            self._presence.changed.set()

    def _distrusted(self) -> tuple[bytes, ...]:
        """Peer ids of reducers that failed us lately, or were unfaithful, sorted."""
        now = self._run.clock.passed()
        return tuple(sorted({*self._reducers.distrusted(now), *self._unfaithful.distrusted(now)}))

    def _note_unfaithful(self, reducer: str) -> None:
        self._unfaithful.failed(PeerID.from_base58(reducer).to_bytes(), self._run.clock.passed())

    def _judge(self, current: Round, now: float) -> None:
        """Remember who answered and who did not."""
        self._reducers.judge(
            [peer.to_bytes() for peer in current.answered], [peer.to_bytes() for peer in current.failed], now
        )
        known = {PeerID.from_base58(peer).to_bytes() for peer in self._presence.view.members}
        for judged in (self._reducers, self._unfaithful, self._silent_leaders):
            judged.forget(known, now)


class _Lost(RoundVoid):
    """This attempt came to nothing, but without those that failed another one may do."""
