"""A task that freezes most of its model: only the rest travels, and whoever freezes something else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import (
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
    small_manifest,
)

from dht_config.errors import ExitCode

pytestmark = pytest.mark.swarm
PROGRAM = (str(Path(__file__).with_name("freezing.py")),)
FIRST_LAYER = {"FROZEN": "0"}
"""Of 64 -> 256 -> 10: 87 % of the parameters."""
TRAINED = 256 * 10 + 10


def test_what_is_frozen_does_not_travel_and_other_frozen_layers_are_refused(swarm: Swarm) -> None:
    manifest = small_manifest(swarm.path / "frozen.toml", hidden_sizes="hidden_sizes = [256]")
    first = swarm.join("first", manifest, 80, environment=FIRST_LAYER, program=PROGRAM)
    swarm.wait_averaged(first, group=1)
    second = swarm.join("second", first.invite, 40, environment=FIRST_LAYER, program=PROGRAM)
    swarm.wait_averaged(first, second, group=2, rounds=4)

    everything = swarm.join("everything", first.invite, 40, environment={"FROZEN": "0,2"}, program=PROGRAM)
    other = swarm.join("other", first.invite, 40, environment={"FROZEN": "2"}, program=PROGRAM)
    random = swarm.join("random", first.invite, 40, environment=FIRST_LAYER | {"RANDOM": "1"}, program=PROGRAM)
    for refused in (everything, other, random):
        refused.expected_to_live = False
    for refused, code, said in (
        (everything, ExitCode.MANIFEST, "nothing to train: all of its parameters are frozen"),
        (other, ExitCode.FINGERPRINT, "This peer's model is not the run's"),
        (random, ExitCode.MANIFEST, "freezes 0.weight, which begins with other values at each build"),
    ):
        assert refused.exit_code() == int(code), refused.text
        assert said in refused.text

    assert set(swarm.leave_all().values()) == {0}
    for peer in (first, second):
        leave = assert_samples_add_up(peer)
        assert sum(row["parameters"] for row in leave["fragments"]) == TRAINED
        for event in peer.rounds(group=2):
            assert event["bytes_sent"] + event["bytes_received"] <= 3 * 4 * TRAINED
    assert_digests_agree(first, second)
    assert_bases_hold_every_credit_once([first, second])
    assert_no_traceback(*swarm.peers)
