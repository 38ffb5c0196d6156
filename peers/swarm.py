"""The averaging process of one peer: one event loop that keeps membership, rounds and bases of all fragments.

Started by ``process.py``; talks to the training process through the messages in ``pipe.py``. Decisions are pure
functions elsewhere (``clock``, ``lineage``, ``ledger``, ``round``); this module gives them what they decide on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, AsyncIterator, Literal, TypeVar  # noqa: UP035  (ServicerBase recognises typing's AsyncIterator only)

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2

from dht_config.address import Address, parse_addresses
from dht_config.errors import IdentityError, P2PTrainerError, SwarmProcessDied
from dht_config.hardening import bound_found_expirations, harden_msgpack
from dht_config.keys import (
    manifest_key,
    matchmaking_prefix,
    profiles_key,
    rpc_namespace,
    run_manifest_key,
    states_key,
)
from dht_config.manifest import RunManifest
from dht_config.records import (
    FragmentClaim,
    PeerProfile,
    RoundAnnouncement,
    SignedManifest,
    SwarmState,
    sign_announcement,
    software_version,
)
from dht_config.validators import SwarmRecordValidator
from peers.arena import SharedArena
from peers.clock import Schedule, SwarmClock
from peers.daemon import answers_elsewhere, dial, limit_message_size, limit_write_time, refuses, start_daemon
from peers.door import (
    enter_dht,
    fetch_manifest,
    find_someone,
    remember_addresses,
    remembered_addresses,
    set_clock,
    wait_for_answer,
)
from peers.fragment_state import FragmentState, NextBase
from peers.grouping import FragmentMatchmaking, GroupSearch, NodeAsDHT
from peers.ledger import PendingSpan
from peers.lineage import Claim, choose_base
from peers.membership import Member, View, read_view
from peers.messages import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    Ask,
    Average,
    AveragedPart,
    BaseAnswer,
    BaseRequest,
    BaseRequestHeader,
    Clock,
    ClockHeader,
    Part,
)
from peers.outer import Nesterov
from peers.pipe import (
    BeginTraining,
    Configure,
    Connected,
    Event,
    Failed,
    Progress,
    Quiesce,
    Quiet,
    Rebase,
    Rebased,
    Resume,
    SnapshotTaken,
    Stop,
    Stopped,
    Synced,
    Syncing,
    TakeSnapshot,
    Waiting,
)
from peers.reducer import MAX_ABSOLUTE_DIFFERENCE
from peers.round import (
    TRANSPORT_ERRORS,
    GroupMember,
    Round,
    RoundPlan,
    RoundVoid,
    deadline_seconds,
    split_fragment,
)
from peers.settings import SwarmSettings
from peers.transfer import BaseServer, FetchedBase, FrozenBase, receive_base

logger = logging.getLogger(__name__)

RECORD_SECONDS = 30.0
"""How long a record of ours stands; a killed peer is forgotten after it."""
PUBLISH_SECONDS = 5.0
REACH_OUT_SECONDS = 2 * PUBLISH_SECONDS
"""Records are renewed every PUBLISH_SECONDS: twice that without news means that something is broken."""
MANIFEST_SECONDS = 600.0
CLOCK_SECONDS = 60.0
PING_SECONDS = 2.0
WRITE_SECONDS = 60.0
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + MAX_BODY_BYTES + 64
FETCH_IDLE_SECONDS = 15.0
FETCH_BYTES_PER_SECOND = 20_000.0
"""A donor slower than this is given up for another."""
BLAME_SECONDS = 10.0
KEEPER_SECONDS = 5.0
LEAVE_ROUND_SECONDS = 3.0
LEAVE_GOODBYE_SECONDS = 1.5
LEAVE_CHANGE_SECONDS = 1.0
REGISTER_SECONDS = 5.0
FETCHES_AT_ONCE = 3
STREAMS_PER_PEER = FETCHES_AT_ONCE
ROUNDS_UNKNOWN_PER_PEER = 4
DIALS_AT_ONCE = 8
MAX_SAMPLES_PER_SECOND = 1e6
"""No peer is this fast: bounds what one can announce since the run began, so that totals stay countable."""
ADDRESSES_PER_PEER = 4
ALONE_NEIGHBOURS = 4
SYNC_ROUNDS_BETWEEN_NOTES = 10

Reply = TypeVar("Reply")
Status = Literal["syncing", "training", "serving", "leaving"]


class SwarmServicer(ServicerBase):  # type: ignore[misc]  # hivemind ships no types
    """What other peers can call; every call goes to the swarm it was made for."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> StubBase:
        """All fragments share the run's handlers: matchmaking's per-fragment prefix is cut off."""
        prefix = re.fullmatch(r"(.+-[0-9a-f]{16})-f\d{1,3}", namespace or "")
        return super().get_stub(p2p, peer, namespace=rpc_namespace(prefix.group(1)) if prefix else namespace)

    async def rpc_time(self, request: Ask, context: P2PContext) -> Clock:
        return Clock(ClockHeader(seconds=self._swarm.clock.now()))

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        matchmaking = self._swarm.matchmaking_for(request.group_key)
        if matchmaking is None:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_GROUP_KEY)
            return
        async for message in matchmaking.rpc_join_group(request, context):
            yield message

    async def rpc_average(self, stream: AsyncIterator[Part], context: P2PContext) -> AsyncIterator[Average]:
        async for answer in self._swarm.answer_sender(stream, context.remote_id):
            yield answer

    async def rpc_base(self, request: BaseRequest, context: P2PContext) -> AsyncIterator[BaseAnswer]:
        async for answer in self._swarm.answer_base(request, context.remote_id):
            yield answer


