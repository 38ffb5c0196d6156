"""Keeping up: which base the swarm has, fetching it from peers, serving ours to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

from hivemind.p2p import PeerID

from peers.base_fetch import BaseFetcher
from peers.base_server import BaseServer
from peers.context import RunContext
from peers.donors import DonorRecords
from peers.fragment_state import FragmentState, counts_at_start
from peers.line import MEASURABLE_BYTES, LineRate, LineUse, line_use
from peers.lineage import Claim, choose_base, in_step
from peers.messages import BaseAnswer, BaseRequest, BaseRequestHeader
from peers.pipe import Configure, Event, Rebased, Synced, Syncing, Waiting
from peers.presence import Presence
from peers.transfer import FetchedBase, FrozenBase, PartialBase
from peers.transport import Transport

logger = logging.getLogger(__name__)

BASE = "base"
"""Name of the call that asks for a base, piece by piece."""
FETCHES_AT_ONCE = 3
SMALL_BYTES = 4 * 1024 * 1024
"""Fragments up to this are fetched several at once, since most of the time goes into round trips. Bigger ones one after
the other: on a slow line each is whole sooner, and can take part in a round before it is out of date."""
MOSTLY = 0.5
"""What has arrived of a version that passed in the meantime is completed if it is more than this."""
HASTY_ANSWER_SECONDS = 6.0
"""Where answers are waited for longer than this, limits on donors are stretched from the start."""
KEEPER_SECONDS = 5.0
"""A serving peer follows the swarm by one fragment at a time, this often; at once where somebody needs its bases."""
USED_UP_SECONDS = 30.0
USED_UP = "A day's traffic is used up: the model is fetched after midnight UTC."
SYNC_ROUNDS_BETWEEN_NOTES = 10
HURRIED_ATTEMPTS = 10
"""What has arrived by then will do to begin with, though it was passed each time: as where only a door can serve us,
which is a moment behind itself."""


class BaseKeeper:
    """Keeps this peer's bases those of the swarm, and serves them."""

    def __init__(self, run: RunContext, presence: Presence, transport: Transport) -> None:
        self._run, self._presence, self._transport = run, presence, transport
        self._server = BaseServer(self._holds, self._freeze)
        self._donors = DonorRecords(run.clock.passed)
        patience = max(1.0, run.node.protocol.wait_timeout / HASTY_ANSWER_SECONDS)
        self._fetcher = BaseFetcher(self._call, self._donors, patience)
        small = max(state.num_bytes for state in run.fragments) <= SMALL_BYTES
        self._fetches_at_once = FETCHES_AT_ONCE if small else 1
        self._partial: dict[int, PartialBase] = {}
        """By fragment: what has arrived of a base that no donor delivered whole yet."""
        self._replacing: set[int] = set()
        self._seen: dict[int, tuple[Claim, float]] = {}
        """By fragment: the better claim, and since when we know of it."""
        self._last_keep = float("-inf")
        self.on_unfaithful: Callable[[str], None] = lambda reducer: None
        """Told of a reducer, by its base58 id, that gave members of a round different averages."""

    async def serve(self) -> None:
        """Serve our bases from now on."""
        await self._transport.serve(BASE, self._server.answer, BaseRequest)

    async def sync(self, configure: Configure) -> None:
        """Fetch the bases that we lack or that are behind, and tell the training process where it stands.

        On a line that needs longer than a cycle for a fragment they are those of a moment ago: the rest of the way is
        made while training, and until then no round counts on us.

        :param configure: our counts as of the checkpoint, and as of our last contributions
        """
        keep = [state.version >= 0 for state in self._run.fragments]
        progress = _Progress(
            [state for state in self._run.fragments if state.version < 0 or self.better_claim(state) is not None],
            self._run.training.send,
        )
        slots = asyncio.Semaphore(self._fetches_at_once)
        refreshing: asyncio.Task[None] | None = None
        received_bytes = 0

        async def refresh() -> None:
            # One for all fragments: over a bad line, the same question asked twice takes twice as long.
            nonlocal refreshing
            if refreshing is None or refreshing.done():
                refreshing = asyncio.create_task(self._presence.refresh())
            await asyncio.shield(refreshing)

        async def complete(state: FragmentState) -> bool:
            """Whether what is here is current, as far as we know."""
            nonlocal received_bytes
            attempts, arrived = 0, False
            # Restored parameters stand on the restored base, however often it is replaced before training begins.
            reference = state.base.clone()
            while True:
                while self._run.allowance.is_used_up:
                    if state.version >= 0:
                        state.snapshot.copy_(reference)
                        return False  # training goes on with what is here, alone
                    self._run.training.send(Waiting(USED_UP))
                    await asyncio.sleep(USED_UP_SECONDS)
                async with slots:
                    claim = self.better_claim(state)
                    fetched = await self._fetch(state, claim, progress.note) if claim is not None else None
                    if fetched is not None:
                        received_bytes += fetched.bytes_received
                        async with state.content:
                            await self.before_change(state)
                            keep[state.index] &= state.adopt(fetched, self._run.own_id, self._possible_samples())
                        arrived = True
                too_slow_to_be_current = fetched is not None and fetched.seconds > self._run.schedule.cycle_seconds
                if too_slow_to_be_current:
                    await refresh()  # whether it has passed in the meantime
                if too_slow_to_be_current or (claim is None and state.version >= 0):
                    state.snapshot.copy_(reference)
                    progress.note(state.index, state.num_bytes)
                    # What passed while it was fetched may have passed again before we hear of it.
                    return not too_slow_to_be_current and self.better_claim(state) is None
                attempts += 1
                if arrived and attempts >= HURRIED_ATTEMPTS:
                    state.snapshot.copy_(reference)
                    return False
                if attempts % SYNC_ROUNDS_BETWEEN_NOTES == 0:
                    self._run.training.send(Waiting("No peer delivers the current base yet; still trying."))
                await asyncio.sleep(min(2.0, 0.2 * attempts))
                await refresh()

        began = self._run.clock.passed()
        current = await asyncio.gather(*(complete(state) for state in self._run.fragments))
        self._partial.clear()
        self._note_rate(received_bytes, self._run.clock.passed() - began)
        self._presence.caught_up = any(current)
        counts = []
        for state, saved, contributed in zip(self._run.fragments, configure.counts, configure.contributed, strict=True):
            counts.append(counts_at_start(state, saved, contributed))
            state.counted = counts[-1]
            # We contributed work that our checkpoint does not know: what we restored is older than that.
            keep[state.index] &= counts[-1].samples == saved.samples
        if self._run.manifest.averaging.mode == "gradient":
            keep = [False] * len(keep)  # a sum of gradients does not survive the process
        for state in self._run.fragments:
            if not keep[state.index]:
                state.drop_undecided(*counts[state.index])
        if not self._presence.caught_up:
            self._run.training.send(
                Waiting("Fetching took longer than the swarm takes to move on: training alone until it has caught up.")
            )
        self._run.training.send(
            Synced(
                fragments=[state.meta for state in self._run.fragments],
                keep=keep,
                samples=max(configure.samples, *(count.samples for count in counts)),
                steps=max(configure.steps, *(count.steps for count in counts)),
                counts=counts,
            )
        )

    def _note_rate(self, received_bytes: int, seconds: float) -> None:
        """The first that is known of our line, with what an earlier start knew of it and what a person leaves of it.

        If it was the donors' line that was slow, rounds will show it.
        """
        if received_bytes >= MEASURABLE_BYTES:
            self._run.link_rate.note(LineRate(down=received_bytes / max(seconds, 1e-6)))
        rate = self._run.link_rate.rate.at_most(self._run.allowance.rate)
        if self._run.manifest.averaging.mode == "gradient" or self._presence.auxiliary or not rate.is_known:
            return
        biggest = max(self._run.fragments, key=lambda state: state.size)

        def use(codec: str) -> LineUse:
            return line_use(
                self._run.manifest.averaging,
                self._run.schedule,
                codec=codec,
                size=biggest.size,
                base_bytes=biggest.num_bytes,
            )

        rate = replace(rate, round_trip_seconds=self._run.clock.round_trip_seconds)
        self._presence.cadence.after_round(self._run.schedule.tick_at(self._run.clock.now()), rate, use)

    def _possible_samples(self) -> float:
        return self._run.schedule.possible_samples(self._run.clock.now())

    def better_claim(self, state: FragmentState) -> Claim | None:
        """What we should fetch for this fragment; a version 0 must be the one the organiser signed.

        Where peers train, theirs are the votes: a door that follows slowly and peers that are just coming back would
        together keep each other on a base of the past. Who was caught lying, or never delivers, has none while there
        are others.
        """
        initial = self._run.signed_manifest.initial_digests[state.index]
        possible_versions = self._run.schedule.possible_versions(self._run.clock.now())
        claims = {
            peer: claim
            for peer, claim in self._presence.view.claims(state.index).items()
            if (claim.version > 0 or claim.digest == initial) and claim.version <= possible_versions
        }
        claims = {peer: claim for peer, claim in claims.items() if self._donors.believed(peer)} or claims
        # An auxiliary peer may be the only one that has all of a round in which we took part.
        voters = self._presence.present() | state.unresolved_mates
        claims = {peer: claim for peer, claim in claims.items() if peer in voters} or claims
        cadences = self._presence.view.cadences()
        votes = in_step(claims, {peer: cadences[peer] for peer in claims})
        behind = claims.keys() - votes.keys()
        return choose_base(
            state.claim if state.version >= 0 else None,
            votes,
            possible_versions=possible_versions,
            groupmates=state.unresolved_mates,
            ancestors=state.ancestors,
            has_vote=not self._presence.auxiliary,
            backers=state.backers - behind if self._run.clock.passed() < state.backed_until else (),
            round_size=max(state.round_size, len(state.unresolved_mates)),
            origin=state.origin,
        )

    def catch_up(self) -> None:
        """Start fetching fragments in which the swarm has moved on without us, those with the most time left first."""
        if self._run.training.begun is None and self._run.settings.role == "training":
            return
        if self._run.allowance.is_used_up:
            return
        now = self._run.clock.now()
        behind = []
        for state in self._run.fragments:
            if not state.busy.locked() and state.index not in self._replacing:
                claim = self.better_claim(state)
                if claim is not None:
                    if self._is_time_for(state, claim, now):
                        behind.append(state)
                else:
                    self._partial.pop(state.index, None)
                    self._seen.pop(state.index, None)
                    if not self._presence.caught_up:
                        self._presence.caught_up = True
                        self._presence.changed.set()
        if self._presence.may_lag and behind:
            passed = self._run.clock.passed()
            if passed - self._last_keep < KEEPER_SECONDS:
                return
            self._last_keep = passed
            behind = [min(behind, key=lambda state: state.version)]
        behind.sort(key=lambda state: self._ticks_left(state, now), reverse=True)
        for state in behind[: max(0, self._fetches_at_once - len(self._replacing))]:
            self._replacing.add(state.index)
            self._run.tasks.spawn(self._replace_base(state))

    def _is_time_for(self, state: FragmentState, claim: Claim, now: float) -> bool:
        """Whether to fetch a better base now. Who skips rounds waits for the base that its next round starts from."""
        if self._seen.get(state.index, (None, now))[0] != claim:
            self._seen[state.index] = (claim, now)
        if self._presence.leaving():
            return True  # now or never
        return self._presence.cadence.wants_base(state.index, self._seen[state.index][1], now)

    def _ticks_left(self, state: FragmentState, now: float) -> int:
        """Ticks until the fragment's next round."""
        schedule = self._run.schedule
        return (state.index - schedule.fragment(schedule.next_tick(now))) % schedule.fragments

    async def _replace_base(self, state: FragmentState) -> None:
        try:
            async with state.busy:
                replaced = await self._replace_locked(state)
        finally:
            self._replacing.discard(state.index)
        if replaced:
            self.catch_up()

    async def _replace_locked(self, state: FragmentState) -> bool:
        """Whether the fragment has another base now."""
        claim = self.better_claim(state)
        if claim is None:
            return False
        before, began = state.version, self._run.clock.passed()
        dropped = state.ledger.dropped_element_samples()
        fetched = await self._fetch(state, claim, lambda *_: None)
        if fetched is None or not await self._believes(state, fetched):
            return False
        if fetched.bytes_received >= MEASURABLE_BYTES:
            self._run.link_rate.note(LineRate(down=fetched.bytes_received / max(fetched.seconds, 1e-6)))
        await self._run.training.no_snapshot_under_way(state)
        keep, rebased = await self._run.tasks.whole(self._put_fetched(state, fetched))
        await self._run.training.rebased(state, keep, rebased)
        state.forget_snapshot()
        self._presence.changed.set()
        self._run.training.send(
            Event(
                "rebase",
                {
                    "fragment": state.index,
                    "from_version": before,
                    "to_version": state.version,
                    "digest": state.digest.hex(),
                    "donors": list(fetched.donors),
                    "kept_progress": keep,
                    "dropped_samples": (state.ledger.dropped_element_samples() - dropped) / state.size,
                    "seconds": self._run.clock.passed() - began,
                    "bytes_received": fetched.bytes_received,
                },
            )
        )
        return True

    async def _believes(self, state: FragmentState, fetched: FetchedBase) -> bool:
        """Whether to take a base instead of ours; who announces one that was made up is not believed for a while."""
        claims = self._presence.view.claims(state.index)
        announcers = {peer for peer, claim in claims.items() if claim == fetched.claim}
        verdict = await asyncio.to_thread(state.judge, fetched, announcers, len(claims))
        for reducer in verdict.unfaithful:
            logger.debug("Reducer %s gave members of a round different averages", reducer)
            self.on_unfaithful(reducer)
        for peer in () if verdict.believed else announcers:
            logger.debug("Peer %s announces a base of a round that did not make it", peer)
            self._donors.lied(peer)
        return verdict.believed

    async def _put_fetched(
        self, state: FragmentState, fetched: FetchedBase
    ) -> tuple[bool, asyncio.Future[Rebased] | None]:
        async with state.content:
            await self.before_change(state)
            keep = await asyncio.to_thread(state.adopt, fetched, self._run.own_id, self._possible_samples())
            return keep, self._run.training.rebase(state, keep)

    async def _fetch(
        self, state: FragmentState, claim: Claim, on_progress: Callable[[int, int], None]
    ) -> FetchedBase | None:
        """A verified base from the peers that announce it, or None if they do not deliver it.

        What arrived before is kept. It may be of a version that has passed: whoever sent it keeps that frozen for us.

        :param on_progress: told the fragment and how many bytes of it are here
        """
        earlier = self._partial.get(state.index)
        if earlier is not None and earlier.claim != claim:
            if state.version < earlier.claim.version < claim.version and self._nearly_here(earlier):
                if not any(self._donors.usable(donor, earlier.claim.digest) for donor in earlier.senders):
                    return None  # they failed a moment ago, and will be asked again in another
                before = earlier.bytes_here
                fetched = await self._complete(earlier, list(earlier.senders), on_progress)
                if fetched is not None or earlier.bytes_here > before:
                    return fetched
            del self._partial[state.index]
        announcing = [peer for peer, other in self._presence.view.claims(state.index).items() if other == claim]
        partial = self._partial.get(state.index)
        if partial is None:
            partial = PartialBase(
                fragment=state.index,
                size=state.size,
                states=len(state.outer_state),
                claim=claim,
                origin=self._presence.present().intersection(announcing),
            )
            self._partial[state.index] = partial
        announcing = [peer for peer in announcing if self._presence.can_meet(peer)]
        random.shuffle(announcing)  # so that newcomers spread
        return await self._complete(partial, list(dict.fromkeys([*partial.senders, *announcing])), on_progress)

    def _nearly_here(self, partial: PartialBase) -> bool:
        """Whether a base is worth completing although the swarm has moved on, and somebody may still serve it."""
        some = any(self._donors.believed(donor) for donor in partial.senders)
        return some and partial.bytes_here > MOSTLY * partial.num_bytes

    async def _complete(
        self, partial: PartialBase, donors: list[str], on_progress: Callable[[int, int], None]
    ) -> FetchedBase | None:
        fetched = await self._fetcher.fetch(partial, donors, lambda: on_progress(partial.fragment, partial.bytes_here))
        if fetched is not None:
            self._partial.pop(partial.fragment, None)
        return fetched

    async def _call(self, donor: str, requests: AsyncIterator[BaseRequest]) -> AsyncGenerator[BaseAnswer, None]:
        return await self._transport.call(PeerID.from_base58(donor), BASE, requests, BaseAnswer)

    def _holds(self, header: BaseRequestHeader) -> bool:
        """Whether the base that is asked for is our current one."""
        if header.fragment >= len(self._run.fragments):
            return False
        state = self._run.fragments[header.fragment]
        return state.version >= 0 and header.digest == state.digest

    async def before_change(self, state: FragmentState) -> None:
        """Whoever puts another base in place has this done first, inside ``state.content``."""
        await self._server.before_change(state.digest)

    async def _freeze(self, fragment: int) -> FrozenBase:
        state = self._run.fragments[fragment]
        async with state.content:
            return state.frozen()


class _Progress:
    """How much of what a peer lacked at its start is here. Never less than before, whatever is fetched again."""

    def __init__(self, lacking: list[FragmentState], send: Callable[[Syncing], None]) -> None:
        self._send = send
        self._here = {state.index: 0 for state in lacking}
        self.expected_bytes = sum(state.num_bytes for state in lacking)
        self._tell()

    def note(self, fragment: int, bytes_here: int) -> None:
        if bytes_here > self._here.get(fragment, bytes_here):
            self._here[fragment] = bytes_here
            self._tell()

    def _tell(self) -> None:
        if self._here:
            self._send(Syncing(sum(self._here.values()), self.expected_bytes))
