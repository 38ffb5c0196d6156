"""Rounds in which little travels, between machines that compute with other kernels: the same bases for everyone."""

from __future__ import annotations

import pytest
from harness import (
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    small_manifest,
)

pytestmark = pytest.mark.swarm


@pytest.mark.parametrize(("codec", "answer_codec"), [("int8", "int8"), ("sparse", "int4")])
def test_bases_agree_whatever_is_left_out_on_the_way(swarm: Swarm, codec: str, answer_codec: str) -> None:
    averaging = f'matchmaking_seconds = 0.5\ncodec = "{codec}"\nanswer_codec = "{answer_codec}"'
    manifest = small_manifest(swarm.path / "lossy.toml", matchmaking_seconds=averaging)
    bootstrap = swarm.bootstrap("bootstrap", manifest)
    kernels: list[dict[str, str]] = [{"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"}, {}]
    peers = [
        swarm.join(name, bootstrap.invite, rate, "--threads", threads, environment=environment)
        for name, rate, threads, environment in zip(
            ("fast", "slow", "other"), (80, 20, 40), "121", kernels, strict=True
        )
    ]
    swarm.wait_averaged(*peers, group=3, rounds=4)
    assert set(swarm.leave_all().values()) == {0}
    for peer in peers:
        leave = assert_samples_add_up(peer)
        assert leave["credited_samples"] > 0 == leave["dropped_samples"]
    assert_bases_hold_every_credit_once(peers)
    assert_digests_agree(*peers)
    parameters = sum(row["parameters"] for row in leave["fragments"]) / len(leave["fragments"])
    round_of_three = peers[0].rounds(group=3)[-1]
    assert round_of_three["bytes_sent"] + round_of_three["bytes_received"] < 3 * 4 * parameters, "less than float32"


def test_a_peer_takes_part_as_often_and_encodes_as_its_person_says(swarm: Swarm) -> None:
    averaging = 'matchmaking_seconds = 0.5\ncodec = "auto"\nanswer_codec = "int8"'
    bootstrap = swarm.bootstrap("bootstrap", small_manifest(swarm.path / "auto.toml", matchmaking_seconds=averaging))
    rare = swarm.join("rare", bootstrap.invite, 20, "--cadence", "2", environment={"P2P_TRAINER_CODEC": "sparse"})
    others = [swarm.join(name, bootstrap.invite, 40) for name in ("one", "other")]
    swarm.wait_averaged(rare, *others, group=3, rounds=3)
    swarm.wait_averaged(*others, group=2, rounds=8)
    assert set(swarm.leave_all().values()) == {0}
    (plan,) = rare.events("plan")
    assert (plan["cadence"], plan["codec"]) == (2, "sparse")
    assert {(event["cadence"], event["codec"]) for event in rare.rounds(group=3)} == {(2, "sparse")}
    for one in others:
        assert {event["codec"] for event in one.rounds(group=3)} == {"int8"}
        assert any(event["group_size"] == 2 for event in one.rounds(group=2)), "rounds without the rare one"
    assert_bases_hold_every_credit_once([rare, *others])
    assert_digests_agree(rare, *others)
    assert_no_traceback(*swarm.peers)
