"""A peer with little memory trains some fragments by turns, in a swarm of peers that train all."""

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
)

pytestmark = pytest.mark.swarm


def test_it_is_credited_with_what_it_trained_and_disturbs_nobody(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    full = [swarm.join(name, bootstrap.invite) for name in ("a", "b")]
    partial = swarm.join("partial", bootstrap.invite, 40.0, "--strategy", "fragments", "--train-fragments", "1")
    swarm.wait_joined(*full, partial)
    swarm.wait_averaged(*full, partial, group=3, rounds=2)
    swarm.wait_until(lambda: len(partial.events("rotation")) >= 3, "it has changed three times", START_SECONDS)
    changed = partial.events("rotation")[-1]["time"]
    swarm.wait_averaged(*full, partial, group=3, rounds=2 * FRAGMENTS, after=changed)
    # It comes back in the same directory, and goes on from its checkpoint.
    assert partial.end() == 0
    before = assert_samples_add_up(partial)
    again = swarm.join("partial", bootstrap.invite, 40.0, "--strategy", "fragments", "--train-fragments", "1")
    swarm.wait_averaged(again, group=3, rounds=2 * FRAGMENTS)
    assert set(swarm.leave_all().values()) == {0}

    peers = [*full, again]
    assert_digests_agree(*full, partial, again)
    leaves = [assert_samples_add_up(peer) for peer in peers]
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(bootstrap, *full, partial, again)
    for leave in leaves[:2]:
        assert leave["trained_samples"] == leave["processed_samples"]
        assert leave["dropped_samples"] == 0
    own = leaves[2]
    assert own["dropped_samples"] == 0, "nothing was lost when it changed, or when it came back"
    assert own["processed_samples"] > before["processed_samples"]
    # One of two fragments took every step's samples.
    assert sum(row["trained_samples"] for row in own["fragments"]) == own["processed_samples"]
    assert all(0 < row["credited_samples"] <= row["trained_samples"] for row in own["fragments"])
    assert "Training 1 of 2 fragments" in partial.text
