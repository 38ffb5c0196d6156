"""The one door for DHT records: what is stored here, and what is believed when others return it.

Every peer installs the same validator, the bootstrap peer included, because hivemind drops a peer's whole
dictionary for one entry that the reader refuses (protocol.py:416). For the same reason a verdict depends on
the record alone, not on who asks or on what was seen before; only the upper bound of the expiry depends on
the clock.

The DHT value is the bytes of a record's ``to_payload``; in matchmaking it is a bool. hivemind packs the
value, this validator wraps the packed value as ``[value, public key, signature]`` on the way out and strips
it on the way in.

What this does not stop:
- Many identities: each may store one record of each kind, and a dictionary over 1 MiB is unreadable for
  everybody.
- Somebody else's manifest under another run id, or, where ``organiser_public_key`` is not known, a second
  signer's under this one.
- An entry at the very end of its allowed lifetime is refused by a peer whose clock is behind, so publish with
  half of it. A stranger may store such entries on purpose: peers whose clocks are behind the storing peer's
  then miss that peer's dictionary until the difference has passed.
- The expiration that a remote peer states for a dictionary as a whole, which hivemind does not show to validators;
  ``hardening.bound_found_expirations`` takes the edge off it.
- Replay of a record until it expires; a newer one, with a later expiry, replaces it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.serializer import MSGPackSerializer

from dht_config import keys, records
from dht_config.errors import RecordError
from dht_config.hardening import unpack_plain
from dht_config.identity import Identity, verify_identity
from dht_config.manifest import PROTOCOL_VERSION

PEER_RECORD_LIFETIME_SECONDS = 120.0
"""Profiles, states and matchmaking entries may expire this far ahead; publish with half of it."""
MANIFEST_LIFETIME_SECONDS = 3600.0

_RECORD_DOMAIN = b"p2p-trainer record v1\n"
_PACKED_NIL = b"\xc0"
_MAX_SUBKEY_BYTES = 128
_BIN_HEADER_BYTES = 5
_FAR_FUTURE_SECONDS = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    """The rules of one DHT key."""

    max_value_bytes: int
    lifetime_seconds: float
    check_payload: Callable[[bytes], object]
    """Raises RecordError for a packed value that does not belong here."""
    signed_by_peer: bool = True
    this_run_only: bool = False
    """For manifests: refuse those of other runs."""


class SwarmRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind ships no types
    """Signs, checks and strips the records of one run; every key that the run does not use is refused.

    :param identity: signs this peer's own records; None for a reader that publishes nothing of its own.
    :param now: clock for the expiry bound, unix seconds. Give it swarm time if the machine's clock may be
        off.
    :param organiser_public_key: if known, only this organiser's manifest is accepted under ``run_id``. Give
        it wherever it is known: without it anybody may publish a manifest of the same run id with other base
        digests.
    """

    def __init__(
        self,
        run_id: str,
        identity: Identity | None,
        *,
        now: Callable[[], float] = time.time,
        organiser_public_key: bytes | None = None,
    ) -> None:
        self._run_id = run_id
        self._identity = identity
        self._now = now
        self._organiser_public_key = organiser_public_key
        self._topics = _topics_by_key(run_id)
        self._own_subkey: bytes | None = None
        if identity is not None:
            self._own_subkey = MSGPackSerializer.dumps(identity.peer_id.to_bytes())

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record may be stored or believed. False for any malformed input, never an exception."""
        try:
            self._check(record)
        except RecordError:
            return False
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        """Wrap the packed value of this peer's own record; leave any other as it is (it won't validate)."""
        topic = self._topics.get(record.key)
        if topic is None or not topic.signed_by_peer or self._identity is None or record.subkey != self._own_subkey:
            return bytes(record.value)
        return records.seal(self._identity, record.value, _signed_message(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The packed value inside a record that ``validate`` accepted; packed None for any other."""
        topic = self._topics.get(record.key)
        if topic is None or not topic.signed_by_peer:
            return bytes(record.value)
        try:
            payload, _, _ = records.open_envelope(record.value, topic.max_value_bytes)
        except RecordError:
            return _PACKED_NIL
        return payload

    def _check(self, record: DHTRecord) -> None:
        # Cheap checks first; a stranger's bytes reach public-key work only if their hash fits the subkey.
        key, subkey, value, expiration = record.key, record.subkey, record.value, record.expiration_time
        if not (isinstance(key, bytes) and isinstance(subkey, bytes) and isinstance(value, bytes)):
            raise RecordError("key, subkey and value must be bytes")
        topic = self._topics.get(key)
        if topic is None:
            raise RecordError("not a key of this run")
        if len(value) > topic.max_value_bytes:
            raise RecordError(f"{len(value)} bytes, at most {topic.max_value_bytes} are allowed")
        self._check_expiration(expiration, topic.lifetime_seconds)
        owner = _canonical_subkey(subkey)
        if topic.signed_by_peer and isinstance(owner, bytes):
            payload, public_key, signature = records.open_envelope(value, topic.max_value_bytes)
            if not verify_identity(owner, public_key, signature, _signed_message(record, payload)):
                raise RecordError("not signed by the peer in the subkey")
            topic.check_payload(payload)
        elif isinstance(owner, str) and not topic.signed_by_peer:
            if topic.this_run_only and owner != self._run_id:
                raise RecordError("the manifest of another run")
            self._check_manifest(owner, value)
        else:
            raise RecordError("the subkey must be a peer id, for a manifest a run id")

    def _check_expiration(self, expiration: object, lifetime_seconds: float) -> None:
        # Already expired is fine: hivemind drops it, and one such entry must not void a whole dictionary.
        if isinstance(expiration, bool) or not isinstance(expiration, float | int):
            raise RecordError("the expiration must be a number")
        if not abs(expiration) < _FAR_FUTURE_SECONDS:  # written so that NaN is refused too
            raise RecordError("the expiration is not a moment")
        if expiration > self._now() + lifetime_seconds:
            raise RecordError(f"expires more than {lifetime_seconds:g} s from now")

    def _check_manifest(self, owner: str, value: bytes) -> None:
        signed = records.SignedManifest.from_payload(_unpacked_bytes(value))
        if owner != signed.run_id():
            raise RecordError("the subkey is not this manifest's run id")
        signed.verify(self._organiser_public_key if owner == self._run_id else None)
        if signed.protocol_version == PROTOCOL_VERSION:
            signed.manifest()


def _topics_by_key(run_id: str) -> dict[bytes, _Topic]:
    """DHTID bytes -> rules. Validators see the hash of a key only, so every key is listed beforehand."""
    profiles = _Topic(
        max_value_bytes=records.MAX_PROFILE_BYTES + _BIN_HEADER_BYTES + records.ENVELOPE_BYTES,
        lifetime_seconds=PEER_RECORD_LIFETIME_SECONDS,
        check_payload=lambda packed: records.PeerProfile.from_payload(_unpacked_bytes(packed)),
    )
    states = _Topic(
        max_value_bytes=records.MAX_STATE_BYTES + _BIN_HEADER_BYTES + records.ENVELOPE_BYTES,
        lifetime_seconds=PEER_RECORD_LIFETIME_SECONDS,
        check_payload=lambda packed: records.SwarmState.from_payload(_unpacked_bytes(packed)),
    )
    matchmaking = _Topic(
        max_value_bytes=records.MAX_MATCHMAKING_BYTES,
        lifetime_seconds=PEER_RECORD_LIFETIME_SECONDS,
        check_payload=_check_packed_bool,
    )
    manifests = _Topic(
        max_value_bytes=records.MAX_SIGNED_MANIFEST_BYTES + _BIN_HEADER_BYTES,
        lifetime_seconds=MANIFEST_LIFETIME_SECONDS,
        check_payload=_unpacked_bytes,
        signed_by_peer=False,
    )
    topics = {
        keys.manifest_key(): manifests,
        keys.run_manifest_key(run_id): replace(manifests, this_run_only=True),
        keys.profiles_key(run_id): profiles,
        keys.states_key(run_id): states,
    }
    topics |= {keys.matchmaking_key(run_id, fragment): matchmaking for fragment in range(keys.MAX_FRAGMENTS)}
    return {DHTID.generate(source=key).to_bytes(): topic for key, topic in topics.items()}


def _signed_message(record: DHTRecord, payload: bytes) -> bytes:
    expiration = struct.pack(">d", record.expiration_time)
    return _RECORD_DOMAIN + records.length_prefixed(record.key, record.subkey, payload, expiration)


def _canonical_subkey(subkey: bytes) -> bytes | str:
    """The decoded subkey.

    hivemind stores the decoded subkey and encodes it anew for others (protocol.py:267, 412): another spelling
    of the same subkey would pass here and poison the dictionary there.
    """
    owner = unpack_plain(subkey, _MAX_SUBKEY_BYTES)
    if not isinstance(owner, bytes | str) or MSGPackSerializer.dumps(owner) != subkey:
        raise RecordError("the subkey is not canonical bytes or text")
    return owner


def _unpacked_bytes(packed: bytes) -> bytes:
    value = unpack_plain(packed, len(packed))
    if not isinstance(value, bytes):
        raise RecordError("the value must be bytes")
    return value


def _check_packed_bool(packed: bytes) -> None:
    if packed not in (b"\xc2", b"\xc3"):
        raise RecordError("the value must be true or false")
