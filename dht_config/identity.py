"""Who signs: a peer's libp2p identity and an organiser's key, each in a private file.

A peer's key is the RSA-2048 key that hivemind's daemon authenticates connections with, so a record's signer
and a connection's remote end are the same peer id. The organiser's key is a separate Ed25519 key: it signs
manifests, may be kept on another machine than the bootstrap peer, and its 32 bytes fit into an invite.

What this does not stop: whoever can read the file is the peer. New identities cost nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from dht_config.address import SHA256_MULTIHASH_PREFIX
from dht_config.errors import DirectoryError, IdentityError

RSA_BITS = 2048
MAX_PUBLIC_KEY_BYTES = 320
"""A protobuf PublicKey with RSA-2048 has 299 bytes; a bound keeps verification of a stranger's key cheap."""
MAX_SIGNATURE_BYTES = RSA_BITS // 8
ORGANISER_KEY_BYTES = 32

_MAX_KEY_FILE_BYTES = 16 * 1024
# libp2p signs its handshakes with the same key under PKCS #1 v1.5: PSS keeps those signatures apart from
# ours.
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A peer's identity: give ``path`` to hivemind as ``identity_path``.

    ``public_key`` is the libp2p protobuf PublicKey whose SHA-256 multihash is ``peer_id``.
    """

    path: Path
    peer_id: PeerID
    public_key: bytes
    _private_key: rsa.RSAPrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """RSA-PSS with SHA-256, 256 bytes, about a millisecond."""
        return self._private_key.sign(message, _PADDING, hashes.SHA256())


@dataclass(frozen=True, slots=True, kw_only=True)
class OrganiserKey:
    """The key that signs a run's manifest; ``public_key`` is its 32 raw bytes."""

    path: Path
    public_key: bytes
    _private_key: Ed25519PrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """Ed25519, 64 bytes."""
        return self._private_key.sign(message)


def load_or_create_identity(path: Path | str) -> Identity:
    """Read the peer's identity, or make one the first time: the daemon's own file format, mode 0600.

    Raises: IdentityError if the file is damaged, unreadable or another user's; DirectoryError if it cannot be
    written.
    """
    path = Path(path)
    data = _read_or_create(path, _new_identity_file)
    try:
        message = crypto_pb2.PrivateKey.FromString(data)
        private_key = serialization.load_der_private_key(message.data, password=None)
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm):
        raise _damaged(path, "a peer identity") from None
    if (
        message.key_type != crypto_pb2.RSA
        or not isinstance(private_key, rsa.RSAPrivateKey)
        or private_key.key_size != RSA_BITS
    ):
        raise _damaged(path, f"an RSA-{RSA_BITS} peer identity")
    public_der = private_key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public_key = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=public_der).SerializeToString()
    return Identity(
        path=path,
        peer_id=PeerID(peer_id_bytes_of(public_key)),
        public_key=public_key,
        _private_key=private_key,
    )


def peer_id_bytes_of(public_key: bytes) -> bytes:
    """The peer id of a libp2p protobuf PublicKey: its SHA-256 multihash, 34 bytes.

    Source: libp2p specs, peer-ids (keys longer than 42 bytes are hashed).
    """
    return SHA256_MULTIHASH_PREFIX + hashlib.sha256(public_key).digest()


def verify_identity(peer_id_bytes: bytes, public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the peer with this id signed the message. False for malformed input, never an exception.

    Hash and lengths are checked before any public-key work; parsed keys are cached, so that a known peer's
    record costs one RSA verification (about 30 microseconds).
    """
    if len(public_key) > MAX_PUBLIC_KEY_BYTES or len(signature) > MAX_SIGNATURE_BYTES:
        return False
    if peer_id_bytes != peer_id_bytes_of(public_key):
        return False
    key = _parsed_public_key(public_key)
    if key is None:
        return False
    try:
        key.verify(signature, message, _PADDING, hashes.SHA256())
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1024)
def _parsed_public_key(public_key: bytes) -> rsa.RSAPublicKey | None:
    try:
        message = crypto_pb2.PublicKey.FromString(public_key)
        if message.key_type != crypto_pb2.RSA:
            return None
        key = serialization.load_der_public_key(message.data)
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != RSA_BITS:
        return None
    return key


def load_or_create_organiser_key(path: Path | str) -> OrganiserKey:
    """Read the organiser's Ed25519 key (PKCS #8 PEM, mode 0600), or make one the first time.

    Raises: IdentityError if the file is damaged, unreadable or another user's; DirectoryError if it cannot be
    written.
    """
    path = Path(path)
    data = _read_or_create(path, _new_organiser_file)
    try:
        private_key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _damaged(path, "an organiser key") from None
    if not isinstance(private_key, Ed25519PrivateKey):
        raise _damaged(path, "an Ed25519 organiser key")
    public_key = private_key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return OrganiserKey(path=path, public_key=public_key, _private_key=private_key)


def verify_organiser(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the organiser with this 32-byte key signed the message. False for malformed input."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _new_identity_file() -> bytes:
    private_key = rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
    der = private_key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    data: bytes = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return data


def _new_organiser_file() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _damaged(path: Path, what: str) -> IdentityError:
    return IdentityError(
        problem=f"{path} does not hold {what}: it is damaged or another kind of file.",
        remedy="Put back a backup, or move it away to start with a new one; credit stays with the old one.",
    )


def _read_or_create(path: Path, new_content: Callable[[], bytes]) -> bytes:
    data = _read_private(path)
    if data is None:
        _create_private(path, new_content())
        # Read back instead of trusting what was written: another process may have been first.
        data = _read_private(path)
    if data is None:
        raise IdentityError(
            problem=f"{path} vanished right after it was created.",
            remedy="Use a directory that no other program cleans.",
        )
    return data


def _read_private(path: Path) -> bytes | None:
    """The content of a private file, or None if there is none. Tightens its mode to 0600."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise IdentityError(
                    problem=f"{path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}.",
                    remedy=f"Run as that user, or: chown {os.geteuid()} {path}",
                )
            if status.st_mode & 0o077:
                with contextlib.suppress(OSError):  # a secret mounted read-only keeps the mode it has
                    os.fchmod(file.fileno(), 0o600)
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IdentityError(
            problem=f"The key file {path} cannot be read: {error.strerror or error}.",
            remedy="Make it a file that this user may read, or choose another directory.",
        ) from error
    if not data or len(data) > _MAX_KEY_FILE_BYTES:
        raise _damaged(path, "a key")
    return data


def _create_private(path: Path, data: bytes) -> None:
    """Write a new private file so that a crash or a second process never leaves half of one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)  # fails, unlike a rename, if another process was first
            except FileExistsError:
                return
            except OSError:
                os.replace(temporary, path)  # file systems without hard links (FAT, some network mounts)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DirectoryError(
            problem=f"The key file {path} cannot be created: {error.strerror or error}.",
            remedy="Make its directory writable for this user, or choose another one.",
        ) from error