class Swarm:
    """One peer's side of a run.

    :param send: puts a message into the pipe to the training process
    """

    def __init__(self, settings: SwarmSettings, send: Callable[[Any], None]) -> None:
        self.settings = settings
        self.send = send
        self.clock = SwarmClock()
        self.view = View()
        self._own_record: Member | None = None
        self._last_donor = ""
        self.fragments: list[FragmentState] = []
        self._matchmaking: dict[str, FragmentMatchmaking] = {}
        self._rounds: dict[bytes, asyncio.Future[Round]] = {}
        self._served: Counter[PeerID] = Counter()
        self._guessing: Counter[PeerID] = Counter()
        self._server = BaseServer(self._freeze)
        self._replies: dict[tuple[type, int], asyncio.Future[Any]] = {}
        self._configured: asyncio.Future[tuple[Configure, SharedArena]] = asyncio.Future()
        self._stop: asyncio.Future[str] = asyncio.Future()
        self._changed = asyncio.Event()
        self._quiet: list[FragmentState] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Future[Any]] = set()
        self._backed_until: dict[int, float] = {}
        self._fetching = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._dialling = asyncio.Semaphore(DIALS_AT_ONCE)
        self._dead: dict[str, float] = {}
        self._blamed: dict[tuple[str, bytes], float] = {}
        self._known: set[str] = set()
        self._progress = Progress(samples=0, steps=0, credited_samples=0.0, samples_per_second=0.0)
        self._training: BeginTraining | None = None
        self._announced = False
        self._joined_at = 0.0
        self._last_expiration = 0.0
        self._last_keep = 0.0
        self._heard_at = float("-inf")

    # ------------------------------------------------------------------ life

    async def run(self) -> None:
        """Enter, sync, take part until told to stop. Errors a person can act on go through the pipe."""
        harden_msgpack()
        bound_found_expirations()
        limit_write_time(WRITE_SECONDS)
        limit_message_size(MAX_MESSAGE_BYTES)
        self.clock.install()
        try:
            self.p2p = await start_daemon(
                self.settings.network, self.settings.identity.path, self.settings.socket_directory
            )
        except P2PTrainerError as error:
            self.send(Failed(error))
            return
        try:
            life = asyncio.create_task(self._live())
            daemon_end = asyncio.create_task(self.p2p._child.wait())
            watched: set[asyncio.Future[Any]] = {life, daemon_end, self._stop}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if daemon_end.done():
                life.cancel()
                raise SwarmProcessDied(
                    f"The p2p daemon ended unexpectedly (exit code {daemon_end.result()}).",
                    "Start the same command again: it continues from the last checkpoint.",
                )
            daemon_end.cancel()
            if life.done():
                life.result()
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
            await self._leave()
        except P2PTrainerError as error:
            self.send(Failed(error))
        finally:
            await self._cancel_tasks()
            await self.p2p.shutdown()
        clean = not any(state.uncertain for state in self.fragments)
        self.send(Stopped([state.meta for state in self.fragments], clean))

    async def _live(self) -> None:
        await self._enter()
        configure, arena = await self._configured
        self._configure(configure, arena)
        await self._refresh()
        await self._refuse_twin()
        await self._publish_manifest()
        await self._publish(self._first_status)
        await self._refresh()
        await self._sync(configure)
        if self.settings.role == "serving":
            await self._publish("serving")
        await asyncio.gather(self._keep_membership(), self._keep_clock(), self._keep_ticks())

    async def _enter(self) -> None:
        settings = self.settings
        self._servicer = SwarmServicer(self)
        await self._servicer.add_p2p_handlers(self.p2p, namespace=rpc_namespace(settings.run_id))
        addresses = [*settings.addresses, *remembered_addresses(settings.remembered_peers_path)]
        known = await find_someone(
            self.p2p,
            list({address.text: address for address in addresses}.values()),
            may_start=settings.may_start,
            wait_seconds=settings.wait_seconds,
            on_waiting=lambda text: self.send(Waiting(text)),
        )
        peer_ids = [PeerID.from_base58(address.peer_id) for address in known]
        await set_clock(self.clock, self._stub, peer_ids, newcomer=True)
        validator = SwarmRecordValidator(
            settings.run_id,
            settings.identity,
            now=self.clock.now,
            organiser_public_key=settings.organiser_public_key,
        )
        self.node: DHTNode = await enter_dht(self.p2p, validator, known)
        await wait_for_answer(
            self.node,
            peer_ids,
            wait_seconds=settings.wait_seconds,
            on_waiting=lambda text: self.send(Waiting(text)),
        )
        self._joined_at = self.clock.now()
        self._heard_at = self._joined_at if known else float("-inf")
        manifest = None
        if settings.needs_manifest:
            manifest = await fetch_manifest(
                self.node, settings.run_id, settings.organiser_public_key, ours_json=settings.manifest_json
            )
        self.addresses = tuple(str(address) for address in await self.p2p.get_visible_maddrs(latest=True))
        remember_addresses(settings.remembered_peers_path, [address.text for address in [*known, *addresses]])
        self.send(Connected(peer_id=str(self.p2p.peer_id), addresses=self.addresses, signed_manifest=manifest))

    def _configure(self, configure: Configure, arena: SharedArena) -> None:
        self.signed_manifest: SignedManifest = configure.signed_manifest
        self.manifest: RunManifest = configure.signed_manifest.manifest()
        run, averaging, outer = self.manifest.run, self.manifest.averaging, self.manifest.outer_optimizer
        self.layout = configure.layout
        self.arena = arena
        self.schedule = Schedule(
            start_seconds=run.start.timestamp(), tick_seconds=run.tick_seconds, fragments=run.fragments
        )
        self.outer = Nesterov(lr=outer.lr, momentum=outer.momentum)
        self.fragments = [FragmentState(index, self.layout, arena) for index in range(run.fragments)]
        for state, meta in zip(self.fragments, configure.fragments or (), strict=False):
            state.restore(meta)
            state.uncertain = not configure.clean
        self._progress = Progress(
            samples=configure.samples, steps=configure.steps, credited_samples=0.0, samples_per_second=0.0
        )
        dht = NodeAsDHT(self.node)
        self.node.protocol.wait_timeout = min(3.0, max(0.5, averaging.matchmaking_seconds / 2))
        for index in range(run.fragments):
            prefix = matchmaking_prefix(self.settings.run_id, index)
            matchmaking = FragmentMatchmaking(
                self.p2p,
                dht,
                run_id=self.settings.run_id,
                prefix=prefix,
                servicer_type=SwarmServicer,
                matchmaking_seconds=averaging.matchmaking_seconds,
                size=self.layout.size(index),
                present=self._present,
                possible_samples=lambda: MAX_SAMPLES_PER_SECOND * (self.clock.now() - self.schedule.start_seconds),
            )
            self._matchmaking[matchmaking.group_key_manager.current_key] = matchmaking

    async def _cancel_tasks(self) -> None:
        """End what still runs; a change of a base that has begun is finished, which takes milliseconds."""
        ending = {*self._tasks}
        for task in ending:
            task.cancel()
        if ending or self._changes:
            await asyncio.wait({*ending, *self._changes}, timeout=LEAVE_CHANGE_SECONDS)

    @property
    def _first_status(self) -> Status:
        return "syncing" if self.settings.role == "training" else "serving"

    async def _leave(self) -> None:
        """Let rounds that are under way end, say goodbye; never longer than a few seconds."""
        running = [task for task in self._tasks if not task.done()]
        if running:
            await asyncio.wait(running, timeout=LEAVE_ROUND_SECONDS)
        if self.fragments:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._publish("leaving"), LEAVE_GOODBYE_SECONDS)

    # ------------------------------------------------------------------ pipe

    def receive(self, message: Any) -> None:
        """A message from the training process."""
        if isinstance(message, SnapshotTaken | Rebased):
            reply = self._replies.pop((type(message), message.fragment), None)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif isinstance(message, BeginTraining):
            self._training = message
            self._changed.set()
        elif isinstance(message, Progress):
            self._progress = message
        elif isinstance(message, Quiesce):
            self._spawn(self._quiesce())
        elif isinstance(message, Resume):
            for state in self._quiet:
                state.content.release()
            self._quiet = []
        elif isinstance(message, Stop) and not self._stop.done():
            self._stop.set_result(message.reason)

    def configured(self, configure: Configure, arena: SharedArena) -> None:
        """``Configure`` came, and the arena's descriptor with it."""
        self._configured.set_result((configure, arena))

    def _ask(self, request: Any, reply: type[Reply], fragment: int) -> asyncio.Future[Reply]:
        """Send a request for one fragment, or wait on for the answer to the same one."""
        key = (reply, fragment)
        if key not in self._replies:
            self._replies[key] = asyncio.get_running_loop().create_future()
            self.send(request)
        return self._replies[key]

    async def _quiesce(self) -> None:
        for state in self.fragments:
            await state.content.acquire()
            self._quiet.append(state)
        self.send(Quiet([state.meta for state in self.fragments]))

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A task of the averaging process failed: %r", error, exc_info=error)

    # ------------------------------------------------------------ membership

    async def _publish_manifest(self) -> None:
        run_id, payload = self.settings.run_id, self.signed_manifest.to_payload()
        until = self.clock.now() + MANIFEST_SECONDS
        await asyncio.gather(
            *(self.node.store(key, payload, until, subkey=run_id) for key in (run_manifest_key(run_id), manifest_key()))
        )

    async def _publish(self, status: Status) -> None:
        """Store our profile and our bases' claims."""
        training, progress = self._training, self._progress
        profile = PeerProfile(
            software_version=software_version(),
            status=status,
            samples_per_second=progress.samples_per_second or (training.samples_per_second if training else 0.0),
            processed_samples=progress.samples,
            credited_samples=progress.credited_samples,
            micro_batch=training.micro_batch if training else 0,
            device=training.device if training else "",
            addresses=self.addresses[:16],
            joined_at=self._joined_at,
            restart=self.settings.restart,
        )
        own = self.settings.identity.peer_id.to_bytes()
        expiration = self._expiration(RECORD_SECONDS)
        stores = [self.node.store(profiles_key(self.settings.run_id), profile.to_payload(), expiration, subkey=own)]
        if all(state.version >= 0 for state in self.fragments):
            claims = SwarmState(
                fragments=tuple(
                    FragmentClaim(
                        version=state.claim.version,
                        digest=state.claim.digest,
                        total_samples=state.claim.total_samples,
                    )
                    for state in self.fragments
                )
            )
            stores.append(
                self.node.store(states_key(self.settings.run_id), claims.to_payload(), expiration, subkey=own)
            )
        if not all(await asyncio.gather(*stores)):
            logger.debug("The DHT refused a record of ours")

    def _expiration(self, seconds: float) -> float:
        """Later than any expiration given before: the DHT keeps the record that expires last."""
        self._last_expiration = max(self.clock.now() + seconds, self._last_expiration + 0.001)
        return self._last_expiration

    async def _refresh(self) -> None:
        """Read everyone's records into a new view."""
        run_id = self.settings.run_id
        found = await self.node.get_many([profiles_key(run_id), states_key(run_id)], float("inf"))
        everyone = read_view(found, run_id, self.clock.now())
        own = str(self.settings.identity.peer_id)
        self._own_record = everyone.members.get(own)
        # A record that a search missed still stands until it expires: a hiccup must not make a peer think it is alone.
        standing = {peer: member for peer, member in self.view.members.items() if member.expires > everyone.read_at}
        members = {peer: member for peer, member in {**standing, **everyone.members}.items() if peer != own}
        before = self.view.members
        if any(peer not in before or member.expires > before[peer].expires for peer, member in members.items()):
            self._heard_at = everyone.read_at
        self.view = View(read_at=everyone.read_at, members=members)
        self.send(Event("peers", {"training": len(self._present()), "known": len(members)}))
        self._meet(members)

    def _meet(self, members: dict[str, Member]) -> None:
        """Connect to peers we have not met, and remember the way to all of them."""
        fresh = [peer for peer in members if peer not in self._known]
        self._known = set(members)
        if not fresh:
            return
        for peer in fresh:
            good, _ = parse_addresses(members[peer].profile.addresses[:ADDRESSES_PER_PEER])
            for address in good:
                if address.peer_id == peer:
                    self._spawn(self._greet(address))
        texts = [text for peer in members for text in members[peer].profile.addresses]
        remember_addresses(
            self.settings.remembered_peers_path,
            [*texts, *(address.text for address in self.settings.addresses)],
        )

    async def _greet(self, address: Address) -> None:
        async with self._dialling:
            await dial(self.p2p, address)

    async def _reach_out(self) -> None:
        """Nobody was heard of for a while: dial and ping anew, since hivemind forgets nodes that do not answer."""
        known = [*self.settings.addresses, *remembered_addresses(self.settings.remembered_peers_path)]
        addresses = list(
            {address.text: address for address in known if address.peer_id != str(self.p2p.peer_id)}.values()
        )
        await asyncio.gather(*(self._greet(address) for address in addresses))
        peers = {PeerID.from_base58(address.peer_id) for address in addresses}
        await asyncio.gather(*(self.node.protocol.call_ping(peer) for peer in peers))

    async def _refuse_twin(self) -> None:
        """A copied identity: somebody else answers under our peer id at the addresses in our own record."""
        if self._own_record is None or self._own_record.profile.status == "leaving":
            return
        texts = self._own_record.profile.addresses
        good, _ = parse_addresses([text for text in texts if text not in self.addresses])
        if good and await answers_elsewhere(str(self.p2p.peer_id), good, self.settings.socket_directory):
            raise IdentityError(
                f"Another peer runs with this identity at {good[0].text}.",
                f"Stop it, or delete {self.settings.identity.path} to get an identity of your own.",
            )

    def _present(self) -> frozenset[str]:
        """Training peers, without those known to be dead; one counts again as soon as it renews its record."""
        return frozenset(
            peer for peer in self.view.training() if self._dead.get(peer, 0.0) < self.view.members[peer].expires
        )

    async def _look_for_dead(self, peers: Collection[str]) -> None:
        """Find out which of the peers that failed us ended: their machine answers, but nobody listens there any more.

        Silence proves nothing: both halves of a split swarm would take each other for dead and go on alone.
        """

        async def look(peer: str) -> None:
            member = self.view.members.get(peer)
            if member is None:
                return
            good, _ = parse_addresses(member.profile.addresses[:ADDRESSES_PER_PEER])
            if good and all(await asyncio.gather(*(refuses(address) for address in good))):
                self._dead[peer] = member.expires

        await asyncio.gather(*(look(peer) for peer in peers))

    async def _keep_membership(self) -> None:
        published = manifest_published = reached_out = self.clock.now()
        period = max(0.25, self.schedule.tick_seconds / 2)
        status = self._first_status
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), period)
            now = self.clock.now()
            try:
                if self._changed.is_set() or now - published >= PUBLISH_SECONDS:
                    self._changed.clear()
                    if self._training is not None and status == "syncing":
                        status = "training"
                    await self._publish(status)
                    published = now
                    self._announced = self._announced or status == "training"
                if now - manifest_published >= 60.0:
                    await self._publish_manifest()
                    manifest_published = now
                await self._refresh()
                if now - max(self._heard_at, reached_out) >= REACH_OUT_SECONDS:
                    reached_out = now
                    self._spawn(self._reach_out())
            except (*TRANSPORT_ERRORS, ValueError) as error:
                # ValueError: a record that we would have to publish is out of bounds; membership must outlive it.
                logger.debug("Membership was not refreshed: %r", error)
                continue
            self._catch_up()

    async def _keep_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            peers = [PeerID.from_base58(peer) for peer in self.view.members]
            random.shuffle(peers)
            await set_clock(self.clock, self._stub, peers, newcomer=False)

    def _stub(self, peer: PeerID) -> StubBase:
        return SwarmServicer.get_stub(self.p2p, peer, namespace=rpc_namespace(self.settings.run_id))

    # ----------------------------------------------------------------- bases

    async def _sync(self, configure: Configure) -> None:
        """Fetch the bases that we lack or that are behind, and tell the training process where it stands."""
        keep = [state.version >= 0 for state in self.fragments]
        expected = sum(2 * 4 * state.size for state in self.fragments)
        received = 0

        def count(length: int) -> None:
            nonlocal received
            received += length
            self.send(Syncing(received, max(expected, received)))

        async def complete(state: FragmentState) -> None:
            attempts = 0
            while True:
                claim = self._better_claim(state)
                if claim is None and state.version >= 0:
                    return
                if claim is not None:
                    fetched = await self._fetch(state, claim, count)
                    if fetched is not None:
                        async with state.content:
                            own = self.settings.identity.peer_id.to_bytes()
                            keep[state.index] &= state.adopt(fetched, own)
                attempts += 1
                if attempts % SYNC_ROUNDS_BETWEEN_NOTES == 0:
                    self.send(Waiting("No peer delivers the current base yet; still trying."))
                await asyncio.sleep(min(2.0, 0.2 * attempts))
                await self._refresh()

        await asyncio.gather(*(complete(state) for state in self.fragments))
        samples, steps = configure.samples, configure.steps
        counted = max(span.samples for state in self.fragments for span in state.ledger.spans)
        if counted > samples:
            # The swarm holds work of ours that our checkpoint does not know: what we restored is older than that.
            samples = counted
            steps = max(span.steps for state in self.fragments for span in state.ledger.spans)
            keep = [False] * len(keep)
        for state in self.fragments:
            if not keep[state.index]:
                state.ledger = state.ledger.drop(samples, steps)
        self.send(Synced(fragments=[state.meta for state in self.fragments], keep=keep, samples=samples, steps=steps))

    def _better_claim(self, state: FragmentState) -> Claim | None:
        """What we should fetch for this fragment; a version 0 must be the one the organiser signed.

        Where peers train, theirs are the votes: a door that follows slowly and peers that are just coming back would
        together keep each other on a base of the past.
        """
        initial = self.signed_manifest.initial_digests[state.index]
        claims = {
            peer: claim
            for peer, claim in self.view.claims(state.index).items()
            if claim.version > 0 or claim.digest == initial
        }
        training = self._present()
        claims = {peer: claim for peer, claim in claims.items() if peer in training} or claims
        return choose_base(
            state.claim if state.version >= 0 else None,
            claims,
            possible_versions=self.schedule.possible_versions(self.clock.now()),
            groupmates=state.unresolved_mates,
            ancestors=state.ancestors,
            backers=state.backers if self.clock.now() < self._backed_until.get(state.index, 0.0) else 1,
        )

    def _catch_up(self) -> None:
        """Start fetching every fragment in which the swarm has moved on without us."""
        if self._training is None and self.settings.role == "training":
            return
        behind = [
            state for state in self.fragments if not state.busy.locked() and self._better_claim(state) is not None
        ]
        if self.settings.role == "serving" and behind:
            now = self.clock.now()
            if now - self._last_keep < KEEPER_SECONDS:
                return
            self._last_keep = now
            behind = [min(behind, key=lambda state: state.version)]
        for state in behind:
            self._spawn(self._replace_base(state))

    async def _replace_base(self, state: FragmentState) -> None:
        if state.busy.locked():
            return
        async with state.busy:
            claim = self._better_claim(state)
            if claim is None:
                return
            before, began = state.version, self.clock.now()
            fetched = await self._fetch(state, claim, lambda _: None)
            if fetched is None:
                return
            pending = self._replies.get((SnapshotTaken, state.index))
            if pending is not None:
                await asyncio.shield(pending)
            own = self.settings.identity.peer_id.to_bytes()
            keep, rebased = await self._whole(self._put_fetched(state, fetched, own))
            await self._wait_rebased(state, keep, rebased)
            self._changed.set()
            self.send(
                Event(
                    "rebase",
                    {
                        "fragment": state.index,
                        "from_version": before,
                        "to_version": state.version,
                        "digest": state.digest.hex(),
                        "donor": self._last_donor,
                        "kept_progress": keep,
                        "seconds": self.clock.now() - began,
                        "bytes_received": fetched.bytes_received,
                    },
                )
            )

    async def _put_fetched(
        self, state: FragmentState, fetched: FetchedBase, own: bytes
    ) -> tuple[bool, asyncio.Future[Rebased] | None]:
        async with state.content:
            keep = await asyncio.to_thread(state.adopt, fetched, own)
            return keep, self._rebase(state, keep)

    async def _fetch(self, state: FragmentState, claim: Claim, on_bytes: Callable[[int], None]) -> FetchedBase | None:
        """A verified base from one of the peers that announce it, or None if none of them delivers."""
        now = self.clock.now()
        self._blamed = {blame: until for blame, until in self._blamed.items() if until > now}
        donors = [
            peer
            for peer, other in self.view.claims(state.index).items()
            if other == claim and (peer, claim.digest) not in self._blamed
        ]
        random.shuffle(donors)
        request = BaseRequest(
            BaseRequestHeader(
                fragment=state.index, version=claim.version, digest=claim.digest, known_version=state.version
            )
        )
        limit_seconds = FETCH_IDLE_SECONDS + 2 * 4 * state.size / FETCH_BYTES_PER_SECOND
        async with self._fetching:
            for donor in donors:
                try:
                    fetched = await asyncio.wait_for(
                        self._fetch_from(donor, request, state, claim, on_bytes), limit_seconds
                    )
                except Exception as error:
                    # Whatever goes wrong while reading what a donor sends is the donor's failure, not ours.
                    logger.debug("Donor %s of fragment %d: %r", donor, state.index, error)
                    self._blamed[donor, claim.digest] = self.clock.now() + BLAME_SECONDS
                    continue
                self._last_donor = donor
                return fetched
        return None

    async def _fetch_from(
        self,
        donor: str,
        request: BaseRequest,
        state: FragmentState,
        claim: Claim,
        on_bytes: Callable[[int], None],
    ) -> FetchedBase:
        answers = await self._stub(PeerID.from_base58(donor)).rpc_base(request)
        return await receive_base(
            _with_idle_timeout(answers, FETCH_IDLE_SECONDS),
            fragment=state.index,
            size=state.size,
            claim=claim,
            on_bytes=on_bytes,
        )

    async def _freeze(self, fragment: int) -> FrozenBase:
        state = self.fragments[fragment]
        async with state.content:
            return await asyncio.to_thread(state.frozen)

    async def answer_base(self, request: BaseRequest, remote_id: PeerID) -> AsyncIterator[BaseAnswer]:
        """Serve a base, if we hold the one that is asked for."""
        header = request.header
        if header is None or header.fragment >= len(self.fragments):
            return
        state = self.fragments[header.fragment]
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

    # ---------------------------------------------------------------- rounds

    def matchmaking_for(self, group_key: str) -> FragmentMatchmaking | None:
        """The matchmaking behind one of this run's group keys."""
        return self._matchmaking.get(group_key)

    async def answer_sender(self, stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncIterator[Average]:
        """A groupmate sends its contribution; its round may be known to us a moment later than to it."""
        try:
            first = await asyncio.wait_for(stream.__aiter__().__anext__(), REGISTER_SECONDS)
        except (StopAsyncIteration, asyncio.TimeoutError):
            return
        if first.header is None:
            return
        current = await self._round_of(first.header.group_id, remote_id)
        if current is None:
            return
        async for answer in current.answer(_chain(first, stream), remote_id):
            yield answer

    async def _round_of(self, group_id: bytes, remote_id: PeerID) -> Round | None:
        """The round of a group, waited for a moment if we do not know of it yet; a few such waits per peer."""
        waiting = self._rounds.get(group_id)
        if waiting is not None and waiting.done():
            return waiting.result()
        if self._guessing[remote_id] >= ROUNDS_UNKNOWN_PER_PEER:
            return None
        if waiting is None:
            waiting = self._rounds[group_id] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(2 * REGISTER_SECONDS, self._forget_round, group_id)
        self._guessing[remote_id] += 1
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), REGISTER_SECONDS)
        except asyncio.TimeoutError:
            return None
        finally:
            self._guessing[remote_id] -= 1
            if not self._guessing[remote_id]:
                del self._guessing[remote_id]

    def _forget_round(self, group_id: bytes) -> None:
        """Of a group id that somebody named but that never became a round here."""
        waiting = self._rounds.get(group_id)
        if waiting is not None and not waiting.done():
            del self._rounds[group_id]

    async def _keep_ticks(self) -> None:
        """Begin every tick's round in time to find a group by the tick's beginning."""
        if self.settings.role == "serving":
            await asyncio.Future()
        lead = self.manifest.averaging.matchmaking_seconds
        tick = self.schedule.next_tick(self.clock.now() + lead)
        while True:
            await asyncio.sleep(max(0.0, self.schedule.begins(tick) - lead - self.clock.now()))
            if self._announced:
                self._spawn(self._hold_round(tick))
            tick = max(tick + 1, self.schedule.next_tick(self.clock.now() + lead - 0.01))

    async def _hold_round(self, tick: int) -> None:
        """One round, from snapshot to commit, and its line in the metrics."""
        state = self.fragments[self.schedule.fragment(tick)]
        report = {
            "tick": tick,
            "fragment": state.index,
            "outcome": "skipped",
            "reason": "",
            "group_size": 0,
            "weight": 0,
            "weight_share": 0.0,
            "seconds": 0.0,
            "bytes_sent": 0,
            "bytes_received": 0,
        }
        if state.busy.locked():
            report["reason"] = "the previous round or a fetch of this fragment is still under way"
        else:
            async with state.busy:
                try:
                    await self._attempt_round(tick, state, report)
                except RoundVoid as error:
                    report["reason"] = str(error)
                except Exception as error:
                    logger.exception("A round failed in an unexpected way; its contribution is carried on")
                    report["reason"] = f"unexpected: {error!r}"
        report.update(version=state.version, digest=state.digest.hex())
        self.send(Event("round", report))

    async def _attempt_round(self, tick: int, state: FragmentState, report: dict[str, Any]) -> None:
        begins = self.schedule.begins(tick)
        better = self._better_claim(state)
        if better is not None:
            raise RoundVoid(f"the swarm is at version {better.version}; fetching it first")
        taken = state.taken = await self._snapshot(state, begins)
        report["outcome"] = "carried"
        spans = state.ledger.pending(taken.samples, taken.steps)
        contribution = await asyncio.to_thread(state.contribution)
        if not bool((contribution.abs() <= MAX_ABSOLUTE_DIFFERENCE).all()):  # also true for NaN
            await self._discard_progress(state)
            raise RoundVoid("the local parameters had diverged; they were set back to the base")
        group_id, members = await self._find_group(tick, state, taken, spans, begins)
        plan = RoundPlan(
            group_id=group_id,
            tick=tick,
            fragment=state.index,
            size=state.size,
            members=members,
            ranges=split_fragment(state.size, len(members), max(1, self.manifest.averaging.part_bytes // 4)),
        )
        report["group_size"] = len(members)
        weights = [_mean_samples(member.spans, state.size) for member in members]
        own_index = plan.index(self.p2p.peer_id) or 0
        report["weight"] = weights[own_index]
        report["weight_share"] = weights[own_index] / sum(weights) if sum(weights) else 0.0
        if not sum(weights):
            raise RoundVoid("nobody in the group has samples to contribute")
        began = self.clock.now()
        if len(members) == 1:
            average = contribution
            parts: tuple[AveragedPart, ...] = (AveragedPart(start=0, stop=state.size, included=[0]),)
        else:
            average, parts = await self._all_reduce(plan, state, contribution, report)
        own = self.settings.identity.peer_id.to_bytes()
        new = await asyncio.to_thread(state.next_base, self.outer, plan, average, parts)
        rebased = await self._whole(self._commit(state, new, plan, parts, own))
        self._backed_until[state.index] = self.clock.now() + RECORD_SECONDS
        self._changed.set()
        report["outcome"] = "committed"
        report["seconds"] = self.clock.now() - began
        if any(own_index not in part.included for part in parts):
            report["reason"] = "some parts closed without us; their contribution is carried on"
        await self._wait_rebased(state, True, rebased)

    async def _snapshot(self, state: FragmentState, begins: float) -> SnapshotTaken:
        """The fragment as training has it now, or as of the last request if that was answered too late for its round.

        :raises RoundVoid: not answered before the tick begins; the next round of the fragment can use it
        """
        if state.late is not None:
            taken, state.late = state.late, None
            return taken
        state.taken = None  # the snapshot it describes is about to be overwritten
        asked = self._ask(TakeSnapshot(state.index), SnapshotTaken, state.index)
        try:
            return await asyncio.wait_for(asyncio.shield(asked), max(0.1, begins - self.clock.now()))
        except asyncio.TimeoutError as error:

            def keep(answer: asyncio.Future[SnapshotTaken]) -> None:
                state.late = answer.result()

            asked.add_done_callback(keep)
            raise RoundVoid(
                "the training step was too long for a snapshot in time; it serves the next round"
            ) from error

    async def _commit(
        self, state: FragmentState, new: NextBase, plan: RoundPlan, parts: tuple[AveragedPart, ...], own: bytes
    ) -> asyncio.Future[Rebased] | None:
        async with state.content:
            await asyncio.to_thread(state.commit, new, plan, parts, own)
            return self._rebase(state, True)

    async def _whole(self, change: Coroutine[Any, Any, Reply]) -> Reply:
        """Make a change of a base and its message to the training process one: leaving must not come in between."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _discard_progress(self, state: FragmentState) -> None:
        """Set the training process back to the base: what it has is of use to nobody."""
        async with state.content:
            rebased = self._rebase(state, False)
        await self._wait_rebased(state, False, rebased)

    async def _find_group(
        self,
        tick: int,
        state: FragmentState,
        taken: SnapshotTaken,
        spans: tuple[PendingSpan, ...],
        begins: float,
    ) -> tuple[bytes, tuple[GroupMember, ...]]:
        """The group for this round: ourselves if the records show that we are alone. :raises RoundVoid:"""
        present = self._present()
        me = GroupMember(peer_id=self.p2p.peer_id, spans=spans, samples=taken.samples, steps=taken.steps)
        if not present:
            await self._confirm_alone(begins)
            return b"alone", (me,)
        announcement = RoundAnnouncement(
            fragment=state.index,
            tick=tick,
            version=state.version,
            digest=state.digest,
            samples_total=taken.samples,
            steps_total=taken.steps,
            spans=tuple((span.start, span.stop, span.samples, span.steps) for span in spans),
        )
        lead = self.manifest.averaging.matchmaking_seconds
        search = GroupSearch(
            scheduled_time=begins,
            deadline=begins + min(lead, self.schedule.cycle_seconds / 4),
            data_for_gather=sign_announcement(self.settings.identity, announcement, self.settings.run_id),
            now=self.clock.now,
        )
        key = f"{matchmaking_prefix(self.settings.run_id, state.index)}.0b"
        found = await self._matchmaking[key].find(search, fragment=state.index, tick=tick, claim=state.claim)
        if found is None:
            await self._look_for_dead(present)
            if not self._present():
                await self._confirm_alone(begins)
                return b"alone", (me,)
            raise RoundVoid(f"no group of enough of the {len(present) + 1} training peers came together")
        return found

    async def _confirm_alone(self, begins: float) -> None:
        """Look again when the tick begins: whoever joins its round has announced itself by then. :raises RoundVoid:"""
        await asyncio.sleep(max(0.0, begins - self.clock.now()))
        try:
            await self._refresh()
        except TRANSPORT_ERRORS as error:
            raise RoundVoid("the records of other peers could not be read") from error
        if self._present():
            raise RoundVoid("another peer has just joined; averaging with it from the next round on")
        neighbours = list(self.node.protocol.routing_table.uid_to_peer_id.values())[:ALONE_NEIGHBOURS]
        if any(await asyncio.gather(*(self.node.protocol.call_ping(peer) for peer in neighbours))):
            self._heard_at = self.clock.now()
        elif self.clock.now() - self._heard_at < RECORD_SECONDS and not await self._all_are_gone():
            # No records because nobody answers is not the same as nobody being there.
            raise RoundVoid("no other peer answers; waiting to be sure that this one is alone")

    async def _all_are_gone(self) -> bool:
        """Whether everybody we heard of has left or is dead."""
        left = [peer for peer, member in self.view.members.items() if member.profile.status != "leaving"]
        await self._look_for_dead(left)
        return bool(self.view.members) and all(peer in self._dead for peer in left)

    async def _all_reduce(
        self, plan: RoundPlan, state: FragmentState, contribution: Any, report: dict[str, Any]
    ) -> tuple[Any, tuple[AveragedPart, ...]]:
        wait = deadline_seconds(state.recent_seconds, self.schedule.cycle_seconds)

        async def call_reducer(reducer: PeerID, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
            stream: AsyncIterator[Average] = await self._stub(reducer).rpc_average(parts)
            return stream

        current = Round(plan, self.p2p.peer_id, contribution, call_reducer, wait)
        waiting = self._rounds.setdefault(plan.group_id, asyncio.get_running_loop().create_future())
        waiting.set_result(current)
        asyncio.get_running_loop().call_later(2 * wait + REGISTER_SECONDS, self._rounds.pop, plan.group_id, None)
        state.unresolved_mates |= {str(member.peer_id) for member in plan.members}
        state.uncertain = True
        began = self.clock.now()
        try:
            result = await current.run()
        except RoundVoid:
            self._spawn(self._look_for_dead([str(peer) for peer in current.failed]))
            raise
        finally:
            # A round that failed for want of time is a measurement as well: the next one waits longer.
            state.recent_seconds.append(self.clock.now() - began)
            report.update(bytes_sent=current.bytes_sent, bytes_received=current.bytes_received)
        return result.average, result.parts

    def _rebase(self, state: FragmentState, keep: bool) -> asyncio.Future[Rebased] | None:
        """Tell the training process of a new base; inside ``content``, so that it comes before any ``Quiet``."""
        if self._training is None:
            return None
        return self._ask(Rebase(fragment=state.index, keep=keep, meta=state.meta), Rebased, state.index)

    async def _wait_rebased(self, state: FragmentState, keep: bool, rebased: asyncio.Future[Rebased] | None) -> None:
        if rebased is None:
            return
        done = await rebased
        if not keep:
            state.ledger = state.ledger.drop(done.samples, done.steps)


def _mean_samples(spans: tuple[PendingSpan, ...], size: int) -> float:
    """Samples a contribution brings, mean over the fragment's elements."""
    return sum((span.stop - span.start) * span.samples for span in spans) / size


async def _chain(first: Part, rest: AsyncIterator[Part]) -> AsyncIterator[Part]:
    yield first
    async for part in rest:
        yield part


async def _with_idle_timeout(stream: AsyncIterator[Reply], seconds: float) -> AsyncIterator[Reply]:
    """Pass a stream on; TimeoutError if nothing arrives for ``seconds``."""
    iterator = stream.__aiter__()
    while True:
        try:
            item = await asyncio.wait_for(iterator.__anext__(), seconds)
        except StopAsyncIteration:
            return
        yield item
