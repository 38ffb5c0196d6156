"""``doctor`` with an invite to a real run: everything is found, nothing is changed, and a peer beside it goes on."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from harness import Swarm, assert_no_traceback

from dht_config.errors import ExitCode
from dht_config.invite import Invite

pytestmark = pytest.mark.swarm


def looked(swarm: Swarm, *arguments: str, code: ExitCode = ExitCode.OK) -> dict[str, dict[str, Any]]:
    """What ``doctor --json`` finds, by check."""
    doctor = swarm.run("doctor", "doctor", *arguments, "--json", "--device", "cpu")
    assert doctor.exit_code() == code, doctor.text
    rows = json.loads(next(line for line in doctor.text.splitlines() if line.startswith("[")))
    return {row["check"]: row for row in rows}


def test_a_run_is_examined_and_a_port_dialled_back(swarm: Swarm) -> None:
    invite = swarm.bootstrap().invite
    one, two = swarm.join("one", invite), swarm.join("two", invite)
    swarm.wait_averaged(one, two)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = looked(swarm, invite, "--host", "127.0.0.1", "--port", str(port))
    assert [found[check]["ok"] for check in ("swarm", "clock", "manifest", "peers", "traffic")] == [True] * 5
    assert "2 train" in found["peers"]["cause"] and "with 3 peers training" in found["traffic"]["cause"]
    # All are on this machine: the port was reached, but nobody outside was there to say so.
    assert found["port"]["ok"] is None and f"3 of 3 peer(s) reached port {port}" in found["port"]["cause"]
    assert found["nat"]["ok"] is None

    # A port on which our own peer listens cannot be tried; a peer does not mind being looked at.
    beside = looked(swarm, invite, "--host", "127.0.0.1", "--dir", str(one.directory))
    assert beside["port"]["ok"] is None and "in use" in beside["port"]["cause"]
    swarm.wait_averaged(one, two, rounds=2, after=time.time())
    swarm.leave_all()
    assert_no_traceback(*swarm.peers)


def test_a_door_that_is_shut_and_a_run_that_is_unknown_are_findings(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    invite = Invite.decode(bootstrap.invite)
    other = invite.model_copy(update={"run_id": "digits-0123456789abcdef"}).encode()
    found = looked(swarm, other, code=ExitCode.CHECKS_FAILED)
    assert found["swarm"]["ok"] is True and found["manifest"]["ok"] is False
    assert invite.run_id in found["manifest"]["cause"]
    assert [found[check]["ok"] for check in ("peers", "traffic", "port", "nat")] == [None] * 4
    bootstrap.end()
    found = looked(swarm, bootstrap.invite, "--wait-seconds", "1", code=ExitCode.CHECKS_FAILED)
    assert found["swarm"]["ok"] is False and "nobody listens there" in found["swarm"]["cause"]
    assert found["memory"]["ok"] is True
    assert_no_traceback(*swarm.peers)
