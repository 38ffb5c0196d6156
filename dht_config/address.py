"""Peer addresses as people type them: parsed, normalised, and refused in words with a correct example.

An address is a libp2p multiaddr, ``/ip4/203.0.113.7/tcp/31337/p2p/Qm...``. The few protocols that can stand
in one are encoded here, byte for byte as hivemind does, so that an invite can be read before the heavy
libraries load.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import base58

from dht_config.errors import AddressError

PEER_ID_BYTES = 34
SHA256_MULTIHASH_PREFIX = b"\x12\x20"
"""What a peer id starts with; the SHA-256 of the peer's public key follows."""
MAX_ADDRESS_CHARACTERS = 512
INSIDE = "inside this network"
"""From where a private address can be dialled."""

_EXAMPLE_PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
EXAMPLE = f"/ip4/203.0.113.7/tcp/31337/p2p/{_EXAMPLE_PEER_ID}"
EXAMPLE_WITH_NAME = f"/dns4/peer.example.org/tcp/31337/p2p/{_EXAMPLE_PEER_ID}"

_TCP_CODE = 6
_HOST_CODES = {"ip4": 4, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55}
_HOST_NAMES = {code: name for name, code in _HOST_CODES.items()}
_IP_BYTES = {"ip4": 4, "ip6": 16}
_WRAPPING = " \t\r\n\"'`\u00b4\u2018\u2019\u201c\u201d\u00ab\u00bb,;.<>()[]{}\u200b\ufeff\u00a0"
_HOST_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Where to connect to: the part of an address before ``/p2p/``."""

    protocol: str
    """"ip4", "ip6", "dns", "dns4" or "dns6"."""
    host: str
    port: int

    @property
    def text(self) -> str:
        return f"/{self.protocol}/{self.host}/tcp/{self.port}"

    def to_bytes(self) -> bytes:
        """As multiaddr bytes."""
        if self.protocol in _IP_BYTES:
            host = ipaddress.ip_address(self.host).packed
        else:
            name = self.host.encode()
            host = _varint(len(name)) + name
        return _varint(_HOST_CODES[self.protocol]) + host + _varint(_TCP_CODE) + self.port.to_bytes(2, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One way to reach one peer. ``text`` is the normalised multiaddr; ``peer_id`` is in base58."""

    text: str
    peer_id: str
    transport: Transport


def parse_address(text: str) -> Address:
    """Read one address; quotes, brackets, commas and white space around it are dropped.

    Raises: AddressError saying what is wrong, with a correct example.
    """
    cleaned = text.strip(_WRAPPING).rstrip("/")
    if not cleaned:
        raise _refused(text, "is empty")
    if len(cleaned) > MAX_ADDRESS_CHARACTERS:
        raise _refused(text, f"is longer than {MAX_ADDRESS_CHARACTERS} characters")
    if not cleaned.startswith("/"):
        raise _refused(text, "does not start with /ip4/, /ip6/ or /dns4/")
    transport, rest = _parsed_transport(cleaned, text)
    if not rest:
        raise _refused(text, "has no /p2p/ part, the peer id at its end")
    if rest[0] not in ("p2p", "ipfs"):  # /ipfs/ is the old name of /p2p/
        raise _refused(text, f"has /{rest[0]} where /p2p/ and the peer id should stand")
    if "p2p-circuit" in rest:
        raise _refused(text, "goes through a relay; a peer to join through must be reachable directly")
    if len(rest) == 1:
        raise _refused(text, "ends after /p2p/, without the peer id")
    if len(rest) > 2:
        raise _refused(text, f"goes on after the peer id, with /{rest[2]}")
    return address_of(transport, _checked_peer_id(rest[1], text))


def parse_addresses(texts: Iterable[str]) -> tuple[list[Address], list[AddressError]]:
    """Read many addresses, also several in one string; a bad one does not spoil the good ones.

    Duplicates are dropped.
    """
    good: dict[str, Address] = {}
    bad: list[AddressError] = []
    for text in texts:
        for item in re.split(r"[\s,;]+", text):
            if not item.strip(_WRAPPING):
                continue
            try:
                address = parse_address(item)
            except AddressError as error:
                bad.append(error)
            else:
                good.setdefault(address.text, address)
    return list(good.values()), bad


def parse_announced(text: str) -> Transport:
    """Read an address that this peer announces for itself: with a port, without ``/p2p/``.

    Raises: AddressError.
    """
    cleaned = text.strip(_WRAPPING).rstrip("/")
    if not cleaned.startswith("/") or len(cleaned) > MAX_ADDRESS_CHARACTERS:
        raise _refused(text, "does not start with /ip4/, /ip6/ or /dns4/", example="/dns4/peer.example.org/tcp/31337")
    transport, rest = _parsed_transport(cleaned, text)
    if rest:
        raise _refused(text, f"goes on after the port, with /{rest[0]}", example="/dns4/peer.example.org/tcp/31337")
    return transport


def address_of(transport: Transport, peer_id: str) -> Address:
    """The address of a peer, given in base58, at a transport."""
    return Address(text=f"{transport.text}/p2p/{peer_id}", peer_id=peer_id, transport=transport)


def dialable(addresses: Sequence[Address]) -> list[Address]:
    """Addresses that others may reach, public ones first; loopback only if there is nothing else."""
    ranked = sorted(addresses, key=_rank)
    elsewhere = [address for address in ranked if _rank(address) < 3]
    return elsewhere or ranked


