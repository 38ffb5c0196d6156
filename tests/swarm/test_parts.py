"""Parts of a peer that die or freeze alone: it comes back by itself, and none looks healthy that is not."""

from __future__ import annotations

import json
import signal
import time

import pytest
from harness import (
    FRAGMENTS,
    START_SECONDS,
    Peer,
    Swarm,
    assert_bases_hold_every_credit_once,
    assert_digests_agree,
    assert_no_traceback,
    assert_samples_add_up,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

OFTEN = ("--checkpoint-seconds", "2")


def fault_of(peer: Peer) -> str:
    """What it said of its own failure; there must be one."""
    (fault,) = peer.events("fault")
    assert fault["exit_code"] == 22
    return str(fault["reason"])


def wait_back(swarm: Swarm, *peers: Peer) -> None:
    for peer in peers:
        swarm.wait_until(
            lambda peer=peer: peer.events("fault") and len(peer.events("join")) == 2,
            f"{peer.name} has come back",
            START_SECONDS,
        )


def test_a_peer_whose_daemon_or_averaging_process_dies_or_freezes_comes_back_by_itself(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    names = ("steady", "daemon-killed", "averaging-killed", "daemon-frozen", "averaging-frozen")
    peers = [swarm.join(name, bootstrap.invite, 40, *OFTEN) for name in names]
    steady, daemon_killed, averaging_killed, daemon_frozen, averaging_frozen = peers
    swarm.wait_averaged(*peers, group=len(peers), rounds=FRAGMENTS)
    swarm.wait_until(averaging_killed.checkpoint.exists, "it has saved a checkpoint", START_SECONDS)
    before = {peer: peer.daemon_process().pid for peer in (bootstrap, *peers)}

    daemon_killed.daemon_process().kill()
    averaging_killed.averaging_process().kill()
    bootstrap.daemon_process().kill()
    wait_back(swarm, bootstrap, daemon_killed, averaging_killed)
    swarm.wait_averaged(*peers, group=len(peers), rounds=FRAGMENTS, after=time.time())
    daemon_frozen.daemon_process().suspend()
    frozen = averaging_frozen.averaging_process()
    frozen.suspend()
    wait_back(swarm, daemon_frozen, averaging_frozen)
    swarm.wait_averaged(*peers, group=len(peers), rounds=FRAGMENTS, after=time.time())

    assert not frozen.is_running()
    struck = [bootstrap, *peers[1:]]
    assert not {peer.daemon_process().pid for peer in struck} & set(before.values())
    assert steady.daemon_process().pid == before[steady] and not steady.events("fault")
    for peer in (daemon_killed, bootstrap):
        assert fault_of(peer) == "The p2p daemon ended unexpectedly (exit code -9)."
    assert fault_of(averaging_killed) == "The averaging process ended unexpectedly (exit code -9)."
    assert "daemon was frozen" in fault_of(daemon_frozen)
    assert "averaging process was frozen" in fault_of(averaging_frozen)
    assert all("Coming back" in peer.text for peer in struck)
    assert set(swarm.leave_all().values()) == {0}
    for peer in (steady, daemon_killed, daemon_frozen):  # what they had was saved when their daemon failed
        assert assert_samples_add_up(peer)["dropped_samples"] == 0, peer.name
    for peer in (averaging_killed, averaging_frozen):
        assert_samples_add_up(peer)
    assert_bases_hold_every_credit_once(peers)
    assert_digests_agree(bootstrap, *peers)
    assert_no_traceback(*swarm.peers)


def test_a_peer_whose_training_process_is_stopped_leaves_and_comes_back_when_it_is_continued(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    peers = [swarm.join(name, bootstrap.invite, 40) for name in ("one", "other", "stopped")]
    *others, stopped = peers
    swarm.wait_averaged(*peers, group=3, rounds=FRAGMENTS)

    def health() -> tuple[int, str]:
        asked = swarm.run("status", "status", "--local", "--dir", str(stopped.directory), "--json")
        code = asked.exit_code()
        return code, json.loads(asked.text)["peers"][0]["state"]

    code, state = health()
    assert code == 0 and state.startswith("training")
    stopped.process.send_signal(signal.SIGSTOP)
    code, state = health()
    assert code == 25 and "is stopped" in state
    swarm.wait_until(lambda: len(stopped.processes()) == 1, "its averaging process has said goodbye", START_SECONDS)
    training = [peer["peer_id"] for peer in swarm.status(bootstrap.invite)["peers"] if peer["status"] == "training"]
    assert sorted(training) == sorted(peer.peer_id for peer in others)
    swarm.wait_averaged(*others, group=2, rounds=FRAGMENTS, after=time.time())

    stopped.process.send_signal(signal.SIGCONT)
    swarm.wait_until(lambda: len(stopped.events("join")) == 2, "it has come back", START_SECONDS)
    swarm.wait_averaged(*peers, group=3, rounds=FRAGMENTS, after=time.time())
    code, state = health()
    assert code == 0 and state.startswith("training")
    assert set(swarm.leave_all().values()) == {0}
    assert assert_samples_add_up(stopped)["dropped_samples"] == 0
    assert_bases_hold_every_credit_once(peers)
    assert_digests_agree(*peers)
    assert_no_traceback(*swarm.peers)
