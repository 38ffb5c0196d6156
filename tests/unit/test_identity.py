"""Identity files: made once, private, refused when damaged or foreign; signatures bound to the peer id."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dht_config.errors import DirectoryError, ExitCode, IdentityError
from dht_config.identity import (
    Identity,
    OrganiserKey,
    load_or_create_identity,
    load_or_create_organiser_key,
    peer_id_bytes_of,
    verify_identity,
    verify_organiser,
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create_identity(tmp_path_factory.mktemp("identity") / "identity.key")


@pytest.fixture(scope="module")
def organiser_key(tmp_path_factory: pytest.TempPathFactory) -> OrganiserKey:
    return load_or_create_organiser_key(tmp_path_factory.mktemp("organiser") / "organiser.key")


def test_an_identity_is_made_once_private_and_alone_in_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    first, second = load_or_create_identity(path), load_or_create_identity(path)
    assert first.peer_id == second.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_hivemind_reads_our_file_and_we_read_hiveminds(identity: Identity, tmp_path: Path) -> None:
    assert PeerID.from_identity(identity.path.read_bytes()) == identity.peer_id
    theirs = tmp_path / "theirs.key"
    P2P.generate_identity(str(theirs))
    assert load_or_create_identity(theirs).peer_id == PeerID.from_identity(theirs.read_bytes())


def test_a_file_readable_by_others_is_made_private(identity: Identity, tmp_path: Path) -> None:
    copy = tmp_path / "copy.key"
    copy.write_bytes(identity.path.read_bytes())
    copy.chmod(0o644)
    assert load_or_create_identity(copy).peer_id == identity.peer_id
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


def test_signatures_hold_for_this_peer_and_this_message_only(identity: Identity, tmp_path: Path) -> None:
    other = load_or_create_identity(tmp_path / "other.key")
    peer_id, key, signature = identity.peer_id.to_bytes(), identity.public_key, identity.sign(b"message")
    assert peer_id == peer_id_bytes_of(key)
    assert verify_identity(peer_id, key, signature, b"message")
    assert not verify_identity(peer_id, key, signature, b"another message")
    assert not verify_identity(other.peer_id.to_bytes(), key, signature, b"message")
    assert not verify_identity(peer_id, other.public_key, signature, b"message")
    assert not verify_identity(peer_id, key, other.sign(b"message"), b"message")


@unhurried
@given(st.binary(max_size=64), st.binary(max_size=400), st.binary(max_size=300), st.binary(max_size=64))
def test_any_bytes_for_an_identity_are_just_not_verified(
    peer_id: bytes, key: bytes, signature: bytes, message: bytes
) -> None:
    assert not verify_identity(peer_id, key, signature, message)
    assert not verify_identity(peer_id_bytes_of(key), key, signature, message)
    assert not verify_organiser(key, signature, message)


@pytest.mark.parametrize("bits", [1024, 4096])
def test_keys_of_other_sizes_are_not_verified(bits: int) -> None:
    # A stranger's 16384-bit key would make each verification cost milliseconds.
    public_key = rsa.generate_private_key(public_exponent=65537, key_size=bits).public_key()
    der = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    assert not verify_identity(peer_id_bytes_of(message), message, b"signature", b"message")


def test_an_organiser_key_is_made_once_private_and_signs(organiser_key: OrganiserKey) -> None:
    again = load_or_create_organiser_key(organiser_key.path)
    assert again.public_key == organiser_key.public_key
    assert len(organiser_key.public_key) == 32
    assert stat.S_IMODE(organiser_key.path.stat().st_mode) == 0o600
    signature = organiser_key.sign(b"manifest")
    assert verify_organiser(organiser_key.public_key, signature, b"manifest")
    assert not verify_organiser(organiser_key.public_key, signature, b"another")


def test_private_keys_are_not_shown(identity: Identity, organiser_key: OrganiserKey) -> None:
    assert "private" not in repr(identity).lower()
    assert "private" not in repr(organiser_key).lower()


def ed25519_identity_file() -> bytes:
    der = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    data: bytes = crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=der).SerializeToString()
    return data


@pytest.mark.parametrize("load", [load_or_create_identity, load_or_create_organiser_key])
@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"\x08\x00\x12\x03abc", b"x" * 100_000, ed25519_identity_file()],
    ids=["empty", "garbage", "no key", "long", "another kind of key"],
)
def test_a_damaged_file_is_named_and_left_alone(load: object, content: bytes, tmp_path: Path) -> None:
    assert callable(load)
    path = tmp_path / "damaged.key"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"damaged\.key") as caught:
        load(path)
    assert caught.value.remedy
    assert caught.value.exit_code is ExitCode.IDENTITY
    assert path.read_bytes() == content


def test_a_truncated_identity_is_damaged(identity: Identity, tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(identity.path.read_bytes()[:-100])
    with pytest.raises(IdentityError, match="damaged"):
        load_or_create_identity(path)


def test_a_foreign_owners_file_is_refused_with_both_users_named(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: identity.path.stat().st_uid + 1)
    with pytest.raises(IdentityError, match="belongs to user") as caught:
        load_or_create_identity(identity.path)
    assert str(identity.path) in caught.value.remedy


def test_a_directory_in_its_place_and_an_impossible_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot be read"):
        load_or_create_identity(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((IdentityError, DirectoryError), match="file"):
        load_or_create_identity(tmp_path / "file" / "identity.key")


def test_a_second_process_that_was_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "organiser.key"
    winner = load_or_create_organiser_key(tmp_path / "winner.key")
    link = os.link

    def link_after_somebody_else(source: Path, target: Path) -> None:
        path.write_bytes(winner.path.read_bytes())
        link(source, target)

    monkeypatch.setattr(os, "link", link_after_somebody_else)
    assert load_or_create_organiser_key(path).public_key == winner.public_key


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    key = load_or_create_organiser_key(tmp_path / "organiser.key")
    assert [entry.name for entry in tmp_path.iterdir()] == [key.path.name]
