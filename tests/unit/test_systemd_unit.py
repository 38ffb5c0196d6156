"""The service unit of a bootstrap peer: what it starts, and that systemd reads it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dht_config.errors import ExitCode
from p2p_trainer.cli import app
from p2p_trainer.systemd_unit import unit

pytestmark = pytest.mark.usefixtures("untouched")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bootstrap", "digits", "--systemd", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_unit_starts_the_same_command_with_absolute_paths(tmp_path: Path) -> None:
    text = printed("--dir", "door", "--port", "31337", "--announce", "/dns4/a.example.org/tcp/31337", "--no-direct")
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    directory = tmp_path / "door"
    assert line == (
        f"ExecStart={sys.executable} -m p2p_trainer bootstrap digits --plain --dir {directory} --port 31337 "
        "--no-direct --announce /dns4/a.example.org/tcp/31337"
    )
    assert f"ReadWritePaths={directory}" in text and "KillMode=mixed" in text
    assert "RestartPreventExitStatus=2 10 11" in text
    assert not directory.exists()


def test_words_are_quoted_as_systemd_reads_them() -> None:
    text = unit(["/opt/a b/python"], ['100%"', "$HOME"], run="50%", user="ada", directory=Path("/d d"))
    assert 'ExecStart="/opt/a b/python" 100%%\\" $$HOME\n' in text
    assert "the door to 50%%" in text and 'ReadWritePaths="/d d"' in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    (tmp_path / "door").mkdir()
    path = tmp_path / "p2p-trainer.service"
    path.write_text(printed("--dir", str(tmp_path / "door")))
    checked = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and str(path) not in checked.stderr, checked.stderr


def test_a_standby_needs_an_invite_and_a_first_door_a_manifest() -> None:
    result = CliRunner().invoke(app, ["bootstrap", "digits", "--standby"])
    assert result.exit_code == int(ExitCode.USAGE) and "invite" in result.stderr
    result = CliRunner().invoke(app, ["bootstrap", "digits", "--standby", "--systemd"])
    assert result.exit_code == int(ExitCode.USAGE)
