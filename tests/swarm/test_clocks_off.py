"""Machines whose clocks are off by minutes: they train with the others in swarm time, and doctor says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness import Swarm, assert_digests_agree, assert_no_traceback, assert_samples_add_up

from dht_config.errors import ExitCode

pytestmark = pytest.mark.swarm

# Python imports it at the start of every process, so also in those that a peer starts.
SITECUSTOMIZE = """
import os, time
_right, _off = time.time, float(os.environ["CLOCK_OFF_SECONDS"])
time.time = lambda: _right() + _off
"""


def off_by(directory: Path, seconds: float) -> dict[str, str]:
    """The environment of a process that takes the time to be that much later."""
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "CLOCK_OFF_SECONDS": f"{seconds}"}


def test_peers_whose_clocks_are_off_by_minutes_train_together_and_doctor_names_it(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    right = swarm.join("right", bootstrap.invite, 40)
    ahead = swarm.join("ahead", bootstrap.invite, 40, environment=off_by(swarm.path / "clock", 420.0))
    behind = swarm.join("behind", bootstrap.invite, 40, environment=off_by(swarm.path / "clock", -420.0))
    swarm.wait_averaged(right, ahead, behind, group=3, rounds=3)

    doctor = swarm.run("doctor", "doctor", bootstrap.invite, "--json", environment=off_by(swarm.path / "clock", 420.0))
    assert doctor.exit_code() == int(ExitCode.CHECKS_FAILED)
    (clock,) = (check for check in json.loads(doctor.text) if check["check"] == "clock")
    assert not clock["ok"] and " s ahead of" in clock["cause"] and "timedatectl" in clock["remedy"]
    assert set(swarm.leave_all().values()) == {0}
    for peer in (right, ahead, behind):
        assert_samples_add_up(peer)
    assert_digests_agree(right, ahead, behind)
    assert_no_traceback(*swarm.peers)
