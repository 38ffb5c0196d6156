"""The averaging process of one peer: enters the swarm, puts the parts together, leaves.

Started by ``process.py``; talks to the training process through the messages in ``pipe.py``. The parts: ``presence``
(our records and the view of others'), ``bases`` (keeping up and serving), ``rounds`` (taking part), ``training_link``
(requests to training). Decisions are pure functions elsewhere (``clock``, ``lineage``, ``ledger``, ``round``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from hivemind.p2p import P2P, PeerID

from dht_config.errors import START_AGAIN, P2PTrainerError, SwarmProcessDied
from dht_config.hardening import bound_found_expirations, harden_msgpack
from dht_config.keys import rpc_namespace
from dht_config.manifest import RunManifest
from dht_config.records import SignedManifest
from dht_config.validators import SwarmRecordValidator
from peers.allowance import Allowance, MeteredTransport
from peers.arena import SharedArena
from peers.bases import BaseKeeper
from peers.clock import Schedule, SwarmClock
from peers.context import RunContext
from peers.contribution import Difference, GradientSum
from peers.daemon import hosts_of, limit_message_size, limit_write_time, start_daemon
from peers.dial_back import DialBackDesk
from peers.direct import DirectTransport, listen_next_to
from peers.door import (
    answer_seconds,
    enter_dht,
    fetch_manifest,
    find_someone,
    hosts_reached,
    remember_addresses,
    remembered_addresses,
    set_clock,
    wait_for_answer,
)
from peers.fragment_state import FragmentState
from peers.known_line import known_line
from peers.life import BIRTH, Life, State
from peers.line import LinkRate
from peers.messages import MAX_BODY_BYTES, MAX_HEADER_BYTES
from peers.pipe import (
    BeginTraining,
    Configure,
    Connected,
    Event,
    Failed,
    Progress,
    Quiesce,
    Rebased,
    Resume,
    SnapshotTaken,
    Stop,
    Stopped,
    Waiting,
)
from peers.presence import Presence
from peers.rounds import RoundKeeper
from peers.servicer import SwarmServicer
from peers.settings import SwarmSettings
from peers.silence import Silence
from peers.tasks import Tasks
from peers.training_link import TrainingLink
from peers.transport import TRANSPORT_ERRORS, DaemonTransport, Transport
from peers.ways_in import announced, clock_line, listening

logger = logging.getLogger(__name__)

WRITE_SECONDS = 60.0
MAX_MESSAGE_BYTES = MAX_HEADER_BYTES + MAX_BODY_BYTES + 64
DAEMON_PAUSE_SECONDS, DAEMON_ANSWER_SECONDS = 3.0, 4.0
DAEMON_PATIENCE_LOOKS = 2
"""It is asked for its own addresses, which takes milliseconds. Three questions without an answer are 21 s at most: less
than the RECORD_SECONDS after which the others forget a peer that they do not hear of."""
LEAVE_SECONDS = 6.0
"""For everything up to the goodbye and the handing over; its parts:"""
LEAVE_ROUND_SECONDS = 3.0
LEAVE_GOODBYE_SECONDS = 1.5
LEAVE_CHANGE_SECONDS = 1.0


class Swarm:
    """One peer's side of a run.

    :param send: puts a message into the pipe to the training process
    """

    def __init__(self, settings: SwarmSettings, send: Callable[[Any], None]) -> None:
        self._settings = settings
        self._clock = SwarmClock()
        self._training = TrainingLink(send)
        self._tasks = Tasks()
        self._life = Life(self._tell)
        self._servicer = SwarmServicer(self._clock)
        self._fragments: tuple[FragmentState, ...] = ()
        self._presence: Presence | None = None
        self._direct: DirectTransport | None = None
        self._allowance: Allowance | None = None
        self._configured: asyncio.Future[tuple[Configure, SharedArena]] = asyncio.Future()
        self._stop: asyncio.Future[str] = asyncio.Future()

    async def run(self) -> None:
        """Enter, sync, take part until told to stop. Errors a person can act on go through the pipe."""
        harden_msgpack()
        bound_found_expirations()
        limit_write_time(WRITE_SECONDS)
        limit_message_size(MAX_MESSAGE_BYTES)
        self._clock.install()
        settings = self._settings
        self._tell(None, *BIRTH)
        try:
            p2p = await start_daemon(settings.network, settings.identity.path, settings.socket_directory)
        except P2PTrainerError as error:
            self._training.send(Failed(error))
            return
        self._servicer.dial_back = DialBackDesk(partial(hosts_of, p2p))
        try:
            await self._live_until_stopped(p2p)
            await self._leave()
        except P2PTrainerError as error:
            self._training.send(Failed(error))
        finally:
            await self._tasks.cancel(LEAVE_CHANGE_SECONDS)
            # Before the daemon ends: training has a checkpoint to write meanwhile.
            clean = not any(state.uncertain for state in self._fragments)
            self._training.send(Stopped([state.record for state in self._fragments], clean))
            if self._allowance is not None:
                self._allowance.keep()
            if self._direct is not None:
                await self._direct.close()
            await p2p.shutdown()

    async def _live_until_stopped(self, p2p: P2P) -> None:
        """:raises SwarmProcessDied: the daemon ended by itself"""
        life = asyncio.create_task(self._live(p2p))
        daemon_end = asyncio.create_task(self._daemon_end(p2p))
        watched: set[asyncio.Future[Any]] = {life, daemon_end, self._stop}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            life.result()
        life.cancel()
        with suppress(asyncio.CancelledError):
            await life
        if daemon_end.done():
            raise SwarmProcessDied(daemon_end.result(), START_AGAIN)
        daemon_end.cancel()

    async def _daemon_end(self, p2p: P2P) -> str:
        """When the daemon has ended, why. It is asked something small now and then, and killed if it is frozen."""
        ended = asyncio.create_task(p2p._child.wait())
        silence = Silence(DAEMON_PATIENCE_LOOKS)
        try:
            while not (await asyncio.wait({ended}, timeout=DAEMON_PAUSE_SECONDS))[0]:
                try:
                    await asyncio.wait_for(p2p._client.identify(), DAEMON_ANSWER_SECONDS)
                    silence.heard()
                except TRANSPORT_ERRORS:
                    if silence.look(asyncio.get_running_loop().time()):
                        p2p._child.kill()
                        return "The p2p daemon was frozen: it did not answer three times."
            return f"The p2p daemon ended unexpectedly (exit code {ended.result()})."
        finally:
            ended.cancel()

    async def _live(self, p2p: P2P) -> None:
        run, heard, configure = await self._enter(p2p)
        presence = self._presence = Presence(run, heard_from_others=heard)
        self._allowance = run.allowance
        transport = MeteredTransport(await self._transport(p2p), run.allowance)
        if self._direct is not None:
            presence.on_moved = self._direct.forget
        bases = BaseKeeper(run, presence, transport)
        rounds = RoundKeeper(run, presence, bases, transport)
        self._servicer.rounds, self._servicer.presence = rounds, presence
        await rounds.serve()
        await bases.serve()
        await presence.refresh()
        await presence.refuse_twin()
        await presence.own.publish_manifest()
        await presence.own.publish()
        await presence.refresh()
        # A newcomer's record must outlast its fetching: what only a door can serve, it keeps current while it sees one.
        announcing = asyncio.create_task(presence.keep_announced())
        try:
            await bases.sync(configure)
        finally:
            announcing.cancel()
        if self._settings.role == "serving":
            self._life.happens("opened")
        presence.changed.set()
        await asyncio.gather(
            presence.keep(on_news=bases.catch_up), presence.keep_clock(), presence.watch_time(), rounds.keep_ticks()
        )

    def _tell(self, before: State | None, state: State, reason: str) -> None:
        self._training.send(Event("state", {"before": before, "state": state, "reason": reason}))

    async def _transport(self, p2p: P2P) -> Transport:
        """How rounds travel: directly if the settings allow it and this machine has a port for it."""
        daemon = DaemonTransport(p2p, rpc_namespace(self._settings.run_id), WRITE_SECONDS)
        network = self._settings.network
        if network.direct_port is None:
            return daemon
        try:
            listener = listen_next_to(network.host, network.direct_port)
        except OSError as error:
            logger.debug("No direct connections: %r", error)
            return daemon
        self._direct = DirectTransport(p2p, daemon, listener)
        await self._direct.start()
        return self._direct

    async def _enter(self, p2p: P2P) -> tuple[RunContext, bool, Configure]:
        """Find somebody, set the clock, enter the DHT, learn the manifest, and be configured for it.

        Returns the context, whether anybody else was found, and the configuration.
        """
        settings = self._settings

        def waiting(text: str) -> None:
            self._training.send(Waiting(text))

        await self._servicer.add_p2p_handlers(p2p, namespace=rpc_namespace(settings.run_id))
        addresses = [*settings.addresses, *remembered_addresses(settings.remembered_peers_path)]
        known = await find_someone(
            p2p,
            list({address.text: address for address in addresses}.values()),
            may_start=settings.may_start,
            wait_seconds=settings.wait_seconds,
            on_waiting=waiting,
        )
        peers = [PeerID.from_base58(address.peer_id) for address in known]

        def stub(peer: PeerID) -> Any:
            return SwarmServicer.get_stub(p2p, peer, namespace=rpc_namespace(settings.run_id))

        await set_clock(self._clock, stub, peers, newcomer=True)
        if line := clock_line(self._clock.offset_seconds):
            waiting(line)
        validator = SwarmRecordValidator(
            settings.run_id,
            settings.identity,
            now=self._clock.now,
            organiser_public_key=settings.organiser_public_key,
        )
        own = tuple(str(address) for address in await p2p.get_visible_maddrs(latest=True))
        # Whoever names an address of a router or a relay knows better than we could find out.
        if not settings.network.announce:
            ours, _ = listening(own, settings.network.host)
            own = tuple(address.text for address in ours)
            if ours and peers:
                hosts = await hosts_reached(stub, peers, ours[0].transport.port)
                own = announced(own, hosts) if hosts is not None else ()
        node = await enter_dht(p2p, validator, known, asks_only=not own)
        answer = partial(wait_for_answer, node, peers, wait_seconds=settings.wait_seconds, on_waiting=waiting)
        measured_seconds = await answer()
        manifest: SignedManifest | None = None
        if settings.needs_manifest:
            manifest = await fetch_manifest(
                node,
                settings.run_id,
                settings.organiser_public_key,
                still_there=answer,
                ours_json=settings.manifest_json,
            )
        remember_addresses(settings.remembered_peers_path, [address.text for address in [*known, *addresses]])
        self._training.send(Connected(peer_id=str(p2p.peer_id), addresses=own, signed_manifest=manifest))
        if settings.role == "training":
            self._life.happens("found")
        configure, arena = await self._configured
        self._life.happens("measured")
        run = configure.signed_manifest.manifest()
        node.protocol.wait_timeout = answer_seconds(run.averaging.matchmaking_seconds, measured_seconds)
        self._fragments = _fragments(configure, arena, run)
        self._training.progress = _restored_progress(configure, self._fragments)
        context = RunContext(
            settings=settings,
            clock=self._clock,
            p2p=p2p,
            node=node,
            addresses=list(own),
            signed_manifest=configure.signed_manifest,
            manifest=run,
            schedule=Schedule(
                start_seconds=run.run.start.timestamp(),
                tick_seconds=run.run.tick_seconds,
                fragments=run.run.fragments,
            ),
            fragments=self._fragments,
            training=self._training,
            tasks=self._tasks,
            life=self._life,
            link_rate=LinkRate(known_line(settings.run_directory, time.time())),
            allowance=Allowance(
                settings.traffic_path,
                time.time,
                up_bytes_per_second=settings.up_bytes_per_second,
                daily_bytes=settings.daily_bytes,
            ),
        )
        return context, bool(known), configure

    async def _leave(self) -> None:
        """Let rounds that are under way end, say goodbye, hand our bases over; never longer than a few seconds."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + LEAVE_SECONDS
        await self._tasks.settle(LEAVE_ROUND_SECONDS)
        if self._presence is None:
            return
        # ValueError: a record that cannot be published. Whatever fails here, what we have is still to be saved.
        with suppress(ValueError, *TRANSPORT_ERRORS):
            await asyncio.wait_for(self._presence.own.publish(), LEAVE_GOODBYE_SECONDS)
        with suppress(ValueError, *TRANSPORT_ERRORS):
            await asyncio.wait_for(self._presence.hand_over(), give_up - loop.time())

    def configured(self, configure: Configure, arena: SharedArena) -> None:
        """``Configure`` came, and the arena's descriptor with it."""
        self._configured.set_result((configure, arena))

    def receive(self, message: Any) -> None:
        """A message from the training process."""
        if isinstance(message, SnapshotTaken | Rebased):
            self._training.answered(message)
        elif isinstance(message, BeginTraining):
            self._training.begun = message
            for state in self._fragments:
                state.forget_snapshot()  # references of what was restored
            if self._presence is not None:
                self._presence.changed.set()
        elif isinstance(message, Progress):
            self._training.progress = message
        elif isinstance(message, Quiesce):
            self._tasks.spawn(self._training.quiesce(self._fragments))
        elif isinstance(message, Resume):
            self._training.resume()
        elif isinstance(message, Stop) and not self._stop.done():
            self._life.happens("stopped", message.reason)
            self._stop.set_result(message.reason)


def _fragments(configure: Configure, arena: SharedArena, run: RunManifest) -> tuple[FragmentState, ...]:
    """The fragments as they lie in the arena, or empty ones that must be fetched."""
    kind = GradientSum if run.averaging.mode == "gradient" else Difference
    fragments = tuple(FragmentState(index, configure.layout, arena, kind()) for index in range(run.run.fragments))
    for state, meta in zip(fragments, configure.fragments or (), strict=False):
        state.restore(meta)
        state.uncertain = not configure.clean
    return fragments


def _restored_progress(configure: Configure, fragments: tuple[FragmentState, ...]) -> Progress:
    """What a returning peer announces until training reports: the counts and the credit of its checkpoint."""
    credited = sum(state.ledger.credited_element_samples() for state in fragments)
    return Progress(
        samples=configure.samples,
        steps=configure.steps,
        credited_samples=credited / configure.layout.num_elements,
        samples_per_second=0.0,
    )
