"""Records through hivemind's validation: what a peer stores, another believes; all else is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dht_config import keys
from dht_config.identity import Identity, load_or_create_identity, load_or_create_organiser_key
from dht_config.manifest import parse_manifest, run_id
from dht_config.records import (
    ENVELOPE_BYTES,
    MAX_MATCHMAKING_BYTES,
    MAX_PROFILE_BYTES,
    FragmentClaim,
    PeerProfile,
    SignedManifest,
    SwarmState,
    sign_manifest,
)
from dht_config.validators import (
    MANIFEST_LIFETIME_SECONDS,
    PEER_RECORD_LIFETIME_SECONDS,
    SwarmRecordValidator,
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NOW = 1.8e9
DIGEST = bytes(range(32))
MANIFEST = parse_manifest('[run]\nname = "tiny"\nfragments = 2\n[task]\nname = "text"\n', source="run.toml")
RUN_ID = run_id(MANIFEST, task_version=1)
OTHER_MANIFEST = parse_manifest('[run]\nname = "tiny"\nfragments = 3\n[task]\nname = "text"\n', source="run.toml")
PROFILE = PeerProfile(
    software_version="0.1.0",
    status="training",
    samples_per_second=80.5,
    processed_samples=1000,
    credited_samples=900.25,
    micro_batch=8,
    device="cpu",
    addresses=("/ip4/203.0.113.7/tcp/31337",),
    joined_at=NOW,
    restart=0,
)
STATE = SwarmState(fragments=(FragmentClaim(version=3, digest=DIGEST, total_samples=4096),) * 2)


def clock() -> float:
    return NOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Two peers, an organiser and a reader, with the validators their DHTs would have."""

    ours: Identity
    theirs: Identity
    our_validator: CompositeValidator
    their_validator: CompositeValidator
    reader: CompositeValidator
    manifest: SignedManifest
    forged_manifest: SignedManifest
    foreign_manifest: SignedManifest


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Swarm:
    directory = tmp_path_factory.mktemp("swarm")
    ours, theirs = (load_or_create_identity(directory / name) for name in ("ours.key", "theirs.key"))
    organiser, forger = (load_or_create_organiser_key(directory / name) for name in ("organiser.key", "forger.key"))

    def validator(identity: Identity | None) -> CompositeValidator:
        return CompositeValidator(
            [SwarmRecordValidator(RUN_ID, identity, now=clock, organiser_public_key=organiser.public_key)]
        )

    return Swarm(
        ours=ours,
        theirs=theirs,
        our_validator=validator(ours),
        their_validator=validator(theirs),
        reader=validator(None),
        manifest=sign_manifest(organiser, MANIFEST, 1, [DIGEST, DIGEST]),
        forged_manifest=sign_manifest(forger, MANIFEST, 1, [bytes(32), bytes(32)]),
        foreign_manifest=sign_manifest(forger, OTHER_MANIFEST, 1, [DIGEST] * 3),
    )


def record_of(key: str, subkey: object, value: object, lifetime_seconds: float = 60.0) -> DHTRecord:
    """The record as DHTNode.store_many makes it (node.py:404)."""
    return DHTRecord(
        DHTID.generate(source=key).to_bytes(),
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(value),
        NOW + lifetime_seconds,
    )


def stored(validator: CompositeValidator, record: DHTRecord) -> DHTRecord:
    return dataclasses.replace(record, value=validator.sign_value(record))


def topics(swarm: Swarm) -> list[tuple[str, object]]:
    """(key, value) of everything a peer stores under its peer id."""
    return [
        (keys.profiles_key(RUN_ID), PROFILE.to_payload()),
        (keys.states_key(RUN_ID), STATE.to_payload()),
        (keys.matchmaking_key(RUN_ID, 0), True),
        (keys.matchmaking_key(RUN_ID, 255), False),
    ]


def test_what_a_peer_stores_every_peer_believes_and_reads(swarm: Swarm) -> None:
    for key, value in topics(swarm):
        record = stored(swarm.our_validator, record_of(key, swarm.ours.peer_id.to_bytes(), value))
        for validator in (swarm.our_validator, swarm.their_validator, swarm.reader):
            assert validator.validate(record)
            assert MSGPackSerializer.loads(validator.strip_value(record)) == value


