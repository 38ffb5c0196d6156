"""Containers for tests: images built with buildah, run with podman, and nothing of either left afterwards.

The base image is made here, with debootstrap from this machine's own Debian mirror, under the name that the Dockerfile
asks for; wheels are collected with this machine's pip. So no registry of images is asked for anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dht_config.records import software_version

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/debian:bookworm-slim"
IMAGES = {"bootstrap": "p2p-trainer-test-bootstrap", "volunteer": "p2p-trainer-test-volunteer"}
SUITE = "bookworm"
BASE_PYTHON = "3.11"
"""That suite's: what wheels must fit."""
NEEDED = ("buildah", "podman", "debootstrap")
VERSION = software_version()
COMMAND_SECONDS = 60.0
WAIT_SECONDS = 180.0
BUILD_SECONDS = 1500.0
POLL_SECONDS = 0.3

Result = TypeVar("Result")


class UnavailableError(Exception):
    """What containers need of this machine is not to be had, which is no fault of ours."""


def missing() -> str:
    """Why containers cannot be built and run here; empty if they can, as far as one can see without trying."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip() != "0":
        return "debootstrap needs root"
    if _python() is None:
        return f"there is no Python {BASE_PYTHON} to collect wheels with"
    return ""


def run(*command: str, seconds: float = COMMAND_SECONDS, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command to its end; AssertionError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return done


def wait_until(condition: Callable[[], Result], what: str, seconds: float) -> Result:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)
    return result


def events_in(metrics: str, kind: str) -> list[dict[str, Any]]:
    """Of one kind, in what a peer has written down; the last line may be half written."""
    found = [json.loads(line) for line in metrics.splitlines() if line.endswith("}")]
    return [event for event in found if event["event"] == kind]


def rounds_with_others(metrics: str, after: float = 0.0) -> list[dict[str, Any]]:
    """A peer's committed rounds of more than itself. :param after: unix seconds"""
    rounds = [event for event in events_in(metrics, "round") if event["outcome"] == "committed"]
    return [event for event in rounds if event["group_size"] > 1 and event["time"] > after]


# ------------------------------------------------------------------------ images


