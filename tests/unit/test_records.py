"""Records: what is refused before anybody looks at it, and who can have signed what."""

from __future__ import annotations

import math
from itertools import pairwise

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dht_config import records
from dht_config.errors import RecordError
from dht_config.identity import (
    Identity,
    OrganiserKey,
    load_or_create_identity,
    load_or_create_organiser_key,
)
from dht_config.manifest import PROTOCOL_VERSION, parse_manifest, run_id
from dht_config.records import (
    FragmentClaim,
    PeerProfile,
    RoundAnnouncement,
    SignedManifest,
    SwarmState,
    open_announcement,
    sign_announcement,
    sign_manifest,
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

RUN_ID = "tiny-0123456789abcdef"
DIGEST = bytes(range(32))
MANIFEST = parse_manifest('[run]\nname = "tiny"\nfragments = 2\n[task]\nname = "text"\n', source="run.toml")

PROFILE = PeerProfile(
    software_version="0.1.0",
    status="training",
    samples_per_second=80.5,
    processed_samples=1000,
    credited_samples=900.25,
    micro_batch=8,
    device="NVIDIA GeForce RTX 4090",
    addresses=("/ip4/203.0.113.7/tcp/31337",),
    joined_at=1.8e9,
    restart=0,
)
STATE = SwarmState(fragments=(FragmentClaim(version=3, digest=DIGEST, total_samples=4096),) * 4)
ANNOUNCEMENT = RoundAnnouncement(
    fragment=1,
    tick=42,
    version=3,
    digest=DIGEST,
    samples_total=1000,
    steps_total=125,
    spans=((0, 100, 80, 10), (100, 250, 40, 5)),
    megabits_per_second=98.5,
)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create_identity(tmp_path_factory.mktemp("identity") / "identity.key")


@pytest.fixture(scope="module")
def organiser_key(tmp_path_factory: pytest.TempPathFactory) -> OrganiserKey:
    return load_or_create_organiser_key(tmp_path_factory.mktemp("organiser") / "organiser.key")


@pytest.fixture(scope="module")
def signed(organiser_key: OrganiserKey) -> SignedManifest:
    return sign_manifest(organiser_key, MANIFEST, task_version=1, initial_digests=[DIGEST, DIGEST])


def test_every_record_reads_back(signed: SignedManifest) -> None:
    assert PeerProfile.from_payload(PROFILE.to_payload()) == PROFILE
    assert SwarmState.from_payload(STATE.to_payload()) == STATE
    assert RoundAnnouncement.from_payload(ANNOUNCEMENT.to_payload()) == ANNOUNCEMENT
    assert SignedManifest.from_payload(signed.to_payload()) == signed


def test_records_may_be_made_from_lists() -> None:
    assert SwarmState(fragments=list(STATE.fragments)) == STATE  # type: ignore[arg-type]
    lists = [list(span) for span in ANNOUNCEMENT.spans]
    assert RoundAnnouncement(**{**ANNOUNCEMENT.model_dump(), "spans": lists}) == ANNOUNCEMENT


def test_the_biggest_allowed_records_fit_their_limits() -> None:
    claim = FragmentClaim(version=records.MAX_VERSION, digest=DIGEST, total_samples=records.MAX_SAMPLES)
    assert len(SwarmState(fragments=(claim,) * 256).to_payload()) <= records.MAX_STATE_BYTES
    top, total = 2**48, records.MAX_SAMPLES
    cuts = [*range(1023), top - 1, top]
    spans = [(start, stop, total, total) for start, stop in pairwise(cuts)]
    announcement = RoundAnnouncement(
        fragment=255,
        tick=top,
        version=records.MAX_VERSION,
        digest=DIGEST,
        samples_total=total,
        steps_total=total,
        spans=tuple(spans),
    )
    assert len(announcement.spans) == records.MAX_SPANS
    assert len(announcement.to_payload()) <= records.MAX_ANNOUNCEMENT_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"samples_per_second": math.inf},
        {"samples_per_second": math.nan},
        {"samples_per_second": -1.0},
        {"samples_per_second": 1e10},
        {"processed_samples": -1},
        {"processed_samples": 2**63},
        {"processed_samples": 1.0},
        {"processed_samples": True},
        {"credited_samples": 1e300},
        {"status": "leader"},
        {"device": "x" * 65},
        {"device": "\x1b[31mred"},
        {"software_version": "1\u202e0"},
        {"addresses": ["/ip4/203.0.113.7/tcp/1"] * 17},
        {"addresses": "/ip4/203.0.113.7/tcp/1"},
        {"addresses": [1]},
        {"schema_version": 2},
        {"joined_at": -1e300},
        {"extra": 1},
    ],
)
def test_a_profile_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        PeerProfile.from_payload(msgpack.packb({**PROFILE.model_dump(), **change}))


