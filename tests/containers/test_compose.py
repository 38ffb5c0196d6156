"""``docker compose up`` with Docker itself: the door and two peers, which find each other and average."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from docker_daemon import Docker
from engine import UnavailableError, rounds_with_others, wait_until

pytestmark = pytest.mark.containers

PEERS = ("first", "second")
SERVICES = ("bootstrap", *PEERS)
START_SECONDS = 180.0


@pytest.fixture
def docker(images: None, tmp_path: Path) -> Iterator[Docker]:
    try:
        with Docker(tmp_path) as docker:
            docker.take_images()
            try:
                yield docker
            finally:
                print(docker.compose("logs", "--no-color", "--tail", "20", check=False).stdout)
                docker.compose("down", "-v", "-t", "2", check=False)
    except UnavailableError as error:
        pytest.skip(f"compose cannot be tried here: {error}")


def test_what_compose_starts_trains_is_healthy_and_leaves_when_it_is_stopped(docker: Docker) -> None:
    docker.compose("up", "-d", "--no-build")

    def averages(peer: str) -> bool:
        said = docker.compose("exec", "-T", peer, "cat", "/data/peer/metrics.jsonl", check=False).stdout
        return bool(rounds_with_others(said))

    for peer in PEERS:
        wait_until(partial(averages, peer), f"{peer} averages with another", START_SECONDS)
    healthy = dict.fromkeys(SERVICES, "healthy")
    wait_until(lambda: docker.states(SERVICES, "{{.State.Health.Status}}") == healthy, "all are healthy", START_SECONDS)
    docker.compose("stop", "-t", "30")
    assert docker.states(SERVICES, "{{.State.ExitCode}}") == dict.fromkeys(SERVICES, "0")
    assert "Traceback" not in docker.compose("logs", "--no-color").stdout
