"""Doors behind addresses of which some lead nowhere: a newcomer gets in by the others, or is told why it does not."""

from __future__ import annotations

import subprocess

import pytest
from harness import (
    Swarm,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    needs_links,
    port_of_its_own,
)

from dht_config.errors import P2PTrainerError
from p2p_trainer.rehearsal.links import Network
from peers.daemon import check_port_free

pytestmark = pytest.mark.swarm

DEVICE = "tun0"
IPV6_INTO_NOWHERE = "2001:db8::2/64"
SILENT = "2001:db8::77"
LEFT_OUT = "198.18.0.200"
"""In the subnet of all lines, where nobody is: what goes there gets no answer."""
STRANGER = "QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"


def other_way(address: str, transport: str) -> str:
    """The same peer elsewhere."""
    return f"{transport}/p2p/{address.rpartition('/p2p/')[2]}"


def port_of(address: str) -> str:
    return address.split("/")[4]


def route_ipv6_into_nowhere(network: Network, name: str) -> None:
    """As at home, where the router announces IPv6 and the provider carries none."""
    command = ["ip", "-6", "address", "add", IPV6_INTO_NOWHERE, "dev", DEVICE, "nodad"]
    done = subprocess.run(network.command(name, command), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no IPv6 in a namespace here: {done.stderr.strip()}")


@pytest.mark.namespaces
@needs_links
def test_a_dead_ipv6_route_beside_a_good_ipv4_address_costs_a_moment(swarm: Swarm) -> None:
    network = swarm.links(bootstrap="100M/10ms", one="100M/10ms", other="100M/10ms")
    route_ipv6_into_nowhere(network, "one")
    route_ipv6_into_nowhere(network, "other")
    address = swarm.bootstrap().address
    dead = f"/ip6/{SILENT}/tcp/{port_of(address)}"
    # The bootstrap has both kinds of address, or is the second of two doors.
    peers = [
        swarm.join("one", swarm.manifest, 40, "--peer", other_way(address, dead), "--peer", address),
        swarm.join("other", swarm.manifest, 40, "--peer", f"{dead}/p2p/{STRANGER}", "--peer", address),
    ]
    swarm.wait_averaged(*peers)
    for peer in peers:
        assert "Nobody answers yet" not in peer.text, "it never had to wait for the dead one"
    swarm.leave_all()
    assert_no_traceback(*swarm.peers)


def test_a_swarm_over_ipv6_alone_trains(swarm: Swarm) -> None:
    try:
        check_port_free("::1", 0)
    except P2PTrainerError:
        pytest.skip("no IPv6 here")
    bootstrap = swarm.bootstrap("bootstrap", None, "--host", "::1")
    assert bootstrap.address.startswith("/ip6/::1/tcp/")
    peers = [swarm.join(name, bootstrap.invite, 40, "--host", "::1") for name in ("one", "two")]
    swarm.wait_averaged(*peers)
    swarm.leave_all()
    assert_digests_agree(*peers)
    assert_no_traceback(*swarm.peers)


def test_a_swarm_whose_peers_announce_names_alone_trains(swarm: Swarm) -> None:
    """As with dynamic DNS, or behind a router with a forwarded port."""

    def named(port: int) -> tuple[str, ...]:
        return "--port", str(port), "--announce", f"/dns4/localhost/tcp/{port}"

    doors = [port_of_its_own() for _ in range(3)]
    bootstrap = swarm.bootstrap("bootstrap", None, *named(doors[0]))
    assert bootstrap.address.startswith(f"/dns4/localhost/tcp/{doors[0]}/p2p/")
    one, two = (
        swarm.join(name, bootstrap.invite, 40, *named(port))
        for name, port in zip(("one", "two"), doors[1:], strict=True)
    )
    swarm.wait_averaged(one, two, rounds=4)
    seen = {peer["peer_id"]: peer["addresses"] for peer in swarm.status(bootstrap.invite)["peers"]}
    for peer, port in zip((bootstrap, one, two), doors, strict=True):
        assert seen[peer.peer_id] == [f"/dns4/localhost/tcp/{port}/p2p/{peer.peer_id}"]
    swarm.leave_all()
    assert_digests_agree(one, two)
    for peer in (one, two):
        assert_samples_add_up(peer)
    assert_no_traceback(*swarm.peers)


@pytest.mark.namespaces
@needs_links
def test_why_nobody_lets_a_peer_in_is_told_in_words(swarm: Swarm) -> None:
    swarm.links(bootstrap="100M/10ms", one="100M/10ms", two="100M/10ms", three="100M/10ms")
    bootstrap = swarm.bootstrap()
    address = bootstrap.address
    here = address.rpartition("/p2p/")[0]
    host = here.split("/")[2]
    impatient = ("--wait-seconds", "1")
    shut, silent, wrong = (
        swarm.join(name, swarm.manifest, 40, *impatient, "--peer", way)
        for name, way in (
            ("one", other_way(address, f"/ip4/{host}/tcp/9")),
            ("two", other_way(address, f"/ip4/{LEFT_OUT}/tcp/31337")),
            ("three", f"{here}/p2p/{STRANGER}"),
        )
    )
    for peer in (shut, silent, wrong):
        peer.expected_to_live = False
    assert (shut.exit_code(), silent.exit_code(), wrong.exit_code()) == (13, 13, 14)
    assert "nobody listens there" in shut.text and "no peer runs on it" in shut.text
    assert "no answer" in silent.text and "A firewall or a router keeps the port shut" in silent.text
    assert bootstrap.peer_id in wrong.text and "not " + STRANGER in wrong.text
    assert_no_traceback(*swarm.peers)
