"""Whatever the memory strategy, a peer that comes late begins at what the others hold, bit for bit."""

from __future__ import annotations

import pytest
from harness import (
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
)

from dht_config.manifest import example_manifest

pytestmark = pytest.mark.swarm


def test_late_peers_of_every_strategy_that_a_cpu_has_hold_the_bases_of_the_others(swarm: Swarm) -> None:
    manifest = swarm.path / "blocks.toml"
    text = example_manifest("stdlib-text")
    small = {"hidden_size": 32, "intermediate_size": 64, "sequence_length": 32}
    lines = [
        f"{key} = {small[key]}" if (key := line.split("=")[0].strip()) in small else line for line in text.splitlines()
    ]
    manifest.write_text("\n".join(lines) + "\n")
    bootstrap = swarm.bootstrap("bootstrap", manifest)
    first = swarm.join("first", bootstrap.invite, 40)
    swarm.wait_averaged(first, group=1, rounds=6)
    strategies = {"full": (), "checkpoint": (), "fragments": ("--train-fragments", "1")}
    late = [swarm.join(name, bootstrap.invite, 20, "--strategy", name, *more) for name, more in strategies.items()]
    swarm.wait_averaged(first, *late, group=4, rounds=4)
    assert set(swarm.leave_all().values()) == {0}
    assert_digests_agree(first, *late)
    assert_bases_hold_every_credit_once([first, *late])
    for peer in late:
        assert min(event["version"] for event in peer.rounds()) > 1, "it made none of the first"
        assert assert_samples_add_up(peer)["credited_samples"] > 0
    assert_no_traceback(*swarm.peers)