def test_a_profile_too_big_to_be_accepted_is_refused_by_its_maker() -> None:
    big = PROFILE.model_copy(update={"addresses": tuple(f"/dns4/{'x' * 240}/tcp/1" for _ in range(16))})
    with pytest.raises(RecordError, match="at most 4096"):
        big.to_payload()


@pytest.mark.parametrize(
    "payload",
    [
        [1, [[1, DIGEST[:31], 1]]],
        [1, [[1, "x" * 32, 1]]],
        [1, [[2**40 + 1, DIGEST, 1]]],
        [1, [[1, DIGEST, 2**60 + 1]]],
        [1, [[1, DIGEST]]],
        [1, [[1, DIGEST, 1]] * 257],
        [1, {"version": 1}],
        [2, []],
        [1],
        {"schema_version": 1, "fragments": []},
        None,
    ],
)
def test_a_state_out_of_bounds_is_refused(payload: object) -> None:
    with pytest.raises(RecordError):
        SwarmState.from_payload(msgpack.packb(payload))


@pytest.mark.parametrize(
    "spans",
    [
        [(1, 2, 1, 1)],
        [(0, 0, 1, 1)],
        [(0, 2, 1, 1), (3, 4, 1, 1)],
        [(0, 2, 1, 1), (1, 4, 1, 1)],
        [(0, 2, 1, 0)],
        [(0, 2, 0, 1)],
        [(0, 2, 1001, 1)],
        [(0, 2, 1, 126)],
        [(0, 2, -1, 1)],
        [(0, 2, 1.0, 1)],
        [(0, 2, True, 1)],
        [(0, 2, 1)],
        [(index, index + 1, 1, 1) for index in range(1025)],
    ],
)
def test_spans_that_contradict_themselves_are_refused(spans: list[tuple[int, ...]]) -> None:
    with pytest.raises(RecordError):
        RoundAnnouncement.from_payload(msgpack.packb({**ANNOUNCEMENT.model_dump(), "spans": spans}))
    with pytest.raises(ValidationError):
        RoundAnnouncement(**{**ANNOUNCEMENT.model_dump(), "spans": spans})


def test_an_announcement_opens_for_its_sender_and_its_run_only(identity: Identity) -> None:
    peer_id = identity.peer_id.to_bytes()
    blob = sign_announcement(identity, ANNOUNCEMENT, RUN_ID)
    assert open_announcement(peer_id, blob, RUN_ID) == ANNOUNCEMENT
    with pytest.raises(RecordError, match="not signed by its sender"):
        open_announcement(peer_id, blob, "another-run")
    with pytest.raises(RecordError, match="not signed by its sender"):
        open_announcement(peer_id[:-1] + b"x", blob, RUN_ID)


def test_no_byte_of_an_announcement_can_change(identity: Identity) -> None:
    peer_id, blob = identity.peer_id.to_bytes(), sign_announcement(identity, ANNOUNCEMENT, RUN_ID)
    for position in range(len(blob)):
        changed = bytes([*blob[:position], blob[position] ^ 1, *blob[position + 1 :]])
        with pytest.raises(RecordError):
            open_announcement(peer_id, changed, RUN_ID)


def test_a_signed_manifest_names_its_run_its_organiser_and_nothing_else_passes(
    signed: SignedManifest, organiser_key: OrganiserKey
) -> None:
    signed.verify()
    signed.verify(organiser_key.public_key)
    assert signed.manifest().canonical_json() == MANIFEST.canonical_json()
    assert signed.run_id() == run_id(MANIFEST, task_version=1)
    with pytest.raises(RecordError, match="another organiser"):
        signed.verify(bytes(32))
    for change in (
        {"initial_digests": (DIGEST, bytes(32))},
        {"task_version": 2},
        {"protocol_version": PROTOCOL_VERSION + 1},
        {"software_version": "9"},
        {"manifest_json": signed.manifest_json.replace("tiny", "huge")},
        {"organiser_public_key": bytes(32)},
        {"signature": signed.signature[:-1]},
    ):
        with pytest.raises(RecordError, match="signature"):
            signed.model_copy(update=change).verify()


