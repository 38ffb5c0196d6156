"""Coming back by itself: how often, after what, and that nothing of the old life is in the new one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dht_config.errors import DeviceLostError, DirectoryError, ExitCode, SwarmProcessDied, UnreachableError
from p2p_trainer import comeback, session
from p2p_trainer.cli import app
from p2p_trainer.comeback import ENVIRONMENT_NAME, STEADY_SECONDS, WAIT_SECONDS, Comeback, next_comeback, wait

DIED = SwarmProcessDied("The p2p daemon ended unexpectedly (exit code -9).")


def test_it_comes_back_a_few_times_each_time_later_and_then_ends() -> None:
    environment: dict[str, str] = {}
    waits = []
    while (following := next_comeback(DIED, 10.0, environment)) is not None:
        environment[ENVIRONMENT_NAME] = str(following.number)
        waits.append(following.wait_seconds)
    assert tuple(waits) == WAIT_SECONDS == tuple(sorted(WAIT_SECONDS))


def test_after_a_long_life_counting_begins_anew() -> None:
    environment = {ENVIRONMENT_NAME: str(len(WAIT_SECONDS))}
    assert next_comeback(DIED, STEADY_SECONDS - 1, environment) is None
    assert next_comeback(DIED, STEADY_SECONDS, environment) == Comeback(1)
    assert next_comeback(DIED, 0.0, {ENVIRONMENT_NAME: "x"}) == Comeback(1)


@pytest.mark.parametrize("error", [DirectoryError("full"), DeviceLostError("gone")])
def test_what_starting_again_does_not_help_against_ends_the_command(error: DirectoryError | DeviceLostError) -> None:
    assert next_comeback(error, STEADY_SECONDS, {}) is None


def test_who_finds_nobody_tries_again_if_it_has_come_back_but_not_at_its_first_start() -> None:
    nobody = UnreachableError("Nobody answered.")
    assert next_comeback(nobody, 10.0, {}) is None
    assert next_comeback(nobody, 10.0, {ENVIRONMENT_NAME: "1"}) == Comeback(2)
    assert next_comeback(nobody, 10.0, {ENVIRONMENT_NAME: str(len(WAIT_SECONDS))}) is None


def test_who_is_asked_to_leave_meanwhile_does_not_come_back() -> None:
    class Asked(Exception):
        pass

    def check() -> None:
        raise Asked

    with pytest.raises(Asked):
        wait(Comeback(len(WAIT_SECONDS)), check)


REPLACED = 77
"""Ends the command where the process would be another one."""


@pytest.fixture
def dying(untouched: None, monkeypatch: pytest.MonkeyPatch) -> list[Comeback]:
    """A session whose averaging process dies at once, and what the command then does."""
    begun: list[Comeback] = []

    def run(self: session.Session) -> str:
        raise DIED

    def start_again(again: Comeback) -> None:
        begun.append(again)
        raise SystemExit(REPLACED)

    monkeypatch.setattr(session.Session, "run", run)
    monkeypatch.setattr(comeback, "start_again", start_again)
    monkeypatch.setattr(comeback, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(comeback, "WAIT_SECONDS", (0.0, 0.0))
    return begun


@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_the_command_says_what_failed_and_starts_again(
    command: str, dying: list[Comeback], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        result = CliRunner().invoke(app, [command, "digits", "--plain"])
        assert result.exit_code == REPLACED
        assert dying[-1] == Comeback(number)
        (said,) = (line for line in result.output.splitlines() if "Coming back" in line)
        assert said.startswith(DIED.problem)
        monkeypatch.setenv(ENVIRONMENT_NAME, str(number))
    ended = CliRunner().invoke(app, [command, "digits", "--plain"])
    assert ended.exit_code == int(ExitCode.SWARM_PROCESS_DIED) and DIED.problem in ended.stderr
    assert len(dying) == 2


def test_the_command_does_not_start_again_when_it_was_asked_to_leave(
    dying: list[Comeback], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked_while_waiting(again: Comeback, check: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            check()  # type: ignore[operator]

    monkeypatch.setattr(comeback, "wait", asked_while_waiting)
    result = CliRunner().invoke(app, ["join", "digits", "--plain"])
    assert result.exit_code == 0 and not dying


def test_who_is_asked_to_leave_while_a_checkpoint_is_written_does_not_come_back(
    dying: list[Comeback], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comeback, "let_threads_end", lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = CliRunner().invoke(app, ["join", "digits", "--plain"])
    assert result.exit_code == 0 and not dying


PROGRAM = """
import concurrent.futures, json, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from p2p_trainer import comeback
from p2p_trainer.comeback import ENVIRONMENT_NAME, Comeback, start_again
life = int(os.environ.get(ENVIRONMENT_NAME, "0"))
row = {"pid": os.getpid(), "arguments": sys.argv[2:], "life": life, "descriptors": sorted(os.listdir("/proc/self/fd"))}
with open("lives", "a") as file:
    file.write(json.dumps(row) + "\\n")
if life < 2:
    held = os.open("lives", os.O_RDONLY)
    os.set_inheritable(held, True)
    def write_late():
        time.sleep(0.2)
        open(f"written{life}", "w").close()
    threading.Thread(target=write_late).start()
    if life == 1:
        comeback.LATE_SECONDS = 3.0
        pool = concurrent.futures.ThreadPoolExecutor()
        pool.submit(int).result()  # an idle thread that never ends
    comeback.let_threads_end()
    start_again(Comeback(life + 1))
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_a_comeback_is_the_same_command_in_the_same_process_with_nothing_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "program.py", root, "join", "an invite", "--dir", "ä b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    lives = [json.loads(line) for line in (tmp_path / "lives").read_text().splitlines()]
    assert [life["life"] for life in lives] == [0, 1, 2]
    assert all(life["arguments"] == ["join", "an invite", "--dir", "ä b"] for life in lives)
    assert len({life["pid"] for life in lives}) == 1
    assert len({tuple(life["descriptors"]) for life in lives}) == 1
    assert (tmp_path / "written0").exists() and (tmp_path / "written1").exists(), "threads came to their end"
