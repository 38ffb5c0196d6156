"""A swarm that the network cuts in two: both halves train on, and after it there is one line with every sample once."""

from __future__ import annotations

import time

import pytest
from harness import (
    FRAGMENTS,
    Peer,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    needs_links,
    small_manifest,
)

pytestmark = [pytest.mark.swarm, pytest.mark.namespaces, needs_links]

TICK_SECONDS = 2.0
"""Six peers share the machine."""
OUTAGE_SECONDS = 120.0
"""At most, until the smaller half takes the others for gone: their records stand for 30 s."""
TO_BE_BACK_SECONDS = 120.0


def samples(peer: Peer) -> int:
    """Processed so far."""
    return int(peer.events("train")[-1]["samples"])


def common_base(peers: list[Peer], after: float) -> float | None:
    """When the last of the peers had a base of fragment 0 that all of them had after a moment; None: there is none."""
    moments: dict[str, dict[str, float]] = {}
    for peer in peers:
        for event in (*peer.rounds(after=after), *peer.events("rebase")):
            if event["fragment"] == 0 and event["time"] > after:
                moments.setdefault(event["digest"], {}).setdefault(peer.name, event["time"])
    return min((max(had.values()) for had in moments.values() if len(had) == len(peers)), default=None)


def test_two_halves_train_on_and_are_one_swarm_again_when_they_meet(swarm: Swarm) -> None:
    names = ("a", "b", "c", "d", "e")
    swarm.links(bootstrap="100M/10ms", **dict.fromkeys(names, "100M/10ms"))
    manifest = small_manifest(swarm.path / "run.toml", tick_seconds=f"tick_seconds = {TICK_SECONDS}")
    bootstrap = swarm.bootstrap(manifest=manifest)
    peers = [swarm.join(name, bootstrap.invite, rate) for name, rate in zip(names, (40, 30, 30, 20, 20), strict=True)]
    swarm.wait_averaged(*peers, group=5, rounds=FRAGMENTS)
    most, fewer = peers[:3], peers[3:]

    swarm.network.split(("bootstrap", "a", "b", "c"), ("d", "e"))
    cut = time.time()
    trained = [samples(peer) for peer in peers]
    swarm.wait_averaged(*most, group=3, rounds=2 * FRAGMENTS, after=cut)
    # The others' records have run out: as far as they know these two are all that is left.
    swarm.wait_until(
        lambda: all(peer.rounds(group=2, after=cut) for peer in fewer),
        "the smaller half goes on by itself",
        OUTAGE_SECONDS,
    )
    apart = {event["digest"] for event in fewer[0].rounds(after=cut)}
    assert not apart & {event["digest"] for event in most[0].rounds(after=cut)}
    assert all(samples(peer) > before for peer, before in zip(peers, trained, strict=True)), "everybody trains on"
    assert not any(event["state"] == "isolated" for peer in peers for event in peer.events("state"))

    swarm.network.split()
    met = time.time()
    together = swarm.wait_until(lambda: common_base(peers, met), "all are on one line", TO_BE_BACK_SECONDS)
    print(f"one line {together - met:.1f} s after the halves could meet, {(together - met) / TICK_SECONDS:.0f} ticks")
    swarm.wait_averaged(*peers, group=3, rounds=FRAGMENTS, after=together)
    for peer in most:
        for event in peer.events("rebase"):
            assert event["dropped_samples"] == 0, "most peers' line goes on, and so does what is credited in it"
    assert set(swarm.leave_all().values()) == {0}
    for peer in peers:
        assert_samples_add_up(peer)
    dropped = [peer.events("leave")[-1]["dropped_samples"] for peer in fewer]
    print(f"credited in the smaller half's line, and dropped with it: {dropped}")
    assert_digests_agree(*most)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)