def build(work: Path) -> dict[str, float]:
    """Make the base if it is not here, and build both images; returns how long each part took, in seconds.

    :raises UnavailableError: no base can be made, or no container be started
    """
    times = {}
    began = time.monotonic()

    def lap(name: str) -> None:
        nonlocal began
        times[name] = time.monotonic() - began
        began = time.monotonic()

    context = work / "context"
    shutil.copytree(ROOT, context, ignore=shutil.ignore_patterns(".*", "wheels", "tests", "__pycache__"))
    shutil.copy(ROOT / ".dockerignore", context)
    python = _python()
    assert python is not None
    collecting = subprocess.Popen(
        [python, "-m", "pip", "wheel", "-q", "--wheel-dir", str(context / "wheels"), str(ROOT), "hatchling"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if run("podman", "image", "exists", BASE, check=False).returncode:
            _make_base(work / "base")
        working_options()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        collecting.kill()
        collecting.wait()
        raise UnavailableError(str(error)) from error
    lap("base")
    said, _ = collecting.communicate(timeout=BUILD_SECONDS)
    assert collecting.returncode == 0, said[-4000:]
    lap("wheels")
    for target, name in IMAGES.items():
        # chroot: needs no privileges that a container of its own would not have. docker: the format with health checks.
        run(
            *("buildah", "bud", "--layers", "--isolation", "chroot", "--format", "docker", "--target", target),
            *("--build-arg", "WHEELS=wheels", "-t", name),
            *("-f", str(context / "docker/Dockerfile"), str(context)),
            seconds=BUILD_SECONDS,
        )
        lap(target)
    return times


def _make_base(directory: Path) -> None:
    """A minimal Debian as the public image is one: without documentation, translations and downloaded packages."""
    run("debootstrap", "--variant=minbase", SUITE, str(directory), *_mirror(), seconds=BUILD_SECONDS)
    for left in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(directory / left, ignore_errors=True)
        (directory / left).mkdir(parents=True)
    archive = directory.with_suffix(".tar")
    run("tar", "-C", str(directory), "-cf", str(archive), ".")
    run("podman", "import", "-q", str(archive), BASE)
    shutil.rmtree(directory)
    archive.unlink()


def _mirror() -> list[str]:
    """This machine's Debian mirror, if it has one written down; else debootstrap's own default."""
    places = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(path.read_text() for path in places if path.is_file())
    found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+/debian/?)(?:\s|$)", text, re.MULTILINE)
    return [found[1]] if found else []


def _python() -> str | None:
    if f"{sys.version_info.major}.{sys.version_info.minor}" == BASE_PYTHON:
        return sys.executable
    return shutil.which(f"python{BASE_PYTHON}")


# -------------------------------------------------------------------- containers


class Engine:
    """Podman with a private network; every container and volume of a test by its short name, and their end."""

    def __init__(self) -> None:
        self._prefix = f"p2p-trainer-test-{os.getpid()}"
        self._runtime, self._limits = working_options()
        self._containers: list[str] = []
        self._volumes: list[str] = []
        run("podman", "network", "create", self._prefix)

    def start(self, name: str, target: str, arguments: Sequence[str], volume: str | Path) -> None:
        """Start a container of ours in the background, on a read-only root, with its state in a volume.

        :param volume: its short name, or a directory of this machine's
        """
        place = str(volume) if isinstance(volume, Path) else self._full(volume)
        if isinstance(volume, str) and volume not in self._volumes:
            run("podman", "volume", "create", place)
            self._volumes.append(volume)
        self._containers.append(name)
        run(
            *("podman", *self._runtime, "run", "-d", *self._limits, "--name", self._full(name)),
            *("--network", self._prefix, "--read-only", "-v", f"{place}:/data", IMAGES[target], *arguments),
        )

    def exit_code(self, name: str) -> int:
        """Wait for a container that ends by itself."""
        return int(run("podman", "wait", self._full(name), seconds=WAIT_SECONDS).stdout)

    def stop(self, *names: str) -> dict[str, int]:
        """TERM, and -9 long after it should have been enough; their exit codes."""
        run("podman", *self._runtime, "stop", "-t", "30", *map(self._full, names), seconds=WAIT_SECONDS)
        return {name: self.exit_code(name) for name in names}

    def kill(self, name: str) -> None:
        run("podman", *self._runtime, "kill", self._full(name))

    def exec(self, name: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run("podman", *self._runtime, "exec", self._full(name), *command, check=check)

    def log(self, name: str, lines: int = -1) -> str:
        """The end of what a container said, or all of it."""
        done = run("podman", "logs", "--tail", str(lines), self._full(name), check=False)
        return done.stdout + done.stderr

    def logs(self) -> str:
        """The end of what every container said."""
        return "\n".join(f"--- {name}\n{self.log(name, 15)}" for name in self._containers)

    def close(self) -> None:
        for name in self._containers:
            run("podman", *self._runtime, "rm", "-f", "-t", "2", self._full(name), check=False)
        for volume in self._volumes:
            run("podman", "volume", "rm", "-f", self._full(volume), check=False)
        run("podman", "network", "rm", "-f", self._prefix, check=False)

    def _full(self, name: str) -> str:
        return f"{self._prefix}-{name}"


@cache
def working_options() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(of podman, of its ``run``): what containers start with here. Inside a container podman may not raise limits."""
    limits = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
    failures = []
    for runtime, options in (((), ()), ((), limits), (("--runtime", "runc"), limits)):
        done = run("podman", *runtime, "run", "--rm", *options, BASE, "true", check=False)
        if not done.returncode:
            return runtime, options
        failures.append(done.stderr.strip())
    raise AssertionError(f"podman starts no container here: {failures}")
