"""Ways to end a peer: within ten seconds nothing of it is left, and what it did is kept."""

from __future__ import annotations

import os
import signal

import pytest
from harness import Swarm, assert_no_traceback, assert_samples_add_up

from dht_config.errors import ExitCode
from p2p_trainer import comeback

pytestmark = pytest.mark.swarm


def test_however_a_peer_is_ended_nothing_of_it_is_left_after_ten_seconds(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    names = ("terminated", "interrupted", "interrupted-twice", "killed", "childless", "daemonless")
    # As after the last of several comebacks in a row: parts that die end the peer, which test_parts.py is about else.
    last_life = {comeback.ENVIRONMENT_NAME: str(len(comeback.WAIT_SECONDS))}
    peers = {name: swarm.join(name, bootstrap.invite, 40, environment=last_life) for name in names}
    swarm.wait_averaged(*peers.values())
    # The door is forked from a process that has imported everything, the others are started as a person does.
    for peer in (bootstrap, *peers.values()):
        # The check below is worth something only if the marks are inherited by all of them.
        assert {peer.process.pid, peer.averaging_process().pid, peer.daemon_process().pid} == {
            process.pid for process in peer.processes()
        }

    assert peers["terminated"].end(signal.SIGTERM) == ExitCode.OK

    peers["interrupted"].signal_group(signal.SIGINT)
    assert peers["interrupted"].gone() == ExitCode.OK

    peers["interrupted-twice"].signal_group(signal.SIGINT)
    peers["interrupted-twice"].signal_group(signal.SIGINT)
    assert peers["interrupted-twice"].gone() in (ExitCode.OK, ExitCode.INTERRUPTED)

    peers["killed"].expected_to_live = False
    peers["killed"].process.kill()
    assert peers["killed"].gone() == -signal.SIGKILL

    for name, process in (
        ("childless", peers["childless"].averaging_process()),
        ("daemonless", peers["daemonless"].daemon_process()),
    ):
        peers[name].expected_to_live = False
        os.kill(process.pid, signal.SIGKILL)
    assert peers["childless"].gone() == ExitCode.SWARM_PROCESS_DIED
    assert peers["childless"].text.splitlines()[-1].startswith("p2p-trainer: The averaging process ended")

    for name in ("terminated", "interrupted"):
        assert peers[name].checkpoint.is_file()
        assert_samples_add_up(peers[name])
    assert peers["daemonless"].gone() == ExitCode.SWARM_PROCESS_DIED
    assert peers["daemonless"].text.splitlines()[-1].startswith("p2p-trainer: The p2p daemon ended")
    assert_no_traceback(*peers.values())
