"""What peers tell each other, and how it is signed: every wire record on one page.

A record's payload is plain msgpack (no extension types) of a pydantic model that refuses unknown fields (but for the
manifest's), loose types, infinities and anything out of bounds. In the DHT a peer stores the bytes that ``to_payload``
gives; ``validators.py`` signs them on the way out and checks them on the way in. Announcements travel inside
matchmaking and sign themselves; so does the manifest, whose signer is the organiser.

What this does not stop: a signed record may be a lie. Signatures say who lied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, Literal, TypeVar

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from dht_config.errors import RecordError
from dht_config.hardening import unpack_plain
from dht_config.identity import (
    MAX_PUBLIC_KEY_BYTES,
    MAX_SIGNATURE_BYTES,
    ORGANISER_KEY_BYTES,
    Identity,
    OrganiserKey,
    verify_identity,
    verify_organiser,
)
from dht_config.keys import MAX_FRAGMENTS
from dht_config.manifest import (
    MAX_MANIFEST_BYTES,
    PROTOCOL_VERSION,
    RunManifest,
    fingerprint_of_json,
)

DIGEST_BYTES = 32
MAX_PROFILE_BYTES = 4 * 1024
MAX_STATE_BYTES = 16 * 1024
MAX_SIGNED_MANIFEST_BYTES = 64 * 1024
MAX_MATCHMAKING_BYTES = 1024
MAX_ANNOUNCEMENT_BYTES = 64 * 1024
ENVELOPE_BYTES = MAX_PUBLIC_KEY_BYTES + MAX_SIGNATURE_BYTES + 32
"""What a signature adds to a payload, at most: the limits above are for payloads."""

MAX_VERSION = 2**40
MAX_SAMPLES = 2**60
MAX_SPANS = 1024
MAX_DISTRUSTED = 64

_ANNOUNCEMENT_DOMAIN = b"p2p-trainer announcement v1\n"
_MANIFEST_DOMAIN = b"p2p-trainer manifest v1\n"

_RecordT = TypeVar("_RecordT", bound=BaseModel)


def _printable(text: str) -> str:
    # Remote text is shown in terminals: no escape sequences, no direction overrides, no line breaks.
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


ShortText = Annotated[str, Field(max_length=64), AfterValidator(_printable)]
AddressText = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Samples = Annotated[int, Field(ge=0, le=MAX_SAMPLES)]
PeerIdBytes = Annotated[bytes, Field(min_length=8, max_length=64)]
SchemaVersion = Literal[1]

Span = tuple[Annotated[int, Field(ge=0, le=2**48)], Annotated[int, Field(ge=1, le=2**48)], Samples, Samples]
"""(start, stop, samples, steps): what a peer has pending for elements start..stop of a fragment."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PeerProfile(_Record):
    """What a peer says about itself. Shown to people, used for planning; it admits nothing."""

    schema_version: SchemaVersion = 1
    software_version: ShortText
    status: Literal["syncing", "training", "serving", "leaving"]
    samples_per_second: float = Field(ge=0, le=1e9)
    """Measured, 0 before the first measurement."""
    processed_samples: Samples
    credited_samples: float = Field(ge=0, le=float(MAX_SAMPLES))
    """Mean over the fragments, each weighted by its parameters."""
    micro_batch: int = Field(ge=0, le=2**20)
    """Samples per forward pass; 0 for a peer that does not train."""
    device: ShortText
    addresses: Annotated[tuple[AddressText, ...], Field(strict=False, max_length=16)] = ()
    joined_at: float = Field(ge=0, le=1e11)
    """Swarm time, unix seconds."""
    restart: int = Field(ge=0, le=2**31)
    """How often this identity has started in this run."""
    cadence: Literal[1, 2, 4] = 1
    """It takes part in every round of a fragment, every second or every fourth."""
    trains: Annotated[bytes, Field(max_length=MAX_FRAGMENTS // 8)] = b""
    """Bit f says whether it trains fragment f; empty for a peer that trains all of them."""

    def to_payload(self) -> bytes:
        """Raises: RecordError if it is bigger than validators accept."""
        return _packed(self.model_dump(), MAX_PROFILE_BYTES)

    @classmethod
    def from_payload(cls, payload: bytes) -> PeerProfile:
        """Raises: RecordError."""
        return _validated(cls, unpack_plain(payload, MAX_PROFILE_BYTES))


class FragmentClaim(_Record):
    """Which base of one fragment a peer holds."""

    version: Version
    digest: Digest
    total_samples: Samples
    """Samples in this base's lineage."""


class SwarmState(_Record):
    """The bases a peer holds, one claim per fragment in order.

    Payload: ``[schema version, [[version, digest, total samples], ...]]``.
    """

    schema_version: SchemaVersion = 1
    fragments: Annotated[tuple[FragmentClaim, ...], Field(strict=False, max_length=MAX_FRAGMENTS)]

    def to_payload(self) -> bytes:
        """Raises: RecordError if it is bigger than validators accept."""
        claims = [[claim.version, claim.digest, claim.total_samples] for claim in self.fragments]
        return _packed([self.schema_version, claims], MAX_STATE_BYTES)

    @classmethod
    def from_payload(cls, payload: bytes) -> SwarmState:
        """Raises: RecordError."""
        match unpack_plain(payload, MAX_STATE_BYTES):
            case (schema_version, tuple() as rows) if all(isinstance(row, tuple) and len(row) == 3 for row in rows):
                claims = [{"version": row[0], "digest": row[1], "total_samples": row[2]} for row in rows]
                return _validated(cls, {"schema_version": schema_version, "fragments": claims})
            case _:
                raise RecordError("not a swarm state")


class RoundAnnouncement(_Record):
    """What a peer brings to one round: the base it starts from and the samples pending per range of elements.

    Weights come from here, never from the wire of the all-reduce. A reader still has to check that ``tick``
    and ``fragment`` are the round's, that the spans end at the fragment's size, and that ``samples_total``
    grows no faster than the peer's admitted throughput.
    """

    schema_version: SchemaVersion = 1
    fragment: int = Field(ge=0, lt=MAX_FRAGMENTS)
    tick: int = Field(ge=0, le=2**48)
    version: Version
    digest: Digest
    samples_total: Samples
    """Samples this peer has processed in the run up to its snapshot."""
    steps_total: Samples
    """Inner steps up to the snapshot."""
    spans: Annotated[tuple[Annotated[Span, Field(strict=False)], ...], Field(strict=False, max_length=MAX_SPANS)]
    """Contiguous from element 0, in order."""
    attempt: int = Field(default=0, ge=0, le=16)
    """Of this tick; above 0 when a group re-forms without a reducer that was lost."""
    megabits_per_second: float | None = Field(default=None, ge=0, le=1e6)
    """Measured in rounds, each way; None before it was measured."""
    distrusted: Annotated[tuple[PeerIdBytes, ...], Field(strict=False, max_length=MAX_DISTRUSTED)] = ()
    """Reducers that failed this peer lately."""
    can_be_dialled: bool = True
    """Whether others can open connections to it; who cannot be dialled averages nothing for others."""
    cadence: Literal[1, 2, 4] = 1
    """As in its profile; who skips rounds for its line's sake averages nothing for others."""
    codec: Literal["int8", "int4", "sparse"] = "int8"
    """How its contribution is encoded, in runs that leave that to each peer."""
    auxiliary: bool = False
    """Whether it does not train: it brings nothing, and averages where no member that trains can be dialled."""

    @model_validator(mode="after")
    def _spans_are_consistent(self) -> RoundAnnouncement:
        end = 0
        for start, stop, samples, steps in self.spans:
            if start != end or stop <= start:
                raise ValueError("spans must be contiguous from 0")
            if (samples == 0) != (steps == 0):
                raise ValueError("a span has samples exactly if it has steps")
            if samples > self.samples_total or steps > self.steps_total:
                raise ValueError("a span has more pending than was ever processed")
            if samples and self.auxiliary:
                raise ValueError("an auxiliary peer brings no samples")
            end = stop
        return self

    def to_payload(self) -> bytes:
        """Raises: RecordError if it is bigger than readers accept."""
        return _packed(self.model_dump(), MAX_ANNOUNCEMENT_BYTES)

    @classmethod
    def from_payload(cls, payload: bytes) -> RoundAnnouncement:
        """Raises: RecordError."""
        return _validated(cls, unpack_plain(payload, MAX_ANNOUNCEMENT_BYTES))


class SignedManifest(_Record):
    """The run manifest as the organiser published it, with the digests of the bases of version 0.

    Newcomers of other versions read it as well: what a later one adds, plain values alone, comes last and is signed
    for, but not looked at. Refused, it would have them told that nobody knows the run, not which version to install.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bytes | str | int | float | bool | None] = Field(init=False)

    schema_version: SchemaVersion = 1
    manifest_json: str = Field(max_length=MAX_MANIFEST_BYTES)
    """``RunManifest.canonical_json()``."""
    protocol_version: int = Field(ge=0, le=2**31)
    task_version: int = Field(ge=0, le=2**31)
    software_version: ShortText
    organiser_public_key: Annotated[bytes, Field(min_length=ORGANISER_KEY_BYTES, max_length=ORGANISER_KEY_BYTES)]
    initial_digests: Annotated[tuple[Digest, ...], Field(strict=False, min_length=1, max_length=MAX_FRAGMENTS)]
    """One per fragment, in order."""
    layout_digest: Digest | None = None
    """Of what the organiser's model has to train and how it is cut: a task may freeze other layers on another machine.
    None in a manifest from before there was this."""
    signature: bytes = Field(max_length=64)

    def signed_bytes(self) -> bytes:
        """What the organiser's signature covers: everything but the signature."""
        packed: bytes = msgpack.packb(self._fields(exclude={"signature"}))
        return _MANIFEST_DOMAIN + packed

    def _fields(self, exclude: set[str] | None = None) -> dict[str, Any]:
        unknown = {"layout_digest"} if self.layout_digest is None else set()
        return self.model_dump(exclude=unknown | (exclude or set()))

    def verify(self, expected_key: bytes | None = None) -> None:
        """Check the signature and, given the key from an invite, who signed.

        Raises: RecordError. Without ``expected_key`` it only says that the record is unchanged since somebody
        signed it.
        """
        if expected_key is not None and self.organiser_public_key != expected_key:
            raise RecordError("the manifest is signed by another organiser")
        if not verify_organiser(self.organiser_public_key, self.signature, self.signed_bytes()):
            raise RecordError("the organiser's signature does not fit the manifest")

    def manifest(self) -> RunManifest:
        """The manifest itself, readable only under the same protocol version.

        Raises: RecordError.
        """
        if self.protocol_version != PROTOCOL_VERSION:
            raise RecordError(f"the run speaks protocol version {self.protocol_version}, this is {PROTOCOL_VERSION}")
        try:
            manifest = RunManifest.model_validate_json(self.manifest_json)
        except ValidationError as error:
            raise RecordError(_first_complaint(error)) from None
        if manifest.canonical_json() != self.manifest_json:
            raise RecordError("the manifest is not in canonical form")
        if len(self.initial_digests) != manifest.run.fragments:
            raise RecordError(f"{len(self.initial_digests)} digests for {manifest.run.fragments} fragments")
        return manifest

    def run_id(self) -> str:
        """The id of the run that this manifest makes, of whatever protocol version.

        Raises: RecordError if the text is no manifest at all.
        """
        try:
            table = from_json(self.manifest_json, allow_inf_nan=False)
        except ValueError as error:
            raise RecordError(f"the manifest is not JSON: {error}") from None
        match table:
            case {"run": {"name": str() as name}}:
                digest = fingerprint_of_json(self.manifest_json, self.protocol_version, self.task_version)
                return f"{name}-{digest[:16]}"
            case _:
                raise RecordError("the manifest names no run")

    def to_payload(self) -> bytes:
        """Raises: RecordError if it is bigger than validators accept."""
        return _packed(self._fields(), MAX_SIGNED_MANIFEST_BYTES)

    @classmethod
    def from_payload(cls, payload: bytes) -> SignedManifest:
        """Raises: RecordError."""
        return _validated(cls, unpack_plain(payload, MAX_SIGNED_MANIFEST_BYTES))


def sign_manifest(
    organiser_key: OrganiserKey,
    manifest: RunManifest,
    task_version: int,
    initial_digests: Sequence[bytes],
    layout_digest: bytes | None = None,
) -> SignedManifest:
    """Make the record by which a run is known. ``initial_digests``: 32 bytes per fragment, in order.

    Raises: ValueError if the number of digests is not the manifest's number of fragments.
    """
    if len(initial_digests) != manifest.run.fragments:
        raise ValueError(f"{len(initial_digests)} digests for {manifest.run.fragments} fragments")
    unsigned = SignedManifest(
        manifest_json=manifest.canonical_json(),
        protocol_version=PROTOCOL_VERSION,
        task_version=task_version,
        software_version=software_version(),
        organiser_public_key=organiser_key.public_key,
        initial_digests=tuple(initial_digests),
        layout_digest=layout_digest,
        signature=b"",
    )
    return unsigned.model_copy(update={"signature": organiser_key.sign(unsigned.signed_bytes())})


def sign_announcement(identity: Identity, announcement: RoundAnnouncement, run_id: str) -> bytes:
    """The announcement in an envelope that only this identity can make, for this run."""
    payload = announcement.to_payload()
    return seal(identity, payload, _announcement_message(run_id, payload))


def open_announcement(peer_id_bytes: bytes, blob: bytes, run_id: str) -> RoundAnnouncement:
    """The announcement that this very peer signed for this run.

    Raises: RecordError. Whether it is of the right tick is the reader's to check: an old one opens as well.
    """
    payload, public_key, signature = open_envelope(blob, MAX_ANNOUNCEMENT_BYTES + ENVELOPE_BYTES)
    if not verify_identity(peer_id_bytes, public_key, signature, _announcement_message(run_id, payload)):
        raise RecordError("the announcement is not signed by its sender")
    return RoundAnnouncement.from_payload(payload)


def seal(identity: Identity, payload: bytes, message: bytes) -> bytes:
    """Envelope: msgpack ``[payload, public key, signature of message]``."""
    envelope: bytes = msgpack.packb([payload, identity.public_key, identity.sign(message)])
    return envelope


def open_envelope(blob: bytes, max_bytes: int) -> tuple[bytes, bytes, bytes]:
    """(payload, public key, signature), not yet verified.

    Raises: RecordError.
    """
    match unpack_plain(blob, max_bytes):
        case (bytes() as payload, bytes() as public_key, bytes() as signature):
            return payload, public_key, signature
        case _:
            raise RecordError("not an envelope")


def length_prefixed(*parts: bytes) -> bytes:
    """Join parts so that no two lists of parts give the same bytes: what a signature should cover."""
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def software_version() -> str:
    """The installed distribution's version, for profiles and manifests."""
    try:
        return metadata.version("p2p-trainer")[:64]
    except metadata.PackageNotFoundError:
        return "0+source"


def _announcement_message(run_id: str, payload: bytes) -> bytes:
    return _ANNOUNCEMENT_DOMAIN + length_prefixed(run_id.encode(), payload)


def _packed(value: Any, max_bytes: int) -> bytes:
    payload: bytes = msgpack.packb(value, use_bin_type=True)
    if len(payload) > max_bytes:
        raise RecordError(f"{len(payload)} bytes, at most {max_bytes} are allowed")
    return payload


def _validated(record: type[_RecordT], value: object) -> _RecordT:
    try:
        return record.model_validate(value)
    except ValidationError as error:
        raise RecordError(_first_complaint(error)) from None


def _first_complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
