"""Peers that vanish without a word: what it costs the others, and what of their work counts when they come back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from harness import (
    FRAGMENTS,
    ROUND_SECONDS,
    TICK_SECONDS,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
)

pytestmark = pytest.mark.swarm


def test_a_peer_killed_in_a_round_costs_the_others_at_most_one_round_of_a_fragment(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    rates = {"a": 80.0, "b": 40.0, "c": 20.0, "victim": 40.0}
    *survivors, victim = [swarm.join(name, bootstrap.invite, rate) for name, rate in rates.items()]
    swarm.wait_averaged(*survivors, victim, group=4, rounds=FRAGMENTS)

    # A tick's round starts its all-reduce when the tick begins.
    died = swarm.wait_for_tick(0.02)
    victim.crash()
    swarm.wait_averaged(*survivors, group=3, rounds=3 * FRAGMENTS, after=died + TICK_SECONDS)

    for peer in survivors:
        lost = [event for event in peer.events("round") if event["time"] > died and event["outcome"] != "committed"]
        by_fragment = [event["fragment"] for event in lost]
        assert len(by_fragment) == len(set(by_fragment)), (peer.name, lost)
    assert set(swarm.leave_all().values()) == {0}
    for peer in survivors:
        assert_samples_add_up(peer)
    assert_digests_agree(*survivors, victim)
    assert_no_traceback(*swarm.peers)


@pytest.mark.slow
def test_a_peer_killed_five_times_is_one_peer_whose_samples_count_once(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    steady = swarm.join("steady", bootstrap.invite, 40)
    victim = swarm.join("victim", bootstrap.invite, 40, "--checkpoint-seconds", "1")
    swarm.wait_averaged(steady, victim)
    lives = [victim]
    for _ in range(5):
        swarm.wait_until(victim.checkpoint.exists, "the victim saved a checkpoint", 60)
        victim.crash()
        victim = swarm.join("victim", bootstrap.invite, 40, "--checkpoint-seconds", "1", directory=victim.directory)
        lives.append(victim)
        swarm.wait_averaged(victim)

    # It was away for many versions, and the bootstrap may be as far behind: it must come back in every fragment.
    swarm.wait_until(
        lambda: {event["fragment"] for event in victim.rounds(group=2)} == set(range(FRAGMENTS)),
        "the victim averages every fragment again",
        ROUND_SECONDS,
    )
    assert len({life.peer_id for life in lives}) == 1
    assert [life.events("join")[0]["restart"] for life in lives] == list(range(6))
    entries = [peer["peer_id"] for peer in swarm.status(bootstrap.invite)["peers"]]
    assert sorted(entries) == sorted({bootstrap.peer_id, steady.peer_id, victim.peer_id})

    assert set(swarm.leave_all().values()) == {0}
    leave = assert_samples_add_up(victim)
    assert assert_samples_add_up(steady)["dropped_samples"] == 0
    for before, after in pairwise(lives):
        trained = before.events("train")[-1]["samples"]
        resumed = after.events("join")[0]["processed_samples"]
        assert resumed <= trained + 40 * TICK_SECONDS, "it resumed with more samples than it had processed"
    # What a kill can cost: pending since the last round of a fragment. Five cycles of it, and as much for slow rounds.
    assert leave["dropped_samples"] <= 5 * 2 * 40 * FRAGMENTS * TICK_SECONDS
    assert_bases_hold_every_credit_once([steady, victim])
    assert_digests_agree(steady, *lives)
    assert_no_traceback(*swarm.peers)