def test_matchmaking_uses_hiveminds_own_key() -> None:
    # GroupKeyManager.current_key with empty group bits (key_manager.py:44).
    prefix = keys.matchmaking_prefix(RUN_ID, 1)
    assert keys.matchmaking_key(RUN_ID, 1) == f"{prefix}.0b{''}"


def test_nobody_stores_under_another_peers_id(swarm: Swarm) -> None:
    for key, value in topics(swarm):
        ours = stored(swarm.our_validator, record_of(key, swarm.ours.peer_id.to_bytes(), value))
        as_theirs = MSGPackSerializer.dumps(swarm.theirs.peer_id.to_bytes())
        assert not swarm.reader.validate(dataclasses.replace(ours, subkey=as_theirs))
        unsigned = stored(swarm.our_validator, record_of(key, swarm.theirs.peer_id.to_bytes(), value))
        assert not swarm.reader.validate(unsigned)


def test_a_signature_covers_key_subkey_value_and_expiration(swarm: Swarm) -> None:
    record = stored(
        swarm.our_validator, record_of(keys.matchmaking_key(RUN_ID, 0), swarm.ours.peer_id.to_bytes(), True)
    )
    payload, public_key, signature = msgpack.unpackb(record.value)
    other_key = record_of(keys.matchmaking_key(RUN_ID, 1), b"", True).key
    assert payload == b"\xc3"
    for change in (
        {"key": other_key},
        {"expiration_time": record.expiration_time + 1},
        {"value": msgpack.packb([b"\xc2", public_key, signature])},
        {"value": msgpack.packb([payload, swarm.theirs.public_key, signature])},
        {"value": msgpack.packb([payload, public_key, signature[:-1]])},
        {"value": msgpack.packb([payload, public_key])},
    ):
        assert not swarm.reader.validate(dataclasses.replace(record, **change))
    assert swarm.reader.validate(record)


def test_expirations_are_bounded_and_the_past_is_left_to_hivemind(swarm: Swarm) -> None:
    def verdict(lifetime_seconds: float) -> bool:
        key, subkey = keys.profiles_key(RUN_ID), swarm.ours.peer_id.to_bytes()
        return bool(
            swarm.reader.validate(
                stored(swarm.our_validator, record_of(key, subkey, PROFILE.to_payload(), lifetime_seconds))
            )
        )

    assert verdict(PEER_RECORD_LIFETIME_SECONDS)
    assert not verdict(PEER_RECORD_LIFETIME_SECONDS + 1)
    assert verdict(-60.0)
    for lifetime in (math.inf, -math.inf, math.nan, 1e300, -1e300):
        assert not verdict(lifetime)


@pytest.mark.parametrize("expiration", [None, "soon", True, b"", [1.0], 10**400, -(10**400)])
def test_an_expiration_that_is_no_moment_is_refused(swarm: Swarm, expiration: object) -> None:
    record = stored(
        swarm.our_validator,
        record_of(keys.profiles_key(RUN_ID), swarm.ours.peer_id.to_bytes(), PROFILE.to_payload()),
    )
    assert not swarm.reader.validate(dataclasses.replace(record, expiration_time=expiration))


def test_a_plain_value_at_one_of_our_keys_is_refused(swarm: Swarm) -> None:
    # HIVEMIND: a plain value with a far expiration at the matchmaking key kept everybody from finding a
    # group.
    for key, value in [*topics(swarm), (keys.manifest_key(), swarm.manifest.to_payload())]:
        record = stored(swarm.our_validator, record_of(key, None, value))
        assert record.subkey == DHTProtocol.IS_REGULAR_VALUE
        assert not swarm.reader.validate(record)
        assert not swarm.reader.validate(dataclasses.replace(record, subkey=DHTProtocol.IS_DICTIONARY))


