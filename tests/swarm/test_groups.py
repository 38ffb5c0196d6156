"""Several groups in one tick of a real swarm: everybody ends on one base, made of everybody's samples."""

from __future__ import annotations

import pytest
from harness import (
    FRAGMENTS,
    START_SECONDS,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    small_manifest,
)

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(600)]

PEERS, GROUP = 12, 4


def test_twelve_peers_in_groups_of_four_end_on_one_base(swarm: Swarm) -> None:
    manifest = small_manifest(
        swarm.path / "groups.toml",
        tick_seconds="tick_seconds = 4.0",
        matchmaking_seconds=f"matchmaking_seconds = 3.0\ntarget_group_size = {GROUP}",
    )
    bootstrap = swarm.bootstrap(manifest=manifest)
    peers = [swarm.join(f"p{index:02}", bootstrap.invite, 4 + 4 * (index % 3)) for index in range(PEERS)]
    swarm.wait_until(
        lambda: all(
            {event["fragment"] for event in peer.rounds(group=PEERS)} == set(range(FRAGMENTS)) for peer in peers
        ),
        lambda: f"all twelve in one round: {[[e['group_size'] for e in peer.rounds()] for peer in peers]}",
        2 * START_SECONDS,
    )
    for peer in peers:
        assert {event["groups"] for event in peer.rounds(group=PEERS)} == {PEERS // GROUP}
    # The promise of ten seconds is one peer's, not that of a dozen on two cores at once.
    assert set(swarm.leave_all(START_SECONDS).values()) == {0}
    assert_digests_agree(*peers)
    for peer in peers:
        assert_samples_add_up(peer)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(*swarm.peers)
