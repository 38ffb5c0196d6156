"""Checkpoints that were damaged on the disk: a warning, then the one before, then the other peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up

pytestmark = pytest.mark.swarm


@pytest.mark.slow
def test_a_peer_with_a_damaged_checkpoint_continues_from_the_one_before_or_from_the_others(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    other = swarm.join("other", bootstrap.invite, 40)
    peer = swarm.join("peer", bootstrap.invite, 40, "--checkpoint-seconds", "1")
    previous = peer.directory / "checkpoint.previous.safetensors"
    swarm.wait_averaged(other, peer)
    swarm.wait_until(previous.exists, "the peer has saved twice", 60)
    assert peer.end() == 0
    processed = assert_samples_add_up(peer)["processed_samples"]

    _truncate(peer.checkpoint)
    from_previous = swarm.join("peer", bootstrap.invite, 40, directory=peer.directory)
    swarm.wait_averaged(from_previous)
    assert "is damaged" in from_previous.text and "using the one before it" in from_previous.text
    assert 0 < from_previous.events("join")[0]["processed_samples"] <= processed
    assert from_previous.end() == 0
    assert_samples_add_up(from_previous)

    _flip_a_bit(peer.checkpoint)
    previous.unlink()
    from_others = swarm.join("peer", bootstrap.invite, 40, directory=peer.directory)
    swarm.wait_averaged(from_others)
    assert "is damaged" in from_others.text and "there is none before it" in from_others.text
    assert from_others.peer_id == peer.peer_id
    assert min(event["version"] for event in from_others.rounds(group=2)) > 2, "it fetched the swarm's bases"

    assert set(swarm.leave_all().values()) == {0}
    assert_samples_add_up(from_others)
    assert_digests_agree(other, peer, from_previous, from_others)
    assert_no_traceback(*swarm.peers)


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 0x10
    path.write_bytes(content)
