"""A card that vanishes while it trains, or is hidden when it should begin: a distinct end, and nobody else notices."""

from __future__ import annotations

import time
from pathlib import Path

import nvml_stub
import pynvml
import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up

from dht_config.errors import ExitCode

pytestmark = pytest.mark.swarm
FAULTY = (str(Path(__file__).with_name("device_fault.py")),)


def test_a_card_that_is_gone_at_step_10_ends_its_peer_alone(swarm: Swarm) -> None:
    invite = swarm.bootstrap().invite
    one, two = swarm.join("one", invite), swarm.join("two", invite)
    swarm.wait_averaged(one, two)
    lost = swarm.join("lost", invite, environment={"DEVICE_FAULT": "10"}, program=FAULTY)
    assert lost.exit_code() == ExitCode.DEVICE_LOST
    said = [line for line in lost.text.splitlines() if line.startswith("p2p-trainer: ")]
    assert len(said) == 1 and "CUDA error: GPU is lost" in said[0] and "start the same command again" in said[0]
    (leave,) = lost.events("leave")
    assert leave["exit_code"] == ExitCode.DEVICE_LOST
    assert lost.gone() == ExitCode.DEVICE_LOST
    swarm.wait_averaged(one, two, rounds=3, after=time.time())
    again = swarm.join("lost", invite)
    swarm.wait_averaged(one, two, again, group=3)
    swarm.leave_all()
    for peer in (one, two, again):
        assert_samples_add_up(peer)
    assert_digests_agree(one, two, again)
    assert_no_traceback(*swarm.peers)


def test_a_driver_mismatch_at_the_start_is_an_error_and_never_the_cpu(swarm: Swarm, tmp_path: Path) -> None:
    library = nvml_stub.build(tmp_path / "nvml")
    mismatch = {
        "DEVICE_FAULT": "hidden",
        "LD_LIBRARY_PATH": str(library),
        "NVML_STUB_FAIL": f"nvmlInitWithFlags={pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}",
    }
    invite = swarm.bootstrap().invite
    one = swarm.join("one", invite)
    swarm.wait_averaged(one, group=1)
    hidden = swarm.join("hidden", invite, environment=mismatch, program=FAULTY)
    assert hidden.exit_code() == ExitCode.DEVICE
    said = [line for line in hidden.text.splitlines() if line.startswith("p2p-trainer: ")]
    assert len(said) == 1 and "Restart the machine." in said[0] and "--device cpu" in said[0]
    assert not hidden.events("join"), "it never took part"
    swarm.wait_averaged(one, group=1, rounds=2, after=time.time())
    looked = swarm.run("doctor", "doctor", invite, environment=mismatch, program=FAULTY)
    assert looked.exit_code() == ExitCode.CHECKS_FAILED
    wrong = [line for line in looked.text.splitlines() if line.startswith("✗")]
    assert [line.split()[1] for line in wrong] == ["driver", "device"]
    assert all("Restart the machine." in line for line in wrong)
    assert_no_traceback(*swarm.peers)
