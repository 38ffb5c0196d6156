"""A run on averaged gradients: unlike peers share one global batch, and the bases they make learn."""

from __future__ import annotations

import pytest
from harness import (
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_samples_add_up,
    small_manifest,
)

pytestmark = pytest.mark.swarm


def test_peers_share_a_global_batch_by_their_speed(swarm: Swarm) -> None:
    manifest = small_manifest(
        swarm.path / "gradient.toml",
        mode='mode = "gradient"\nglobal_batch = 48',
        matchmaking_seconds="matchmaking_seconds = 0.5",
    )
    text = manifest.read_text().replace('name = "nesterov"\nlr = 0.7\nmomentum = 0.6', 'name = "adamw"\nlr = 0.01')
    assert 'name = "adamw"' in text
    manifest.write_text(text)
    bootstrap = swarm.bootstrap("bootstrap", manifest)
    fast, slow = swarm.join("fast", bootstrap.invite, 90), swarm.join("slow", bootstrap.invite, 30)
    swarm.wait_averaged(fast, slow, rounds=8)
    assert set(swarm.leave_all().values()) == {0}
    for peer in (fast, slow):
        assert assert_samples_add_up(peer)["credited_samples"] > 0
    assert_bases_hold_every_credit_once([fast, slow])
    assert_digests_agree(fast, slow)
    weights = [(event["weight"], event["weight_share"]) for event in fast.rounds(group=2)[2:]]
    assert all(0.9 * 48 <= weight / share <= 2 * 48 for weight, share in weights if share), weights
    share = sum(share for _, share in weights) / len(weights)
    assert 0.6 < share < 0.9, f"three quarters of the speed, {share:.2f} of the weight"
