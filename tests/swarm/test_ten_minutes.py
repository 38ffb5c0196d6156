"""The README's page "From nothing to a public run in ten minutes": its commands as they stand there, in that order."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from harness import START_SECONDS, Peer, Swarm, assert_no_traceback, assert_samples_add_up

from p2p_trainer.checkpoint import NEWEST_NAME

pytestmark = pytest.mark.swarm

README = Path(__file__).parents[2] / "README.md"
IN_BASH = ("-c", "import os, sys; os.execvp('bash', ['bash', '-euc', sys.argv[1]])")


def commands() -> list[str]:
    """The lines of the page's block; one that ends in & stays."""
    found = re.search(r"^<!-- ten minutes: the organiser -->\n```bash\n(.*?)^```", README.read_text(), re.M | re.S)
    assert found is not None
    return found[1].splitlines()


def start(swarm: Swarm, command: str) -> Peer:
    """Run a line of the page in the test's directory, where ``p2p-trainer`` is this program."""
    shim = swarm.path / "bin/p2p-trainer"
    if not shim.exists():
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m p2p_trainer "$@"\n')
        shim.chmod(0o755)
    words = command.split()
    name = words[words.index("--dir") + 1] if "--dir" in words else words[1]
    stays = command.endswith("&")
    line = f"cd '{swarm.path}'; {'exec ' if stays else ''}{command.removesuffix('&')}"
    path = {"PATH": f"{shim.parent}:{os.environ['PATH']}"}
    return swarm.run(name, line, directory=swarm.path / name, environment=path, program=IN_BASH)


def test_every_command_of_the_page_works_in_its_place(swarm: Swarm) -> None:
    peers: dict[str, Peer] = {}
    for command in commands():
        running = start(swarm, command)
        if not command.endswith("&"):
            assert running.exit_code(2 * START_SECONDS) == 0, (command, running.text)
            continue
        peers[running.directory.name] = running
        if running.directory.name == "door":
            invite = running.directory / "invite"
            swarm.wait_until(invite.exists, "the door is open", START_SECONDS)
        else:
            swarm.wait_until(lambda peer=running: peer.rounds(), "training makes versions", START_SECONDS)  # type: ignore[misc]
    assert (swarm.path / "my-run.toml").is_file() and (swarm.path / "my-model/model.safetensors").is_file()
    assert (peers["door"].directory / NEWEST_NAME).is_file()
    assert set(swarm.leave_all().values()) == {0}
    assert_samples_add_up(peers["peer"])
    assert_no_traceback(*swarm.peers)