def reach(address: Address) -> str:
    """From where an address can be dialled, in words; empty if from everywhere, as far as one can see."""
    return ("", INSIDE, INSIDE, "on this machine alone")[_rank(address)]


def _rank(address: Address) -> int:
    ip = _ip_address(address.transport.host)
    if ip is None:
        return 0  # a name
    return 3 if ip.is_loopback else 2 if ip.is_link_local else 0 if ip.is_global else 1


def transport_from_bytes(data: bytes) -> Transport:
    """The inverse of ``Transport.to_bytes``.

    Raises: AddressError for bytes that ``parse_address`` would not produce.
    """
    # Every code here is below 128 and a name has at most 253 bytes: varints of one byte, or two for a long
    # name.
    protocol = _HOST_NAMES.get(data[0], "") if data else ""
    offset = 1
    if protocol in _IP_BYTES:
        size = _IP_BYTES[protocol]
    else:
        size, offset = _read_varint(data, offset)
    host_bytes, tail = data[offset : offset + size], data[offset + size :]
    if not protocol or len(host_bytes) != size or len(tail) != 3 or tail[0] != _TCP_CODE:
        raise AddressError(problem="The address bytes are malformed.")
    if protocol in _IP_BYTES:
        host = str(ipaddress.ip_address(host_bytes))
    else:
        host = host_bytes.decode("ascii", errors="replace")
    text = f"/{protocol}/{host}/tcp/{int.from_bytes(tail[1:], 'big')}"
    transport, _ = _parsed_transport(text, text)
    if transport.to_bytes() != data:
        raise AddressError(problem="The address bytes are malformed.")
    return transport


def _parsed_transport(cleaned: str, original: str) -> tuple[Transport, list[str]]:
    """(where to connect to, the path elements after the port)."""
    elements = cleaned[1:].split("/")
    protocol, host = elements[0], elements[1] if len(elements) > 1 else ""
    if protocol not in _HOST_CODES:
        raise _refused(original, f"starts with /{protocol}; it should start with /ip4/, /ip6/ or /dns4/")
    if not host:
        raise _refused(original, f"has nothing after /{protocol}/")
    host = _checked_host(protocol, host, original)
    if len(elements) < 3:
        raise _refused(original, "has no /tcp/ part with a port")
    if elements[2] != "tcp":
        raise _refused(original, f"uses /{elements[2]}; peers are reached over /tcp/")
    port_text = elements[3] if len(elements) > 3 else ""
    if not re.fullmatch(r"[0-9]{1,5}", port_text):
        raise _refused(original, f'has "{port_text[:20]}" for a port, which must be a number from 1 to 65535')
    port = int(port_text)
    if not 1 <= port <= 65535:
        raise _refused(original, f"has port {port}; ports go from 1 to 65535")
    return Transport(protocol=protocol, host=host, port=port), elements[4:]


def _checked_host(protocol: str, host: str, original: str) -> str:
    ip = _ip_address(host)
    if protocol in _IP_BYTES:
        version = 4 if protocol == "ip4" else 6
        if ip is None and _is_host_name(host.lower()) and not _looks_like_ip4(host):
            raise _refused(
                original,
                f'has the host name "{host}" under /{protocol}/; names go under /dns4/ (or /dns6/)',
                example=EXAMPLE_WITH_NAME,
            )
        if ip is None:
            raise _refused(original, f'has "{host[:64]}" under /{protocol}/, which is not an IPv{version} address')
        if ip.version != version:
            raise _refused(original, f"has an IPv{ip.version} address under /{protocol}/; write /ip{ip.version}/")
        if ip.is_unspecified:
            raise _refused(original, f"has {ip}, which means every interface of a machine; nobody can dial it")
        return str(ip)
    if ip is not None:
        raise _refused(original, f"has an IP address under /{protocol}/; write /ip{ip.version}/")
    name = host.lower().rstrip(".")
    if not _is_host_name(name):
        raise _refused(original, f'has "{host[:64]}" for a host name', example=EXAMPLE_WITH_NAME)
    return name


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if "%" in text:  # an interface of the writer's machine means nothing on another
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_host_name(name: str) -> bool:
    return len(name) <= 253 and all(len(label) <= 63 and _HOST_LABEL.fullmatch(label) for label in name.split("."))


def _looks_like_ip4(text: str) -> bool:
    return re.fullmatch(r"[0-9.]+", text) is not None


def _checked_peer_id(peer_id: str, original: str) -> str:
    try:
        raw = base58.b58decode(peer_id.encode("ascii", errors="replace"))
    except ValueError:
        raw = b""
    if len(raw) == PEER_ID_BYTES and raw.startswith(SHA256_MULTIHASH_PREFIX):
        return peer_id
    raise _refused(original, f'has "{peer_id[:64]}" for a peer id; a peer id is Qm and 44 more letters and digits')


def _refused(text: str, problem: str, example: str = EXAMPLE) -> AddressError:
    shown = text.strip() if len(text) <= 160 else f"{text.strip()[:157]}..."
    message = f'The address "{shown}" {problem}.'
    # The text may come from a remote peer: no escape sequences into the terminal.
    message = "".join(character if character.isprintable() else "?" for character in message)
    return AddressError(problem=message, remedy=f"A correct one looks like {example}")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """(value, offset after it) of a varint of at most two bytes; 0 where there is none."""
    if offset < len(data) and data[offset] < 0x80:
        return data[offset], offset + 1
    if offset + 1 < len(data):
        return data[offset] & 0x7F | data[offset + 1] << 7, offset + 2
    return 0, offset
