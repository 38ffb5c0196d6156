"""Disks that fill up or turn read-only while a peer trains: it goes on and says so, and the last checkpoint stays."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import START_SECONDS, Peer, Swarm, assert_digests_agree, assert_no_traceback

from dht_config.errors import ExitCode
from dht_config.identity import load_or_create_identity
from dht_config.invite import Invite
from p2p_trainer.archive import Archive
from p2p_trainer.checkpoint import load_checkpoint, read_checkpoint

pytestmark = pytest.mark.swarm

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"
COMPLAINT = "Training goes on, but the checkpoint could not be saved: "


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB. Requested before ``swarm``, so that it is unmounted after the peers have ended."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    if (refused := mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", directory)) is not None:
        pytest.skip(f"mounting is not allowed here: {refused}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.fixture
def unmounted_later() -> Iterator[list[Path]]:
    """Put paths in that have become mount points."""
    paths: list[Path] = []
    try:
        yield paths
    finally:
        for path in paths:
            subprocess.run(["umount", path], check=True)


def mount(*arguments: str | Path) -> str | None:
    """None if it worked, else why not."""
    if shutil.which("mount") is None:
        return "there is no mount command"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else None


def fill(directory: Path) -> Path:
    """A file that leaves no room for another byte."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return filler


def test_peers_whose_disks_fill_up_or_turn_read_only_train_on(
    tiny_disk: Path, unmounted_later: list[Path], swarm: Swarm
) -> None:
    bootstrap = swarm.bootstrap()
    often = ("--checkpoint-seconds", "1")
    healthy = swarm.join("healthy", bootstrap.invite, 40)
    full = swarm.join("full", bootstrap.invite, 40, *often, directory=tiny_disk / "full")
    fixed = swarm.join("fixed", bootstrap.invite, 40, *often)
    swarm.wait_averaged(healthy, full, fixed, group=3)
    swarm.wait_until(lambda: full.checkpoint.exists() and fixed.checkpoint.exists(), "both saved a checkpoint", 60)

    filler = fill(tiny_disk)
    # Not a remount: that is refused while files are open for writing. What the peer opens from now on is read-only.
    assert mount("--bind", fixed.directory, fixed.directory) is None
    unmounted_later.append(fixed.directory)
    assert mount("-o", "remount,bind,ro", fixed.directory) is None
    for peer, reason in ((full, "No space left on device"), (fixed, "Read-only file system")):
        swarm.wait_said(peer, f"{COMPLAINT}The checkpoint {peer.checkpoint} cannot be written", reason)

    kept = {peer: peer.checkpoint.read_bytes() for peer in (full, fixed)}
    # The peer with the full disk loses its metrics as well; in whose group it was, the others know.
    swarm.wait_averaged(healthy, fixed, group=3, rounds=4, after=time.time())
    for peer in (full, fixed):
        assert peer.checkpoint.read_bytes() == kept[peer]
        assert loaded_samples(swarm, peer) > 0
        assert peer.text.count(COMPLAINT) == 1
    # At most: the last page of the metrics file may have room for a while.
    assert full.text.count("events are lost, training goes on") <= 1

    filler.unlink()
    freed = time.time()
    swarm.wait_until(lambda: os.stat(full.checkpoint).st_mtime > freed, "it saves again where there is room", 30)
    swarm.wait_averaged(full, group=3, after=freed)

    assert set(swarm.leave_all().values()) == {0}
    assert fixed.checkpoint.read_bytes() == kept[fixed]
    assert full.checkpoint_meta()["samples"] == full.events("leave")[0]["processed_samples"]
    assert_digests_agree(healthy, full, fixed)
    assert_no_traceback(*swarm.peers)


def test_a_door_whose_disk_fills_up_serves_on_and_keeps_the_snapshots_it_has(tiny_disk: Path, swarm: Swarm) -> None:
    door = ("bootstrap", str(swarm.manifest), "--dir", str(tiny_disk / "door"), "--host", "127.0.0.1", "--plain")
    often = ("--snapshot-versions", "1", "--snapshot-keep", "2", "--checkpoint-seconds", "1")
    bootstrap = swarm.run("door", *door, *often, directory=tiny_disk / "door")
    swarm.wait_until((bootstrap.directory / "invite").exists, "it is open", START_SECONDS)
    invite = (bootstrap.directory / "invite").read_text().strip()
    archive = Archive(bootstrap.directory / "archive", 1, 2)
    first, second = swarm.join("first", invite, 80), swarm.join("second", invite, 40)
    swarm.wait_averaged(first, second)
    swarm.wait_until(lambda: len(archive.versions()) > 2, "it keeps snapshots", START_SECONDS)

    filler = fill(tiny_disk)
    swarm.wait_said(bootstrap, "Serving goes on, but version", "is not in the archive", "Free some space")
    kept = archive.versions()
    assert kept and all(read_checkpoint(archive.path(version)).tensors["base"].isfinite().all() for version in kept)
    # It is killed in that state, and comes back where there is room: the same door, with the same archive.
    bootstrap.crash()
    filler.unlink()
    killed = time.time()
    again = swarm.run("door", *door, *often, directory=bootstrap.directory)
    swarm.wait_joined(again)
    assert again.peer_id == bootstrap.peer_id
    swarm.wait_until(lambda: max(archive.versions()) > max(kept), "it goes on with its archive", START_SECONDS)
    assert min(archive.versions()) == min(kept)
    swarm.wait_averaged(first, second, after=killed)
    assert set(swarm.leave_all().values()) == {0}
    assert_digests_agree(first, second, again)
    assert_no_traceback(*swarm.peers)


def test_a_directory_that_cannot_be_used_is_named_before_anybody_is_asked(
    tiny_disk: Path, unmounted_later: list[Path], swarm: Swarm
) -> None:
    """The invite leads nowhere: whoever dialled would wait for minutes, and end with another code."""
    nobody = Invite(run_id="tiny-0123456789abcdef", organiser_public_key=bytes(32), addresses=(ADDRESS,)).encode()
    fixed, foreign = swarm.path / "fixed", swarm.path / "foreign"
    for directory in (fixed, foreign):
        directory.mkdir()
    assert mount("--bind", fixed, fixed) is None
    unmounted_later.append(fixed)
    assert mount("-o", "remount,bind,ro", fixed) is None
    load_or_create_identity(foreign / "identity.key")
    os.chown(foreign / "identity.key", os.geteuid() + 1, -1)
    (tiny_disk / "full").mkdir()
    fill(tiny_disk)

    for directory, code, reason in (
        (fixed, ExitCode.DIRECTORY, "Read-only file system"),
        (tiny_disk / "full", ExitCode.DIRECTORY, "No space left on device"),
        (foreign, ExitCode.IDENTITY, f"belongs to user {os.geteuid() + 1}"),
    ):
        peer = swarm.join(directory.name, nobody, 40, directory=directory)
        assert peer.exit_code() == int(code), peer.text
        (line,) = (line for line in peer.text.splitlines() if line.startswith("p2p-trainer: "))
        assert str(directory) in line and reason in line
        assert "Looking for the run" not in peer.text
    assert_no_traceback(*swarm.peers)


def loaded_samples(swarm: Swarm, peer: Peer) -> int:
    """How many samples the checkpoint holds, which must be whole; read from a copy, since reading tidies up."""
    copy = swarm.path / f"copy-of-{peer.name}"
    copy.mkdir()
    shutil.copy(peer.checkpoint, copy)
    warnings: list[str] = []
    checkpoint = load_checkpoint(copy, warnings.append)
    assert checkpoint is not None and not warnings
    return int(checkpoint.meta["samples"])
