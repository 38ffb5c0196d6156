"""Addresses as people type them."""

from __future__ import annotations

import pytest
from hivemind.utils.multiaddr import Multiaddr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dht_config.address import (
    EXAMPLE,
    Address,
    parse_address,
    parse_addresses,
    parse_announced,
    transport_from_bytes,
)
from dht_config.errors import AddressError, ExitCode
from dht_config.network import NetworkSettings

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
GOOD = [
    f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}",
    f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}",
    f"/ip6/2001:db8::1/tcp/65535/p2p/{PEER_ID}",
    f"/dns/peer.example.org/tcp/443/p2p/{PEER_ID}",
    f"/dns4/localhost/tcp/31337/p2p/{PEER_ID}",
    f"/dns6/a-b.example/tcp/31337/p2p/{PEER_ID}",
    f"/dns4/{'.'.join(['x' * 63] * 3)}.org/tcp/31337/p2p/{PEER_ID}",
]


@pytest.mark.parametrize("text", GOOD)
def test_a_good_address_is_kept_and_encoded_as_hivemind_does(text: str) -> None:
    address = parse_address(text)
    assert (address.text, address.peer_id) == (text, PEER_ID)
    assert address.transport.to_bytes() == Multiaddr(address.transport.text).to_bytes()
    assert transport_from_bytes(address.transport.to_bytes()) == address.transport
    assert Multiaddr(text)["p2p"] == PEER_ID


def test_the_example_in_every_message_is_itself_correct() -> None:
    assert parse_address(EXAMPLE).text == EXAMPLE


@pytest.mark.parametrize("wrapped", ['"{}"', " {} ", "'{}',", "<{}>", "({})", "\t{}\n", "{}/", "\u201c{}\u201d", "{},"])
def test_stray_quotes_brackets_and_commas_are_dropped(wrapped: str) -> None:
    assert parse_address(wrapped.format(GOOD[0])).text == GOOD[0]


