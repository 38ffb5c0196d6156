"""Peers that compute in different formats, and one in compiled code: what they average is the same for all."""

from __future__ import annotations

import pytest
from harness import (
    START_SECONDS,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
)

pytestmark = pytest.mark.swarm


def test_bfloat16_float16_and_float32_peers_find_groups_and_hold_the_same_bases(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    formats = ("bfloat16", "float16", "float32")
    peers = [swarm.join(name, bootstrap.invite, 40, "--compute-dtype", name) for name in formats]
    swarm.wait_averaged(*peers, group=3, rounds=4)
    assert set(swarm.leave_all().values()) == {0}
    for name, peer in zip(formats, peers, strict=True):
        assert peer.events("plan")[0]["compute_dtype"] == name
        leave = assert_samples_add_up(peer)
        assert leave["credited_samples"] > 0 == leave["dropped_samples"]
    sizes = {event["bytes_sent"] for peer in peers for event in peer.rounds(group=3) if event["attempts"] == 1}
    assert max(sizes) < 3 * min(sizes), "what is sent does not depend on the format"
    assert_digests_agree(*peers)
    assert_bases_hold_every_credit_once(peers)
    assert_no_traceback(bootstrap, *peers)


@pytest.mark.slow
def test_a_peer_that_is_to_try_compiled_code_trains_whatever_comes_of_it(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    plain = swarm.join("plain", bootstrap.invite, 40)
    trying = swarm.run(
        "trying",
        *("join", bootstrap.invite, "--dir", str(swarm.path / "trying"), "--host", "127.0.0.1", "--plain"),
        *("--threads", "1", "--eval-samples", "8", "--eval-seconds", "2", "--compile"),
    )
    swarm.wait_until(lambda: trying.joined, "it has compiled, or given up", 2 * START_SECONDS)
    swarm.wait_averaged(plain, trying, group=2, rounds=3)
    swarm.wait_until(lambda: trying.events("eval"), "it has evaluated", START_SECONDS)
    assert set(swarm.leave_all().values()) == {0}
    (plan,) = [event for event in trying.events("plan") if "torch.compile" in " ".join(event["reasons"])]
    assert plan["compiled"] == ("Compiling the training step" in trying.text)
    assert_samples_add_up(trying)
    assert_digests_agree(plain, trying)
    assert_no_traceback(*swarm.peers)
