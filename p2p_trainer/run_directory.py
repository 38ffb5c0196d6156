"""The directory in which one peer of one run keeps everything: identity, manifest, checkpoints, metrics."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from dht_config.errors import DirectoryError, RecordError
from dht_config.identity import Identity, OrganiserKey, load_or_create_identity, load_or_create_organiser_key
from dht_config.records import SignedManifest
from p2p_trainer.limits import nearest_existing
from p2p_trainer.run_files import INVITE_NAME, LOCK_NAME, METRICS_NAME, SIGNED_MANIFEST_NAME, STATE_NAME
from peers.daemon import make_socket_directory
from peers.notes import write_note

LOCK_PATIENCE_SECONDS = 1.0
"""``status --local`` holds the lock of a directory for an instant, to see whether somebody does."""


class RunDirectory:
    """Checked to be writable and locked against a second peer for as long as this object lives.

    :raises DirectoryError: not writable, or in use by another process
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._lock = (path / LOCK_NAME).open("a+")
        except OSError as error:
            raise DirectoryError(
                f"{path / LOCK_NAME} cannot be written: {error.strerror or error}.",
                f"If another user started a peer in {path}: chown -R {os.getuid()} {path}, or choose another directory "
                "with --dir.",
            ) from error
        _take(self._lock, path)
        os.set_inheritable(self._lock.fileno(), False)
        with suppress(OSError):  # a disk that is full; only ``status --local`` reads it
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), f"{os.getpid()}\n".encode())
        with suppress(OSError):
            (path / STATE_NAME).unlink(missing_ok=True)  # of a life before

    def close(self) -> None:
        self._lock.close()

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS_NAME

    @property
    def socket_note_path(self) -> Path:
        return self.path / "sockets.path"

    def identity(self) -> Identity:
        return load_or_create_identity(self.path / "identity.key")

    def organiser_key(self) -> OrganiserKey:
        return load_or_create_organiser_key(self.path / "organiser.key")

    def socket_directory(self) -> Path:
        """A fresh directory for Unix sockets; what a killed predecessor left is removed.

        :raises DirectoryError:
        """
        try:
            return make_socket_directory(self.socket_note_path)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise DirectoryError(
                f"There is no place for this peer's sockets: {error.strerror or error}{where}.",
                "Free some space there and make it writable; TMPDIR chooses another temporary directory.",
            ) from error

    def count_start(self) -> int:
        """How often a peer was started in this directory before."""
        path = self.path / "starts"
        try:
            count = int(path.read_text())
        except (OSError, ValueError):
            count = 0
        self.write_atomically("starts", str(count + 1).encode())
        return count

    def remembered_port(self) -> int:
        """The port of the last start, or 0."""
        return remembered_port(self.path)

    def remember_port(self, port: int) -> None:
        self.write_atomically("port", str(port).encode())

    def signed_manifest(self) -> SignedManifest | None:
        """The manifest of the last start; None if there was none or it is damaged.

        :raises DirectoryError: it is there and may not be read
        """
        path = self.path / SIGNED_MANIFEST_NAME
        try:
            signed = SignedManifest.from_payload(path.read_bytes())
            signed.verify()
        except (FileNotFoundError, RecordError):
            return None
        except OSError as error:
            raise DirectoryError(
                f"{path} cannot be read: {error.strerror or error}.",
                f"Make it this user's (chown {os.getuid()} {path}).",
            ) from error
        return signed

    def keep_signed_manifest(self, signed: SignedManifest) -> None:
        self.write_atomically(SIGNED_MANIFEST_NAME, signed.to_payload())

    @property
    def archive_path(self) -> Path:
        """Where a bootstrap peer keeps snapshots."""
        return self.path / "archive"

    def keep_state(self, state: str, reason: str) -> None:
        """What the peer is doing and why, for whoever looks from outside; a full disk only keeps that from them."""
        write_note(self.path / STATE_NAME, {"state": state, "reason": reason})

    def keep_invite(self, code: str) -> None:
        """For ``p2p-trainer invite``, which makes others of it."""
        self.write_atomically(INVITE_NAME, f"{code}\n".encode())

    def write_atomically(self, name: str, data: bytes) -> None:
        """:raises DirectoryError:"""
        partial = self.path / f".{name}.partial"
        try:
            partial.write_bytes(data)
            os.replace(partial, self.path / name)
        except OSError as error:
            raise DirectoryError(
                f"{self.path / name} cannot be written: {error.strerror or error}.",
                "Free some space or choose another directory with --dir.",
            ) from error


def _take(lock: IO[str], path: Path) -> None:
    """:raises DirectoryError: another process holds it"""
    give_up = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if time.monotonic() > give_up:
                raise DirectoryError(
                    f"Another peer is running in {path}.",
                    "Stop it, or give this one a directory of its own with --dir.",
                ) from error
            time.sleep(0.05)


def remembered_port(path: Path) -> int:
    """The port of the last start in a directory, or 0; nobody need own the directory."""
    try:
        port = int((path / "port").read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65536 else 0


def _unusable(path: Path, error: OSError) -> DirectoryError:
    """Say what is in the way of a directory, and what helps against just that."""
    there = nearest_existing(path)
    if there == path and not path.is_dir():
        return DirectoryError(
            f"{path} is a file, not a directory.", "Give --dir a directory, or a name that does not exist yet."
        )
    if not there.is_dir():
        return DirectoryError(
            f"The directory {path} cannot be made: {there} is a file.", "Give --dir a path that leads through no file."
        )
    why = error.strerror or str(error)
    what = f"The directory {path} cannot be {'written to' if there == path else f'made in {there}'}: {why}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DirectoryError(what, "Free some space there, or choose a directory on another disk with --dir.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DirectoryError(
            what,
            f"Make {there} writable for this user (chown {os.getuid()}, or chmod), or choose another directory with "
            "--dir.",
        )
    if error.errno == errno.EROFS:
        return DirectoryError(what, "Choose a directory on a file system that can be written to with --dir.")
    return DirectoryError(what, "Choose another directory with --dir.")
