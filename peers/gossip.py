"""Asking other peers for news, and answering them (anti-entropy: asker and asked compare what they have).

Whoever asks too often, or for too much, gets an empty answer until its window is over. What is sent and what comes
counts as a day's traffic; when that is used up nobody is answered, but this peer goes on asking a little: it stays a
member, and reading everybody's records in the DHT would take more. What else it does not stop is said in ``news.py``,
which keeps the news.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping

from hivemind.p2p import PeerID
from hivemind.p2p.servicer import StubBase

from peers.allowance import Allowance
from peers.membership import Member
from peers.messages import News, NewsAsk, NewsAskHeader, NewsHeader
from peers.news import MOST_ANSWERED_BYTES, MOST_PEERS, Newsroom
from peers.transport import TRANSPORT_ERRORS

PARTNERS = 2
"""Peers that are asked at a time."""
SILENT_SECONDS = 10.0
"""For so long a peer that did not answer is not asked, if there are others."""
WINDOW_SECONDS = 10.0
ANSWERS = 100
"""To one peer within WINDOW_SECONDS. Two that are alone, with the shortest ticks, ask each other some four times a
second, and once more whenever a base is new."""
ANSWERED_BYTES = 8 * MOST_ANSWERED_BYTES
"""To one peer within WINDOW_SECONDS: all the records of 256 peers with models of 256 fragments, 16 kB each."""


class Askers:
    """What each peer has been answered of late.

    :param now: seconds, by a clock that is never corrected
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began = now()
        self._answers: dict[PeerID, tuple[int, int]] = {}
        """By peer: how many, and their bytes, in the window that began then."""

    def may_ask(self, peer: PeerID) -> bool:
        """Whether a peer may have another answer now."""
        if self._now() - self._began >= WINDOW_SECONDS:
            self._began = self._now()
            self._answers = {}
        answers, answered_bytes = self._answers.get(peer, (0, 0))
        if peer not in self._answers and len(self._answers) >= MOST_PEERS:
            return False
        return answers < ANSWERS and answered_bytes < ANSWERED_BYTES

    def note(self, peer: PeerID, answered_bytes: int) -> None:
        """It has had one of so many bytes."""
        answers, before = self._answers.get(peer, (0, 0))
        self._answers[peer] = answers + 1, before + answered_bytes


class Gossip:
    """This peer's side of it.

    :param stub: to call a peer
    :param now: seconds, by a clock that is never corrected
    :param wait_seconds: how long to wait for an answer, as of now
    :param allowance: of a day's traffic
    :param on_answer: told of every peer that answers, by its base58 id
    """

    def __init__(
        self,
        newsroom: Newsroom,
        stub: Callable[[PeerID], StubBase],
        now: Callable[[], float],
        wait_seconds: Callable[[], float],
        allowance: Allowance,
        on_answer: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._on_answer = on_answer
        self._allowance, self._askers = allowance, Askers(now)
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
        have, own = self._newsroom.have(), self._newsroom.own
        request = NewsAsk(NewsAskHeader(have=have), own)
        self._allowance.moved(len(have) + len(own))
        try:
            answer = await self._stub(PeerID.from_base58(peer)).rpc_news(request, timeout=self._wait_seconds())
        except TRANSPORT_ERRORS:
            answer = News()
        if answer.header is None:
            self._silent[peer] = self._now() + SILENT_SECONDS
            return False
        self._silent.pop(peer, None)
        self._allowance.moved(len(answer.body))
        self._newsroom.take(bytes(answer.body))
        self._on_answer(peer)
        return True

    def answers(self, asker: PeerID) -> bool:
        """Whether it would get more than an empty answer now."""
        return not self._allowance.is_used_up and self._askers.may_ask(asker)

    def answer(self, request: NewsAsk, asker: PeerID) -> News:
        """What we have that is newer than what an asker has. It tells its own as well."""
        if request.header is None or not self.answers(asker):
            return News(NewsHeader())
        self._newsroom.take_one(bytes(request.body))
        answer = News(NewsHeader(), self._newsroom.newer_than(request.header.have))
        self._askers.note(asker, len(answer.body))
        self._allowance.moved(len(request.header.have) + len(request.body) + len(answer.body))
        return answer


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
