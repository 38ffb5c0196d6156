"""The peers of this machine from outside: what runs is told by the lock, what it does by its events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dht_config.errors import DirectoryError, ExitCode
from p2p_trainer.cli import app
from p2p_trainer.local_status import STALE_SECONDS, is_healthy, look, peers_below
from p2p_trainer.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("untouched")

BORN = "joining: looking for peers of the run"
TRAINING = ("join", "training_started", "train")


def write(directory: Path, *kinds: str, at: float = 1000.0, **fields: Any) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        for kind in kinds:
            file.write(json.dumps({"time": at, "event": kind, **fields}) + "\n")


def lives(directory: RunDirectory, state: str, reason: str = "so it is") -> None:
    directory.keep_state(state, reason)


def test_a_peer_is_healthy_from_its_entry_into_the_swarm_to_its_goodbye(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "peer")
    begun = look(directory.path, 1000.0)
    assert (begun.state, begun.healthy) == (BORN, False)
    lives(directory, "syncing")
    assert not look(directory.path, 1000.0).healthy, "it has no base yet"
    write(directory.path, *TRAINING, samples=80)
    assert look(directory.path, 1000.0).healthy, "it trains, if only on its own"
    lives(directory, "training")
    peer = look(directory.path, 1010.0)
    assert (peer.state, peer.samples, peer.healthy, peer.seconds_since_event) == ("training: so it is", 80, True, 10.0)
    lives(directory, "isolated", "nobody has answered for 40 s")
    cut_off = look(directory.path, 1010.0)
    assert (cut_off.state, cut_off.healthy) == ("isolated: nobody has answered for 40 s", False)
    lives(directory, "leaving")
    assert not look(directory.path, 1010.0).healthy
    write(directory.path, "leave", reason="terminated")
    directory.close()
    left = look(directory.path, 1010.0)
    assert left.state == "not running: left (terminated)" and not left.healthy
    again = RunDirectory(directory.path)
    write(again.path, "machine", at=1020.0)
    lives(again, "joining")
    peer = look(again.path, 1021.0)
    assert (peer.samples, peer.healthy) == (None, False), "what it did before it was started again does not count"
    again.close()


def test_a_peer_that_was_killed_does_not_run_and_one_that_hangs_is_not_healthy(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "peer")
    write(directory.path, *TRAINING)
    lives(directory, "training")
    late = look(directory.path, 1000.0 + STALE_SECONDS + 1)
    assert late.running and not late.healthy and "nothing was heard" in late.state
    directory.close()
    assert look(directory.path, 1001.0).state == "not running"


def test_a_bootstrap_peer_without_volunteers_says_nothing_and_is_well(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "bootstrap")
    write(directory.path, "join")
    lives(directory, "serving")
    door = look(directory.path, 1e6)
    assert (door.role, door.state, door.healthy) == ("serving", "serving: so it is", True)
    directory.close()


def test_torn_and_cut_lines_and_other_peoples_files_are_left_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "peer")
    write(directory.path, *["train"] * 9000, samples=1, padding="x" * 40)
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"time": "now", "event": "train"}\n{"time": 1, "event": "train", "samples": "x"}\n{"time": 1')
    assert look(directory.path, 1000.0).samples == 1
    directory.close()


def test_health_is_that_one_runs_and_none_that_runs_hangs(tmp_path: Path) -> None:
    one, other = RunDirectory(tmp_path / "a/peer"), RunDirectory(tmp_path / "b/peer")
    assert [path.parent.name for path in peers_below(tmp_path)] == ["a", "b"]
    write(one.path, *TRAINING)
    lives(one, "training")
    assert not is_healthy([look(path, 1000.0) for path in peers_below(tmp_path)]), "the other one only starts"
    lives(other, "serving")
    assert is_healthy([look(path, 1000.0) for path in peers_below(tmp_path)])
    assert not is_healthy([look(path, 1e6) for path in peers_below(tmp_path)])
    one.close()
    assert is_healthy([look(path, 1e6) for path in peers_below(tmp_path)])
    write(other.path, *TRAINING, at=1e6)
    other.close()
    assert not is_healthy([look(path, 1e6) for path in peers_below(tmp_path)])


def test_looking_does_not_keep_a_peer_from_starting(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "peer").close()
    stop = threading.Event()

    def look_all_the_time() -> None:
        while not stop.is_set():
            look(tmp_path / "peer", 0.0)

    looking = threading.Thread(target=look_all_the_time)
    looking.start()
    try:
        for _ in range(30):
            RunDirectory(tmp_path / "peer").close()
    finally:
        stop.set()
        looking.join()
    held = RunDirectory(tmp_path / "peer")
    with pytest.raises(DirectoryError, match="Another peer is running"):
        RunDirectory(tmp_path / "peer")
    held.close()


def test_the_command_ends_with_what_a_health_check_wants(tmp_path: Path) -> None:
    nobody = CliRunner().invoke(app, ["status", "--local"])
    assert nobody.exit_code == int(ExitCode.CHECKS_FAILED) and "No peer was ever started" in nobody.stdout
    directory = RunDirectory(tmp_path / "data/p2p-trainer/runs/a-0123456789abcdef/peer")
    begun = CliRunner().invoke(app, ["status", "--local"])
    assert begun.exit_code == int(ExitCode.CHECKS_FAILED) and "joining" in begun.stdout
    lives(directory, "serving")
    assert CliRunner().invoke(app, ["status", "--local"]).exit_code == 0
    told = json.loads(CliRunner().invoke(app, ["status", "--local", "--dir", str(directory.path), "--json"]).stdout)
    assert told["healthy"] is True and told["peers"][0]["running"] is True
    directory.close()
    assert CliRunner().invoke(app, ["status", "--local"]).exit_code == int(ExitCode.CHECKS_FAILED)
    which = CliRunner().invoke(app, ["status"])
    assert which.exit_code == int(ExitCode.USAGE) and "--local" in which.stderr


def test_a_peer_of_which_a_part_has_failed_is_not_healthy_until_it_is_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "peer")
    write(directory.path, "start", *TRAINING)
    lives(directory, "training")
    assert look(directory.path, 1001.0).healthy
    write(directory.path, "fault", reason="The p2p daemon ended unexpectedly (exit code -9).", exit_code=22)
    ending = look(directory.path, 1002.0)
    assert not ending.healthy and ending.state == "is ending: The p2p daemon ended unexpectedly (exit code -9)."
    directory.close()
    between = look(directory.path, 1002.5)
    assert not between.running and "may come back" in between.state
    directory = RunDirectory(tmp_path / "peer")
    write(directory.path, "start")
    assert (look(directory.path, 1003.0).state, look(directory.path, 1003.0).healthy) == (BORN, False)
    write(directory.path, *TRAINING)
    lives(directory, "training")
    assert look(directory.path, 1004.0).healthy
    directory.close()


def test_a_start_after_a_kill_is_not_taken_for_the_life_before(tmp_path: Path) -> None:
    killed = RunDirectory(tmp_path / "peer")
    write(killed.path, "start", *TRAINING)
    lives(killed, "training")
    killed.close()
    again = RunDirectory(tmp_path / "peer")
    write(again.path, "start")
    assert (look(again.path, 1001.0).state, look(again.path, 1001.0).healthy) == (BORN, False)
    again.close()


def test_a_peer_that_was_stopped_is_told_from_one_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path / "peer")
    write(directory.path, "start", *TRAINING)
    monkeypatch.setattr("p2p_trainer.local_status.is_stopped", lambda pid: pid == os.getpid())
    stopped = look(directory.path, 1001.0)
    assert not stopped.healthy and stopped.running and "is stopped" in stopped.state
    directory.close()
    assert look(directory.path, 1001.0).state == "not running", "whoever has that pid now"


def test_a_health_check_loads_neither_torch_nor_hivemind(tmp_path: Path) -> None:
    arguments = ["status", "--local", "--dir", str(tmp_path)]
    code = f"""
import sys
from p2p_trainer.cli import app
try:
    app({arguments})
except SystemExit as ended:
    assert ended.code == {int(ExitCode.CHECKS_FAILED)}, ended.code
sys.exit(" ".join({{"torch", "hivemind", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
