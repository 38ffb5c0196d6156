"""What this process may use of the machine: the least of what there is and what a container or a person allows.

In a container ``/proc/meminfo`` and ``os.cpu_count`` show the whole machine. What counts is in the control groups
(cgroups, version 1 or 2): a limit may stand in any ancestor of ours, and the tightest one kills. Reading is separate
from parsing: every ``parse_`` function takes text. What cannot be read is None: unknown, never zero.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dht_config.errors import LimitsError

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_UNLIMITED_BYTES = 2**60
"""cgroup v1 says "no limit" with a number near 2**63."""

LEAST_OPEN_FILES = 64
"""Below this no peer starts. With ``ulimit -n 64`` five peers on one machine trained; the busiest process, an averaging
process, had 37 descriptors open (``rehearse digits --peers 40,20,10,5``)."""
ENOUGH_OPEN_FILES = 256
"""Room for some dozens of peers: each takes a few descriptors."""
WANTED_OPEN_FILES = 4096
"""What the soft limit is raised to where the hard one allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """What the control groups of this process allow; None where they say nothing."""

    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Without page cache that the kernel can drop; of the group whose limit is ``memory_bytes``."""
    cores: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this process may use. Bytes; None where it could not be read."""

    cores: float
    """CPU time per second: the cores it may run on, or less if a control group says so."""
    total_memory_bytes: int
    free_memory_bytes: int
    """What can still be taken, of the machine and of every control group."""
    memory_is_capped: bool
    """Whether a control group allows less than the machine has."""
    shared_memory_bytes: int | None
    """The size of /dev/shm."""
    shared_memory_free_bytes: int | None
    open_files: int
    """The soft limit; the hard one can be reached without further rights."""
    open_files_hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Where a control-group hierarchy is mounted."""

    controllers: frozenset[str]
    """Empty for version 2, where one hierarchy has all."""
    root: str
    """Which group of the hierarchy is at the mount point: in a container often not its root."""
    point: Path


def read_limits() -> Limits:
    """Ask the system. Never fails: a limit that cannot be read is left out."""
    groups = read_group_limits()
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    capped = groups.memory_bytes is not None and groups.memory_bytes < total
    if groups.memory_bytes is not None:
        total = min(total, groups.memory_bytes)
        free = min(free, max(0, groups.memory_bytes - (groups.memory_used_bytes or 0)))
    shared = _usage(_SHARED_MEMORY)
    soft, hard = open_file_limits()
    return Limits(
        cores=min(float(_cores_to_run_on()), groups.cores or math.inf),
        total_memory_bytes=total,
        free_memory_bytes=free,
        memory_is_capped=capped,
        shared_memory_bytes=shared[0] if shared else None,
        shared_memory_free_bytes=shared[1] if shared else None,
        open_files=soft,
        open_files_hard=hard,
    )


def free_disk_bytes(directory: Path) -> int | None:
    """Free for this user where a directory is, or will be made."""
    usage = _usage(nearest_existing(directory))
    return usage[1] if usage else None


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest of its parents that is there as far as this user may see."""
    # Path.exists raises PermissionError below a directory that this user may not enter.
    return next(parent for parent in (path, *path.absolute().parents, Path("/")) if os.path.exists(parent))


def raise_open_file_limit() -> None:
    """Take as many open files as are allowed without asking, and refuse to start with too few.

    :raises LimitsError: the hard limit is below LEAST_OPEN_FILES; names the flag that helps
    """
    soft, hard = open_file_limits()
    if soft < WANTED_OPEN_FILES and soft < hard:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):  # macOS has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, WANTED_OPEN_FILES), allowed))
            soft = min(hard, WANTED_OPEN_FILES)
    if soft < LEAST_OPEN_FILES:
        raise LimitsError(
            f"This process may open {soft} files at once; a peer needs {LEAST_OPEN_FILES}.", open_files_remedy()
        )


def open_files_remedy() -> str:
    return (
        f"Say `ulimit -n {WANTED_OPEN_FILES}` before starting it; for a container, "
        f"`docker run --ulimit nofile={WANTED_OPEN_FILES}:{WANTED_OPEN_FILES}`."
    )


