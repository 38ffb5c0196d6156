"""Being there: everybody's records in one view, ours kept current, and who can be counted on.

Records lie in the DHT, and go from peer to peer as news (``news.py``), which costs a fraction of reading them there.
What ours say: ``own_records.py``.

A peer that is silent is not gone: quorums count it until its record expires or its machine says that nobody listens
there any more. A peer that hears of nobody is isolated, not alone, until it knows what became of the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from hivemind.p2p import PeerID

from dht_config.address import parse_addresses
from dht_config.errors import IdentityError
from dht_config.keys import profiles_key, states_key
from peers.cadence import Cadence, is_due, pace
from peers.company import Company
from peers.contact import Contact
from peers.context import RunContext
from peers.contribution import shares
from peers.daemon import answers_elsewhere, refuses
from peers.door import set_clock
from peers.gossip import Gossip, choose_partners, dht_publishing_seconds, dht_reading_seconds
from peers.life import duration
from peers.lineage import Claim, has_quorum
from peers.membership import Member, View, coverage, read_view
from peers.messages import Ask, AskHeader, News, NewsAsk
from peers.news import Newsroom, newest
from peers.own_records import RECORD_SECONDS, OwnRecords
from peers.pipe import Event
from peers.round import RoundVoid
from peers.transport import TRANSPORT_ERRORS
from peers.ways_in import ways_to

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 5.0
REACH_OUT_SECONDS = 2 * PUBLISH_SECONDS
"""News is made every PUBLISH_SECONDS: twice that without any means that something is broken."""
MANIFEST_PUBLISH_SECONDS = 60.0
CLOCK_SECONDS = 60.0
STILL_SECONDS = 5.0
"""A process that did not run for so long may have missed rounds: its machine was suspended, or it was stopped."""
ALONE_NEIGHBOURS = 4
LOOK_SECONDS = 0.5
LOOKS_AT_ONCE = 64
"""At machines whose peers may have ended: each is a connection, and takes REFUSAL_SECONDS where nobody answers."""
HAND_OVER_POLL_SECONDS = 0.25
HAND_OVER_PEERS = 8
MOST_TOLD = 128
"""Peers that are told by ourselves what we do from now on; beyond these it is passed on."""
USED_UP = "what may be moved in a day has been moved; training goes on alone until midnight UTC"


class Presence:
    """Everybody's records in one view, and what follows from it.

    :param heard_from_others: whether this peer came in through somebody, who may be silent later
    """

    def __init__(self, run: RunContext, *, heard_from_others: bool) -> None:
        self._run = run
        self.view = View()
        self.changed = asyncio.Event()
        """Set by whoever changes what our records say; they are published at once."""
        self.announced = False
        """Whether our record says that we train: only then may we take part in rounds."""
        self.caught_up = False
        """Whether our base of any fragment has been the swarm's. Before that nobody should count on us: on a line too
        slow to keep up, a peer that rounds wait for would hold everybody up."""
        self.cadence = Cadence(
            run.schedule,
            run.manifest.averaging.codec,
            wished_cadence=run.settings.wished_cadence,
            wished_codec=run.settings.wished_codec,
        )
        self._own_peer = str(run.settings.identity.peer_id)
        self._own_record: Member | None = None
        self._dead: dict[str, float] = {}
        self._newsroom = Newsroom(run.settings.run_id, run.own_id, run.clock.now, fragments=len(run.fragments))
        self.own = OwnRecords(run, self._newsroom, self.cadence)
        self._gossip = Gossip(
            self._newsroom,
            run.stub,
            run.clock.passed,
            lambda: run.node.protocol.wait_timeout,
            run.allowance,
            on_answer=lambda peer: run.tasks.spawn(self._contact.keep_in_dht(peer)),
        )
        self._to_ask: set[str] = set()
        """Peers that say that their records have changed."""
        self._read_dht_at = float("-inf")
        self._company = Company(run.clock.passed() if heard_from_others else float("-inf"))
        self.on_moved: Callable[[str], None] = lambda peer: None
        """Told of a peer, by its base58 id, that is at other addresses now."""
        self._contact = Contact(run, self.changed.set, self._gossip.ask, lambda peer: self.on_moved(peer))
        self._looked_at = float("-inf")
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self.step_fell_short = False
        """Whether the last group that met had too few samples for a step on averaged gradients."""
        self._extra = 0

    @property
    def auxiliary(self) -> bool:
        """Whether this peer does not train: no quorum counts it."""
        return self._run.settings.role == "serving"

    async def refresh(self, ask: Collection[str] = ()) -> None:
        """Read everyone's records, in the DHT and from a few peers, into a new view.

        :param ask: peers, in base58, whose own word counts: they are asked in any case, if they and we can meet
        """
        run_id = self._run.settings.run_id
        found, *_ = await asyncio.gather(
            self._run.node.get_many([profiles_key(run_id), states_key(run_id)], float("inf")),
            self._gossip.ask_some(self._gossip.partners(self.view.members, self._dead)),
            *(self._gossip.ask(peer) for peer in {*ask} - {self._own_peer} if self.can_meet(peer)),
        )
        everyone = read_view(found, run_id, self._run.clock.now())
        self._read_dht_at = self._run.clock.passed()
        self._own_record = everyone.members.get(self._own_peer)
        self._see(everyone.members)

    async def hear(self) -> None:
        """Renew the view by what a few peers know; by the DHT as well if it is time, or if none of them answers."""
        due = self._read_dht_at + dht_reading_seconds(len(self.view.members))
        told, self._to_ask = self._to_ask & self.view.members.keys(), set()
        partners = self._gossip.partners(self.view.members, self._dead)
        if told:
            # In any case: a peer that says so all the time must not be the only one that we hear.
            self._run.tasks.spawn(self._gossip.ask_all(partners))
        if self._run.clock.passed() < due and await self._gossip.ask_some(told or partners):
            self._see({})
        else:
            await self.refresh(told)

    async def _tell_everybody(self) -> None:
        """What we do from now on is told to all, not passed on: a quorum is most of those that train."""
        reachable = {peer: member for peer, member in self.view.members.items() if self.can_meet(peer)}
        peers = choose_partners(reachable, self._dead, MOST_TOLD)
        await self._gossip.ask_all(peers)

    def answer_news(self, request: NewsAsk, asker: PeerID) -> News:
        """What others are to hear of us and of everybody."""
        if self.changed.is_set() and self._newsroom.own and self._gossip.answers(asker):
            self.own.tell()  # the asker wants to know what is so now
        return self._gossip.answer(request, asker)

    def _see(self, found: Mapping[str, Member]) -> None:
        """Make a new view of what was found and heard; where there is no news for long, look for anybody."""
        now, passed, before = self._run.clock.now(), self._run.clock.passed(), self.view.members
        # A record that a search missed still stands until it expires: a hiccup must not make a peer think it is alone.
        standing = {peer: member for peer, member in before.items() if member.expires > now}
        # News first: in the DHT a peer's newest profile may lie beside claims of a moment before.
        members = newest(self._newsroom.members(), standing, found)
        members.pop(self._own_peer, None)
        if any(peer not in before or member.expires > before[peer].expires for peer, member in members.items()):
            self._company.news(members, passed)
            if self._run.life.happens("answered"):
                self.caught_up = False
                self._contact.came_back()
        self.view = View(read_at=now, members=members)
        remembered = members.keys() | self._company.members.keys()
        self._dead = {peer: expires for peer, expires in self._dead.items() if peer in remembered}
        self._run.training.send(
            Event(
                "peers",
                {
                    "training": len(self.present()),
                    "known": len(members),
                    "share": self._share(),
                    "coverage": coverage((members[peer].profile for peer in self.present()), len(self._run.fragments)),
                    "reason": self._run.life.reason,
                },
            )
        )
        self._contact.meet(members, self.present())
        silent = self._company.silent_seconds(passed) >= REACH_OUT_SECONDS
        if self._contact.is_time_to_search(passed, silent=silent):
            self._run.tasks.spawn(self._search(silent))

    async def _search(self, silent: bool) -> None:
        """Look for who is missing. Where nobody is heard of for a while, say so if nobody answers who may be there."""
        answered = await self._contact.search(silent=silent)
        if not silent or answered or self.auxiliary or not self._company.lost(self._gone()):
            return
        now = self._run.clock.passed()
        silence = duration(self._company.silent_seconds(now))
        if self._company.give_up(now):
            self._run.life.happens("given up", silence)
        else:
            self._run.life.happens("silent", silence)

    def _gone(self) -> list[str]:
        """Of the company, those that are known to have ended."""
        return [peer for peer, member in self._company.members.items() if self._dead.get(peer, 0.0) >= member.expires]

    def _share(self) -> int:
        """Samples that this peer should bring to the next step on averaged gradients."""
        rates = {peer: self.view.members[peer].profile.samples_per_second for peer in self.present()}
        rates[str(self._run.settings.identity.peer_id)] = self.own.samples_per_second
        batch = self._run.manifest.averaging.global_batch
        share = shares(batch, rates)[str(self._run.settings.identity.peer_id)]
        # Somebody does not bring what it advertised: take over, more at every refresh, until a step succeeds.
        self._extra = min(batch, 2 * self._extra + max(1, batch // 16)) if self.step_fell_short else 0
        return min(batch, share + self._extra)

    async def refuse_twin(self) -> None:
        """A copied identity: somebody else answers under our peer id at the addresses in our own record."""
        if self._own_record is None or self._own_record.profile.status == "leaving":
            return
        texts = self._own_record.profile.addresses
        good, _ = parse_addresses([text for text in texts if text not in self._run.addresses])
        if good and await answers_elsewhere(self._run.p2p, good, self._run.settings.socket_directory):
            raise IdentityError(
                f"Another peer runs with this identity at {good[0].text}.",
                f"Stop it, or delete {self._run.settings.identity.path} to get an identity of your own.",
            )

    def present(self) -> frozenset[str]:
        """Training peers, without those known to be dead; one counts again as soon as it renews its record."""
        return frozenset(
            peer for peer in self.view.training() if self._dead.get(peer, 0.0) < self.view.members[peer].expires
        )

    def expected(self, tick: int) -> frozenset[str]:
        """Those of them that take part in a tick's round, by the cadences that they announce."""
        cadences = self.view.cadences()
        return frozenset(peer for peer in self.present() if is_due(self._run.schedule, tick, cadences[peer]))

    def likely_leaders(self, tick: int) -> frozenset[bytes]:
        """Ids of the peers that can lead a tick's group: those of its members, else helpers, that others can dial."""
        dialled = {peer for peer, member in self.view.members.items() if member.profile.addresses}
        serving = {peer for peer in dialled if self.view.members[peer].profile.status == "serving"}
        return frozenset(PeerID.from_base58(peer).to_bytes() for peer in (self.expected(tick) & dialled) or serving)

    def is_quorum(self, members: Collection[str]) -> bool:
        """Whether these training peers, ourselves among them if we train, may make the next version of a fragment."""
        if self.auxiliary:  # one that is alone needs no help
            return len(members) > 1 and has_quorum(members, self.present())
        return has_quorum(members, {*self.present(), self._own_peer})

    def needs_help(self, peers: Collection[str]) -> bool:
        """Whether these peers cannot reach each other: several, none of which can be dialled."""
        return len(peers) > 1 and not any(self.view.members[peer].profile.addresses for peer in peers)

    def can_meet(self, peer: str) -> bool:
        """Whether a peer can dial us, or we it, as far as we know."""
        member = self.view.members.get(peer)
        return self._run.can_be_dialled or member is None or bool(member.profile.addresses)

    def is_held(self, tick: int) -> bool:
        """Whether enough peers for a next version take part in a tick's round, if we do.

        For an auxiliary peer: whether they could not hold it by themselves.
        """
        expected = self.expected(tick)
        if self.auxiliary:
            return self.needs_help(expected) and self.is_quorum(expected)
        return self.is_quorum({*expected, self._own_peer})

    def pace(self) -> int:
        """In which of its rounds a fragment gets a next version that we help to make."""
        cadences = self.view.cadences()
        own = self.cadence.announced
        return max(own, pace([own, *(cadences[peer] for peer in self.present())]))

    async def look_for_dead(self, peers: Collection[str]) -> None:
        """Find out which of the peers that failed us ended: their machine answers, but nobody listens there any more.

        Silence proves nothing: both halves of a split swarm would take each other for dead and go on alone.
        """

        async def look(peer: str) -> None:
            member = self.view.members.get(peer) or self._company.members.get(peer)
            if member is None:
                return
            ways = ways_to(peer, member.profile.addresses)
            for address in ways:
                async with self._looks:
                    if not await refuses(address):
                        return
            if ways:
                self._dead[peer] = member.expires

        await asyncio.gather(*(look(peer) for peer in peers))

    async def confirm_alone(self, begins: float) -> None:
        """Look again when the tick begins: whoever joins its round has announced itself by then. :raises RoundVoid:"""
        await asyncio.sleep(max(0.0, begins - self._run.clock.now()))
        await self._read_again()
        neighbours = list(self._run.node.protocol.routing_table.uid_to_peer_id.values())[:ALONE_NEIGHBOURS]
        answered = any(await asyncio.gather(*(self._run.node.protocol.call_ping(peer) for peer in neighbours)))
        if self._company.members:
            await self._confirm_gone(answered)
        elif answered:
            self._company.heard_at = self._run.clock.passed()
        elif self._company.silent_seconds(self._run.clock.passed()) < RECORD_SECONDS and not await self._all_are_gone():
            # No records because nobody answers is not the same as nobody being there.
            raise RoundVoid("no other peer answers; waiting to be sure that this one is alone")
        if self.own.said_goodbye:
            # Whoever reads that goes on without us. Two that leave together would each think so of the other.
            raise RoundVoid("this peer has said goodbye")

    async def _confirm_gone(self, answered: bool) -> None:
        """Those whose records ran out unheard of have ended. :raises RoundVoid: or they train on without us"""
        if answered:
            await self._read_again()  # it may know them
        await self.look_for_dead(self._company.members)
        if self._company.lost(self._gone()):
            raise RoundVoid("nobody has answered for a while; the others may train on elsewhere")

    async def _all_are_gone(self) -> bool:
        """Whether everybody whose record stands has left or is dead."""
        left = [peer for peer, member in self.view.members.items() if member.profile.status != "leaving"]
        await self.look_for_dead(left)
        return bool(self.view.members) and all(peer in self._dead for peer in left)

    async def _read_again(self) -> None:
        """:raises RoundVoid: whoever reads that there are others is not alone"""
        try:
            await self.refresh()
        except TRANSPORT_ERRORS as error:
            raise RoundVoid("the records of other peers could not be read") from error
        if not self.is_quorum({self._own_peer}):
            raise RoundVoid("another peer has just joined; averaging with it from the next round on")

    def leaving(self) -> frozenset[str]:
        """Peers that said goodbye a moment ago: what only they hold must be fetched now or never."""
        return frozenset(peer for peer, member in self.view.members.items() if member.profile.status == "leaving")

    @property
    def may_lag(self) -> bool:
        """Whether our bases may be a little behind: we only serve, nobody leaves, others can serve newcomers too."""
        coming = {peer for peer, member in self.view.members.items() if member.profile.status == "syncing"}
        return self.auxiliary and not self.leaving() and not self.needs_help(self.present() | coming)

    def look(self, peer: PeerID) -> None:
        """Somebody says that its records have changed: ask for them now. At most once in LOOK_SECONDS."""
        now = self._run.clock.passed()
        self._to_ask.add(str(peer))
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self.changed.set()

    async def hand_over(self) -> None:
        """Having said goodbye: wait until somebody who stays announces bases as good as ours, if anybody stays.

        Returns at once if there is nobody to wait for. The caller limits the time.
        """
        fragments = [state for state in self._run.fragments if state.version >= 0]
        told: set[str] = set()
        while True:
            await self.refresh()
            gone = self.leaving() | {peer for peer in self.view.members if peer in self._dead}
            staying = {peer: member for peer, member in self.view.members.items() if peer not in gone}
            if not staying or all(
                any(claim.rank >= state.claim.rank for claim in _claims_of(staying.values(), state.index))
                for state in fragments
            ):
                return
            fresh = [peer for peer in staying if peer not in told][:HAND_OVER_PEERS]
            if not told:
                self._run.tasks.spawn(self.look_for_dead(list(staying)))
            told.update(fresh)
            for peer in fresh:
                self._run.tasks.spawn(self._tell(peer))
            await asyncio.sleep(HAND_OVER_POLL_SECONDS)

    async def _tell(self, peer: str) -> None:
        with suppress(*TRANSPORT_ERRORS):
            await self._run.stub(PeerID.from_base58(peer)).rpc_look(Ask(AskHeader()))

    async def keep_announced(self) -> None:
        """Renew our record while we do nothing else yet."""
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            with suppress(ValueError, *TRANSPORT_ERRORS):
                await self.own.publish()

    async def keep(self, on_news: Callable[[], None]) -> None:
        told = published = manifest_published = self._run.clock.passed()
        period = refresh_seconds(self._run.schedule.tick_seconds)
        life, stored = self._run.life, self.own.status
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), period)
            now = self._run.clock.passed()
            if self._run.allowance.is_used_up and life.happens("left out", USED_UP):
                self._doubt_bases()
            if self._run.training.begun is not None and self.caught_up:
                life.happens("caught up")
            try:
                if self.changed.is_set() or now - told >= PUBLISH_SECONDS:
                    self.changed.clear()
                    told = now
                    self._run.tasks.spawn(self._contact.renew_addresses(list(self.view.members)))
                    status = self.own.status
                    if status != stored or now - published >= dht_publishing_seconds(len(self.view.members)):
                        await self.own.publish()
                        published = now
                        if status != stored:
                            await self._tell_everybody()
                        stored = status
                    else:
                        self.own.tell()
                    self.announced = self.announced or status == "training"
                if now - manifest_published >= MANIFEST_PUBLISH_SECONDS:
                    await self.own.publish_manifest()
                    manifest_published = now
                await self.hear()
            except (*TRANSPORT_ERRORS, ValueError) as error:
                # ValueError: a record that we would have to publish is out of bounds; membership must outlive it.
                logger.debug("Membership was not refreshed: %r", error)
                continue
            on_news()

    async def watch_time(self) -> None:
        """Notice that this process did not run for a while: the swarm has gone on meanwhile."""
        while True:
            before = self._run.clock.passed()
            await asyncio.sleep(1.0)
            still = self._run.clock.passed() - before - 1.0
            if still >= STILL_SECONDS and self._run.life.happens("stood still", duration(still)):
                self._doubt_bases()

    def _doubt_bases(self) -> None:
        """The swarm may have gone on: nobody counts on us until our bases are its bases again."""
        self.caught_up = False
        self.changed.set()

    async def keep_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            peers = [PeerID.from_base58(peer) for peer in self.view.members]
            random.shuffle(peers)
            await set_clock(self._run.clock, self._run.stub, peers, newcomer=False)


def refresh_seconds(tick_seconds: float) -> float:
    """How often others are asked for news, if nothing happens in between: however long a tick is, records run out."""
    return min(PUBLISH_SECONDS, max(0.25, tick_seconds / 2))


def _claims_of(members: Iterable[Member], fragment: int) -> Iterator[Claim]:
    return (member.claims[fragment] for member in members if fragment < len(member.claims))
