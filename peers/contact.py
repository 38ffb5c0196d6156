"""Staying in touch: the way to everybody we hear of, and the search for those that we do not hear of any more.

Where the network broke, both parts would stay apart for ever if nobody looked for the other one once it is whole again.
Whoever vanished without a goodbye is looked for; and where nobody at all is heard of, everybody that we ever met.

After a dial that failed libp2p refuses to dial the address again, each time for longer, up to minutes. A peer whose
line was down would be kept from the others for as long, once it is up again. So the search knocks with plain TCP
connections, and libp2p dials where somebody opens.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from dht_config.address import Address, parse_addresses
from peers.company import GONE_SECONDS
from peers.context import RunContext
from peers.daemon import DialOutcome, dial
from peers.door import (
    RETRY_SECONDS,
    become_known_in_dht,
    hosts_reached,
    remember_addresses,
    remembered_addresses,
    set_clock,
)
from peers.membership import Member
from peers.pipe import Waiting
from peers.transport import TRANSPORT_ERRORS
from peers.ways_in import announced, best_first, forwarding_line, listening, only_inside, split_line, ways_to

DIALS_AT_ONCE = 8
MOST_MISSING = 256
SOUGHT_AT_ONCE = 16
"""Of the missing, by one search: who finds one of a part of the swarm hears of all of it."""
PORTS_TRIED = 2
"""Of those that a router is said to forward: others dial an address only a few times a minute."""
ASK_AGAIN_SECONDS = 120.0
"""Whether a router's port leads to us, if nobody could say, or reach us."""
KNOCK_SECONDS = (1.0, 5.0)
"""For a connection, by how long answers take: at most what libp2p gives it. A knock that began while the line was down
may hear of that only after seconds, so it is not waited for longer than it takes where the line is up."""


