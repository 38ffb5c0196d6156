"""The bootstrap is a door, not a coordinator: what goes on without it, and how one gets in."""

from __future__ import annotations

import time

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up, port_of_its_own

pytestmark = pytest.mark.swarm


def test_a_run_goes_on_takes_back_and_takes_in_without_its_bootstrap(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap("bootstrap", None, "--port", str(port_of_its_own()))
    first = swarm.join("first", bootstrap.invite, 80)
    second = swarm.join("second", bootstrap.invite, 40)
    swarm.wait_averaged(first, second)

    bootstrap.crash()
    crashed = time.time()
    swarm.wait_averaged(first, second, rounds=3, after=crashed)

    second_id = second.peer_id
    second.crash()
    returned = swarm.join("second", bootstrap.invite, 40, directory=second.directory)
    by_invite = swarm.join("by-invite", first.invite, 20)
    by_address = swarm.join("by-address", bootstrap.invite, 20, "--peer", first.address)
    swarm.wait_averaged(returned, by_invite, by_address)
    assert returned.peer_id == second_id
    assert returned.events("join")[0]["restart"] == 1

    lost = swarm.join("lost", bootstrap.invite, 20)
    swarm.wait_said(lost, "Nobody answers yet", "trying again in")
    assert not lost.joined
    again = swarm.bootstrap()
    swarm.wait_averaged(lost, group=3)
    assert again.directory == bootstrap.directory
    assert again.peer_id == bootstrap.peer_id

    assert set(swarm.leave_all().values()) == {0}
    trained = (first, returned, by_invite, by_address, lost)
    for peer in trained:
        assert_samples_add_up(peer)
    assert_digests_agree(*trained, second)
    assert_no_traceback(*swarm.peers)
