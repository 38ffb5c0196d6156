"""A peer that is cut off, or does not run for a while: it says so, and comes back by itself with all it has trained."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil
import pytest
from harness import (
    FRAGMENTS,
    TICK_SECONDS,
    Event,
    Peer,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    needs_links,
)

from peers.presence import RECORD_SECONDS, STILL_SECONDS

pytestmark = [pytest.mark.swarm]

TO_BE_BACK_SECONDS = 120.0
TO_NOTICE_SECONDS = 60.0
STILL = STILL_SECONDS + 5.0
MID_ROUND = 0.05
"""Of a tick: contributions are on their way."""


def state_of(peer: Peer) -> str:
    return str(peer.events("state")[-1]["state"])


def credited_round(peer: Peer, after: float, group: int) -> Event | None:
    """The first round after a moment in which the peer's work came into the swarm's base."""
    return next((event for event in peer.rounds(group=group, after=after) if event["late_share"] < 1), None)


def wait_back(swarm: Swarm, peer: Peer, what: str, after: float, group: int) -> None:
    back = swarm.wait_until(lambda: credited_round(peer, after, group), f"{peer.name} is back", TO_BE_BACK_SECONDS)
    seconds = back["time"] - after
    print(f"{what}: {seconds:.1f} s, {seconds / TICK_SECONDS:.0f} ticks, to the first credited samples")


def wait_for_seconds(swarm: Swarm, moment: float) -> None:
    swarm.wait_until(lambda: time.time() >= moment, "time passes", moment - time.time() + 5.0)


@pytest.mark.namespaces
@needs_links
def test_a_peer_whose_line_is_down_is_isolated_not_alone_and_comes_back_at_another_address(swarm: Swarm) -> None:
    names = ("one", "other", "lost")
    swarm.links(bootstrap="100M/10ms", **dict.fromkeys(names, "100M/10ms"))
    bootstrap = swarm.bootstrap()
    one, other = (swarm.join(name, bootstrap.invite, 40) for name in names[:2])
    lost = swarm.join("lost", bootstrap.invite, 40, "--host", "0.0.0.0")
    peers = [one, other, lost]
    swarm.wait_averaged(*peers, group=3, rounds=FRAGMENTS)

    swarm.network.down("lost")
    cut = time.time()
    swarm.wait_until(lambda: state_of(lost) == "isolated", "it says that it is isolated", TO_NOTICE_SECONDS)
    print(f"isolated after {lost.events('state')[-1]['time'] - cut:.1f} s: {lost.events('state')[-1]['reason']}")
    swarm.wait_said(lost, "Isolated: nobody has answered for")
    trained = lost.events("train")[-1]["samples"]
    swarm.wait_averaged(one, other, rounds=2 * FRAGMENTS, after=cut)
    # All records have run out. Who is alone makes a version at the next tick.
    wait_for_seconds(swarm, cut + RECORD_SECONDS + 3 * TICK_SECONDS)
    assert not lost.rounds(after=cut + TICK_SECONDS), "the others train on: a version of its own would be a rival's"
    assert lost.events("train")[-1]["samples"] > trained

    address = swarm.network.renumber("lost")
    swarm.network.up("lost")
    wait_back(swarm, lost, f"line down for {time.time() - cut:.0f} s", time.time(), 3)
    assert [event["state"] for event in lost.events("state")][-3:] == ["isolated", "syncing", "training"]
    remembered = one.directory / "peers.json"
    swarm.wait_until(lambda: f"/{address}/" in remembered.read_text(), "others know its new address", TO_NOTICE_SECONDS)
    swarm.leave_all()
    for peer in peers:
        assert assert_samples_add_up(peer)["dropped_samples"] == 0, "all that it trained by itself counts"
    assert_digests_agree(*peers)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)


def test_a_peer_that_is_stopped_for_a_while_looks_first_and_comes_back(swarm: Swarm) -> None:
    """All of it, in the middle of a round; then its daemon alone."""
    bootstrap = swarm.bootstrap()
    one, other, asleep = peers = [swarm.join(name, bootstrap.invite, 40) for name in ("one", "other", "asleep")]
    swarm.wait_averaged(*peers, group=3, rounds=FRAGMENTS)

    swarm.wait_for_tick(MID_ROUND)
    asleep.freeze()
    frozen = time.time()
    wait_for_seconds(swarm, frozen + STILL)
    swarm.wait_averaged(one, other, rounds=FRAGMENTS, after=frozen)
    asleep.thaw()
    wait_back(swarm, asleep, f"stopped for {time.time() - frozen:.0f} s", time.time(), 3)
    assert any("stood still for" in event["reason"] for event in asleep.events("state"))
    assert state_of(asleep) == "training"

    daemon = asleep.daemon_process()
    daemon.suspend()
    frozen = time.time()
    swarm.wait_averaged(one, other, rounds=FRAGMENTS, after=frozen)
    with suppress(psutil.NoSuchProcess):
        daemon.resume()
    wait_back(swarm, asleep, f"daemon stopped for {time.time() - frozen:.0f} s", time.time(), 3)
    swarm.leave_all()
    for peer in peers:
        assert assert_samples_add_up(peer)["dropped_samples"] == 0
    assert_digests_agree(*peers)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)
