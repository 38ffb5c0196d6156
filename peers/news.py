"""Everybody's newest records, passed on from peer to peer.

Whoever reads the records of N peers in the DHT gets all of them from each of several holders, however little has
changed. Between two such readings a peer asks a few others, whom it chooses anew each time, for what is newer than what
it has: what one peer knows reaches everybody in a number of steps that grows with the logarithm of their number, and
hardly any of it twice.

What this does not stop: a peer that keeps news back (the next one asked is another), and many false identities, up to
MOST_PEERS.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgpack
from hivemind.p2p import PeerID

from dht_config.errors import RecordError
from dht_config.hardening import unpack_plain
from dht_config.news import MAX_NEWS_BYTES, PeerNews, open_news
from dht_config.validators import PEER_RECORD_LIFETIME_SECONDS
from peers.lineage import Claim
from peers.membership import Member

MOST_PEERS = 4096
"""This one included: what it has must fit into a question."""
MOST_ANSWERED_BYTES = 512 * 1024
"""Of one answer; the rest comes with the next."""
_HAVE = struct.Struct("<8sd")
HAVE_BYTES = _HAVE.size


class Newsroom:
    """The newest news that this peer has of everybody, itself included.

    :param now: swarm time, seconds
    :param fragments: of the run: more claims than that nobody has to tell, and everybody would have to keep
    """

    def __init__(self, run_id: str, own_id: bytes, now: Callable[[], float], *, fragments: int) -> None:
        self._run_id, self._own_id, self._now, self._fragments = run_id, own_id, now, fragments
        self._sealed: dict[bytes, bytes] = {}
        self._news: dict[bytes, PeerNews] = {}

    @property
    def own(self) -> bytes:
        """What this peer says of itself, sealed; empty before it has said anything."""
        return self._sealed.get(self._own_id, b"")

    def announce(self, news: PeerNews, sealed: bytes) -> None:
        """This peer's own."""
        self._news[self._own_id], self._sealed[self._own_id] = news, sealed

    def have(self) -> bytes:
        """What others need not send: for each peer the end of its id and when its news expires."""
        self._forget_expired()
        return b"".join(_HAVE.pack(peer_id[-8:], news.expires) for peer_id, news in self._news.items())

    def newer_than(self, have: bytes) -> bytes:
        """For an asker that has this: sealed news that it lacks, packed, as many as one answer may hold."""
        there = dict(_HAVE.iter_unpack(have)) if len(have) % HAVE_BYTES == 0 else {}
        now = self._now()
        wanted = [
            peer_id
            for peer_id, news in self._news.items()
            if news.expires > max(now, there.get(peer_id[-8:], 0.0)) and peer_id in self._sealed
        ]
        random.shuffle(wanted)
        found, size = [], 0
        for peer_id in wanted:
            size += len(self._sealed[peer_id])
            if size > MOST_ANSWERED_BYTES:
                break
            found.append(self._sealed[peer_id])
        packed: bytes = msgpack.packb(found, use_bin_type=True)
        return packed

    def take(self, packed: bytes) -> int:
        """Keep what is new of an answer; what is malformed, not signed by its peer or out of time is left out.

        Returns how much of it was new.
        """
        try:
            blobs = unpack_plain(packed, MOST_ANSWERED_BYTES + 64 * 1024)
        except RecordError:
            return 0
        return sum(self.take_one(blob) for blob in blobs if isinstance(blob, bytes)) if isinstance(blobs, tuple) else 0

    def take_one(self, sealed: bytes) -> bool:
        """The same for one peer's news."""
        with suppress(RecordError):
            if len(sealed) > MAX_NEWS_BYTES or (news := open_news(sealed, self._run_id, self._wants)) is None:
                return False
            if news.state is None or len(news.state.fragments) == self._fragments:
                self._news[news.peer_id], self._sealed[news.peer_id] = news, sealed
                return True
        return False

    def _wants(self, peer_id: bytes, expires: float) -> bool:
        if peer_id == self._own_id or not self._now() < expires <= self._now() + PEER_RECORD_LIFETIME_SECONDS:
            return False
        known = self._news.get(peer_id)
        others = len(self._news) - (self._own_id in self._news)
        return expires > known.expires if known is not None else others < MOST_PEERS - 1

    def _forget_expired(self) -> None:
        now = self._now()
        for peer_id in [peer_id for peer_id, news in self._news.items() if news.expires <= now]:
            del self._news[peer_id], self._sealed[peer_id]

    def members(self) -> dict[str, Member]:
        """The others, by base58 peer id."""
        self._forget_expired()
        return {
            str(PeerID(peer_id)): Member(profile=news.profile, claims=claims_of(news), expires=news.expires)
            for peer_id, news in self._news.items()
            if peer_id != self._own_id
        }


def claims_of(news: PeerNews) -> tuple[Claim, ...]:
    return tuple(
        Claim(version=claim.version, digest=claim.digest, total_samples=claim.total_samples)
        for claim in (news.state.fragments if news.state is not None else ())
    )


def newest(*views: Mapping[str, Member]) -> dict[str, Member]:
    """Of every peer the record that expires last; of equal ones that of the first view."""
    found: dict[str, Member] = {}
    for view in views:
        for peer, member in view.items():
            if peer not in found or member.expires > found[peer].expires:
                found[peer] = member
    return found
