"""What a rehearsal may leave behind, noted while it runs: afterwards nobody could tell whose it was."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

POLL_SECONDS = 0.1
RECORD_SECONDS = 1.0
VANISH_SECONDS = 2.0
"""Until the kernel has ended the children of a process that is gone."""
_SOCKET_DIRECTORY_PREFIX = "p2p-trainer-"


class Traces:
    """Everything a rehearsal may leave behind: descendants, and the socket directories they wrote down."""

    def __init__(self) -> None:
        # psutil compares a process by pid and creation time, so a reused pid is another process.
        self._processes: set[psutil.Process] = set()
        self._before = set(psutil.Process().children(recursive=True))
        self._socket_directories: set[Path] = set()
        self._expected: set[Path] = set()
        self._recorded_at = float("-inf")

    def record(self, directory: Path, now: bool = False) -> None:
        """Note what is there at present. A child that outlives its parent is found because it was noted before."""
        if not now and time.monotonic() - self._recorded_at < RECORD_SECONDS:
            return
        self._recorded_at = time.monotonic()
        self._processes |= set(psutil.Process().children(recursive=True)) - self._before
        for note in directory.glob("*/sockets.path"):
            if (noted := _noted(note)) is not None:
                self._socket_directories.add(noted)

    def expect(self, peer_directory: Path) -> None:
        """What a peer could not remove because it was killed on purpose is removed at the end, and is no leftover."""
        if (noted := _noted(peer_directory / "sockets.path")) is not None:
            self._socket_directories.add(noted)
            self._expected.add(noted)

    def leftovers(self) -> list[str]:
        """What is still there, in words, after a moment for the kernel to end orphans."""
        deadline = time.monotonic() + VANISH_SECONDS
        while (found := self._present()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return found

    def clean(self) -> None:
        """End and remove what was left."""
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # psutil checks that the pid was not reused
        for directory in self._socket_directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _present(self) -> list[str]:
        processes = [
            f"process {process.pid} ({name})" for process in self._processes if (name := _name_if_alive(process))
        ]
        directories = sorted(self._socket_directories - self._expected)
        return sorted(processes) + [f"sockets in {path}" for path in directories if path.exists()]


def _noted(note: Path) -> Path | None:
    """The socket directory that a peer wrote down in this file."""
    with suppress(OSError, UnicodeDecodeError):
        noted = Path(note.read_text().strip())
        # The file is the peer's, but nothing else than a directory of that kind is ever removed.
        if noted.is_absolute() and noted.name.startswith(_SOCKET_DIRECTORY_PREFIX):
            return noted
    return None


def _name_if_alive(process: psutil.Process) -> str:
    """A zombie has ended: it waits for a parent that never asks, as in a container without an init."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return process.name() or "?"
    except psutil.NoSuchProcess:
        return ""
    except psutil.AccessDenied:
        return "?"
