"""Limits of control groups as the kernel writes them, in both versions, inside containers and outside."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dht_config.errors import DirectoryError, ExitCode
from p2p_trainer.limits import (
    LEAST_OPEN_FILES,
    GroupLimits,
    free_disk_bytes,
    nearest_existing,
    parse_bytes,
    parse_cpu_max,
    parse_mounts,
    parse_own_groups,
    read_group_limits,
)
from p2p_trainer.run_directory import RunDirectory

GIGABYTE = 10**9


class Machine:
    """A /proc and a /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "groups"
        (self.proc / "self").mkdir(parents=True)

    def mount(self, kind: str, where: str, root: str = "/", options: str = "rw") -> None:
        point = self.groups / where
        point.mkdir(parents=True, exist_ok=True)
        with (self.proc / "self/mountinfo").open("a") as file:
            file.write("22 1 0:19 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n")
            file.write(f"31 22 0:26 {root} {point} rw,nosuid shared:9 - {kind} {kind} {options}\n")

    def inside(self, lines: str) -> None:
        (self.proc / "self/cgroup").write_text(lines)

    def write(self, group: str, **files: str) -> None:
        directory = self.groups / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("_DOT_", ".")).write_text(text + "\n")

    def limits(self) -> GroupLimits:
        return read_group_limits(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_version_2_with_the_tightest_limit_in_an_ancestor(machine: Machine) -> None:
    machine.mount("cgroup2", "")
    machine.inside("0::/user.slice/run.scope\n")
    machine.write("", cpu_DOT_max="max 100000")
    machine.write(
        "user.slice",
        memory_DOT_max=str(4 * GIGABYTE),
        memory_DOT_current=str(3 * GIGABYTE),
        memory_DOT_stat=f"anon 5\ninactive_file {GIGABYTE}",
        cpu_DOT_max="150000 100000",
    )
    machine.write("user.slice/run.scope", memory_DOT_max="max", cpu_DOT_max="400000 100000")
    assert machine.limits() == GroupLimits(memory_bytes=4 * GIGABYTE, memory_used_bytes=2 * GIGABYTE, cores=1.5)


def test_version_2_in_a_container_that_sees_its_own_group_as_the_root(machine: Machine) -> None:
    machine.mount("cgroup2", "")
    machine.inside("0::/\n")
    machine.write("", memory_DOT_max=str(GIGABYTE), memory_DOT_current="1000", memory_DOT_stat="inactive_file 2000")
    assert machine.limits() == GroupLimits(memory_bytes=GIGABYTE, memory_used_bytes=0)


def test_memory_high_counts_too_since_the_kernel_holds_a_process_up_there(machine: Machine) -> None:
    machine.mount("cgroup2", "")
    machine.inside("0::/a\n")
    machine.write("a", memory_DOT_max=str(2 * GIGABYTE), memory_DOT_high=str(GIGABYTE), memory_DOT_current="0")
    assert machine.limits().memory_bytes == GIGABYTE


def test_the_group_with_the_least_left_counts(machine: Machine) -> None:
    machine.mount("cgroup2", "")
    machine.inside("0::/a/b\n")
    machine.write("a", memory_DOT_max=str(8 * GIGABYTE), memory_DOT_current=str(8 * GIGABYTE - 1))
    machine.write("a/b", memory_DOT_max=str(4 * GIGABYTE), memory_DOT_current="0")
    assert machine.limits().memory_bytes == 8 * GIGABYTE


def test_version_1(machine: Machine) -> None:
    machine.mount("cgroup", "memory", options="rw,memory")
    machine.mount("cgroup", "cpu,cpuacct", options="rw,cpu,cpuacct")
    machine.inside("12:memory:/job\n4:cpu,cpuacct:/job\n0::/\n")
    machine.write(
        "memory/job",
        memory_DOT_limit_in_bytes=str(2 * GIGABYTE),
        memory_DOT_usage_in_bytes=str(GIGABYTE),
        memory_DOT_stat=f"total_inactive_file {GIGABYTE // 2}",
    )
    machine.write("memory", memory_DOT_limit_in_bytes=str(2**63 - 4096))
    machine.write("cpu,cpuacct/job", cpu_DOT_cfs_quota_us="50000", cpu_DOT_cfs_period_us="100000")
    assert machine.limits() == GroupLimits(memory_bytes=2 * GIGABYTE, memory_used_bytes=GIGABYTE // 2, cores=0.5)


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_version_1_in_a_container_that_reads_the_hosts_path(machine: Machine, root: str) -> None:
    machine.mount("cgroup", "memory", root=root, options="rw,memory")
    machine.inside("4:memory:/docker/abc\n")
    machine.write("memory", memory_DOT_limit_in_bytes=str(GIGABYTE), memory_DOT_usage_in_bytes="7")
    assert machine.limits() == GroupLimits(memory_bytes=GIGABYTE, memory_used_bytes=7)


def test_a_mount_point_with_a_blank(machine: Machine) -> None:
    line = "31 22 0:26 / /a\\040b rw - cgroup2 cgroup2 rw\n"
    assert [str(mount.point) for mount in parse_mounts(line)] == ["/a b"]


@pytest.mark.parametrize("text", ["", "nonsense", "::", "0:\n", "1:memory:x", "a b c - d", "- cgroup2", "\0"])
def test_what_cannot_be_parsed_is_no_limit(machine: Machine, text: str) -> None:
    machine.inside(text)
    (machine.proc / "self/mountinfo").write_text(text)
    assert machine.limits() == GroupLimits()
    assert isinstance(parse_own_groups(text), dict)


def test_without_proc_there_is_no_limit(tmp_path: Path) -> None:
    assert read_group_limits(tmp_path) == GroupLimits()


@pytest.mark.parametrize("text", ["max", "", "-1", str(2**63 - 4096), "nonsense"])
def test_no_limit(text: str) -> None:
    assert parse_bytes(text) is None


@pytest.mark.parametrize("text", ["max 100000", "-1 100000", "", "0 0", "100000 0", "100000", "a b"])
def test_no_quota(text: str) -> None:
    assert parse_cpu_max(text) is None


# ---------------------------------------------------------------- open files

START = """
import resource, sys
from dht_config.errors import LimitsError
from p2p_trainer.limits import raise_open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    raise_open_file_limit()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except LimitsError as error:
    print(int(error.exit_code), error)
"""


def started(soft: int, hard: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START, str(soft), str(hard)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_soft_limit_is_raised_to_what_is_allowed() -> None:
    allowed = min(600, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert started(100, allowed) == str(allowed)


def test_a_hard_limit_that_suffices_is_lived_with() -> None:
    assert started(256, 256) == "256"


def test_a_hard_limit_that_does_not_suffice_names_the_flags() -> None:
    said = started(LEAST_OPEN_FILES - 1, LEAST_OPEN_FILES - 1)
    assert said.startswith(f"{int(ExitCode.LIMITS)} ")
    assert "ulimit -n" in said and "--ulimit nofile=" in said


def test_a_directory_below_one_that_this_user_may_not_enter(tmp_path: Path) -> None:
    """Path.exists raises there: a volunteer gets a remedy all the same."""
    closed = tmp_path / "others"
    closed.mkdir(mode=0o600)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        assert nearest_existing(closed / "mine" / "peer") in (closed, *closed.parents)
        assert free_disk_bytes(closed / "mine") is not None
        with pytest.raises(DirectoryError, match="--dir"):
            RunDirectory(closed / "mine")
    finally:
        os.seteuid(user)
        closed.chmod(0o700)
