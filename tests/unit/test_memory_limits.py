"""Limits that the kernel enforces: where they are found, what is told of them, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_trainer.rehearsal.memory_limits import (
    Hierarchy,
    MemoryLimits,
    MemoryLimitsUnavailable,
    hierarchies,
    least_limit_bytes,
    memory_left_bytes,
    memory_of_this_computer,
)

MEGABYTE = 1 << 20


def can_be_limited() -> bool:
    try:
        with MemoryLimits({"probe": 64 * MEGABYTE}):
            return True
    except MemoryLimitsUnavailable:
        return False


needs_memory_limits = pytest.mark.skipif(not can_be_limited(), reason="memory cannot be limited here")


def proc(path: Path, own: str, *mounts: str) -> Path:
    """What the kernel would say of this process."""
    (path / "self").mkdir(parents=True)
    (path / "self" / "cgroup").write_text(own)
    lines = [f"{30 + index} 23 0:{index} {mount}\n" for index, mount in enumerate(mounts)]
    (path / "self" / "mountinfo").write_text("".join(lines))
    return path


def group(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content + "\n")
    return path


def v2_mount(at: Path, root: str = "/") -> str:
    return f"{root} {at} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def test_in_version_2_the_least_limit_around_us_counts(tmp_path: Path) -> None:
    top = group(tmp_path / "top", cgroup__controllers="cpu memory")
    group(top / "user", memory__max=str(900 * MEGABYTE), cgroup__controllers="memory")
    own = group(top / "user" / "me", memory__max="max", cgroup__controllers="memory")
    here = proc(tmp_path / "proc", "0::/user/me\n", v2_mount(top))
    assert hierarchies(here) == [Hierarchy(2, top, own)]
    assert [*hierarchies(here)[0].upwards()] == [own, top / "user", top]
    assert least_limit_bytes(here) == 900 * MEGABYTE
    assert memory_of_this_computer(here) == min(900 * MEGABYTE, memory_of_this_computer(tmp_path))


def test_what_is_left_is_left_in_every_group_around_us(tmp_path: Path) -> None:
    top = group(tmp_path / "top", cgroup__controllers="memory")
    group(
        top / "user",
        memory__max=str(900 * MEGABYTE),
        memory__current=str(700 * MEGABYTE),
        memory__stat=f"anon 1\ninactive_file {100 * MEGABYTE}\nactive_file 5",
        cgroup__controllers="memory",
    )
    group(top / "user" / "me", memory__max="max", memory__current="5", cgroup__controllers="memory")
    here = proc(tmp_path / "proc", "0::/user/me\n", v2_mount(top))
    assert memory_left_bytes(here) == 300 * MEGABYTE
    (here / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 1000 kB\n")
    assert memory_left_bytes(here) == 1000 * 1024
    assert memory_left_bytes(tmp_path) is None

    job = group(tmp_path / "v1", memory__limit_in_bytes=str(9 * MEGABYTE), memory__usage_in_bytes=str(5 * MEGABYTE))
    group(job, memory__stat=f"inactive_file 1\ntotal_inactive_file {MEGABYTE}")
    here = proc(tmp_path / "other", "4:memory:/\n", f"/ {job} rw,relatime - cgroup cgroup rw,memory")
    assert memory_left_bytes(here) == 5 * MEGABYTE


def test_in_version_1_no_limit_is_a_number_near_the_largest(tmp_path: Path) -> None:
    top = group(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712")
    own = group(top / "job", memory__limit_in_bytes=str(300 * MEGABYTE))
    mounts = (
        f"/ {tmp_path} rw - cgroup cgroup rw,cpu",
        f"/ {top} rw,relatime - cgroup cgroup rw,memory",
        v2_mount(tmp_path),  # beside it, for names only
    )
    here = proc(tmp_path / "proc", "4:memory:/job\n3:cpu:/\n0::/\n", *mounts)
    assert hierarchies(here) == [Hierarchy(1, top, own)]
    assert least_limit_bytes(here) == 300 * MEGABYTE
    (own / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert least_limit_bytes(here) is None


def test_in_a_container_our_group_is_what_is_mounted(tmp_path: Path) -> None:
    """Docker mounts a part of the tree, and the path says where that is in the whole."""
    top = group(tmp_path / "top", memory__max=str(50 * MEGABYTE), cgroup__controllers="memory")
    inner = group(top / "inner", memory__max="max", cgroup__controllers="memory")
    here = proc(tmp_path / "proc", "0::/docker/0123/inner\n", v2_mount(top, "/docker/0123"))
    assert hierarchies(here) == [Hierarchy(2, top, inner)]
    elsewhere = proc(tmp_path / "other", "0::/../../somewhere\n", v2_mount(top))
    assert hierarchies(elsewhere) == [Hierarchy(2, top, top)]
    assert least_limit_bytes(here) == least_limit_bytes(elsewhere) == 50 * MEGABYTE


def test_where_nothing_is_known_this_computer_has_what_it_has(tmp_path: Path) -> None:
    assert hierarchies(tmp_path) == [] and least_limit_bytes(tmp_path) is None
    assert memory_of_this_computer(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_a_memory_controller_it_is_said_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, why in (
        ([], "no cgroup with the memory controller is mounted"),
        ([Hierarchy(2, tmp_path / "gone", tmp_path / "gone")], "No such file or directory"),
    ):
        monkeypatch.setattr("p2p_trainer.rehearsal.memory_limits.hierarchies", lambda found=found: found)
        with pytest.raises(MemoryLimitsUnavailable, match=why), MemoryLimits({"a": MEGABYTE}):
            pass


def test_version_2_is_asked_for_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in the kernel's place takes what is written, and says what the kernel would say."""
    top = group(tmp_path / "top", cgroup__controllers="memory", cgroup__subtree_control="cpu")
    monkeypatch.setattr("p2p_trainer.rehearsal.memory_limits.hierarchies", lambda: [Hierarchy(2, top, top)])
    monkeypatch.setattr("p2p_trainer.rehearsal.memory_limits.REMOVE_SECONDS", 0.0)
    limits = MemoryLimits({"a": 5 * MEGABYTE, "b": None})
    with limits:
        assert limits.directory is not None
        assert (top / "cgroup.subtree_control").read_text() == "+memory"
        assert (limits.directory / "cgroup.subtree_control").read_text() == "+memory"
        a, b = limits.directory / "peer-a", limits.directory / "peer-b"
        assert (a / "memory.max").read_text() == str(5 * MEGABYTE) and not (b / "memory.max").exists()
        assert (a / "memory.swap.max").read_text() == "0"
        assert (a / "cgroup.procs").read_text() == "0"
        group(a, memory__current="300", memory__events="low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 0")
        assert (limits.use("a").peak_bytes, limits.use("a").kills) == (300, 2)
        group(a, memory__current="100", memory__peak="900")
        assert limits.use("a").peak_bytes == 900
        assert (limits.use("b").limit_bytes, limits.use("b").peak_bytes, limits.use("b").kills) == (None, 0, 0)
        for file in limits.directory.rglob("*.*"):
            file.unlink()
    assert limits.directory is None
    assert limits.use("a").peak_bytes == 900
    assert (top / "cgroup.subtree_control").read_text() == "-memory"