def test_addresses_are_normalised() -> None:
    assert parse_address(f"/ip6/2001:0DB8:0::1/tcp/080/p2p/{PEER_ID}").text == f"/ip6/2001:db8::1/tcp/80/p2p/{PEER_ID}"
    assert parse_address(f"/dns4/Peer.Example.ORG./tcp/80/ipfs/{PEER_ID}").text == (
        f"/dns4/peer.example.org/tcp/80/p2p/{PEER_ID}"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("203.0.113.7:31337", "does not start with /ip4/"),
        ("/ip4", "nothing after /ip4/"),
        (f"/ip4/peer.example.org/tcp/31337/p2p/{PEER_ID}", "names go under /dns4/"),
        (f"/ip4/999.0.113.7/tcp/31337/p2p/{PEER_ID}", "not an IPv4 address"),
        (f"/ip4/2001:db8::1/tcp/31337/p2p/{PEER_ID}", "write /ip6/"),
        (f"/ip6/203.0.113.7/tcp/31337/p2p/{PEER_ID}", "write /ip4/"),
        (f"/ip6/fe80::1%eth0/tcp/31337/p2p/{PEER_ID}", "not an IPv6 address"),
        (f"/dns4/203.0.113.7/tcp/31337/p2p/{PEER_ID}", "write /ip4/"),
        (f"/dns4/bad name/tcp/31337/p2p/{PEER_ID}", "host name"),
        (f"/dns4/{'x' * 64}/tcp/31337/p2p/{PEER_ID}", "host name"),
        (f"/ip4/0.0.0.0/tcp/31337/p2p/{PEER_ID}", "nobody can dial"),
        ("/ip4/203.0.113.7", "no /tcp/ part"),
        (f"/ip4/203.0.113.7/udp/31337/p2p/{PEER_ID}", "over /tcp/"),
        (f"/ip4/203.0.113.7/tcp/70000/p2p/{PEER_ID}", "port 70000"),
        (f"/ip4/203.0.113.7/tcp/0/p2p/{PEER_ID}", "port 0"),
        (f"/ip4/203.0.113.7/tcp/-1/p2p/{PEER_ID}", 'has "-1" for a port'),
        (f"/ip4/203.0.113.7/tcp/\u0663\u0663/p2p/{PEER_ID}", "for a port"),
        ("/ip4/203.0.113.7/tcp/31337", "no /p2p/ part"),
        ("/ip4/203.0.113.7/tcp/31337/p2p", "without the peer id"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/Qmabc", "for a peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID[:-1]}", "for a peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}/tcp/1", "after the peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}", "relay"),
        (f"/ip4/203.0.113.7/tcp/31337/ws/p2p/{PEER_ID}", "has /ws where /p2p/"),
        (f"/onion3/abc/tcp/31337/p2p/{PEER_ID}", "starts with /onion3"),
        ("/" + "x" * 600, "longer than"),
    ],
)
def test_a_bad_address_is_refused_in_words_with_a_correct_example(text: str, words: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert words in caught.value.problem
    assert caught.value.exit_code is ExitCode.ADDRESS
    example = caught.value.remedy.rsplit(" ", 1)[1]
    assert parse_address(example)


def test_one_bad_address_does_not_spoil_the_good_ones() -> None:
    good, bad = parse_addresses([f'"{GOOD[0]}", {GOOD[2]}', "nonsense", GOOD[0], "", " , "])
    assert [address.text for address in good] == [GOOD[0], GOOD[2]]
    assert [error.problem for error in bad] == ['The address "nonsense" does not start with /ip4/, /ip6/ or /dns4/.']


def test_a_message_never_carries_a_terminal_escape() -> None:
    with pytest.raises(AddressError) as caught:
        parse_address("/ip4/\x1b[31m/tcp/1")
    assert str(caught.value).isprintable()


@unhurried
@given(st.text())
def test_any_text_is_an_address_or_an_address_error(text: str) -> None:
    try:
        address = parse_address(text)
    except AddressError as error:
        assert str(error).isprintable()
    else:
        assert parse_address(address.text) == address


@unhurried
@given(
    st.lists(
        st.sampled_from(["ip4", "ip6", "dns4", "tcp", "p2p", "1.2.3.4", "::1", "host", "99", PEER_ID]),
        max_size=8,
    )
)
def test_any_mix_of_address_elements_is_an_address_or_an_address_error(elements: list[str]) -> None:
    try:
        address = parse_address("/" + "/".join(elements))
    except AddressError:
        return
    assert isinstance(address, Address)
    assert address.transport.to_bytes() == Multiaddr(address.transport.text).to_bytes()


@unhurried
@given(st.binary(max_size=64))
def test_any_bytes_are_a_transport_or_an_address_error(data: bytes) -> None:
    try:
        transport = transport_from_bytes(data)
    except AddressError:
        return
    assert transport.to_bytes() == data


def test_listening_and_announcing_follow_the_settings() -> None:
    assert NetworkSettings().listen_maddrs() == ["/ip4/0.0.0.0/tcp/0"]
    assert NetworkSettings(host="::", port=31337).listen_maddrs() == ["/ip6/::/tcp/31337"]
    settings = NetworkSettings(announce=("/dns4/Peer.example.org/tcp/31337",), initial_peers=(f'"{GOOD[0]}"',))
    assert settings.announce == ("/dns4/peer.example.org/tcp/31337",)
    assert settings.initial_peers == (GOOD[0],)


def test_a_host_name_to_listen_on_and_an_announced_peer_id_are_refused_in_words() -> None:
    with pytest.raises(AddressError, match="not an IP address"):
        NetworkSettings(host="localhost")
    with pytest.raises(AddressError, match="after the port"):
        NetworkSettings(announce=(GOOD[0],))
    with pytest.raises(AddressError, match="does not start"):
        parse_announced("peer.example.org:31337")
