"""Who is in the run: profiles and states read together, whatever else lies in the DHT."""

from __future__ import annotations

from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from dht_config.keys import profiles_key, states_key
from dht_config.records import FragmentClaim, PeerProfile, SwarmState
from peers.lineage import Claim
from peers.membership import View, read_view

RUN_ID = "tiny-0123456789abcdef"
NOW = 1.8e9
DIGEST = bytes(range(32))


def peer(index: int) -> bytes:
    return b"\x12\x20" + bytes([index]) * 32


def name(index: int) -> str:
    return str(PeerID(peer(index)))


def profile(status: str = "training", processed: int = 100) -> bytes:
    return PeerProfile(
        software_version="0.1.0",
        status=status,  # type: ignore[arg-type]
        samples_per_second=8.0,
        processed_samples=processed,
        credited_samples=0.0,
        micro_batch=8,
        device="cpu",
        joined_at=NOW,
        restart=0,
    ).to_payload()


def state(*versions: int) -> bytes:
    claims = tuple(FragmentClaim(version=version, digest=DIGEST, total_samples=10 * version) for version in versions)
    return SwarmState(fragments=claims).to_payload()


def found(
    profiles: dict[bytes, bytes], states: dict[bytes, bytes] | None = None, expires: float = NOW + 30
) -> dict[str, object]:
    def dictionary(entries: dict[bytes, bytes]) -> object:
        values = {subkey: ValueWithExpiration(payload, expires) for subkey, payload in entries.items()}
        return ValueWithExpiration(values, expires)

    return {profiles_key(RUN_ID): dictionary(profiles), states_key(RUN_ID): dictionary(states or {})}


def test_a_profile_and_a_state_of_one_peer_make_one_member() -> None:
    view = read_view(found({peer(1): profile()}, {peer(1): state(3, 4)}), RUN_ID, NOW)
    assert view.read_at == NOW
    (member,) = view.members.values()
    assert list(view.members) == [name(1)]
    assert member.profile.processed_samples == 100
    assert member.expires == NOW + 30
    assert view.claims(1) == {name(1): Claim(version=4, digest=DIGEST, total_samples=40)}


def test_a_peer_without_a_base_is_a_member_that_claims_nothing() -> None:
    view = read_view(found({peer(1): profile("syncing")}), RUN_ID, NOW)
    assert list(view.members) == [name(1)]
    assert view.claims(0) == {}


def test_a_state_without_a_profile_is_nobody() -> None:
    assert read_view(found({}, {peer(1): state(3)}), RUN_ID, NOW).members == {}


def test_claims_of_a_fragment_come_from_those_that_have_that_many() -> None:
    view = read_view(
        found({peer(1): profile(), peer(2): profile()}, {peer(1): state(3), peer(2): state(3, 9)}), RUN_ID, NOW
    )
    assert set(view.claims(0)) == {name(1), name(2)}
    assert set(view.claims(1)) == {name(2)}


def test_only_training_peers_take_part_in_rounds() -> None:
    statuses = ["training", "syncing", "serving", "leaving"]
    view = read_view(found({peer(index): profile(status) for index, status in enumerate(statuses)}), RUN_ID, NOW)
    assert view.training() == {name(0)}
    assert len(view.members) == 4


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 3000, profile()[:-1], state(1), b"x" * 10_000])
def test_a_broken_record_costs_its_owner_only(payload: bytes) -> None:
    view = read_view(found({peer(1): payload, peer(2): profile()}, {peer(1): state(5), peer(2): payload}), RUN_ID, NOW)
    assert list(view.members) == [name(2)]
    assert view.members[name(2)].claims in ((), (Claim(version=1, digest=DIGEST, total_samples=10),))


@pytest.mark.parametrize("value", [None, ValueWithExpiration(b"a plain value", NOW), ValueWithExpiration(7, NOW)])
def test_what_is_not_a_dictionary_is_an_empty_run(value: Any) -> None:
    assert read_view({profiles_key(RUN_ID): value, states_key(RUN_ID): value}, RUN_ID, NOW).members == {}
    assert read_view({}, RUN_ID, NOW).members == {}


def test_an_empty_view_has_nobody() -> None:
    assert View().training() == frozenset()
    assert View().claims(0) == {}
