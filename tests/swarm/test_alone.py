"""A run with one peer: it starts the run, lives alone, takes others in and goes on when they are gone."""

from __future__ import annotations

import time

import pytest
from harness import (
    FRAGMENTS,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_samples_add_up,
)

pytestmark = pytest.mark.swarm


def test_one_peer_starts_a_run_averages_with_a_second_and_goes_on_alone(swarm: Swarm) -> None:
    first = swarm.join("first", swarm.manifest, 40)
    swarm.wait_averaged(first, group=1, rounds=FRAGMENTS)
    assert {event["group_size"] for event in first.rounds()} == {1}
    assert f"p2p-trainer join {first.invite}" in first.text

    second = swarm.join("second", first.invite, 20)
    swarm.wait_averaged(first, second, rounds=FRAGMENTS)
    assert second.end() == 0
    left = time.time()
    swarm.wait_until(
        lambda: [event for event in first.rounds(after=left) if event["group_size"] == 1],
        "the first goes on alone",
        60,
    )

    assert first.end() == 0
    for peer in (first, second):
        assert assert_samples_add_up(peer)["dropped_samples"] == 0
    assert_digests_agree(first, second)
    assert_bases_hold_every_credit_once([first, second])
