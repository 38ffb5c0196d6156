"""Asking other peers for news, and answering them (anti-entropy: asker and asked compare what they have).

What it does not stop is said in ``news.py``, which keeps the news.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping

from hivemind.p2p import PeerID
from hivemind.p2p.servicer import StubBase

from peers.membership import Member
from peers.messages import News, NewsAsk, NewsAskHeader, NewsHeader
from peers.news import Newsroom
from peers.transport import TRANSPORT_ERRORS

PARTNERS = 2
"""Peers that are asked at a time."""
SILENT_SECONDS = 10.0
"""For so long a peer that did not answer is not asked, if there are others."""


class Gossip:
    """This peer's side of it.

    :param stub: to call a peer
    :param now: swarm time, seconds
    :param wait_seconds: how long to wait for an answer, as of now
    :param on_answer: told of every peer that answers, by its base58 id
    """

    def __init__(
        self,
        newsroom: Newsroom,
        stub: Callable[[PeerID], StubBase],
        now: Callable[[], float],
        wait_seconds: Callable[[], float],
        on_answer: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._on_answer = on_answer
        self._newsroom, self._stub, self._now, self._wait_seconds = newsroom, stub, now, wait_seconds
        self._silent: dict[str, float] = {}
        """Peers that did not answer, and until when they are not asked."""
        self._asking: set[asyncio.Task[bool]] = set()

    def partners(self, members: Mapping[str, Member], dead: Collection[str]) -> list[str]:
        """Whom to ask now, of these: nobody who has left, is known to be dead, or was silent a moment ago."""
        self._silent = {peer: until for peer, until in self._silent.items() if until > self._now()}
        return choose_partners(members, {*self._silent, *dead}, PARTNERS)

    async def ask_some(self, peers: Iterable[str]) -> bool:
        """Until one of these peers has answered, if one does; what the others know comes when they answer."""
        asking = {asyncio.create_task(self.ask(peer)) for peer in peers}
        for task in asking:
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        answered = False
        while asking and not answered:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            answered = any(task.result() for task in done)
        return answered

    async def ask_all(self, peers: Iterable[str]) -> None:
        """Until each of these peers has answered, or has not in time."""
        await asyncio.gather(*(self.ask(peer) for peer in peers))

    async def ask(self, peer: str) -> bool:
        """Ask a peer, by its base58 id, for news, and tell it ours. Whether it answered."""
        request = NewsAsk(NewsAskHeader(have=self._newsroom.have()), self._newsroom.own)
        try:
            answer = await self._stub(PeerID.from_base58(peer)).rpc_news(request, timeout=self._wait_seconds())
        except TRANSPORT_ERRORS:
            answer = News()
        if answer.header is None:
            self._silent[peer] = self._now() + SILENT_SECONDS
            return False
        self._silent.pop(peer, None)
        self._newsroom.take(bytes(answer.body))
        self._on_answer(peer)
        return True

    def answer(self, request: NewsAsk) -> News:
        """What we have that is newer than what an asker has. It tells its own as well."""
        if request.header is None:
            return News(NewsHeader())
        self._newsroom.take_one(bytes(request.body))
        return News(NewsHeader(), self._newsroom.newer_than(request.header.have))


def choose_partners(members: Mapping[str, Member], silent: Collection[str], count: int) -> list[str]:
    """Whom to ask: at random, first those that can be dialled; nobody who has left, or is known to be silent."""
    there = [peer for peer, member in members.items() if member.profile.status != "leaving" and peer not in silent]
    random.shuffle(there)
    there.sort(key=lambda peer: not members[peer].profile.addresses)
    return there[:count]


def dht_reading_seconds(peers: int) -> float:
    """Time between two readings of everybody's records in the DHT: they grow with the number of peers."""
    return min(300.0, max(10.0, float(peers)))


def dht_publishing_seconds(peers: int) -> float:
    """Time between two storings of our records in the DHT, if nothing has changed that everybody must find there.

    Whoever stores looks for the nearest nodes, and those that hold everybody's records answer with them.
    """
    return min(10.0, max(5.0, peers / 10))
