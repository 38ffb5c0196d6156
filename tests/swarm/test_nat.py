"""Peers that nobody can dial."""

from __future__ import annotations

import time

import pytest
from harness import (
    FRAGMENTS,
    START_SECONDS,
    TICK_SECONDS,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    needs_links,
    port_of_its_own,
    small_manifest,
)

from peers.presence import RECORD_SECONDS

pytestmark = [pytest.mark.swarm, pytest.mark.namespaces, needs_links]


def test_a_peer_behind_nat_takes_part_among_others(swarm: Swarm) -> None:
    swarm.links(behind_nat=["home"], bootstrap="100M/10ms", one="100M/10ms", other="100M/10ms", home="20M/30ms")
    bootstrap = swarm.bootstrap()
    peers = [swarm.join(name, bootstrap.invite, 40) for name in ("one", "other", "home")]
    swarm.wait_averaged(*peers, group=3, rounds=2 * FRAGMENTS)
    # Whoever came first had nobody to dial: this is a round after all had met.
    swarm.wait_averaged(*peers, group=3, rounds=FRAGMENTS, after=time.time())
    swarm.leave_all()
    assert_digests_agree(*peers)
    for peer in peers:
        assert_samples_add_up(peer)
    assert "Nobody can open connections to this peer" in peers[2].text
    assert not any("Nobody can open" in peer.text for peer in (bootstrap, *peers[:2]))
    assert_no_traceback(*swarm.peers)


def test_three_peers_behind_nat_train_together_through_the_bootstrap(swarm: Swarm) -> None:
    """They have the same private address, and cannot reach each other: the bootstrap leads, averages, and serves."""
    names = ("one", "two", "three")
    swarm.links(behind_nat=names, bootstrap="100M/10ms", one="20M/30ms", two="20M/30ms", three="20M/30ms")
    bootstrap = swarm.bootstrap()
    alone = swarm.join("one", bootstrap.invite, 40)
    swarm.wait_until(lambda: len(alone.rounds()) >= FRAGMENTS, "the first one trains alone", START_SECONDS)
    assert not bootstrap.rounds(), "who is alone needs no help"
    peers = [alone]
    for name in names[1:]:  # one after the other: two that come at once are more than the one that was there
        peers.append(swarm.join(name, bootstrap.invite, 40))
        swarm.wait_averaged(*peers, group=len(peers), rounds=2 * FRAGMENTS)
    assert bootstrap.rounds(group=3), "it commits what they commit"
    killed = peers.pop()
    killed.crash()
    swarm.wait_averaged(*peers, group=2, rounds=2 * FRAGMENTS, after=time.time())
    swarm.leave_all()
    assert_digests_agree(*peers, bootstrap)
    for peer in peers:
        assert_samples_add_up(peer)
    assert "None of them can be dialled by the others: their rounds go through this peer." in bootstrap.text
    assert_no_traceback(*swarm.peers)


def test_a_standby_averages_on_for_peers_behind_nat_where_the_bootstrap_dies(swarm: Swarm) -> None:
    """In averaged gradients, with codecs that lose something: an auxiliary peer's base is that of all others."""
    manifest = small_manifest(
        swarm.path / "gradients.toml",
        mode='mode = "gradient"\nglobal_batch = 48\ncodec = "int4"\nanswer_codec = "int8"',
    )
    names = ("one", "two")
    swarm.links(behind_nat=names, bootstrap="100M/10ms", standby="100M/10ms", one="20M/30ms", two="20M/30ms")
    bootstrap = swarm.bootstrap(manifest=manifest)
    standby = swarm.bootstrap("standby", bootstrap.invite, "--standby")
    peers = [swarm.join(name, bootstrap.invite, 60) for name in names]
    swarm.wait_averaged(*peers, standby, bootstrap, group=2, rounds=FRAGMENTS)
    bootstrap.crash()
    swarm.wait_averaged(*peers, standby, group=2, rounds=2 * FRAGMENTS, after=time.time())
    swarm.leave_all()
    assert_digests_agree(*peers, bootstrap, standby)
    for peer in peers:
        assert_samples_add_up(peer)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)


def test_peers_behind_nat_meet_again_when_their_bootstrap_is_back(swarm: Swarm) -> None:
    """They lose each other with it, and all it has is what they bring it."""
    names = ("one", "two")
    swarm.links(behind_nat=names, bootstrap="100M/10ms", one="20M/30ms", two="20M/30ms")
    port = ("--port", str(port_of_its_own()))
    bootstrap = swarm.bootstrap("bootstrap", None, *port)
    peers = [swarm.join(name, bootstrap.invite, 40) for name in names]
    swarm.wait_averaged(*peers, bootstrap, group=2, rounds=FRAGMENTS)
    bootstrap.crash()
    again = swarm.bootstrap("bootstrap", None, *port)
    back = time.time()
    swarm.wait_averaged(*peers, again, group=2, rounds=2 * FRAGMENTS, after=back)
    swarm.leave_all()
    for peer in peers:
        assert_samples_add_up(peer)
    assert_no_traceback(*swarm.peers)


@pytest.mark.slow
def test_peers_behind_nat_make_no_lines_of_their_own_while_their_only_bootstrap_is_away(swarm: Swarm) -> None:
    """Longer than records stand: each is isolated, trains on, and all of it counts once the bootstrap is back."""
    names = ("one", "two")
    swarm.links(behind_nat=names, bootstrap="100M/10ms", one="20M/30ms", two="20M/30ms")
    port = ("--port", str(port_of_its_own()))
    bootstrap = swarm.bootstrap("bootstrap", None, *port)
    peers = [swarm.join(name, bootstrap.invite, 40) for name in names]
    swarm.wait_averaged(*peers, bootstrap, group=2, rounds=FRAGMENTS)
    bootstrap.crash()
    away = time.time()
    for peer in peers:
        swarm.wait_said(peer, "Isolated: nobody has answered for")
    swarm.wait_until(lambda: time.time() > away + RECORD_SECONDS + 5 * TICK_SECONDS, "time passes", START_SECONDS)
    assert not any(peer.rounds(after=away + TICK_SECONDS) for peer in peers), "it would be a rival's"
    again = swarm.bootstrap("bootstrap", None, *port)
    back = time.time()
    swarm.wait_averaged(*peers, again, group=2, rounds=2 * FRAGMENTS, after=back)
    for peer in peers:
        print(
            f"{peer.name}: {peer.rounds(group=2, after=back)[0]['time'] - back:.1f} s after the invite is there again"
        )
    swarm.leave_all()
    assert_digests_agree(*peers, again)
    for peer in peers:
        assert assert_samples_add_up(peer)["dropped_samples"] == 0
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)


def test_two_peers_behind_nat_meet_where_a_third_can_be_dialled(swarm: Swarm) -> None:
    """They have the same private address, and cannot reach each other."""
    names = ("home", "away")
    swarm.links(behind_nat=names, bootstrap="100M/10ms", one="100M/10ms", home="20M/30ms", away="20M/30ms")
    bootstrap = swarm.bootstrap()
    peers = [swarm.join(name, bootstrap.invite, 40) for name in ("one", *names)]
    swarm.wait_averaged(*peers, group=3, rounds=3 * FRAGMENTS)
    lost = [event["reason"] for peer in peers for event in peer.events("round") if "lost" in event["reason"]]
    assert not lost, "a reducer that somebody could not reach"
    swarm.leave_all()
    assert_digests_agree(*peers)
    for peer in peers:
        assert_samples_add_up(peer)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)
