"""A day's traffic is used up: the peer trains on alone, and the others hold their rounds without it."""

from __future__ import annotations

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up

pytestmark = pytest.mark.swarm


def test_who_has_moved_what_it_may_in_a_day_trains_on_and_holds_nobody_up(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    one, other = (swarm.join(name, bootstrap.invite, 40) for name in ("one", "other"))
    swarm.wait_averaged(one, other)
    frugal = swarm.join("frugal", bootstrap.invite, 20, "--daily-traffic", "0.4M")
    swarm.wait_averaged(frugal)
    swarm.wait_until(
        lambda: [event for event in frugal.events("round") if "training goes on alone" in event["reason"]],
        "the frugal peer said that it has moved what it may",
        120,
    )
    used_up = frugal.events("round")[-1]["time"]
    swarm.wait_until(
        lambda: [event for event in one.rounds(group=2, after=used_up) if event["group_size"] == 2],
        "the others hold rounds without it",
        60,
    )
    before = frugal.events("train")[-1]["samples"]
    swarm.wait_until(lambda: frugal.events("train")[-1]["samples"] > before, "it trains on", 60)
    assert_digests_agree(one, other)
    assert frugal.end() == 0
    assert assert_samples_add_up(frugal)["pending_samples"] > 0
    assert_no_traceback(*swarm.peers)
