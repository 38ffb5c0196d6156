"""A peer that is cut off, or does not run for a while: it says so, and comes back by itself with all it has trained.

``-m slow`` has outages of minutes, with ticks as real runs have them.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

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
    small_manifest,
)

from peers.own_records import RECORD_SECONDS
from peers.presence import STILL_SECONDS

pytestmark = [pytest.mark.swarm]

RUN_BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
"""As the manifest says."""
TO_BE_BACK_SECONDS = 120.0
TO_NOTICE_SECONDS = 60.0
STILL = STILL_SECONDS + 5.0
UNNOTICED_SECONDS = 12.0
"""Longer than a peer stays without news before it looks for others, shorter than a broken connection is held."""
MID_ROUND = 0.05
"""Of a tick: contributions are on their way."""
LONG_TICK_SECONDS, STOPPED_SECONDS, DOWN_SECONDS, JUMP_SECONDS = 5.0, 300.0, 600.0, 300.0
# Python imports it at the start of every process. The daemon and the kernel have the right time.
SET_CLOCK = """
import os, time
_right, _file = time.time, os.environ["CLOCK_SET_BY"]
def _set():
    try:
        with open(_file) as file:
            return _right() + float(file.read() or 0)
    except OSError:
        return _right()
time.time = _set
"""


def state_of(peer: Peer) -> str:
    return str(peer.events("state")[-1]["state"])


def credited_round(peer: Peer, after: float, group: int, tick_seconds: float) -> Event | None:
    """The first round of a tick after a moment in which the peer's work came into the swarm's base.

    One that was under way when the peer was stopped is told of in the moment in which it goes on.
    """
    rounds = [event for event in peer.rounds(group=group) if RUN_BEGAN + event["tick"] * tick_seconds > after]
    return next((event for event in rounds if event["late_share"] < 1), None)


def wait_back(
    swarm: Swarm,
    peer: Peer,
    what: str,
    after: float,
    group: int,
    tick_seconds: float = TICK_SECONDS,
    clock_ahead_seconds: float = 0.0,
) -> None:
    back = swarm.wait_until(
        lambda: credited_round(peer, after, group, tick_seconds), f"{peer.name} is back", TO_BE_BACK_SECONDS
    )
    seconds = back["time"] - clock_ahead_seconds - after
    print(f"{what}: {seconds:.1f} s, {seconds / tick_seconds:.1f} ticks, to the first credited samples")


def wait_for_seconds(swarm: Swarm, moment: float) -> None:
    swarm.wait_until(lambda: time.time() >= moment, "time passes", moment - time.time() + 5.0)


def three_of_which_one_can_move(swarm: Swarm, moving: str) -> list[Peer]:
    """Three peers on lines, who have averaged; the last one listens wherever it is."""
    names = ("one", "other", moving)
    swarm.links(bootstrap="100M/10ms", **dict.fromkeys(names, "100M/10ms"))
    bootstrap = swarm.bootstrap()
    peers = [swarm.join(name, bootstrap.invite, 40) for name in names[:2]]
    peers.append(swarm.join(moving, bootstrap.invite, 40, "--host", "0.0.0.0"))
    swarm.wait_averaged(*peers, group=3, rounds=3 * FRAGMENTS)
    return peers


@pytest.mark.namespaces
@needs_links
def test_a_peer_whose_line_is_down_is_isolated_not_alone_and_comes_back_at_another_address(swarm: Swarm) -> None:
    one, other, lost = peers = three_of_which_one_can_move(swarm, "lost")

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


def with_a_clock_to_set(directory: Path, file: Path) -> dict[str, str]:
    """The environment of a process whose clock is off by the seconds in a file, as soon as there is one."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(SET_CLOCK)
    path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "CLOCK_SET_BY": str(file)}


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(1500)
@needs_links
def test_outages_of_minutes_end_with_the_peer_back_among_the_others(swarm: Swarm) -> None:
    """At once: a line down and back with another address, all of a peer stopped in mid-round, its daemon alone, a clock
    that is set. What each takes to be back is printed."""
    names = ("one", "other", "third", "lost", "asleep", "daemonless", "jumped")
    swarm.links(bootstrap="100M/10ms", **dict.fromkeys(names, "100M/10ms"))
    tick = f"tick_seconds = {LONG_TICK_SECONDS}"
    bootstrap = swarm.bootstrap("bootstrap", small_manifest(swarm.path / "long.toml", tick_seconds=tick))
    one, other, third = (swarm.join(name, bootstrap.invite, 10) for name in names[:3])
    lost = swarm.join("lost", bootstrap.invite, 10, "--host", "0.0.0.0")
    asleep, daemonless = (swarm.join(name, bootstrap.invite, 10) for name in names[4:6])
    clock = swarm.path / "jump"
    environment = with_a_clock_to_set(swarm.path / "clock", clock)
    jumped = swarm.join("jumped", bootstrap.invite, 10, environment=environment)
    peers = [one, other, third, lost, asleep, daemonless, jumped]
    swarm.wait_averaged(*peers, group=len(peers), rounds=FRAGMENTS)

    swarm.wait_for_tick(MID_ROUND, LONG_TICK_SECONDS)
    asleep.freeze()
    daemonless.daemon_process().suspend()
    swarm.network.down("lost")
    clock.write_text(str(JUMP_SECONDS))
    struck = time.time()
    here = [one, other, third]
    swarm.wait_averaged(*here, rounds=FRAGMENTS, after=struck)
    wait_back(swarm, jumped, "clock set ahead", struck, 4, LONG_TICK_SECONDS, clock_ahead_seconds=JUMP_SECONDS)
    swarm.wait_until(lambda: len(daemonless.events("join")) == 2, "it has come back by itself", TO_BE_BACK_SECONDS)
    (fault,) = daemonless.events("fault")
    print(f"daemon stopped: noticed after {fault['time'] - struck:.1f} s")
    began = daemonless.events("training_started")[-1]["time"]
    wait_back(swarm, daemonless, "daemon stopped, from its training again", began, 4, LONG_TICK_SECONDS)

    wait_for_seconds(swarm, struck + STOPPED_SECONDS)
    asleep.thaw()
    thawed = time.time()
    wait_back(swarm, asleep, f"stopped for {thawed - struck:.0f} s", thawed, 4, LONG_TICK_SECONDS)
    assert any("stood still for" in event["reason"] for event in asleep.events("state"))

    wait_for_seconds(swarm, struck + DOWN_SECONDS)
    assert state_of(lost) == "isolated"
    assert not lost.rounds(after=struck + LONG_TICK_SECONDS)
    swarm.network.renumber("lost")
    swarm.network.up("lost")
    up = time.time()
    wait_back(swarm, lost, f"line down for {up - struck:.0f} s", up, 4, LONG_TICK_SECONDS)
    swarm.wait_averaged(*here, group=len(peers), after=up)
    assert set(swarm.leave_all().values()) == {0}
    for peer in peers:
        assert assert_samples_add_up(peer)["dropped_samples"] == 0, peer.name
    assert_digests_agree(*peers)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)


@pytest.mark.namespaces
@needs_links
def test_a_line_that_is_back_at_another_address_before_anybody_noticed_costs_a_few_rounds(swarm: Swarm) -> None:
    """As of a laptop that is carried to another network: connections with where it was still seem to stand."""
    peers = three_of_which_one_can_move(swarm, "moving")
    moving = peers[-1]
    swarm.network.down("moving")
    cut = time.time()
    wait_for_seconds(swarm, cut + UNNOTICED_SECONDS)
    swarm.network.renumber("moving")
    swarm.network.up("moving")
    up = time.time()
    wait_back(swarm, moving, f"moved within {up - cut:.0f} s", up, 2)
    swarm.wait_averaged(*peers, group=3, rounds=5 * FRAGMENTS, after=up)
    rounds = {peer.name: [event["time"] - up for event in peer.rounds(group=3, after=up)] for peer in peers}
    print("; ".join(f"{name}: {', '.join(f'{at:.0f}' for at in times)} s" for name, times in rounds.items()))
    swarm.leave_all()
    for peer in peers:
        assert assert_samples_add_up(peer)["dropped_samples"] == 0
    assert_digests_agree(*peers)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)
