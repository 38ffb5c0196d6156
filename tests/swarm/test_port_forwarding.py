"""A peer behind a router that forwards a port to whoever asks for one."""

from __future__ import annotations

import time

import pytest
from harness import (
    FRAGMENTS,
    START_SECONDS,
    Swarm,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    needs_links,
)
from upnp_router import UpnpRouter, why_not

from peers.contact import ASK_AGAIN_SECONDS

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.namespaces,
    needs_links,
    pytest.mark.skipif(bool(why_not()), reason=f"no router that forwards ports can be made here: {why_not()}"),
]


LINES = {"bootstrap": "100M/10ms", "home": "20M/30ms", "away": "20M/30ms"}


def test_a_peer_behind_a_router_that_forwards_ports_averages_for_others(swarm: Swarm) -> None:
    """It finds that out by itself, and the bootstrap need not help any more."""
    with UpnpRouter(swarm.links(behind_nat=["away"], **LINES), "home", swarm.path) as router:
        (swarm.homes["home"],) = router.homes
        bootstrap = swarm.bootstrap()
        peers = [swarm.join(name, bootstrap.invite, 40) for name in ("home", "away")]
        swarm.wait_said(peers[0], "Nobody can open connections", "The router forwards port")
        swarm.wait_averaged(*peers, rounds=FRAGMENTS, after=time.time())
        reached = time.time()
        swarm.wait_averaged(*peers, rounds=2 * FRAGMENTS, after=reached)
        assert not bootstrap.rounds(after=reached), "they need no help"
        assert len(router.forwards()) == 1
        swarm.leave_all()
        assert not router.forwards(), "the port is given back"
    assert_digests_agree(*peers)
    for peer in peers:
        assert_samples_add_up(peer)
    assert_no_traceback(*swarm.peers)


@pytest.mark.parametrize("forwards", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_peers_of_one_home_meet_and_whoever_is_outside_meets_both(swarm: Swarm, forwards: bool) -> None:
    """Their router leads nothing that they send to its outer address back to them."""
    lines = {"bootstrap": "100M/10ms", "router": "20M/30ms", "away": "20M/30ms"}
    with UpnpRouter(swarm.links(**lines), "router", swarm.path, machines=2, forwards=forwards) as router:
        swarm.homes.update(zip(("home", "beside"), router.homes, strict=True))
        bootstrap = swarm.bootstrap()
        peers = [swarm.join(name, bootstrap.invite, 40) for name in ("home", "beside", "away")]
        if forwards:
            swarm.wait_until(
                lambda: all("The router forwards port" in peer.text for peer in peers[:2]),
                "both are reached through the router",
                START_SECONDS + ASK_AGAIN_SECONDS,
            )
            assert len(router.forwards()) == 2
        swarm.wait_averaged(*peers, group=3, rounds=4 * FRAGMENTS, after=time.time())
        swarm.leave_all()
    assert_digests_agree(*peers)
    for peer in peers:
        assert_samples_add_up(peer)
    assert_no_traceback(*swarm.peers)


@pytest.mark.slow
def test_where_the_router_forwards_no_more_the_bootstrap_averages_again(swarm: Swarm) -> None:
    """And where it does it again, the peer: each is noticed within a minute or so."""
    with UpnpRouter(swarm.links(behind_nat=["away"], **LINES), "home", swarm.path) as router:
        (swarm.homes["home"],) = router.homes
        bootstrap = swarm.bootstrap()
        peers = [swarm.join(name, bootstrap.invite, 40) for name in ("home", "away")]
        swarm.wait_said(peers[0], "The router forwards port")
        swarm.wait_averaged(*peers, rounds=FRAGMENTS)
        router.switch_off()
        swarm.wait_said(peers[0], "The router forwards nothing to this peer any more")
        swarm.wait_averaged(*peers, bootstrap, rounds=FRAGMENTS, after=time.time())
        router.switch_on()
        swarm.wait_until(lambda: peers[0].text.count("The router forwards port") == 2, "it is back", START_SECONDS)
        swarm.wait_averaged(*peers, rounds=FRAGMENTS, after=time.time())
        swarm.leave_all()
    assert_digests_agree(*peers)
    for peer in peers:
        assert_samples_add_up(peer)
    assert_no_traceback(*swarm.peers)