def test_keys_that_the_run_does_not_use_are_refused(swarm: Swarm) -> None:
    subkey = swarm.ours.peer_id.to_bytes()
    for key in (
        "anything",
        keys.profiles_key("other-run"),
        f"{keys.matchmaking_prefix(RUN_ID, 0)}.0b1",
        f"{RUN_ID}-f256.0b",
        f"{keys.matchmaking_prefix(RUN_ID, 0)}.all_averagers",
    ):
        assert not swarm.reader.validate(stored(swarm.our_validator, record_of(key, subkey, True)))
    record = stored(swarm.our_validator, record_of(keys.matchmaking_key(RUN_ID, 0), subkey, True))
    # DHTID.from_bytes would read this as the same id.
    assert not swarm.reader.validate(dataclasses.replace(record, key=b"\x00" + record.key))


def test_a_value_of_another_kind_is_refused_even_if_signed(swarm: Swarm) -> None:
    subkey = swarm.ours.peer_id.to_bytes()
    for key, value in (
        (keys.profiles_key(RUN_ID), STATE.to_payload()),
        (keys.states_key(RUN_ID), PROFILE.to_payload()),
        (keys.profiles_key(RUN_ID), PROFILE.model_dump()),
        (keys.profiles_key(RUN_ID), None),
        (keys.matchmaking_key(RUN_ID, 0), 1),
        (keys.matchmaking_key(RUN_ID, 0), "x"),
        (keys.matchmaking_key(RUN_ID, 0), bytes(MAX_MATCHMAKING_BYTES)),
        (keys.profiles_key(RUN_ID), bytes(MAX_PROFILE_BYTES + ENVELOPE_BYTES)),
    ):
        assert not swarm.reader.validate(stored(swarm.our_validator, record_of(key, subkey, value)))


def test_another_spelling_of_a_subkey_cannot_poison_a_dictionary(swarm: Swarm) -> None:
    peer_id = swarm.ours.peer_id.to_bytes()
    canonical = MSGPackSerializer.dumps(peer_id)
    long_form = b"\xc5" + len(peer_id).to_bytes(2, "big") + peer_id
    assert MSGPackSerializer.loads(long_form) == MSGPackSerializer.loads(canonical)
    signer = SwarmRecordValidator(RUN_ID, swarm.ours, now=clock)
    signer._own_subkey = long_form  # what a malicious peer would run
    record = dataclasses.replace(record_of(keys.matchmaking_key(RUN_ID, 0), peer_id, True), subkey=long_form)
    assert not swarm.reader.validate(stored(CompositeValidator([signer]), record))


def test_the_biggest_profile_its_maker_can_pack_is_accepted(swarm: Swarm) -> None:
    addresses = tuple(f"/dns4/{'x' * 230}/tcp/1" for _ in range(15))
    almost = PROFILE.model_copy(update={"addresses": (*addresses, "x" * 32)}).to_payload()
    room = 32 + MAX_PROFILE_BYTES - len(almost)
    padded = PROFILE.model_copy(update={"addresses": (*addresses, "x" * room)}).to_payload()
    assert len(padded) == MAX_PROFILE_BYTES
    record = record_of(keys.profiles_key(RUN_ID), swarm.ours.peer_id.to_bytes(), padded)
    assert swarm.reader.validate(stored(swarm.our_validator, record))


def test_a_manifest_is_believed_from_its_organiser_under_its_run_id_only(swarm: Swarm) -> None:
    def verdict(subkey: object, signed: SignedManifest, lifetime_seconds: float = 600.0) -> bool:
        record = record_of(keys.manifest_key(), subkey, signed.to_payload(), lifetime_seconds)
        return bool(swarm.reader.validate(stored(swarm.our_validator, record)))

    assert verdict(RUN_ID, swarm.manifest, MANIFEST_LIFETIME_SECONDS)
    assert not verdict(RUN_ID, swarm.manifest, MANIFEST_LIFETIME_SECONDS + 1)
    assert not verdict("tiny-0000000000000000", swarm.manifest)
    assert not verdict(RUN_ID.encode(), swarm.manifest)
    assert not verdict(RUN_ID, swarm.foreign_manifest)
    assert not verdict(RUN_ID, swarm.forged_manifest)
    assert not verdict(RUN_ID, swarm.manifest.model_copy(update={"signature": bytes(64)}))
    assert not verdict(RUN_ID, swarm.manifest.model_copy(update={"initial_digests": (DIGEST, bytes(32))}))


