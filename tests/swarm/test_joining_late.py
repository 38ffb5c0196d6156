"""Coming late, for the first time or again: the swarm's bases, exact accounts, a part in the rounds at once."""

from __future__ import annotations

import pytest
from harness import (
    FRAGMENTS,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_samples_add_up,
)

pytestmark = pytest.mark.swarm


def test_a_newcomer_and_a_peer_that_comes_back_average_within_two_cycles(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    steady, peer = swarm.join("steady", bootstrap.invite, 40), swarm.join("peer", bootstrap.invite, 80)
    swarm.wait_averaged(steady, peer, rounds=4)
    assert peer.end() == 0
    before = assert_samples_add_up(peer)
    assert peer.checkpoint.is_file()

    again = swarm.join("peer", bootstrap.invite, 80, directory=peer.directory)
    late = swarm.join("late", bootstrap.invite, 40)
    swarm.wait_averaged(again, late, rounds=FRAGMENTS)
    for joiner in (again, late):
        rounds = joiner.events("round")
        first = joiner.rounds(group=2)[0]
        # Its own count of ticks, not of seconds: how soon this machine lets it start is not the product's to promise.
        assert first["tick"] - rounds[0]["tick"] <= 2 * FRAGMENTS, (joiner.name, rounds)
        assert first["version"] > 2, "it began from the swarm's base, not from one of its own"
        assert any(event["weight"] > 0 for event in joiner.rounds(group=2))
    assert again.peer_id == peer.peer_id
    assert again.events("join")[0]["processed_samples"] == before["processed_samples"]

    assert set(swarm.leave_all().values()) == {0}
    for left in (steady, late):
        assert_samples_add_up(left)
    after = assert_samples_add_up(again)
    assert after["processed_samples"] > before["processed_samples"]
    assert after["credited_samples"] > before["credited_samples"]
    assert after["dropped_samples"] == before["dropped_samples"] == 0
    assert_bases_hold_every_credit_once([steady, again, late])
    assert_digests_agree(steady, peer, again, late)
