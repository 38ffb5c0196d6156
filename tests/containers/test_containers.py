"""A run in containers: built from the Dockerfile, on a private network, with every peer's state in one volume.

One test, in the order of a day: a container that cannot work says why, the others train together, one is stopped, one
is killed, and one comes back with its volume as who it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine import IMAGES, VERSION, Engine, events_in, rounds_with_others, run, wait_until

from dht_config.errors import ExitCode

pytestmark = pytest.mark.containers

START_SECONDS = 180.0
LEAVE_SECONDS = 10.0
EMPTY = ("var/lib/apt/lists", "var/cache/apt", "root/.cache", "data", "tmp")
DOOR = "/data/bootstrap"
PEER = "/data/peer"


@pytest.fixture
def engine(images: None) -> Iterator[Engine]:
    engine = Engine()
    try:
        yield engine
    finally:
        print(engine.logs())
        engine.close()


def metrics(engine: Engine, name: str) -> str:
    """What a peer has written down, read inside its container."""
    return engine.exec(name, "cat", f"{PEER}/metrics.jsonl", check=False).stdout


def events(engine: Engine, name: str, kind: str) -> list[dict[str, Any]]:
    return events_in(metrics(engine, name), kind)


def averaged(engine: Engine, name: str, after: float = 0.0) -> list[dict[str, Any]]:
    return rounds_with_others(metrics(engine, name), after)


def credited_of(engine: Engine, invite: str, peer_id: str) -> float:
    """What the swarm's records credit a peer with, asked inside the door's container."""
    report = json.loads(engine.exec("door", "p2p-trainer", "status", invite, "--json").stdout)
    return next((row["credited_samples"] for row in report["peers"] if row["peer_id"] == peer_id), 0.0)


def join(engine: Engine, name: str, invite: str, volume: str) -> float:
    """Start a volunteer; returns when, in unix seconds."""
    began = time.time()
    pace = ("--emulate", "40", "--eval-samples", "0", "--threads", "1", "--checkpoint-seconds", "5")
    engine.start(name, "volunteer", ["join", invite, "--dir", PEER, "--plain", *pace], volume)
    return began


def test_a_run_in_containers(engine: Engine, figures: list[str], tmp_path: Path) -> None:
    engine.start("door", "bootstrap", ["bootstrap", "digits", "--dir", DOOR, "--plain"], "door")
    # A directory that belongs to somebody else, and a card that is not there: one line with what to do.
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    engine.start("foreign", "volunteer", ["join", "digits", "--dir", PEER], foreign)
    engine.start("cardless", "volunteer", ["join", "digits", "--dir", PEER, "--device", "cuda"], "cardless")
    for name, code, says in (
        ("foreign", ExitCode.DIRECTORY, "chown 10001"),
        ("cardless", ExitCode.DEVICE, "docker run --gpus all"),
    ):
        assert engine.exit_code(name) == int(code)
        (line,) = (line for line in engine.log(name).splitlines() if line.startswith("p2p-trainer: "))
        assert says in line
    invited = wait_until(
        lambda: engine.exec("door", "p2p-trainer", "invite", DOOR, check=False).stdout.strip(),
        "the door is open",
        START_SECONDS,
    )
    began = {name: join(engine, name, invited, name) for name in ("first", "second")}
    for name in began:
        wait_until(partial(averaged, engine, name), f"{name} averaged with others", START_SECONDS)
    until = {name: round(averaged(engine, name)[0]["time"] - began[name], 1) for name in began}
    figures.append(f"seconds from podman run to the first round with another: {until}")
    for name in ("door", "first", "second"):
        directory = DOOR if name == "door" else PEER
        assert engine.exec(name, "p2p-trainer", "status", "--local", "--dir", directory).returncode == 0
        assert engine.exec(name, "id", "-u").stdout.strip() == "10001"
    identity = {name: events(engine, name, "join")[-1]["peer_id"] for name in began}
    wait_until(lambda: credited_of(engine, invited, identity["second"]), "the swarm credits second", START_SECONDS)

    # TERM reaches the program, which leaves with a goodbye; -9 does not, and the other goes on.
    stopped = time.monotonic()
    assert engine.stop("first") == {"first": 0}
    took = time.monotonic() - stopped
    figures.append(f"seconds from podman stop to the end: {took:.1f}")
    assert took < LEAVE_SECONDS + 5  # podman's own part on a busy machine
    assert "The same command continues" in engine.log("first")
    before = credited_of(engine, invited, identity["second"])
    assert before > 0
    engine.kill("second")

    # Back with their volumes, in new containers: the same peers, with the same credit.
    again = {name: join(engine, f"{name}-again", invited, name) for name in ("first", "second")}
    for name, since in again.items():
        wait_until(partial(averaged, engine, f"{name}-again", since), f"{name} averages again", START_SECONDS)
        assert events(engine, f"{name}-again", "join")[-1]["peer_id"] == identity[name]
        assert events(engine, f"{name}-again", "join")[-1]["restart"] == 1
    assert credited_of(engine, invited, identity["second"]) >= before
    names = ("door", "first-again", "second-again")
    assert engine.stop(*names) == dict.fromkeys(names, 0)
    for name in names:
        assert "Traceback" not in engine.log(name)


def test_the_images_carry_no_tools_and_say_what_they_are(images: None) -> None:
    for image in IMAGES.values():
        (found,) = json.loads(run("podman", "inspect", image).stdout)
        labels = found["Config"]["Labels"]
        assert labels["org.opencontainers.image.version"] == VERSION
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert found["Config"]["User"] == "p2p" and found["Healthcheck"]["Test"][-1] == "--local"
        container = run("buildah", "from", image).stdout.strip()
        try:
            root = Path(run("buildah", "mount", container).stdout.strip())
            tools = [
                name
                for name in ("gcc", "cc", "pip", "pip3")
                if list(root.glob(f"usr/bin/{name}")) or list(root.glob(f"opt/*/bin/{name}"))
            ]
            assert not tools
            assert not [left for place in EMPTY for left in root.glob(f"{place}/*")] and not (root / "wheels").exists()
        finally:
            run("buildah", "umount", container, check=False)
            run("buildah", "rm", container)