def resigned(key: OrganiserKey, signed: SignedManifest, **change: object) -> SignedManifest:
    unsigned = signed.model_copy(update={**change, "signature": b""})
    return unsigned.model_copy(update={"signature": key.sign(unsigned.signed_bytes())})


def test_an_organiser_cannot_sign_a_manifest_that_is_none(signed: SignedManifest, organiser_key: OrganiserKey) -> None:
    bad = [
        signed.manifest_json.replace('"fragments":2', '"fragments":0'),
        signed.manifest_json.replace('"task"', '"tusk"'),
        signed.manifest_json.replace(":", ": "),
        signed.manifest_json.replace('"data":{}', '"data":{"a":' + "1" * 5000 + "}"),
        "[" * 20_000,
        "{}",
        "",
    ]
    for text in bad:
        with pytest.raises(RecordError):
            resigned(organiser_key, signed, manifest_json=text).manifest()
    for text in ("[" * 20_000, "{}", "", '{"run":{"name":1}}', '{"run":{"name":NaN}}'):
        with pytest.raises(RecordError):
            resigned(organiser_key, signed, manifest_json=text).run_id()
    with pytest.raises(RecordError, match="1 digests for 2 fragments"):
        resigned(organiser_key, signed, initial_digests=(DIGEST,)).manifest()
    with pytest.raises(ValueError, match="1 digests for 2 fragments"):
        sign_manifest(organiser_key, MANIFEST, task_version=1, initial_digests=[DIGEST])


def test_a_manifest_of_another_protocol_version_has_a_run_id_but_cannot_be_read(
    signed: SignedManifest, organiser_key: OrganiserKey
) -> None:
    newer = resigned(organiser_key, signed, protocol_version=PROTOCOL_VERSION + 1)
    newer.verify(organiser_key.public_key)
    assert newer.run_id().startswith("tiny-")
    assert newer.run_id() != signed.run_id()
    with pytest.raises(RecordError, match=f"protocol version {PROTOCOL_VERSION + 1}"):
        newer.manifest()


@pytest.mark.parametrize("read", [PeerProfile.from_payload, SwarmState.from_payload, RoundAnnouncement.from_payload])
def test_extension_types_and_deep_nesting_are_refused(read: object) -> None:
    assert callable(read)
    deep = b"\x91" * 4000 + b"\xc0"
    for payload in (msgpack.packb(msgpack.ExtType(0x40, deep)), deep, msgpack.packb(msgpack.Timestamp(1))):
        with pytest.raises(RecordError):
            read(payload)


msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)


@unhurried
@given(st.binary() | msgpack_values.map(msgpack.packb))
def test_any_bytes_are_a_record_error(blob: bytes) -> None:
    for read in (
        PeerProfile.from_payload,
        SwarmState.from_payload,
        RoundAnnouncement.from_payload,
        SignedManifest.from_payload,
    ):
        with pytest.raises(RecordError):
            read(blob)
    with pytest.raises(RecordError):
        open_announcement(b"", blob, RUN_ID)


@unhurried
@given(st.sampled_from(sorted(RoundAnnouncement.model_fields)), msgpack_values)
def test_any_value_in_any_field_of_an_announcement_is_accepted_or_a_record_error(field: str, value: object) -> None:
    payload = msgpack.packb({**ANNOUNCEMENT.model_dump(), field: value})
    try:
        announcement = RoundAnnouncement.from_payload(payload)
    except RecordError:
        return
    assert RoundAnnouncement.from_payload(announcement.to_payload()) == announcement


@unhurried
@given(st.sampled_from(sorted(PeerProfile.model_fields)), msgpack_values)
def test_any_value_in_any_field_of_a_profile_is_accepted_or_a_record_error(field: str, value: object) -> None:
    payload = msgpack.packb({**PROFILE.model_dump(), field: value})
    try:
        profile = PeerProfile.from_payload(payload)
    except RecordError:
        return
    assert profile.device.isprintable()
    assert math.isfinite(profile.samples_per_second)