def test_another_runs_manifest_can_be_read_so_that_a_joiner_is_told_what_differs(swarm: Swarm) -> None:
    record = record_of(keys.manifest_key(), run_id(OTHER_MANIFEST, 1), swarm.foreign_manifest.to_payload())
    assert swarm.reader.validate(record)
    payload = MSGPackSerializer.loads(swarm.reader.strip_value(record))
    assert isinstance(payload, bytes)
    assert SignedManifest.from_payload(payload).manifest() == OTHER_MANIFEST


def test_without_the_organisers_key_any_signer_of_the_same_manifest_passes(swarm: Swarm) -> None:
    trusting = SwarmRecordValidator(RUN_ID, None, now=clock)
    assert trusting.validate(record_of(keys.manifest_key(), RUN_ID, swarm.forged_manifest.to_payload()))


def test_stripping_a_record_that_would_not_validate_gives_none(swarm: Swarm) -> None:
    record = record_of(keys.profiles_key(RUN_ID), b"somebody", b"unsigned")
    assert MSGPackSerializer.loads(swarm.reader.strip_value(record)) is None


some_bytes = st.binary(max_size=200)
some_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=10,
).map(msgpack.packb)


@unhurried
@given(key=some_bytes, subkey=some_bytes | some_values, value=some_bytes | some_values, expiration=st.floats())
def test_any_record_is_refused_without_an_exception(
    swarm: Swarm, key: bytes, subkey: bytes, value: bytes, expiration: float
) -> None:
    known = [DHTID.generate(source=name).to_bytes() for name, _ in topics(swarm)]
    known.append(DHTID.generate(source=keys.manifest_key()).to_bytes())
    for each in (key, *known):
        record = DHTRecord(each, subkey, value, expiration)
        assert swarm.reader.validate(record) is False
        assert isinstance(swarm.reader.strip_value(record), bytes)
        assert isinstance(swarm.our_validator.sign_value(record), bytes)


@unhurried
@given(payload=some_bytes | some_values)
def test_any_signed_payload_is_accepted_only_as_what_it_should_be(swarm: Swarm, payload: bytes) -> None:
    # Signed by a real peer: the schema alone stands in the way.
    for name, _ in topics(swarm):
        record = dataclasses.replace(record_of(name, swarm.ours.peer_id.to_bytes(), None), value=payload)
        accepted = swarm.reader.validate(stored(swarm.our_validator, record))
        assert accepted == (payload in (b"\xc2", b"\xc3") and ".0b" in name)


@unhurried
@given(data=st.data())
def test_any_changed_byte_of_a_stored_record_is_noticed(swarm: Swarm, data: st.DataObject) -> None:
    for name, value in [*topics(swarm)[:3], (keys.manifest_key(), swarm.manifest.to_payload())]:
        subkey: object = RUN_ID if name == keys.manifest_key() else swarm.ours.peer_id.to_bytes()
        record = stored(swarm.our_validator, record_of(name, subkey, value))
        field: str = data.draw(st.sampled_from(["key", "subkey", "value"]))
        old: bytes = getattr(record, field)
        position = data.draw(st.integers(0, len(old) - 1))
        new = bytes([*old[:position], old[position] ^ data.draw(st.integers(1, 255)), *old[position + 1 :]])
        assert not swarm.reader.validate(dataclasses.replace(record, **{field: new}))


@pytest.mark.parametrize("clock_of_reader", [lambda: NOW - 2.0, lambda: NOW + 2.0])
def test_half_the_lifetime_survives_clocks_that_differ(swarm: Swarm, clock_of_reader: Callable[[], float]) -> None:
    reader = SwarmRecordValidator(RUN_ID, None, now=clock_of_reader)
    record = record_of(
        keys.states_key(RUN_ID),
        swarm.ours.peer_id.to_bytes(),
        STATE.to_payload(),
        lifetime_seconds=PEER_RECORD_LIFETIME_SECONDS / 2,
    )
    assert reader.validate(stored(swarm.our_validator, record))
