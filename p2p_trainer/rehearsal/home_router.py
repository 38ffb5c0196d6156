"""The router of a home, as ``link_router`` plays it: the peer behind it can dial others, and is dialled by nobody.

It masquerades as Linux does for a single machine: the peer's packets leave under the home's public address with their
ports kept, and a packet from outside comes in only if it belongs to a conversation that the peer began. Two peers that
dial each other at the same moment meet, as through most home routers (hole punching). What it does not play: routers
that change ports, two peers behind one of them, conversations that it forgets after a silence, and anything but TCP and
UDP. Standard library alone, as ``link_router`` itself.
"""

from __future__ import annotations

import socket
import struct

PRIVATE_ADDRESS = "192.168.1.2"
"""Of every peer behind NAT, as in many homes at once."""
PRIVATE_NETMASK = "255.255.255.0"

_SOURCE, _DESTINATION = slice(12, 16), slice(16, 20)
_TCP, _UDP = 6, 17
_CHECKSUM_AT = {_TCP: 16, _UDP: 6}
"""In the transport's header; ports are its first four bytes."""
_FRAGMENT_OFFSET = 0x1FFF
_SYN, _ACK, _FLAGS_AT = 0x02, 0x10, 13

Conversation = tuple[int, bytes, bytes, bytes]
"""Protocol, the peer's port, the other's address and port."""


class HomeRouter:
    """Rewrites the packets of one peer. :param public: the home's IPv4 address, 4 bytes"""

    def __init__(self, public: bytes, private: bytes = socket.inet_aton(PRIVATE_ADDRESS)) -> None:
        self._public, self._private = public, private
        self._opening: dict[Conversation, bool] = {}
        """Conversations that the peer began: whether the other side has yet to answer."""

    def leaves(self, packet: bytes) -> bytes | None:
        """A packet of the peer as it goes out; None if it does not."""
        transport_at = _transport_at(packet)
        if transport_at is None or packet[_SOURCE] != self._private:
            return None
        ports = packet[transport_at : transport_at + 4]
        conversation = packet[9], ports[:2], packet[_DESTINATION], ports[2:]
        if conversation not in self._opening or _is_syn(packet, transport_at):
            self._opening[conversation] = True
        return _readdressed(packet, _SOURCE, self._public, transport_at)

    def enters(self, packet: bytes) -> bytes | None:
        """A packet from outside as the peer gets it; None if it began nothing that this belongs to."""
        transport_at = _transport_at(packet)
        if transport_at is None or packet[_DESTINATION] != self._public:
            return None
        ports = packet[transport_at : transport_at + 4]
        conversation = packet[9], ports[2:], packet[_SOURCE], ports[:2]
        opening = self._opening.get(conversation)
        # The ports of a conversation that is over are dialled again by whoever dials from where it listens.
        if opening is None or (not opening and _is_syn(packet, transport_at)):
            return None
        if not _is_syn(packet, transport_at):
            self._opening[conversation] = False
        return _readdressed(packet, _DESTINATION, self._private, transport_at)


def _transport_at(packet: bytes) -> int | None:
    """Where the header of TCP or UDP begins; None if there is none that is whole."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] not in _CHECKSUM_AT:
        return None
    if struct.unpack_from("!H", packet, 6)[0] & _FRAGMENT_OFFSET:
        return None
    transport_at = 4 * (packet[0] & 0xF)
    return transport_at if len(packet) >= transport_at + (20 if packet[9] == _TCP else 8) else None


def _is_syn(packet: bytes, transport_at: int) -> bool:
    """Whether this opens a TCP connection."""
    return packet[9] == _TCP and packet[transport_at + _FLAGS_AT] & (_SYN | _ACK) == _SYN


def _readdressed(packet: bytes, which: slice, address: bytes, transport_at: int) -> bytes:
    """The packet with another address, and checksums that are right again."""
    changed = bytearray(packet)
    before = packet[which]
    changed[which] = address
    places = [10]
    checksum_at = transport_at + _CHECKSUM_AT[packet[9]]
    if packet[9] == _TCP or packet[checksum_at : checksum_at + 2] != b"\0\0":  # over UDP it may be left out
        places.append(checksum_at)
    for place in places:
        (checksum,) = struct.unpack_from("!H", changed, place)
        struct.pack_into("!H", changed, place, _updated(checksum, before, address))
    return bytes(changed)


def _updated(checksum: int, before: bytes, after: bytes) -> int:
    """An Internet checksum after four of its bytes have changed. Source: RFC 1624, equation 3."""
    total = ~checksum & 0xFFFF
    for old, new in zip(struct.unpack("!2H", before), struct.unpack("!2H", after), strict=True):
        total += (~old & 0xFFFF) + new
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
