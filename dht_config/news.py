"""News: a peer's records of one moment, signed as one, as other peers pass them on.

The same records lie in the DHT, where newcomers and observers find them; there each is signed by itself
(``validators.py``). What this does not stop: news may be a lie, or older than what its peer tells others; it stands
until it expires, or until newer news comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from dht_config.errors import RecordError
from dht_config.hardening import unpack_plain
from dht_config.identity import Identity, verify_identity
from dht_config.records import (
    ENVELOPE_BYTES,
    MAX_PROFILE_BYTES,
    MAX_STATE_BYTES,
    PeerProfile,
    SwarmState,
    length_prefixed,
    open_envelope,
    seal,
)

_DOMAIN = b"p2p-trainer news v1\n"
_MAX_PAYLOAD_BYTES = MAX_PROFILE_BYTES + MAX_STATE_BYTES + 256
MAX_NEWS_BYTES = _MAX_PAYLOAD_BYTES + ENVELOPE_BYTES
"""Of one peer, sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNews:
    """What one peer says about itself and its bases."""

    peer_id: bytes
    expires: float
    """Swarm time, unix seconds: until then it stands. Of two of one peer, the one that expires later is the newer."""
    profile: PeerProfile
    state: SwarmState | None
    """None while the peer does not hold all bases."""


def sign_news(identity: Identity, news: PeerNews, run_id: str) -> bytes:
    """The news in an envelope that only this identity can make, for this run.

    Raises: RecordError if it is bigger than readers accept.
    """
    state = b"" if news.state is None else news.state.to_payload()
    payload = msgpack.packb([news.peer_id, news.expires, news.profile.to_payload(), state], use_bin_type=True)
    if len(payload) > _MAX_PAYLOAD_BYTES:
        raise RecordError(f"{len(payload)} bytes, at most {_MAX_PAYLOAD_BYTES} are allowed")
    return seal(identity, payload, _message(run_id, payload))


def open_news(blob: bytes, run_id: str, is_wanted: Callable[[bytes, float], bool]) -> PeerNews | None:
    """News that the peer it names signed for this run, or None if the reader does not want it.

    :param is_wanted: asked before the signature is verified: is news of this peer id, expiring then, of any use?
    Raises: RecordError.
    """
    payload, public_key, signature = open_envelope(blob, MAX_NEWS_BYTES)
    match unpack_plain(payload, _MAX_PAYLOAD_BYTES):
        case (bytes() as peer_id, float() as expires, bytes() as profile, bytes() as state) if math.isfinite(expires):
            pass
        case _:
            raise RecordError("not news of a peer")
    if not is_wanted(peer_id, expires):
        return None
    if not verify_identity(peer_id, public_key, signature, _message(run_id, payload)):
        raise RecordError("the news is not signed by the peer that it names")
    return PeerNews(
        peer_id=peer_id,
        expires=expires,
        profile=PeerProfile.from_payload(profile),
        state=SwarmState.from_payload(state) if state else None,
    )


def _message(run_id: str, payload: bytes) -> bytes:
    return _DOMAIN + length_prefixed(run_id.encode(), payload)
