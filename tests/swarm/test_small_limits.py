"""Few open files and next to no shared memory: a peer works, or says which flag it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up
from limited import REFUSED

from dht_config.errors import ExitCode

pytestmark = pytest.mark.swarm
LIMITED = (str(Path(__file__).with_name("limited.py")),)


@pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces are Linux's")
@pytest.mark.parametrize(("size", "shown"), [("64m", "67 MB"), ("1m", "1.0 MB")])
def test_256_open_files_and_a_small_dev_shm_are_enough(swarm: Swarm, size: str, shown: str) -> None:
    tight = {"LIMITED_FILES": "256", "LIMITED_SHM": size}
    looked = swarm.run("doctor", "doctor", "--device", "cpu", environment=tight, program=LIMITED)
    if looked.exit_code() == REFUSED:
        pytest.skip("mounting is not allowed here")
    said = {line[2:15].strip(): line for line in looked.text.splitlines() if line[:1] in "✓✗?"}
    assert said["open files"].startswith("✓") and "256" in said["open files"]
    assert said["shared memory"].startswith("✓") and shown in said["shared memory"]
    invite = swarm.bootstrap().invite
    peers = [swarm.join(name, invite, environment=tight, program=LIMITED) for name in ("one", "two")]
    swarm.wait_averaged(*peers, rounds=3)
    for peer in peers:
        assert os.stat(f"/proc/{peer.process.pid}/root/dev/shm").st_dev != os.stat("/dev/shm").st_dev
    swarm.leave_all()
    for peer in peers:
        assert_samples_add_up(peer)
    assert_digests_agree(*peers)
    assert_no_traceback(*swarm.peers)


def test_too_few_open_files_stop_a_peer_before_it_joins_and_it_names_the_flag(swarm: Swarm) -> None:
    peer = swarm.join("one", "digits", environment={"LIMITED_FILES": "50"}, program=LIMITED)
    assert peer.exit_code() == ExitCode.LIMITS
    assert "ulimit -n 4096" in peer.text and "--ulimit nofile=4096:4096" in peer.text
    assert "may open 50 files" in peer.text
    assert_no_traceback(peer)