def open_file_limits() -> tuple[int, int]:
    """(soft, hard); without a limit, a number that is larger than any need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    without = 2**31
    return (
        without if soft == resource.RLIM_INFINITY else soft,
        without if hard == resource.RLIM_INFINITY else hard,
    )


def read_group_limits(proc: Path = _PROC) -> GroupLimits:
    """The tightest limits of the groups that this process is in, and of all above them."""
    paths = parse_own_groups(_text(proc / "self/cgroup"))
    mounts = parse_mounts(_text(proc / "self/mountinfo"))
    memory: list[tuple[int, int | None]] = []
    cores: list[float] = []
    for mount in mounts:
        if not mount.controllers:
            for group in _lineage(mount, paths.get("", "/")):
                memory += [
                    (limit, _used(group, "memory.current", "inactive_file"))
                    for name in ("memory.max", "memory.high")
                    if (limit := parse_bytes(_text(group / name))) is not None
                ]
                cores += _given(parse_cpu_max(_text(group / "cpu.max")))
        if "memory" in mount.controllers:
            for group in _lineage(mount, paths.get("memory", "/")):
                if (limit := parse_bytes(_text(group / "memory.limit_in_bytes"))) is not None:
                    memory.append((limit, _used(group, "memory.usage_in_bytes", "total_inactive_file")))
        if "cpu" in mount.controllers:
            for group in _lineage(mount, paths.get("cpu", "/")):
                quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
                cores += _given(parse_cpu_max(f"{quota} {period}"))
    # The group with the least left, not with the least limit: another process may have filled a wider one.
    tightest = min(memory, key=lambda pair: pair[0] - (pair[1] or 0), default=(None, None))
    return GroupLimits(memory_bytes=tightest[0], memory_used_bytes=tightest[1], cores=min(cores, default=None))


def parse_own_groups(text: str) -> dict[str, str]:
    """``/proc/self/cgroup``: controller to the path of our group; "" is version 2's."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/") and number.isdigit():
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def parse_mounts(text: str) -> list[Mount]:
    """``/proc/self/mountinfo``: where the control groups are (proc(5))."""
    mounts = []
    for line in text.splitlines():
        before, found, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not found or len(fields) < 5 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[-1].split(",")) if kind[0] == "cgroup" else frozenset()
        if kind[0] == "cgroup2" or controllers & {"memory", "cpu"}:
            mounts.append(Mount(controllers=controllers, root=fields[3], point=Path(_unescaped(fields[4]))))
    return mounts


def parse_bytes(text: str) -> int | None:
    """A limit in bytes; None for "max", for version 1's way of saying so, and for what is no number."""
    value = _number(text)
    return value if value is not None and 0 <= value < _UNLIMITED_BYTES else None


def parse_cpu_max(text: str) -> float | None:
    """``quota period`` in microseconds as a number of cores; None without a quota."""
    words = text.split()
    quota, period = (_number(words[0]), _number(words[1])) if len(words) == 2 else (None, None)
    return quota / period if quota and period and quota > 0 and period > 0 else None


def parse_statistic(text: str, key: str) -> int:
    """One value of ``memory.stat``; 0 if it is not there."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value) or 0
    return 0


def _lineage(mount: Mount, path: str) -> Iterator[Path]:
    """Our group's directory and its ancestors' up to the mount point.

    A container without a cgroup namespace reads the host's path of its group, which is not there; its mount point is.
    """
    inside = path.removeprefix(mount.root.rstrip("/")) if mount.root != "/" else path
    group = mount.point / inside.lstrip("/")
    while group != mount.point and mount.point in group.parents:
        if group.is_dir():
            yield group
        group = group.parent
    yield mount.point


def _used(group: Path, name: str, droppable: str) -> int | None:
    used = parse_bytes(_text(group / name))
    return None if used is None else max(0, used - parse_statistic(_text(group / "memory.stat"), droppable))


def _cores_to_run_on() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _usage(path: Path) -> tuple[int, int] | None:
    """(size, free) of a file system in bytes."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _given(value: float | None) -> Iterable[float]:
    return () if value is None else (value,)


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _text(path: Path) -> str:
    """A file's content, or nothing."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _unescaped(path: str) -> str:
    """mountinfo writes blanks as octal."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
