"""Peers that nobody can dial."""

from __future__ import annotations

import time

import pytest
from harness import FRAGMENTS, Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up, needs_links

pytestmark = [pytest.mark.swarm, needs_links]


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
    assert_no_traceback(*swarm.peers)