class Contact:
    """This peer's ways to the others, and theirs to it.

    :param on_news: told when somebody answers, and when our addresses are others
    :param ask: asks a peer, by its base58 id, for everybody's records
    :param on_moved: told of a peer, by its base58 id, that is at other addresses now
    """

    def __init__(
        self,
        run: RunContext,
        on_news: Callable[[], None],
        ask: Callable[[str], Awaitable[bool]],
        on_moved: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._run, self._on_news, self._ask, self._on_moved = run, on_news, ask, on_moved
        self._known: dict[str, tuple[str, ...]] = {}
        """Their addresses."""
        self._missing: dict[str, tuple[float, tuple[str, ...]]] = {}
        """Peers whose records ran out: since when, and their addresses."""
        self._left: set[str] = set()
        self._greeting: set[str] = set()
        """Peers that are being dialled."""
        self._answered: set[str] = set()
        """Peers that did when we dialled them."""
        self._dialling = asyncio.Semaphore(DIALS_AT_ONCE)
        self._searching = self._renewing = False
        self._search_at = float("-inf")
        self._pauses = self._pauses_anew()
        self._visible: list[str] | None = None
        """Where the daemon said that it listens when others were asked where they see us; None: when we came in."""
        self._forwarded_port: int | None = None
        """The port of a router at which others reached us, if that is how they do."""
        self._reached_inside = False
        """Whether others inside this network reached us before a router's port led to us."""
        self._ask_again_at = float("-inf")

    def meet(self, members: Mapping[str, Member], training: Collection[str]) -> None:
        """Connect to peers we have not met, or not at these addresses, and remember the way to all of them."""
        before, self._known = self._known, {peer: member.profile.addresses for peer, member in members.items()}
        last = {peer: addresses for peer, (_, addresses) in self._missing.items()} | before
        self._miss(before, members)
        self._answered &= self._known.keys()
        # Whoever has other addresses all the time waits until the last ones have been dialled.
        self._known.update({peer: before.get(peer, ()) for peer in self._greeting & self._known.keys()})
        fresh = {peer: addresses for peer, addresses in self._known.items() if before.get(peer) != addresses}
        if fresh:
            self._greeting |= {peer for peer, addresses in fresh.items() if addresses}
            moved = {peer for peer, addresses in fresh.items() if has_moved(last.get(peer, ()), addresses)}
            self._run.tasks.spawn(self._greet_all(fresh, moved, training))

    def _miss(self, before: Mapping[str, tuple[str, ...]], members: Mapping[str, Member]) -> None:
        """Note who vanished without a goodbye."""
        now = self._run.clock.passed()
        for peer, addresses in before.items():
            if peer not in members and peer not in self._left and len(self._missing) < MOST_MISSING:
                self._missing[peer] = now, addresses
                self._pauses, self._search_at = self._pauses_anew(), now
        self._left = {peer for peer, member in members.items() if member.profile.status == "leaving"}
        self._missing = {
            peer: (since, addresses)
            for peer, (since, addresses) in self._missing.items()
            if peer not in members and now - since < GONE_SECONDS
        }

    async def _greet_all(
        self, fresh: Mapping[str, Sequence[str]], moved: Collection[str], training: Collection[str]
    ) -> None:
        ways = {peer: ways_to(peer, texts) for peer, texts in fresh.items() if texts}

        async def greet(peer: str, addresses: Sequence[Address]) -> str | None:
            try:
                if peer in moved:
                    # Of two connections libp2p uses the older one until it notices, after half a minute, that it broke.
                    await self._disconnect(PeerID.from_base58(peer))
                    self._on_moved(peer)
                return peer if any(await asyncio.gather(*(self._greet(address) for address in addresses))) else None
            finally:
                self._greeting.discard(peer)

        self._answered -= fresh.keys()
        self._answered |= set(filter(None, await asyncio.gather(*(greet(*way) for way in ways.items()))))
        named = [peer for peer in training if self._known.get(peer)]
        if line := split_line(len(named), len(self._answered.intersection(named))):
            self._run.training.send(Waiting(line))
        path, given = self._run.settings.remembered_peers_path, self._run.settings.addresses
        earlier = [address.text for address in remembered_addresses(path)]
        remember_addresses(path, best_first(self._known, self._answered, earlier, given=[one.text for one in given]))

    async def _greet(self, address: Address) -> bool:
        async with self._dialling:
            return (await dial(self._run.p2p, address)).outcome is DialOutcome.CONNECTED

    async def _disconnect(self, peer: PeerID) -> None:
        with suppress(ControlFailure, P2PDaemonError, OSError):
            await self._run.p2p._client.disconnect(peer)

    async def keep_in_dht(self, peer: str) -> None:
        """Put a peer that has just answered us back among our DHT's nodes, if it is none of them any more.

        hivemind forgets a node that once did not answer in time. As long as news comes nobody misses it, and two peers
        that forgot each other would never find each other's declarations again.
        """
        peer_id = PeerID.from_base58(peer)
        forgotten = self._run.node.protocol.routing_table.get(peer_id=peer_id) is None
        if forgotten and self._known.get(peer) and await self._answers(peer_id):
            self._run.node.blacklist.register_success(peer_id)

    def is_time_to_search(self, now: float, *, silent: bool) -> bool:
        """Whether a search is due: one at a time, each so long after the last began: longer and longer, up to a tick.

        Up to half a tick for who has nobody else: it takes part again within two of its line's being up.

        :param now: seconds, as ``SwarmClock.passed`` counts them
        :param silent: nobody is heard of; else only those are looked for that are missing
        """
        return not self._searching and now >= self._search_at and (silent or bool(self._wanted()))

    def _wanted(self) -> list[Address]:
        """Where those may be that are missing, and the doors that we were given."""
        doors = [address for address in self._run.settings.addresses if address.peer_id not in self._known]
        found = list(doors)
        for peer in random.sample(list(self._missing), min(SOUGHT_AT_ONCE, len(self._missing))):
            found += ways_to(peer, self._missing[peer][1])
        return found

    async def search(self, *, silent: bool) -> bool:
        """Look for old friends and doors; returns whether somebody answered.

        Where nobody is heard of, who answers has a say in what time it is: a clock that is off makes all records
        unreadable. Of each that answers there is news at once: addresses where nobody is any more take seconds.
        """
        self._searching, began = True, self._run.clock.passed()
        answering: set[PeerID] = set()
        try:
            known = self._wanted()
            if silent:
                known += [
                    *self._run.settings.addresses,
                    *remembered_addresses(self._run.settings.remembered_peers_path),
                ]
            own = str(self._run.p2p.peer_id)
            addresses = {address.text: address for address in known if address.peer_id != own}
            for looking in asyncio.as_completed([self._look_up(address) for address in addresses.values()]):
                if (peer := await looking) is not None:
                    answering.add(peer)
                    self._on_news()
            if answering:
                self._pauses = self._pauses_anew()
                if silent:
                    await set_clock(self._run.clock, self._run.stub, list(answering), newcomer=False, lost=True)
            return bool(answering)
        finally:
            self._searching = False
            pause = next(self._pauses)
            if silent:
                pause = min(pause, max(RETRY_SECONDS[0], self._run.schedule.tick_seconds / 2))
            self._search_at = max(self._run.clock.passed(), began + pause)

    def came_back(self) -> None:
        """Our line was down: a router may have another address, at which the next who are asked see us."""
        self._visible = []

    async def renew_addresses(self, others: Sequence[str]) -> None:
        """Announce other addresses if a line came back with them, or if a router forwards a port to us by now.

        The daemon asks routers for one (UPnP, NAT-PMP), renews it, and gives it back at its end. It takes some seconds,
        and as long to notice another address, so this is asked whenever our record is renewed. Such a port is tried
        where others can dial us inside this network at most; who could not be dialled stays so but for that.

        :param others: base58 peer ids of some who may say where they see us
        """
        if self._renewing or self._run.settings.network.announce:
            return
        self._renewing = True
        try:
            with suppress(*TRANSPORT_ERRORS):
                visible = [str(address) for address in await self._run.p2p.get_visible_maddrs(latest=True)]
                ours, ports = listening(visible, self._run.settings.network.host)
                asked = [PeerID.from_base58(peer) for peer in others]
                if self._forwarded_port is not None or (ports and only_inside(self._run.addresses)):
                    named = [address.text for address in parse_addresses(visible)[0]]
                    await self._renew_forwarding(named, ours, ports, asked)
                elif self._run.addresses:
                    await self._renew_addresses(ours, asked)
        finally:
            self._renewing = False

    async def _renew_addresses(self, ours: Sequence[Address], asked: Sequence[PeerID]) -> None:
        own = [address.text for address in ours]
        visible = sorted(own)
        if self._visible is None:
            self._visible = visible
        elif ours and visible != self._visible:
            hosts = await hosts_reached(self._run.stub, asked, ours[0].transport.port)
            self._visible = visible
            found = announced(own, hosts or ())
            # Where nobody could say how we are reached, nothing is taken back.
            if set(found) - set(self._run.addresses) or (hosts and set(found) != set(self._run.addresses)):
                self._run.addresses[:] = found
                self._on_news()

    async def _renew_forwarding(
        self, named: Sequence[str], ours: Sequence[Address], ports: Sequence[int], asked: Sequence[PeerID]
    ) -> None:
        """Have others try a router's ports where that may be news; a router that lies is found out by them.

        :param named: all that the daemon names: it is news as well that the router has another address by now
        """
        own, now = [address.text for address in ours], self._run.clock.passed()
        visible = sorted(named)
        if visible == self._visible and now < self._ask_again_at:
            return
        hosts: tuple[str, ...] | None = None
        port, untried = None, False
        for port in ports[:PORTS_TRIED]:
            chosen = random.sample(asked, len(asked))
            hosts = await hosts_reached(
                self._run.stub, chosen, port, inside={address.transport.host for address in ours}
            )
            if hosts:
                break
            untried = untried or hosts is not None
        self._visible, self._ask_again_at = visible, math.inf if hosts or not ports else now + ASK_AGAIN_SECONDS
        if not hosts and (untried or self._forwarded_port is None):
            return
        if self._forwarded_port is None:
            self._reached_inside = bool(self._run.addresses)
        found = announced(own, hosts or (), port=port) if hosts or self._reached_inside else ()
        self._forwarded_port = port if hosts else None
        if found == tuple(self._run.addresses):
            return
        self._run.addresses[:] = found
        if found:
            await become_known_in_dht(self._run.node)
        self._run.training.send(Waiting(forwarding_line(self._forwarded_port, inside=self._reached_inside)))
        self._on_news()

    async def _look_up(self, address: Address) -> PeerID | None:
        """The peer at an address, if it is there and answers."""
        peer = PeerID.from_base58(address.peer_id)
        shortest, longest = KNOCK_SECONDS
        if not await knock(address, min(longest, max(shortest, self._run.node.protocol.wait_timeout))):
            return None
        await self._greet(address)
        if not await self._answers(peer):
            # What the daemon takes for a connection may be one that broke with the line.
            await self._disconnect(peer)
            await self._greet(address)
            if not await self._answers(peer):
                return None
        # hivemind leaves out who failed, each time for longer (1.1.12, dht/node.py:897).
        self._run.node.blacklist.register_success(peer)
        await self._ask(str(peer))
        return peer

    async def _answers(self, peer: PeerID) -> bool:
        """Ask, and so tell the DHT again of a peer that it has forgotten."""
        return await self._run.node.protocol.call_ping(peer) is not None

    def _pauses_anew(self) -> Iterator[float]:
        longest = max(RETRY_SECONDS[0], self._run.schedule.tick_seconds)
        return itertools.chain(
            (min(pause, longest) for pause in RETRY_SECONDS), itertools.repeat(min(RETRY_SECONDS[-1], longest))
        )


def has_moved(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether a peer that announced addresses has others now. The old ones may be among them still.

    A line that comes back is noticed by others, who see from where it comes, before the machine at its end notices.
    """
    hosts = [{address.transport.host for address in parse_addresses(texts)[0]} for texts in (before, now)]
    return bool(hosts[0] and hosts[1] - hosts[0])


async def knock(address: Address, timeout_seconds: float) -> bool:
    """Whether somebody accepts connections at an address, whoever that is."""
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(address.transport.host, address.transport.port), timeout_seconds
        )
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True
