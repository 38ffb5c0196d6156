"""Keeping up: which base the swarm has, fetching it from peers, serving ours to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from hivemind.p2p import PeerID

from peers.context import RunContext
from peers.fragment_state import FragmentState, counts_at_start
from peers.lineage import Claim, choose_base
from peers.messages import BaseAnswer, BaseRequest, BaseRequestHeader
from peers.pipe import Event, Rebased, Synced, Syncing, Waiting
from peers.presence import Presence
from peers.transfer import BaseServer, FetchedBase, FrozenBase, receive_base

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 3
STREAMS_PER_PEER = FETCHES_AT_ONCE
FETCH_IDLE_SECONDS = 15.0
FETCH_BYTES_PER_SECOND = 20_000.0
"""A donor slower than this is given up for another."""
MOST_PATIENCE = 8.0
"""Both limits are stretched twofold each time that no donor kept them, up to this: then it is our own line."""
HASTY_ANSWER_SECONDS = 6.0
"""Where answers are waited for longer than this, the limits are stretched from the start."""
BLAME_SECONDS = 10.0
KEEPER_SECONDS = 5.0
"""A serving peer follows the swarm by one fragment at a time, this often; at once if somebody leaves."""
SYNC_ROUNDS_BETWEEN_NOTES = 10

Item = TypeVar("Item")


class BaseKeeper:
    """Keeps this peer's bases those of the swarm, and serves them."""

    def __init__(self, run: RunContext, presence: Presence) -> None:
        self._run, self._presence = run, presence
        self._server = BaseServer(self._freeze)
        self._served: Counter[PeerID] = Counter()
        self._fetching = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._blamed: dict[tuple[str, bytes], float] = {}
        self._last_keep = 0.0
        self._patience = self._least_patience = max(1.0, run.node.protocol.wait_timeout / HASTY_ANSWER_SECONDS)

    async def sync(self, samples: int, steps: int, contributed: tuple[int, int]) -> None:
        """Fetch the bases that we lack or that are behind, and tell the training process where it stands.

        :param contributed: cumulative samples and steps of our last contribution
        """
        keep = [state.version >= 0 for state in self._run.fragments]
        expected = sum(state.num_bytes for state in self._run.fragments)
        received = 0

        def count(length: int) -> None:
            nonlocal received
            received += length
            self._run.training.send(Syncing(received, max(expected, received)))

        refreshing: asyncio.Task[None] | None = None

        async def refresh() -> None:
            # One for all fragments: over a bad line, the same question asked twice takes twice as long.
            nonlocal refreshing
            if refreshing is None or refreshing.done():
                refreshing = asyncio.create_task(self._presence.refresh())
            await asyncio.shield(refreshing)

        async def complete(state: FragmentState) -> None:
            attempts = 0
            # Restored parameters stand on the restored base, however often it is replaced before training begins.
            reference = state.base.clone()
            while True:
                claim = self.better_claim(state)
                if claim is None and state.version >= 0:
                    state.snapshot.copy_(reference)
                    return
                if claim is not None:
                    fetched = await self._fetch(state, claim, count)
                    if fetched is not None:
                        async with state.content:
                            keep[state.index] &= state.adopt(fetched, self._run.own_id)
                attempts += 1
                if attempts % SYNC_ROUNDS_BETWEEN_NOTES == 0:
                    self._run.training.send(Waiting("No peer delivers the current base yet; still trying."))
                await asyncio.sleep(min(2.0, 0.2 * attempts))
                await refresh()

        await asyncio.gather(*(complete(state) for state in self._run.fragments))
        counts = counts_at_start(self._run.fragments, (samples, steps), contributed)
        if counts[0] > samples:
            # We contributed work that our checkpoint does not know: what we restored is older than that.
            keep = [False] * len(keep)
        samples, steps = counts
        if self._run.manifest.averaging.mode == "gradient":
            keep = [False] * len(keep)  # a sum of gradients does not survive the process
        for state in self._run.fragments:
            if not keep[state.index]:
                state.drop_undecided(samples, steps)
        self._run.training.send(
            Synced(fragments=[state.meta for state in self._run.fragments], keep=keep, samples=samples, steps=steps)
        )

    def better_claim(self, state: FragmentState) -> Claim | None:
        """What we should fetch for this fragment; a version 0 must be the one the organiser signed.

        Where peers train, theirs are the votes: a door that follows slowly and peers that are just coming back would
        together keep each other on a base of the past.
        """
        initial = self._run.signed_manifest.initial_digests[state.index]
        claims = {
            peer: claim
            for peer, claim in self._presence.view.claims(state.index).items()
            if claim.version > 0 or claim.digest == initial
        }
        training = self._presence.present()
        claims = {peer: claim for peer, claim in claims.items() if peer in training} or claims
        return choose_base(
            state.claim if state.version >= 0 else None,
            claims,
            possible_versions=self._run.schedule.possible_versions(self._run.clock.now()),
            groupmates=state.unresolved_mates,
            ancestors=state.ancestors,
            backers=state.backers if self._run.clock.now() < state.backed_until else (),
        )

    def catch_up(self) -> None:
        """Start fetching every fragment in which the swarm has moved on without us."""
        if self._run.training.begun is None and self._run.settings.role == "training":
            return
        behind = [
            state for state in self._run.fragments if not state.busy.locked() and self.better_claim(state) is not None
        ]
        if self._run.settings.role == "serving" and behind and not self._presence.leaving():
            now = self._run.clock.now()
            if now - self._last_keep < KEEPER_SECONDS:
                return
            self._last_keep = now
            behind = [min(behind, key=lambda state: state.version)]
        for state in behind:
            self._run.tasks.spawn(self._replace_base(state))

    async def _replace_base(self, state: FragmentState) -> None:
        if state.busy.locked():
            return
        async with state.busy:
            claim = self.better_claim(state)
            if claim is None:
                return
            before, began = state.version, self._run.clock.now()
            dropped = state.ledger.dropped_element_samples()
            fetched = await self._fetch(state, claim, lambda _: None)
            if fetched is None:
                return
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
                        "donor": fetched.donor,
                        "kept_progress": keep,
                        "dropped_samples": (state.ledger.dropped_element_samples() - dropped) / state.size,
                        "seconds": self._run.clock.now() - began,
                        "bytes_received": fetched.bytes_received,
                    },
                )
            )

    async def _put_fetched(
        self, state: FragmentState, fetched: FetchedBase
    ) -> tuple[bool, asyncio.Future[Rebased] | None]:
        async with state.content:
            keep = await asyncio.to_thread(state.adopt, fetched, self._run.own_id)
            return keep, self._run.training.rebase(state, keep)

    async def _fetch(self, state: FragmentState, claim: Claim, on_bytes: Callable[[int], None]) -> FetchedBase | None:
        """A verified base from one of the peers that announce it, or None if none of them delivers."""
        now = self._run.clock.now()
        self._blamed = {blame: until for blame, until in self._blamed.items() if until > now}
        donors = [
            peer
            for peer, other in self._presence.view.claims(state.index).items()
            if other == claim and (peer, claim.digest) not in self._blamed
        ]
        random.shuffle(donors)
        request = BaseRequest(BaseRequestHeader(fragment=state.index, version=claim.version, digest=claim.digest))
        limit_seconds = self._patience * (FETCH_IDLE_SECONDS + state.num_bytes / FETCH_BYTES_PER_SECOND)
        too_slow = False
        async with self._fetching:
            for donor in donors:
                try:
                    fetched = await asyncio.wait_for(
                        self._fetch_from(donor, request, state, claim, on_bytes), limit_seconds
                    )
                except Exception as error:
                    # Whatever goes wrong while reading what a donor sends is the donor's failure, not ours.
                    logger.debug("Donor %s of fragment %d: %r", donor, state.index, error)
                    self._blamed[donor, claim.digest] = self._run.clock.now() + BLAME_SECONDS
                    too_slow = too_slow or isinstance(error, asyncio.TimeoutError)
                    continue
                self._patience = self._least_patience
                return fetched
        if too_slow:
            self._patience = min(MOST_PATIENCE * self._least_patience, 2 * self._patience)
        return None

    async def _fetch_from(
        self,
        donor: str,
        request: BaseRequest,
        state: FragmentState,
        claim: Claim,
        on_bytes: Callable[[int], None],
    ) -> FetchedBase:
        answers = await self._run.stub(PeerID.from_base58(donor)).rpc_base(request)
        return await receive_base(
            _with_idle_timeout(answers, self._patience * FETCH_IDLE_SECONDS),
            fragment=state.index,
            size=state.size,
            states=len(state.outer_state),
            claim=claim,
            donor=donor,
            on_bytes=on_bytes,
        )

    async def _freeze(self, fragment: int) -> FrozenBase:
        state = self._run.fragments[fragment]
        async with state.content:
            return await asyncio.to_thread(state.frozen)

    async def answer_base(self, request: BaseRequest, remote_id: PeerID) -> AsyncIterator[BaseAnswer]:
        """Serve a base, if we hold the one that is asked for."""
        header = request.header
        if header is None or header.fragment >= len(self._run.fragments):
            return
        state = self._run.fragments[header.fragment]
        if state.version < 0 or (header.digest != state.digest and not self._server.holds(header)):
            return
        if self._served[remote_id] >= STREAMS_PER_PEER:
            return
        self._served[remote_id] += 1
        try:
            async for answer in self._server.answer(header):
                yield answer
        finally:
            self._served[remote_id] -= 1
            if not self._served[remote_id]:
                del self._served[remote_id]


async def _with_idle_timeout(stream: AsyncIterator[Item], seconds: float) -> AsyncIterator[Item]:
    """Pass a stream on; TimeoutError if nothing arrives for ``seconds``."""
    iterator = stream.__aiter__()
    while True:
        try:
            item = await asyncio.wait_for(iterator.__anext__(), seconds)
        except StopAsyncIteration:
            return
        yield item
