"""``doctor`` with an invite to a real run: everything is found, nothing is changed, and a peer beside it goes on."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from harness import Swarm, assert_no_traceback

from dht_config.address import parse_address
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
    assert found["port"]["ok"] is None and f"peer(s) reached port {port} at 127.0.0.1" in found["port"]["cause"]
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


@contextmanager
def router(port: int, outside: str) -> Iterator[int]:
    """Passes connections on to a port of this machine, as if they came from another address; gives its own port.

    Like NAT that forwards nothing back: whoever is called sees ``outside``.
    """

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                inner, _ = listener.accept()
                outer = socket.create_connection(("127.0.0.1", port), source_address=(outside, 0))
                for ends in ((inner, outer), (outer, inner)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine's on Linux only")
def test_behind_a_router_peers_tell_where_they_see_this_machine_and_whether_they_reach_it(swarm: Swarm) -> None:
    invite = Invite.decode(swarm.bootstrap().invite)
    address = parse_address(invite.addresses[0])
    with router(address.transport.port, "127.0.0.9") as port:
        through = address.text.replace(f"/tcp/{address.transport.port}/", f"/tcp/{port}/")
        behind = invite.model_copy(update={"addresses": (through,)}).encode()
        found = looked(swarm, behind, "--host", "127.0.0.1", code=ExitCode.CHECKS_FAILED)
        assert found["port"]["ok"] is False and "at 127.0.0.9" in found["port"]["cause"]
        assert found["nat"]["ok"] is False and "peers see 127.0.0.9" in found["nat"]["cause"]
        assert "--announce /ip4/127.0.0.9/tcp/31337" in found["nat"]["remedy"]
        # A router that forwards the port: here, to listen on every address is the same.
        found = looked(swarm, behind, "--host", "0.0.0.0")
        assert found["nat"]["ok"] is True and "forwards the port" in found["nat"]["cause"]
    assert_no_traceback(*swarm.peers)
