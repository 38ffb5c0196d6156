"""What records cost a swarm of some size, in the DHT and as news: their size times how often they are written and read.

Sizes are measured on records that the product's own code makes and signs. Counts follow hivemind 1.1.12 as the product
sets it up: a dictionary lies at the NUM_REPLICAS nodes nearest to its key, whoever reads it asks the BUCKET_SIZE
nearest, and every holder answers with all of it (``dht/node.py``: no caches, the latest expiration is wanted). A reader
checks the signature of every entry of every answer. News of a peer reaches every other one once (``peers/gossip.py``).

What it does not show: retries, routing on long ways through big DHTs, nodes that fail, what newcomers are handed over,
TCP and encryption. It is a mean over peers; the few nodes near a run's keys carry far more than that. It is a lower
bound: when it was last held against what crossed the interfaces of 4 and of 8 real peers, before there was news, it had
0.64 and 0.90 of it (``tests/benchmarks/simulation_check.py --lines``).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer

from dht_config.hardening import MAX_MESSAGE_BYTES
from dht_config.identity import Identity, load_or_create_identity
from dht_config.news import PeerNews, sign_news
from dht_config.records import (
    FragmentClaim,
    PeerProfile,
    RoundAnnouncement,
    SwarmState,
    seal,
    sign_announcement,
    software_version,
)
from peers.gossip import PARTNERS, dht_publishing_seconds, dht_reading_seconds
from peers.grouping import DECLARED_LEADERS, POLL_SECONDS
from peers.news import HAVE_BYTES
from peers.presence import PUBLISH_SECONDS, refresh_seconds

NUM_REPLICAS, BUCKET_SIZE = 5, 20
"""hivemind's defaults (``DHTNode.create``), which the product leaves as they are."""
NEIGHBOUR_BYTES = 20 + 34 + 4
"""A node id and a peer id in an answer, with what protobuf adds."""
LOOKS = 2
"""For somebody who leads, of a peer in a tick: as soon as it may find one, and mostly once more."""
_LATER = 2.0e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSizes:
    """Bytes of one peer's entries."""

    profile: int
    state: int
    matchmaking: int
    announcement: int
    """Sent in matchmaking, not kept in the DHT."""
    news: int
    """Profile and state in one, from peer to peer."""

    def largest_dictionary(self, peers: int) -> int:
        """Bytes of the biggest dictionary of a run with so many peers."""
        return max(self.profile, self.state, self.matchmaking) * peers

    def readable(self, peers: int) -> bool:
        """Whether everybody's records can still be read: the product refuses messages beyond its cap."""
        return self.largest_dictionary(peers) <= MAX_MESSAGE_BYTES

    @classmethod
    def measured(cls, fragments: int, fragment_size: int) -> RecordSizes:
        """Of records as a peer makes them that has trained for a while."""
        with tempfile.TemporaryDirectory() as directory:
            identity = load_or_create_identity(Path(directory) / "identity.key")
        profile = PeerProfile(
            software_version=software_version(),
            status="training",
            samples_per_second=40.25,
            processed_samples=10**6,
            credited_samples=1e6 - 0.5,
            micro_batch=8,
            device="NVIDIA GeForce RTX 3090",
            addresses=(f"/ip4/203.0.113.77/tcp/31337/p2p/{identity.peer_id}",),
            joined_at=_LATER - 0.5,
            restart=1,
        )
        claim = FragmentClaim(version=10**4, digest=bytes(32), total_samples=10**8)
        announcement = RoundAnnouncement(
            fragment=0,
            tick=10**6,
            version=10**4,
            digest=bytes(32),
            samples_total=10**6,
            steps_total=10**5,
            spans=((0, fragment_size, 160, 20),),
            megabits_per_second=93.7,
        )
        run_id, state = "run-0123456789abcdef", SwarmState(fragments=(claim,) * fragments)
        news = PeerNews(peer_id=identity.peer_id.to_bytes(), expires=_LATER, profile=profile, state=state)
        return cls(
            profile=_entry_bytes(identity, profile.to_payload()),
            state=_entry_bytes(identity, state.to_payload()),
            matchmaking=_entry_bytes(identity, True),
            announcement=len(sign_announcement(identity, announcement, run_id)),
            news=len(sign_news(identity, news, run_id)),
        )


def _entry_bytes(identity: Identity, value: object) -> int:
    """What one more peer's record adds to a dictionary as it travels."""
    signed = seal(identity, MSGPackSerializer.dumps(value), b"what it is signed for")
    lengths = []
    dictionary = DictionaryDHTValue()
    for number in (b"1", b"2"):
        dictionary.store(identity.peer_id.to_bytes()[:-1] + number, signed, _LATER)
        lengths.append(len(MSGPackSerializer.dumps(dictionary)))
    return int(lengths[1] - lengths[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class DHTLoad:
    """Of one peer, as a mean over all; what is received somebody sends, so it is each way."""

    readable: bool
    """False: nobody can read everybody's records any more, since their dictionary is too big."""
    dictionary_bytes: int
    """Of the biggest one."""
    bytes_per_second: float
    signatures_per_second: float
    """That it has to check."""
    holder_bytes_per_second: float
    """What a peer sends that happens to hold one of the run's dictionaries."""


def dht_load(sizes: RecordSizes, peers: int, tick_seconds: float, lead_seconds: float, commits: float) -> DHTLoad:
    """The load of a swarm.

    :param peers: with a record, all of them training
    :param lead_seconds: how long each tick's group is looked for (the manifest's ``matchmaking_seconds``)
    :param commits: of one peer, per second: after each its records say something new
    """
    # What a peer holds itself costs it nothing.
    remote = max(0.0, min(NUM_REPLICAS, peers) * (1 - 1 / peers))
    asked = min(BUCKET_SIZE, peers - 1)
    neighbours = asked * min(BUCKET_SIZE, peers - 1) * NEIGHBOUR_BYTES
    records, entries = sizes.profile + sizes.state, peers * (sizes.profile + sizes.state)
    declared = min(DECLARED_LEADERS, peers)
    reads, writes = 1 / dht_reading_seconds(peers), 1 / dht_publishing_seconds(peers)
    searches = min(LOOKS, lead_seconds / POLL_SECONDS) / tick_seconds
    declarations = declared / peers / tick_seconds
    # Whoever stores looks for the nearest nodes first, and those that hold the dictionary answer with it.
    carried = (
        reads * (remote * entries + 2 * neighbours)
        + writes * (remote * (entries + records) + 2 * neighbours)
        + searches * (remote * declared * sizes.matchmaking + neighbours)
        + declarations * (remote * (declared + 1) * sizes.matchmaking + neighbours)
    )
    changes, questions = max(commits, 1 / PUBLISH_SECONDS), PARTNERS / refresh_seconds(tick_seconds)
    others = peers - 1
    told = others * changes * sizes.news
    if others:
        told += questions * (sizes.news + peers * HAVE_BYTES)
    return DHTLoad(
        readable=sizes.readable(peers),
        dictionary_bytes=sizes.largest_dictionary(peers),
        bytes_per_second=carried + told,
        signatures_per_second=remote * (2 * peers * (reads + writes) + declared * (searches + declarations))
        + others * changes,
        holder_bytes_per_second=peers * (reads + writes) * entries / 2,
    )
