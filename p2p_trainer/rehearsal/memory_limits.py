"""Memory that a peer really lives in: a control group for each, which the kernel holds to its limit.

Of cgroup v1 or v2, whichever has the memory controller here and lets us make groups: as root, in a container whose
groups are writable, or in a part of the v2 tree that was delegated to this user. Nothing is moved out of a limit that
already holds us. What a group counts is what its processes touch first: what several peers read of one file is the
first one's. Memory of a GPU is not in it.

The groups are removed at the end. If we are killed, a process of this very file (``keep_watch``) removes them as soon
as nobody is in them; what does not end by then it kills. Standard library alone, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ORPHAN_SECONDS = 15.0
"""Peers whose rehearsal was killed leave by themselves; whoever has not by then is killed."""
REMOVE_SECONDS = 2.0
"""Until the kernel has ended the last processes of a group."""
POLL_SECONDS = 0.05
_PROC = Path("/proc")
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2**63 where there is no limit."""


class MemoryLimitsUnavailable(Exception):
    """Memory cannot be limited here; the text says why."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the memory controller is, and where in it this process is."""

    version: int
    """Of cgroup, 1 or 2."""
    mounted_at: Path
    own: Path

    def upwards(self) -> Iterator[Path]:
        """This process's group, and those around it."""
        yield self.own
        if self.own != self.mounted_at:
            for parent in self.own.parents:
                yield parent
                if parent == self.mounted_at:
                    return

    @property
    def usage_name(self) -> str:
        return "memory.usage_in_bytes" if self.version == 1 else "memory.current"

    def reclaimable(self, group: Path) -> int:
        """Bytes of files that were read and that nobody has used for a while."""
        counts = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
        return int(counts.get("total_inactive_file" if self.version == 1 else "inactive_file", 0))

    def limit(self, group: Path) -> int | None:
        """A group's own limit in bytes."""
        text = _read(group / ("memory.limit_in_bytes" if self.version == 1 else "memory.max"))
        return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def hierarchies(proc: Path = _PROC) -> list[Hierarchy]:
    """The memory controllers there are: of v1, v2, none, and never both."""
    groups = {}
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups[controllers] = path
    found = []
    for line in _read(proc / "self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        root, mounted_at = (part.encode().decode("unicode_escape") for part in mount.split()[3:5])
        file_system, _, options = kind.split(" ", 2)
        for controllers, path in groups.items():
            is_v1 = file_system == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(",")
            is_v2 = file_system == "cgroup2" and controllers == ""
            if is_v1 or is_v2:
                # In a container what is mounted may be a part of the tree, and our path may begin above it.
                below = path[len(root.rstrip("/")) :] if (path + "/").startswith(root.rstrip("/") + "/") else ""
                own = Path(mounted_at + below)
                if not own.is_dir():
                    own = Path(mounted_at)
                if is_v1 or "memory" in _read(own / "cgroup.controllers").split():
                    found.append(Hierarchy(1 if is_v1 else 2, Path(mounted_at), own))
    return found


def least_limit_bytes(proc: Path = _PROC) -> int | None:
    """The least limit of the groups that this process is in; None if there is none."""
    limits = [
        limit
        for hierarchy in hierarchies(proc)
        for group in hierarchy.upwards()
        if (limit := hierarchy.limit(group)) is not None
    ]
    return min(limits, default=None)


def memory_of_this_computer(proc: Path = _PROC) -> int:
    """Bytes that processes started here may take at most: what there is, or less if a group around us has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = least_limit_bytes(proc)
    return physical if limit is None else min(physical, limit)


def memory_left_bytes(proc: Path = _PROC) -> int | None:
    """Bytes that processes here may still take: of what there is, and of every limit around us; None if not known.

    What holds files that were read counts as free, as it does for the kernel.
    """
    lines = _read(proc / "meminfo").splitlines()
    left = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for hierarchy in hierarchies(proc):
        for group in hierarchy.upwards():
            if (limit := hierarchy.limit(group)) is not None:
                used = int(_read(group / hierarchy.usage_name) or 0)
                left.append(max(0, limit - used + hierarchy.reclaimable(group)))
    return min(left, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What became of a peer's memory."""

    limit_bytes: int | None
    """None: it had no limit of its own."""
    peak_bytes: int
    """The most that its processes held at once, and files they read as far as there was room."""
    kills: int
    """Processes that the kernel killed because the limit was reached."""


class MemoryLimits:
    """A control group for each peer, from entering this context to leaving it.

    :param limits: bytes for each peer's name, of one at least; None only counts
    """

    def __init__(self, limits: Mapping[str, int | None]) -> None:
        self._limits = dict(limits)
        self._version = 0
        self._groups: dict[str, Path] = {}
        self._seen = {peer: MemoryUse(limit_bytes=limit, peak_bytes=0, kills=0) for peer, limit in limits.items()}
        self._let: list[Path] = []
        """Groups of v2 in which limits were not allowed before."""
        self._watch: subprocess.Popen[bytes] | None = None
        self.directory: Path | None = None
        """The group around all of theirs, for as long as it is there."""

    def __enter__(self) -> MemoryLimits:
        """:raises MemoryLimitsUnavailable: there is no memory controller here that this user may use"""
        reason = "no cgroup with the memory controller is mounted"
        for hierarchy in hierarchies():
            for parent in hierarchy.upwards():
                try:
                    self._make(hierarchy.version, parent)
                    return self
                except (OSError, subprocess.SubprocessError) as error:
                    reason = f"{parent}: {error.strerror if isinstance(error, OSError) else error}"
                    self.close()
                # Above a group with a limit we would be free of it; v1 takes groups anywhere, or nowhere.
                if hierarchy.version == 1 or hierarchy.limit(parent) is not None:
                    break
        raise MemoryLimitsUnavailable(reason)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the groups. One with a living process in it stays, and so does ``directory``; call again then."""
        self.sample()
        if self.directory is not None and remove(self.directory, REMOVE_SECONDS):
            self.directory = None
        while self._let and self.directory is None:
            with suppress(OSError):  # somebody else has made groups with limits in it meanwhile
                (self._let.pop() / "cgroup.subtree_control").write_text("-memory")
        if self._watch is not None and self.directory is None:
            with self._watch:  # closes its input, which ends it
                self._watch = None

    def __contains__(self, peer: object) -> bool:
        return peer in self._limits

    def enter(self, peer: str) -> None:
        """Move this process there, and with it all that it will start. For one that has just been forked."""
        (self._groups[peer] / "cgroup.procs").write_text("0")

    def sample(self) -> None:
        """Look at all of them now: before Linux 5.19, v2 does not remember the most that was used."""
        for peer in self._groups:
            self.use(peer)

    def use(self, peer: str) -> MemoryUse:
        """What a peer has used so far: all its processes together, also those that have ended."""
        group, seen = self._groups[peer], self._seen[peer]
        peak, current, events = (
            ("memory.max_usage_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
            if self._version == 1
            else ("memory.peak", "memory.current", "memory.events")  # the first one since Linux 5.19
        )
        sizes = [int(text) for name in (peak, current) if (text := _read(group / name)).isdigit()]
        counts = dict(line.split(maxsplit=1) for line in _read(group / events).splitlines())
        self._seen[peer] = MemoryUse(
            limit_bytes=seen.limit_bytes,
            peak_bytes=max(seen.peak_bytes, *sizes, 0),
            kills=max(seen.kills, int(counts.get("oom_kill", 0))),
        )
        return self._seen[peer]

    def _make(self, version: int, parent: Path) -> None:
        """:raises OSError: :raises subprocess.SubprocessError: it cannot be done below this group"""
        self._version = version
        directory = parent / f"p2p-trainer-rehearsal-{os.getpid()}-{time.monotonic_ns():x}"
        if version == 2 and _let_limit(parent):
            self._let.append(parent)
        directory.mkdir()
        self.directory = directory
        if version == 2:
            _let_limit(directory)
        for peer, limit in self._limits.items():
            group = self._groups[peer] = directory / f"peer-{peer}"
            group.mkdir()
            if limit is not None:
                _limit(version, group, limit)
        # Whether processes may be moved here is known when one was.
        first = next(iter(self._limits))
        subprocess.run([sys.executable, "-IS", "-c", ""], preexec_fn=lambda: self.enter(first), check=True)
        self._watch = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the rehearsal
        )


def remove(directory: Path, within_seconds: float) -> bool:
    """Remove a group and those in it as soon as no process is in them; False if one still was."""
    deadline = time.monotonic() + within_seconds
    while directory.is_dir():
        for group in [*directory.glob("*/"), directory]:
            with suppress(OSError):
                group.rmdir()
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return not directory.is_dir()


def keep_watch(directory: Path) -> None:
    """Wait until whoever started this is gone; remove what it left, after its peers had time to leave."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    if not directory.is_dir() or remove(directory, ORPHAN_SECONDS):
        return
    for group in directory.glob("*/"):
        for pid in _read(group / "cgroup.procs").split():
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)  # also one that is frozen
    remove(directory, REMOVE_SECONDS)


def _limit(version: int, group: Path, limit_bytes: int) -> None:
    """Without swap where there is any: a peer that swaps would be slow instead of out of memory."""
    if version == 1:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        with suppress(OSError):
            (group / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
    else:
        (group / "memory.max").write_text(str(limit_bytes))
        with suppress(OSError):
            (group / "memory.swap.max").write_text("0")


def _let_limit(group: Path) -> bool:
    """Let the groups in a v2 group have limits; False if they already could.

    :raises OSError: it is not this user's, or has processes of its own
    """
    if "memory" in _read(group / "cgroup.subtree_control").split():
        return False
    (group / "cgroup.subtree_control").write_text("+memory")
    return True


def _read(path: Path) -> str:
    """Without the last line's end; empty if it cannot be read: this version has no such file, or the group is gone."""
    try:
        return path.read_text().rstrip("\n")
    except OSError:
        return ""


if __name__ == "__main__":
    keep_watch(Path(sys.argv[1]))
