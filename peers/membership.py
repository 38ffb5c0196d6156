"""Who is in the run: the peers' signed records, read together into one view at one moment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from hivemind.p2p import PeerID

from dht_config.errors import RecordError
from dht_config.keys import profiles_key, states_key
from dht_config.records import PeerProfile, SwarmState
from peers.lineage import Claim
from peers.messages import indices_of

MOST_MEDIANS = 10.0
"""A peer's announced rate counts for at most so many times the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one peer announces, and until when (swarm time, seconds) that stands."""

    profile: PeerProfile
    claims: tuple[Claim, ...] = ()
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Every other peer with a live record, by base58 peer id, as read at ``read_at`` (swarm time, seconds)."""

    read_at: float = 0.0
    members: Mapping[str, Member] = field(default_factory=dict)

    def training(self) -> frozenset[str]:
        """Peers that take part in rounds, as long as their records stand.

        A peer that does not answer for a moment still counts: two halves of a swarm that lost sight of each other
        must not both believe that they are most of it.
        """
        return frozenset(peer for peer, member in self.members.items() if member.profile.status == "training")

    def cadences(self) -> dict[str, int]:
        """In which of the rounds peers take part."""
        return {peer: member.profile.cadence for peer, member in self.members.items()}

    def claims(self, fragment: int) -> dict[str, Claim]:
        """What peers announce for one fragment."""
        return {peer: member.claims[fragment] for peer, member in self.members.items() if fragment < len(member.claims)}


def coverage(profiles: Iterable[PeerProfile], num_fragments: int) -> list[float]:
    """For each fragment, the samples per second of those who train it.

    Nobody counts for more than ten usual peers, whatever it announces: one could steer everybody's rotation.
    """
    profiles = list(profiles)
    most = MOST_MEDIANS * statistics.median(profile.samples_per_second for profile in profiles) if profiles else 0.0
    rates: list[list[float]] = [[] for _ in range(num_fragments)]
    for profile in profiles:
        trained = indices_of(profile.trains, num_fragments) if profile.trains else None
        for fragment in range(num_fragments) if trained is None else trained:
            rates[fragment].append(min(profile.samples_per_second, most))
    return [math.fsum(each) for each in rates]  # whatever the order: equally covered fragments must compare as equal


def read_view(found: Mapping[str, object], run_id: str, now: float) -> View:
    """Put profiles and states together.

    :param found: what ``DHTNode.get_many`` gave for the run's profiles and states
    """
    profiles, states = (_entries(found.get(key(run_id))) for key in (profiles_key, states_key))
    claims: dict[bytes, tuple[Claim, ...]] = {}
    for subkey, (payload, _) in states.items():
        with suppress(RecordError):
            claims[subkey] = tuple(
                Claim(version=claim.version, digest=claim.digest, total_samples=claim.total_samples)
                for claim in SwarmState.from_payload(payload).fragments
            )
    members: dict[str, Member] = {}
    for subkey, (payload, expires) in profiles.items():
        with suppress(RecordError):
            members[str(PeerID(subkey))] = Member(
                profile=PeerProfile.from_payload(payload), claims=claims.get(subkey, ()), expires=expires
            )
    return View(read_at=now, members=members)


def _entries(found: object) -> dict[bytes, tuple[bytes, float]]:
    """Subkey to payload and expiration, from hivemind's dictionary value."""
    value = getattr(found, "value", None)
    if not isinstance(value, dict):
        return {}
    return {subkey: (entry.value, entry.expiration_time) for subkey, entry in value.items()}
