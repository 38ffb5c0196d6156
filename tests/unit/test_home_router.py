"""NAT as a rehearsal plays it: who gets through, and packets that are whole when they do."""

from __future__ import annotations

import socket
import struct

import pytest

from p2p_trainer.rehearsal.home_router import PRIVATE_ADDRESS, HomeRouter

PUBLIC, OTHER, STRANGER = "198.18.0.3", "198.18.0.1", "198.18.0.2"
TCP, UDP, ICMP = 6, 17, 1
SYN, SYN_ACK, ACK = 0x02, 0x12, 0x10


def checksum(content: bytes) -> int:
    """Of RFC 1071; 0 over what holds its own."""
    content += b"\0" * (len(content) % 2)
    total = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(
    source: str,
    source_port: int,
    destination: str,
    destination_port: int,
    *,
    protocol: int = TCP,
    flags: int = ACK,
    body: bytes = b"hello",
    offset: int = 0,
) -> bytes:
    ends = socket.inet_aton(source) + socket.inet_aton(destination)
    if protocol == TCP:
        transport = struct.pack("!HHIIBBHHH", source_port, destination_port, 7, 9, 5 << 4, flags, 1000, 0, 0) + body
        at = 16
    else:
        transport = struct.pack("!HHHH", source_port, destination_port, 8 + len(body), 0) + body
        at = 6
    pseudo = ends + struct.pack("!BBH", 0, protocol, len(transport))
    transport = transport[:at] + struct.pack("!H", checksum(pseudo + transport)) + transport[at + 2 :]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(transport), 1, offset, 64, protocol, 0) + ends
    return header[:10] + struct.pack("!H", checksum(header)) + header[12:] + transport


def is_whole(sent: bytes) -> bool:
    pseudo = sent[12:20] + struct.pack("!BBH", 0, sent[9], len(sent) - 20)
    return checksum(sent[:20]) == 0 and checksum(pseudo + sent[20:]) == 0


def ends(sent: bytes) -> tuple[str, int, str, int]:
    source_port, destination_port = struct.unpack_from("!HH", sent, 20)
    return socket.inet_ntoa(sent[12:16]), source_port, socket.inet_ntoa(sent[16:20]), destination_port


@pytest.fixture
def router() -> HomeRouter:
    return HomeRouter(socket.inet_aton(PUBLIC))


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_what_it_sends_comes_from_its_home_and_the_answer_comes_back(router: HomeRouter, protocol: int) -> None:
    for body in (b"", b"a", b"hello", bytes(range(256))):
        left = router.leaves(packet(PRIVATE_ADDRESS, 4000, OTHER, 7000, protocol=protocol, flags=SYN, body=body))
        assert left is not None and is_whole(left)
        assert ends(left) == (PUBLIC, 4000, OTHER, 7000) and left.endswith(body)
        came = router.enters(packet(OTHER, 7000, PUBLIC, 4000, protocol=protocol, flags=SYN_ACK, body=body))
        assert came is not None and is_whole(came)
        assert ends(came) == (OTHER, 7000, PRIVATE_ADDRESS, 4000) and came.endswith(body)


def test_nobody_gets_in_unasked(router: HomeRouter) -> None:
    assert router.enters(packet(OTHER, 7000, PUBLIC, 4000, flags=SYN)) is None
    router.leaves(packet(PRIVATE_ADDRESS, 4000, OTHER, 7000, flags=SYN))
    for other, other_port, port, protocol in (
        (STRANGER, 7000, 4000, TCP),
        (OTHER, 7001, 4000, TCP),
        (OTHER, 7000, 4001, TCP),
        (OTHER, 7000, 4000, UDP),
    ):
        assert router.enters(packet(other, other_port, PUBLIC, port, protocol=protocol, flags=ACK)) is None


def test_the_ports_of_an_answered_call_are_no_way_in(router: HomeRouter) -> None:
    """libp2p dials from the port that it listens on."""
    router.leaves(packet(PRIVATE_ADDRESS, 4000, OTHER, 7000, flags=SYN))
    assert router.enters(packet(OTHER, 7000, PUBLIC, 4000, flags=SYN_ACK)) is not None
    assert router.enters(packet(OTHER, 7000, PUBLIC, 4000, flags=SYN)) is None
    assert router.enters(packet(OTHER, 7000, PUBLIC, 4000, flags=ACK)) is not None


def test_two_that_dial_each_other_at_once_meet(router: HomeRouter) -> None:
    router.leaves(packet(PRIVATE_ADDRESS, 4000, OTHER, 7000, flags=SYN))
    assert router.enters(packet(OTHER, 7000, PUBLIC, 4000, flags=SYN)) is not None


def test_what_cannot_be_translated_is_dropped(router: HomeRouter) -> None:
    whole = packet(PRIVATE_ADDRESS, 4000, OTHER, 7000)
    assert router.leaves(packet(STRANGER, 4000, OTHER, 7000)) is None, "not its address"
    assert router.leaves(packet(PRIVATE_ADDRESS, 4000, OTHER, 7000, offset=100)) is None, "the rest of a packet"
    assert router.leaves(whole[:9] + bytes([ICMP]) + whole[10:]) is None
    for length in (0, 10, 20, 39):
        assert router.leaves(whole[:length]) is None and router.enters(whole[:length]) is None


def test_a_datagram_without_a_checksum_keeps_none(router: HomeRouter) -> None:
    sent = packet(PRIVATE_ADDRESS, 4000, OTHER, 7000, protocol=UDP)
    left = router.leaves(sent[:26] + b"\0\0" + sent[28:])
    assert left is not None and left[26:28] == b"\0\0" and checksum(left[:20]) == 0
