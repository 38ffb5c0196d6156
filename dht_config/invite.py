"""The invite: one word that a volunteer pastes to join a run.

It holds the run id, the organiser's key and how to reach one or more peers; the manifest itself comes over
the DHT, signed by that key. Letters are lower case and digits only, so no shell, chat program or double click
cuts it apart.

Layout: ``p2pt1``, then base32 (lower case, no padding) of

    length of what follows (2) | run id length (1) | run id | organiser key (32)
    | address count (1) | addresses | check (5)

or ``p2pt2``, which has the moment until which it is good (5, unix seconds) before the check. An invite without such a
moment is written as ``p2pt1``, which programs from before read as well.

where an address is ``transport length (2) | transport as multiaddr bytes | peer id digest (32)``. The top bit
of its length says that the peer is the previous address's one and the digest is left out. The check is the
head of a SHA-256 over all before it.

What this does not stop: an invite is not a secret and not signed. Whoever can change it on its way can send a
volunteer to another run, or make it good for longer: an expiry keeps old invites from going round, not people out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from datetime import datetime, timezone
from typing import Annotated

import base58
from pydantic import BaseModel, ConfigDict, Field, field_validator

from dht_config.address import (
    SHA256_MULTIHASH_PREFIX,
    Address,
    address_of,
    parse_address,
    transport_from_bytes,
)
from dht_config.errors import AddressError, InviteError

_BEGINNING = "p2pt"
INVITE_PREFIX = f"{_BEGINNING}1"
EXPIRING_PREFIX = f"{_BEGINNING}2"
MAX_ADDRESSES = 16
MAX_TEXT_CHARACTERS = 64 * 1024
"""What an invite may stand in: a whole chat or mail."""

_KEY_BYTES = 32
_CHECK_BYTES = 5
_DIGEST_BYTES = 32
_EXPIRY_BYTES = 5
_SAME_PEER = 0x8000
_MAX_TRANSPORT_BYTES = 260
"""A host name of 253 characters, a port, and what says so."""
_MIN_BYTES = 1 + 1 + _KEY_BYTES + 1 + _CHECK_BYTES
_MAX_BYTES = (
    1 + 64 + _KEY_BYTES + 1 + MAX_ADDRESSES * (2 + _MAX_TRANSPORT_BYTES + _DIGEST_BYTES) + _EXPIRY_BYTES + _CHECK_BYTES
)
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_REMEDY = "Copy the whole invite again from where you got it, or ask the organiser for a new one."


class Invite(BaseModel):
    """Everything a volunteer needs to find a run and to know it when found."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str
    organiser_public_key: Annotated[bytes, Field(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    addresses: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=MAX_ADDRESSES)]
    """Normalised; AddressError for a bad one."""
    good_until: Annotated[int, Field(ge=0, lt=2 ** (8 * _EXPIRY_BYTES))] | None = None
    """Unix seconds; None for ever."""

    @field_validator("run_id")
    @classmethod
    def _is_a_run_id(cls, run_id: str) -> str:
        if not _RUN_ID.fullmatch(run_id):
            raise ValueError("a run id is lower-case letters, digits and hyphens")
        return run_id

    @field_validator("addresses")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_address(text).text for text in addresses)

    def encode(self) -> str:
        """The invite as one word of [a-z0-9]."""
        run_id = self.run_id.encode()
        body = bytes([len(run_id)]) + run_id + self.organiser_public_key + bytes([len(self.addresses)])
        previous_peer_id = ""
        for text in self.addresses:
            address = parse_address(text)
            transport = address.transport.to_bytes()
            same_peer = address.peer_id == previous_peer_id
            body += (len(transport) | (_SAME_PEER if same_peer else 0)).to_bytes(2, "big") + transport
            if not same_peer:
                body += base58.b58decode(address.peer_id)[len(SHA256_MULTIHASH_PREFIX) :]
            previous_peer_id = address.peer_id
        prefix = INVITE_PREFIX
        if self.good_until is not None:
            prefix = EXPIRING_PREFIX
            body += self.good_until.to_bytes(_EXPIRY_BYTES, "big")
        data = (len(body) + _CHECK_BYTES).to_bytes(2, "big") + body
        return prefix + _base32(data + _check(prefix, data))

    def refuse_if_expired(self, now: float) -> None:
        """:raises InviteError: it was good until a moment before ``now``, in unix seconds"""
        if self.good_until is not None and now > self.good_until:
            raise InviteError(
                problem=f"This invite was good until {_moment(self.good_until)}; this machine's clock says "
                f"{_moment(now)}.",
                remedy="Ask the organiser for a new one.",
            )

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Read an invite as it comes out of a chat: with line breaks, quotes, capitals or words around it.

        Raises: InviteError telling whether it is cut off, changed, of another version, or no invite.
        """
        prefix, code = _code_in(text)
        # Two bytes of length are in the first four characters.
        if len(code) < 4:
            raise _cut_off(f"only {len(code)} characters are there")
        following_bytes = int.from_bytes(_from_base32(code[:4])[:2], "big")
        total_characters = ((2 + following_bytes) * 8 + 4) // 5
        if not _MIN_BYTES <= following_bytes <= _MAX_BYTES:
            # No invite has this length, so nothing is known of how much is missing.
            raise InviteError(
                problem=f"This is no invite, or it was changed on its way: no invite goes on after {prefix} so.",
                remedy=_REMEDY,
            )
        if len(code) < total_characters:
            there, whole = len(prefix) + len(code), len(prefix) + total_characters
            raise _cut_off(f"{there} of {whole} characters are there")
        # What follows is not the invite's: a full stop's neighbour, "thanks", the rest of a command line.
        code = code[:total_characters]
        data = _from_base32(code)
        data, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if check != _check(prefix, data) or _base32(data + check) != code:
            raise _changed()
        return _from_body(data[2:], expires=prefix == EXPIRING_PREFIX)


def _code_in(text: str) -> tuple[str, str]:
    """The prefix and the base32 characters after it, whatever stands between and around them."""
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InviteError(
            problem=f"This is far too long for an invite: {len(text)} characters.",
            remedy="Copy only the invite; most have about 200 characters.",
        )
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    # 1 is not a base32 digit, so its prefix cannot stand by chance inside an invite; the other's hardly ever does.
    for prefix in (INVITE_PREFIX, EXPIRING_PREFIX):
        _, found, code = letters.partition(prefix)
        if found:
            return prefix, code
    other_version = re.search(r"p2pt([0-9])", letters)
    if other_version:
        raise InviteError(
            problem=f"This invite has version {other_version[1]}; this program reads {INVITE_PREFIX[-1]} and "
            f"{EXPIRING_PREFIX[-1]}.",
            remedy="Update p2p-trainer (pip install --upgrade p2p-trainer), or ask the organiser for an invite of your "
            "version.",
        )
    raise InviteError(
        problem="This is not an invite, or its beginning is cut off.",
        remedy=f"An invite starts with {INVITE_PREFIX}. {_REMEDY}",
    )


def _from_body(body: bytes, *, expires: bool) -> Invite:
    """Raises: InviteError; only somebody who made the check fit can cause it."""
    reader = _Reader(body)
    try:
        run_id = reader.take(reader.take_int(1)).decode("ascii")
        organiser_public_key = reader.take(_KEY_BYTES)
        addresses: list[Address] = []
        for _ in range(reader.take_int(1)):
            length = reader.take_int(2)
            transport = transport_from_bytes(reader.take(length & ~_SAME_PEER))
            if length & _SAME_PEER:
                if not addresses:
                    raise _changed()
                peer_id = addresses[-1].peer_id
            else:
                peer_id = base58.b58encode(SHA256_MULTIHASH_PREFIX + reader.take(_DIGEST_BYTES)).decode()
            addresses.append(address_of(transport, peer_id))
        good_until = reader.take_int(_EXPIRY_BYTES) if expires else None
        reader.finish()
        return Invite(
            run_id=run_id,
            organiser_public_key=organiser_public_key,
            addresses=tuple(address.text for address in addresses),
            good_until=good_until,
        )
    except (ValueError, AddressError):
        raise _changed() from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise ValueError("too short")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def take_int(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def finish(self) -> None:
        if self._position != len(self._data):
            raise ValueError("bytes left over")


def _check(prefix: str, data: bytes) -> bytes:
    return hashlib.sha256(prefix.encode() + data).digest()[:_CHECK_BYTES]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _from_base32(code: str) -> bytes:
    """Raises: InviteError for a character that no invite holds."""
    try:
        return base64.b32decode(code.upper() + "=" * (-len(code) % 8))
    except binascii.Error:
        raise _changed() from None


def _cut_off(detail: str) -> InviteError:
    return InviteError(problem=f"The invite's end is cut off: {detail}.", remedy=_REMEDY)


def _changed() -> InviteError:
    return InviteError(problem="The invite was changed on its way: its check does not fit.", remedy=_REMEDY)