# --- real groups


def run_in(limits: MemoryLimits, peer: str, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], preexec_fn=lambda: limits.enter(peer), stdout=subprocess.PIPE, text=True
    )


@needs_memory_limits
def test_a_peer_gets_what_it_was_given_and_not_more() -> None:
    limits = MemoryLimits({"small": 64 * MEGABYTE, "other": 64 * MEGABYTE, "free": None})
    with limits:
        directory = limits.directory
        assert directory is not None and directory.is_dir()
        assert run_in(limits, "small", f"bytearray({20 * MEGABYTE})").returncode == 0
        assert 20 * MEGABYTE < limits.use("small").peak_bytes < 64 * MEGABYTE and limits.use("small").kills == 0
        assert run_in(limits, "small", f"bytearray({100 * MEGABYTE})").returncode == -signal.SIGKILL
        assert limits.use("small").kills == 1
        assert run_in(limits, "free", f"bytearray({100 * MEGABYTE})").returncode == 0
        assert limits.use("free").peak_bytes > 100 * MEGABYTE
        assert limits.use("other").kills == 0
    assert not directory.exists() and limits.directory is None
    assert limits.use("small").kills == 1, "told also afterwards"


@needs_memory_limits
def test_a_process_sees_the_memory_that_it_was_given() -> None:
    program = (
        "from p2p_trainer.rehearsal.memory_limits import memory_of_this_computer; print(memory_of_this_computer())"
    )
    with MemoryLimits({"small": 64 * MEGABYTE}) as limits:
        assert int(run_in(limits, "small", program).stdout) == 64 * MEGABYTE


@needs_memory_limits
def test_a_group_that_somebody_is_in_stays_until_he_is_gone() -> None:
    with MemoryLimits({"a": None}) as limits:
        directory = limits.directory
        assert directory is not None
        with subprocess.Popen(["sleep", "60"], preexec_fn=lambda: limits.enter("a")) as process:
            limits.close()
            assert limits.directory == directory and directory.is_dir()
            process.kill()
    assert not directory.exists()


@needs_memory_limits
def test_groups_go_also_when_the_program_that_made_them_is_killed() -> None:
    program = (
        "import signal\nfrom p2p_trainer.rehearsal.memory_limits import MemoryLimits\n"
        "with MemoryLimits({'a': None}) as limits: print(limits.directory, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        assert directory.is_dir()
        process.kill()
    wait_until(lambda: not directory.exists())


def wait_until(condition: Callable[[], bool], within_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
