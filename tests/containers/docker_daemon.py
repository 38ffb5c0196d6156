"""Docker for a test: a daemon of its own beside any other's, and ``compose`` with it; nothing is left afterwards.

Images come from podman's storage, where the other tests built them: the same bytes, and no second build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from engine import IMAGES, ROOT, UnavailableError, run, wait_until

COMPOSE_FILE = ROOT / "docker/compose.yaml"
COMPOSE_NAMES = {"bootstrap": "p2p-trainer-bootstrap", "volunteer": "p2p-trainer"}
"""What that file calls the images."""
PROJECT = "p2p-trainer"
START_SECONDS = 60.0
END_SECONDS = 10.0
"""Docker 20.10 ends its containerd first, and may then wait for it for minutes; nothing of it runs any more by then."""
COPY_SECONDS = 300.0
COMPOSE_SECONDS = 300.0


def compose_command() -> list[str]:
    """Debian 12 has compose as a program of its own, later ones (also) as a part of docker. Empty if there is none."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and run("docker", "compose", "version", check=False).returncode == 0:
        return ["docker", "compose"]
    return []


class Docker:
    """A daemon from ``with`` to its end, with everything that it stores below one directory."""

    def __init__(self, directory: Path) -> None:
        if absent := [name for name in ("dockerd", "docker") if shutil.which(name) is None]:
            raise UnavailableError(f"{', '.join(absent)} not installed")
        if not compose_command():
            raise UnavailableError("docker compose is not installed")
        self._directory = directory
        self._socket = f"unix://{directory}/docker.sock"
        self._log = directory / "dockerd.log"
        self._compose_file = directory / "project/docker/compose.yaml"

    def __enter__(self) -> Docker:
        # No bridge of its own, no rules of a firewall: containers of a project meet on the network that compose makes.
        command = ["dockerd", "--host", self._socket, "--bridge", "none", "--iptables=false", "--ip6tables=false"]
        for option, name in (("--data-root", "data"), ("--exec-root", "run"), ("--pidfile", "pid")):
            command += [option, str(self._directory / name)]
        with self._log.open("wb") as log:
            self._daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: self._answers() or self._daemon.poll() is not None, "dockerd answers", START_SECONDS)
            if self._daemon.poll() is not None:
                raise UnavailableError(f"dockerd does not run here: {self._log.read_text()[-500:]}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def take_images(self) -> None:
        """Those that podman has, under the names that the compose file gives them."""
        archive = self._directory / "images.tar"
        run("podman", "save", "-q", "-m", "-o", str(archive), *IMAGES.values(), seconds=COPY_SECONDS)
        self.run("load", "-q", "-i", str(archive), seconds=COPY_SECONDS)
        archive.unlink()
        for target, name in COMPOSE_NAMES.items():
            self.run("tag", f"localhost/{IMAGES[target]}", name)

    def run(self, *arguments: str, seconds: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run("docker", "--host", self._socket, *arguments, seconds=seconds, check=check)

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``docker compose`` with the file as it is shipped, and the smaller of the two runs."""
        self._compose_file.parent.mkdir(parents=True, exist_ok=True)
        text = COMPOSE_FILE.read_text()
        if _is_first_generation():  # knows no name in the file
            text = text.replace(f"\nname: {PROJECT}\n", "\n")
        self._compose_file.write_text(text)
        environment = ("env", f"DOCKER_HOST={self._socket}", "RUN=digits")
        command = (*compose_command(), "-p", PROJECT, "-f", str(self._compose_file), *arguments)
        return run(*environment, *command, seconds=COMPOSE_SECONDS, check=check)

    def states(self, services: Sequence[str], template: str) -> dict[str, str]:
        """What ``docker inspect`` says of the container of each service."""
        return {
            service: self.run("inspect", "--format", template, self._container(service)).stdout.strip()
            for service in services
        }

    def _container(self, service: str) -> str:
        return self.compose("ps", "-a", "-q", service).stdout.strip()

    def _answers(self) -> bool:
        return self.run("version", check=False).returncode == 0

    def _end(self) -> None:
        self._daemon.terminate()
        try:
            self._daemon.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        # A daemon that was killed leaves its mounts.
        for mount in _mounts_below(self._directory):
            run("umount", "-l", mount, check=False)
        shutil.rmtree(self._directory / "data", ignore_errors=True)


def _is_first_generation() -> bool:
    return run(*compose_command(), "version", "--short").stdout.startswith("1.")


def _mounts_below(directory: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [place for line in lines if (place := line.split()[1]).startswith(f"{directory}{os.sep}")][::-1]
