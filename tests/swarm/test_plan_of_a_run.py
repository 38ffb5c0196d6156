"""``plan`` with an invite: the run's manifest comes from its swarm, and nobody there notices."""

from __future__ import annotations

import json

import pytest
from harness import Swarm, assert_no_traceback

from dht_config.errors import ExitCode

pytestmark = pytest.mark.swarm


def test_a_volunteer_sees_what_the_machine_would_do_before_it_joins(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    volunteer = swarm.join("volunteer", bootstrap.invite)
    swarm.wait_averaged(volunteer, group=1)
    asked = ("plan", bootstrap.invite, "--device", "cpu", "--threads", "1", "--up", "10M")
    looked = swarm.run("plan", *asked, "--memory", "2GB", "--json")
    assert looked.exit_code() == ExitCode.OK, looked.text
    plan = json.loads(looked.text.splitlines()[-1])
    assert (plan["strategy"], plan["fragments"], plan["cadence"], plan["codec"]) == ("full", 2, 1, "float32")
    assert 1 <= plan["micro_batch"] <= 16 and plan["samples_per_second"] > 0
    assert "1 other peer(s) train in this run now." in plan["reasons"]
    refused = swarm.run("too-small", *asked, "--memory", "100M")
    assert refused.exit_code() == ExitCode.NO_PLAN
    assert refused.text.splitlines()[-1].startswith("p2p-trainer: 100 MB of memory do not hold this run")
    codec = swarm.run("codec", *asked, "--codec", "int8")
    assert codec.exit_code() == ExitCode.USAGE
    assert codec.text.splitlines()[-1].startswith("p2p-trainer: --codec: all peers of this run encode with float32.")
    assert volunteer.events("plan"), "the volunteer's own"
    assert_no_traceback(*swarm.peers)
