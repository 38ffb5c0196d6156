"""What people get wrong: one clear line, an exit code of its own, no traceback; and what is forgiven."""

from __future__ import annotations

import shutil
import socket

import pytest
from harness import Peer, Swarm, assert_no_traceback, small_manifest

from dht_config.errors import ExitCode
from dht_config.invite import Invite

pytestmark = pytest.mark.swarm

SOMEBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def assert_refused(peer: Peer, code: ExitCode, *words: str) -> None:
    """It ended with this code, its last line says so in these words, and nothing of it is left."""
    assert (peer.exit_code(), peer.text) and peer.process.returncode == code, f"{peer.name}: {peer.text}"
    lines = [line for line in peer.text.splitlines() if line.startswith("p2p-trainer:")]
    assert len(lines) == 1 and lines[0] == peer.text.splitlines()[-1], f"{peer.name}: {peer.text}"
    for word in words:
        assert word in lines[0], f"{peer.name} did not say {word!r}: {lines[0]}"
    assert_no_traceback(peer)


def test_what_cannot_be_used_is_refused_in_one_line(swarm: Swarm) -> None:
    invite = Invite(
        run_id="digits-0123456789abcdef", organiser_public_key=bytes(32), addresses=(_address(1, SOMEBODY),)
    ).encode()
    changed = invite[:-12] + ("b" if invite[-12] == "a" else "a") + invite[-11:]
    unknown_field = small_manifest(swarm.path / "unknown.toml", tick_seconds="tick_second = 1.0")
    a_file = swarm.path / "a-file"
    a_file.touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used_port = taken.getsockname()[1]
        by_peer = {
            "host-name-under-ip4": ("/ip4/peer.example.org/tcp/1/p2p/" + SOMEBODY, "/dns4/"),
            "no-peer-id": ("/ip4/127.0.0.1/tcp/1", "/p2p/"),
            "port-70000": (_address(70000, SOMEBODY), "65535"),
        }
        cases = [
            (swarm.join(name, swarm.manifest, 40, "--peer", text), ExitCode.ADDRESS, (word, "A correct one looks like"))
            for name, (text, word) in by_peer.items()
        ]
        cases += [
            (swarm.join("invite-cut-off", invite[:-3]), ExitCode.INVITE, ("cut off",)),
            (swarm.join("invite-changed", changed), ExitCode.INVITE, ("changed on its way",)),
            (swarm.join("unknown-field", unknown_field), ExitCode.MANIFEST, ("tick_second ", "tick_seconds")),
            (
                swarm.join("unwritable", swarm.manifest, directory=a_file / "peer"),
                ExitCode.DIRECTORY,
                (str(a_file), "--dir"),
            ),
            (
                swarm.join("used-port", swarm.manifest, 40, "--port", str(used_port)),
                ExitCode.PORT_IN_USE,
                (str(used_port), "--port"),
            ),
            (
                swarm.join("nobody-there", invite, 40, "--wait-seconds", "1"),
                ExitCode.UNREACHABLE,
                ("nobody listens there", "--peer"),
            ),
        ]
        for peer, _, _ in cases:
            peer.expected_to_live = False
        for peer, code, words in cases:
            assert_refused(peer, code, *words)


@pytest.mark.slow
def test_what_does_not_fit_a_running_swarm_is_refused_and_small_slips_are_forgiven(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    peer = swarm.join("peer", bootstrap.invite, 40)
    # Quotes around a good address; a bad one beside a good one is an error where it was typed, and left out where the
    # organiser wrote it.
    sloppy = swarm.join("sloppy", bootstrap.invite, 40, "--peer", f' "{bootstrap.address}", ')
    mistyped = swarm.join("mistyped", bootstrap.invite, 40, "--peer", "/ip4/127.0.0.1/tcp/1")
    written = small_manifest(
        swarm.path / "written.toml", initial_peers=f'initial_peers = ["/ip4/127.0.0.1/tcp/1", "{bootstrap.address}"]'
    )
    lenient = swarm.join("lenient", written, 40)
    transport = bootstrap.address.rpartition("/p2p/")[0]
    wrong_id = swarm.join("wrong-id", swarm.manifest, 40, "--peer", f"{transport}/p2p/{SOMEBODY}")
    other = small_manifest(
        swarm.path / "other.toml",
        batch_size="batch_size = 32",
        initial_peers=f'initial_peers = ["{bootstrap.address}"]',
    )
    differing = swarm.join("differing", other)
    for refused in (wrong_id, differing, mistyped):
        refused.expected_to_live = False
    assert_refused(wrong_id, ExitCode.WRONG_PEER_ID, SOMEBODY, bootstrap.address.rpartition("/")[2])
    assert_refused(differing, ExitCode.FINGERPRINT, "inner_optimizer.batch_size: ours 32, theirs 16")

    assert_refused(mistyped, ExitCode.ADDRESS, "--peer", "no /p2p/ part")

    swarm.wait_averaged(peer, sloppy, lenient)
    assert "Ignored: " in lenient.text and "no /p2p/ part" in lenient.text

    same_directory = swarm.join("same-directory", bootstrap.invite, directory=peer.directory)
    clone_directory = swarm.path / "clone"
    shutil.copytree(peer.directory, clone_directory)
    clone = swarm.join("clone", bootstrap.invite, directory=clone_directory)
    for refused in (same_directory, clone):
        refused.expected_to_live = False
    assert_refused(same_directory, ExitCode.DIRECTORY, str(peer.directory), "--dir")
    assert_refused(clone, ExitCode.IDENTITY, "identity", "identity.key")

    rounds = len(peer.rounds(group=2))
    swarm.wait_averaged(peer, sloppy, rounds=rounds + 2)
    assert set(swarm.leave_all().values()) == {0}


@pytest.mark.slow
def test_a_peer_waits_for_a_bootstrap_that_is_frozen(swarm: Swarm) -> None:
    bootstrap = swarm.bootstrap()
    bootstrap.freeze()
    patient = swarm.join("patient", bootstrap.invite, 40)
    # Its first attempt to connect takes ten seconds until it is given up.
    swarm.wait_said(patient, "Nobody answers yet", "no answer", "trying again in")
    assert not patient.joined
    bootstrap.thaw()
    swarm.wait_averaged(patient, group=1)
    assert_no_traceback(patient, bootstrap)


def _address(port: int, peer_id: str) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}"
