"""Peers of other versions: of another protocol they are refused in words, and nobody in the run is disturbed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up, small_manifest

from dht_config.errors import ExitCode
from dht_config.manifest import PROTOCOL_VERSION

pytestmark = pytest.mark.swarm

OTHER = (str(Path(__file__).with_name("other_version.py")),)


def test_another_protocol_is_refused_another_product_version_trains(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    first = swarm.join("first", bootstrap.invite, 80)
    newer = swarm.join("newer", bootstrap.invite, 40, environment={"OTHER_PRODUCT": "7.8.9"}, program=OTHER)
    swarm.wait_averaged(first, newer)

    by_file = small_manifest(swarm.path / "by-file.toml", initial_peers=f'initial_peers = ["{bootstrap.address}"]')
    asked = time.time()
    environment = {"OTHER_PROTOCOL": str(PROTOCOL_VERSION + 1), "OTHER_PRODUCT": "8.0.0"}
    strangers = [
        swarm.join(f"stranger-{index}", target, 40, environment=environment, program=OTHER)
        for index, target in enumerate((bootstrap.invite, by_file))
    ]
    for stranger in strangers:
        assert stranger.exit_code() == int(ExitCode.FINGERPRINT), stranger.text
        for said in (f"protocol version {PROTOCOL_VERSION} ", f"program {PROTOCOL_VERSION + 1} (p2p-trainer 8.0.0)"):
            assert said in stranger.text
        assert "pip install --upgrade" in stranger.text
    swarm.wait_averaged(first, newer, rounds=3, after=asked)
    lost = [event for peer in (first, newer) for event in peer.rounds("carried", after=asked)]
    assert len(lost) <= 2, lost
    assert {row["software_version"] for row in swarm.status(bootstrap.invite)["peers"]} >= {"7.8.9"}
    assert set(swarm.leave_all().values()) == {0}
    for peer in (first, newer):
        assert_samples_add_up(peer)
    assert_digests_agree(first, newer)
    assert_no_traceback(*swarm.peers)
