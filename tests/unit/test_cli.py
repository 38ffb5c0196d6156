"""The command line: what exists, and that every failure is one line with its own exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from dht_config.errors import ExitCode, P2PTrainerError
from dht_config.invite import Invite
from dht_config.manifest import EXAMPLES, example_manifest
from p2p_trainer import cli, doctor, session
from p2p_trainer.cli import app
from p2p_trainer.settings import PeerSettings

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmZtmD2qt6fJot32nabSP3CUjicnypEBz7bHVDhPQt9aAy"
INVITE = Invite(run_id="tiny-0123456789abcdef", organiser_public_key=bytes(32), addresses=(ADDRESS,)).encode()

COMMON = {
    "--dir",
    "--settings",
    "--host",
    "--port",
    "--no-direct",
    "--announce",
    "--peer",
    "--checkpoint-seconds",
    "--invite-file",
}
SHOWN = {"--json", "--plain", "--verbose", "-v"}
COMMANDS = {
    "join": COMMON
    | SHOWN
    | {
        "target",
        "--device",
        "--threads",
        "--wait-seconds",
        "--eval-seconds",
        "--eval-samples",
        "--emulate",
        "--memory",
        "--micro-batch",
        "--batch",
        "--strategy",
        "--train-fragments",
        "--compute-dtype",
        "--cadence",
        "--codec",
        "--compile",
        "--upload-limit",
        "--daily-traffic",
        "--allow-files",
    },
    "bootstrap": COMMON | SHOWN | {"target", "--snapshot-versions", "--snapshot-keep", "--standby", "--systemd"},
    "invite": {"doors", "--address", "--expires", "--json"},
    "example": {"name"},
    "new": {"name", "--task", "--parameters", "--volunteers", "--slowest-up", "--fastest", "--sequence-length"}
    | {"--batch-size", "--out"},
    "export": {"run_directory", "out", "--json", "--verbose", "-v"},
    "status": {"target", "--peer", "--wait-seconds", "--json", "--verbose", "-v", "--local", "--dir"},
    "doctor": {"target", "--dir", "--settings", "--host", "--port", "--peer", "--device", "--wait-seconds"}
    | {"--allow-files", "--json", "--verbose", "-v"},
    "plan": {"target", "--memory", "--up", "--down", "--device", "--threads", "--micro-batch", "--batch"}
    | {
        "--strategy",
        "--train-fragments",
        "--compute-dtype",
        "--cadence",
        "--codec",
        "--compile",
        "--settings",
        "--peer",
        "--wait-seconds",
        "--allow-files",
    }
    | {"--json", "--verbose", "-v"},
    "rehearse": {"--peers", "--seconds", "--run", "--json", "--html", "--dir", "--keep", "--verbose", "-v"}
    | {"run", "--scene", "--churn", "--minutes", "--seed", "--simulate", "--virtual-time"},
}
"""A promise to people's scripts: adding is free, removing or renaming is not."""


pytestmark = pytest.mark.usefixtures("untouched")


def fails(arguments: list[str], code: ExitCode, *says: str) -> str:
    """Run a command that must fail with ``code`` and one line on standard error; returns that line."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == int(code), (result.stdout, result.stderr)
    assert result.stderr.startswith("p2p-trainer: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert "Traceback" not in result.output
    for text in says:
        assert text in result.stderr
    return result.stderr


def group() -> click.Group:
    return typer.main.get_command(app)


def test_there_are_exactly_these_commands_and_options() -> None:
    commands = group().commands
    found = {
        name: {
            option
            for parameter in command.params
            for option in (parameter.opts if parameter.param_type_name == "option" else [str(parameter.name)])
        }
        - {"--help"}
        for name, command in commands.items()
    }
    assert found == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0
    for option in COMMANDS[command] - {"target", "name", "run_directory", "out", "doors"}:
        assert option in result.stdout
    for parameter in group().commands[command].params:
        assert getattr(parameter, "help", None), f"{parameter.name} has no help"


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(app, [])
    assert all(command in result.output for command in COMMANDS)


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"p2p-trainer {version('p2p-trainer')}\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["join", "digits", "--settings"], ExitCode.USAGE),
        (["status", "--local", "--dir"], ExitCode.DIRECTORY),
        (["new", "mine", "--parameters", "1M", "--out"], ExitCode.DIRECTORY),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_line(arguments: list[str], code: ExitCode) -> None:
    name = "q" * 300  # too long for any file system; what may not be looked into raises the same
    fails([*arguments, name], code, name)
    result = CliRunner().invoke(app, ["export", name, "out", "--json"])
    assert result.exit_code == json.loads(result.stdout)["exit_code"] == ExitCode.DIRECTORY


@pytest.mark.parametrize("arguments", [["example", "stdlib-text"], ["status", "--local", "--json"]])
def test_a_reader_that_is_gone_gets_no_report(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "p2p_trainer", *arguments], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (int(ExitCode.UNEXPECTED), b"")


def test_every_setting_has_a_flag_of_its_name() -> None:
    options = COMMANDS["join"] | COMMANDS["bootstrap"]
    flags = {option.removeprefix("--").replace("-", "_") for option in options}
    assert set(PeerSettings.model_fields) <= flags


def test_exit_codes_are_a_promise() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "UNEXPECTED": 1,
        "USAGE": 2,
        "MANIFEST": 10,
        "INVITE": 11,
        "ADDRESS": 12,
        "UNREACHABLE": 13,
        "WRONG_PEER_ID": 14,
        "FINGERPRINT": 15,
        "DIRECTORY": 16,
        "PORT_IN_USE": 17,
        "IDENTITY": 18,
        "DATA": 19,
        "CHECKPOINT": 20,
        "DEVICE": 21,
        "SWARM_PROCESS_DIED": 22,
        "REHEARSAL_FAILED": 23,
        "LIMITS": 24,
        "CHECKS_FAILED": 25,
        "DEVICE_LOST": 26,
        "NO_PLAN": 27,
        "INTERRUPTED": 130,
    }


@pytest.mark.parametrize("command", ["join", "status", "bootstrap"])
@pytest.mark.parametrize("invite", ["hello", INVITE[:-9], INVITE[:-1] + ("a" if INVITE[-1] != "a" else "b"), ""])
def test_a_wrong_invite(command: str, invite: str) -> None:
    fails([command, invite], ExitCode.INVITE)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--memory", "0"], ExitCode.USAGE, "--memory: '0' cannot be used"),
        (["--memory", "lots"], ExitCode.USAGE, "such as 512M or 2G"),
        (["--up", "nonsense"], ExitCode.USAGE, "--up: 'nonsense' cannot be used"),
        (["--down", "0M"], ExitCode.USAGE, "--down: '0M' cannot be used"),
        (["--micro-batch", "0"], ExitCode.USAGE, "--micro-batch"),
        (["--strategy", "magic"], ExitCode.USAGE, "--strategy"),
        (["--device", "toaster"], ExitCode.DEVICE, "toaster"),
        (["--memory", "1M"], ExitCode.NO_PLAN, "of memory do not hold this run"),
        (["--strategy", "checkpoint"], ExitCode.USAGE, "cannot be used"),
    ],
)
def test_a_plan_that_cannot_be_made(arguments: list[str], code: ExitCode, says: str) -> None:
    fails(["plan", "digits", *arguments], code, says)


def test_a_bootstrap_peer_needs_a_manifest() -> None:
    fails(["bootstrap", INVITE], ExitCode.INVITE, "started from a run manifest")


@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_a_wrong_path(command: str) -> None:
    fails([command, "missing.toml"], ExitCode.MANIFEST, "missing.toml")
    fails([command, "runs/missing"], ExitCode.INVITE, "There is no file runs/missing")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("batch_size = 16", "batch_sise = 16", "batch_sise"),
        ("batch_size = 16", "batch_size = 0", "batch_size"),
        ("lr = 0.05", 'lr = "fast"', "lr"),
        ("[averaging]", "[averageing]", "averageing"),
        ("fragments = 2", "fragments = ", "not valid TOML"),
        ("hidden_sizes", "hiden_sizes", "hiden_sizes"),
        ('name = "digits"         ', 'name = "chess" #', "chess"),
    ],
)
@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_a_wrong_manifest_field_is_named(command: str, before: str, after: str, says: str, tmp_path: Path) -> None:
    text = example_manifest("digits")
    assert before in text
    (tmp_path / "run.toml").write_text(text.replace(before, after, 1 if "chess" not in after else -1))
    fails([command, "run.toml"], ExitCode.MANIFEST, says)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("hidden_size = 64", "hidden_sise = 64", "Did you mean hidden_size?"),
        ("hidden_size = 64", 'hidden_size = "many"', "hidden_size"),
        ("hidden_size = 64", "hidden_size = 63", "63"),
        ('model_type = "llama"', 'model_type = "lama"', "'lama'"),
        ("max_position_embeddings = 128", "max_position_embeddings = 32", "sequence_length"),
    ],
)
def test_a_wrong_model_is_told_before_anybody_is_asked_and_anything_is_written(
    before: str, after: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(settings: object) -> None:
        raise AssertionError("the averaging process was started")

    monkeypatch.setattr(session, "start_swarm", started)
    text = example_manifest("stdlib-text")
    assert before in text
    (tmp_path / "run.toml").write_text(text.replace(before, after))
    fails(["join", "run.toml", "--dir", "peer"], ExitCode.MANIFEST, says)
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize(
    ("run", "flags"), [("digits", ("--codec", "int8")), ("gradient.toml", ("--compute-dtype", "float16"))]
)
def test_what_a_run_does_not_allow_is_told_before_anybody_is_asked_and_anything_is_written(
    run: str, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(settings: object) -> None:
        raise AssertionError("the averaging process was started")

    monkeypatch.setattr(session, "start_swarm", started)
    local, gradient = 'mode = "local"', 'mode = "gradient"\nglobal_batch = 64'
    (tmp_path / "gradient.toml").write_text(example_manifest("digits").replace(local, gradient))
    fails(["join", run, "--dir", "peer", *flags], ExitCode.USAGE, flags[0], "Leave")
    assert not (tmp_path / "peer").exists()
    # A door shares its machine's settings and trains nothing.
    monkeypatch.setenv("P2P_TRAINER_" + flags[0].removeprefix("--").replace("-", "_").upper(), flags[1])
    fails(["bootstrap", run, "--dir", "door"], ExitCode.UNEXPECTED, "the averaging process was started")


@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_a_directory_that_cannot_be_written_to(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails([command, "digits", "--dir", "file/peer"], ExitCode.DIRECTORY, "file/peer", "--dir")


@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_the_organiser_does_not_start_another_run_where_the_manifest_of_the_first_is_damaged(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer/manifest.signed").write_bytes(b"damaged")
    fails([command, "digits", "--dir", "peer"], ExitCode.CHECKPOINT, "manifest.signed", "Every peer of the run has")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fails(
            ["bootstrap", "digits", "--dir", "peer", "--host", "127.0.0.1", "--port", str(port)],
            ExitCode.PORT_IN_USE,
            f"Port {port} is in use",
            "--port",
        )
    left = Path((tmp_path / "peer" / "sockets.path").read_text())
    assert not left.exists(), "the socket directory is removed although nothing was started"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--host", "localhost"], ExitCode.ADDRESS, "localhost"),
        (["--host", "203.0.113.7"], ExitCode.ADDRESS, "This machine has no address 203.0.113.7"),
        (["--announce", "peer.example.org:1"], ExitCode.ADDRESS, "peer.example.org"),
        (["--peer", "203.0.113.7"], ExitCode.ADDRESS, "--peer"),
        (["--peer", ADDRESS, "--peer", "203.0.113.7"], ExitCode.ADDRESS, '"203.0.113.7"'),
        (["--peer", ""], ExitCode.ADDRESS, "is empty"),
        (["--device", "gpu"], ExitCode.DEVICE, "gpu"),
        (["--port", "70000"], ExitCode.USAGE, "--port: 70000"),
        (["--emulate", "-1"], ExitCode.USAGE, "--emulate"),
        (["--settings", "missing.toml"], ExitCode.USAGE, "missing.toml"),
    ],
)
def test_a_flag_that_cannot_be_used(flags: list[str], code: ExitCode, says: str) -> None:
    fails(["join", "digits", "--dir", "peer", *flags], code, says)
    note = Path("peer/sockets.path")
    assert not note.exists() or not Path(note.read_text()).exists(), "a socket directory is left behind"


@pytest.mark.parametrize(
    "arguments",
    [
        ["rehearse", "--seconds", "0"],
        ["rehearse", "--minutes", "0"],
        ["rehearse", "--minutes", "nan"],
        ["rehearse", "--simulate", "--virtual-time"],
        ["rehearse", "--simulate", "--keep"],
        ["rehearse", "--virtual-time", "--keep"],
        ["rehearse", "--simulate", "--peers", "0"],
        ["rehearse", "--simulate", "--peers", "10001"],
        ["rehearse", "--seconds", "nan"],
        ["status", INVITE, "--wait-seconds", "-1"],
        ["status", INVITE, "--wait-seconds", "nan"],
        ["join", INVITE, "--wait-seconds", "-1"],
        ["bootstrap", "digits", "--checkpoint-seconds", "0"],
    ],
)
def test_an_option_that_cannot_be_used_is_wrong_usage_whatever_the_command(arguments: list[str]) -> None:
    fails(arguments, ExitCode.USAGE, arguments[-2], arguments[-1])


@pytest.mark.parametrize(
    ("arguments", "says", "excerpt"),
    [
        (["--peers", "80,x"], "'x'", "80,x\n   ^\n"),
        (["--peers", "80,8:1k/20ms"], "packet", "80,8:1k/20ms\n     ^^\n"),
        (["--churn", "120%"], "over 100%", "120%\n^^^^\n"),
    ],
)
def test_a_scene_that_cannot_be_played_is_underlined(arguments: list[str], says: str, excerpt: str) -> None:
    result = CliRunner().invoke(app, ["rehearse", *arguments])
    assert result.exit_code == int(ExitCode.USAGE)
    line, _, rest = result.stderr.partition("\n")
    assert line.startswith("p2p-trainer: --") and says in line
    assert rest == excerpt


def test_a_scene_file_with_a_mistake_is_underlined() -> None:
    Path("scene.toml").write_text("[[peers]]\nspeed = 8\njoins_at = 30\nkilled_at = 20  # seconds\n")
    result = CliRunner().invoke(app, ["rehearse", "--scene", "scene.toml"])
    assert result.exit_code == int(ExitCode.USAGE)
    assert "scene.toml, line 4" in result.stderr
    assert result.stderr.endswith("\nkilled_at = 20  # seconds\n            ^^\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["rehearse", "--minutes", "1", "--seconds", "60"],
        ["rehearse", "digits", "--run", "stdlib-text"],
        ["rehearse", "--peers", "80", "--scene", "scene.toml"],
    ],
)
def test_two_options_that_say_the_same_are_refused(arguments: list[str]) -> None:
    fails(arguments, ExitCode.USAGE, "Give one of them")


def test_status_of_an_invite_with_nobody_behind_it_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{ADDRESS.rpartition('/')[2]}"
    nobody = Invite(run_id="tiny-0123456789abcdef", organiser_public_key=bytes(32), addresses=(address,)).encode()
    fails(["status", nobody, "--wait-seconds", "0"], ExitCode.UNREACHABLE, address, "nobody listens there")


@pytest.mark.parametrize("run", ["digits", "run.toml", "./run.toml"])
def test_status_of_a_manifest_needs_somebody_to_ask(run: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{ADDRESS.rpartition('/')[2]}"
    (tmp_path / "run.toml").write_text(example_manifest("digits"))
    fails(["status", run], ExitCode.USAGE, "digits-", "--peer")
    fails(["status", run, "--peer", address, "--peer", "nonsense"], ExitCode.ADDRESS, "--peer: ", "nonsense")
    fails(["status", run, "--peer", address, "--wait-seconds", "0"], ExitCode.UNREACHABLE, address)
    (tmp_path / "run.toml").write_text(
        example_manifest("digits").replace("initial_peers = []", f'initial_peers = ["{address}", "nonsense"]')
    )
    result = CliRunner().invoke(app, ["status", "run.toml", "--wait-seconds", "0"])
    assert result.exit_code == ExitCode.UNREACHABLE and address in result.stderr
    assert 'Ignored: The address "nonsense"' in result.stderr


@pytest.mark.parametrize("run", ["missing.toml", "runs/missing", "digts"])
def test_status_of_what_is_nowhere_is_told_as_for_join(run: str) -> None:
    code = ExitCode.MANIFEST if run.endswith(".toml") else ExitCode.INVITE
    assert fails(["status", run], code) == fails(["join", run], code)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_shipped_manifest_can_be_copied(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["example", name])
    assert result.exit_code == 0 and result.stderr == ""
    (tmp_path / "run.toml").write_text(result.stdout)
    assert cli.read_target("run.toml").run_id == cli.read_target(name).run_id
    assert name in CliRunner().invoke(app, ["example"]).stdout.splitlines()


def test_an_example_that_is_not_shipped_is_named() -> None:
    fails(["example", "digit"], ExitCode.MANIFEST, '"digits"')


def test_programs_get_json_on_standard_output_as_well() -> None:
    result = CliRunner().invoke(app, ["join", "missing.toml", "--json"])
    assert result.exit_code == ExitCode.MANIFEST
    report = json.loads(result.stdout)
    assert report["exit_code"] == ExitCode.MANIFEST
    assert "missing.toml" in report["error"] and report["remedy"]
    assert result.stderr.count("\n") == 1


def test_what_is_wrong_with_the_machine_follows_a_failed_join(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def failing_lines(error: P2PTrainerError, patient: doctor.Patient) -> list[str]:
        asked.append((error.exit_code, patient.target is not None))
        return ["✗ memory        There is too little of it."]

    monkeypatch.setattr(doctor, "failing_lines", failing_lines)
    result = CliRunner().invoke(app, ["join", "digits", "--dir", "peer", "--host", "203.0.113.7"])
    assert result.exit_code == ExitCode.ADDRESS
    first, second = result.stderr.splitlines()
    assert first.startswith("p2p-trainer: ") and second.startswith("✗ memory")
    assert asked == [(ExitCode.ADDRESS, True)]


def test_what_nobody_expected_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(cli, "read_target", broken)
    fails(["join", "digits"], ExitCode.UNEXPECTED, "RuntimeError: two lines", "--verbose")


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), ExitCode.INTERRUPTED), (MemoryError(), ExitCode.LIMITS)],
    ids=["interrupted", "memory"],
)
def test_an_interruption_and_a_lack_of_memory_have_codes_of_their_own(
    error: BaseException, code: ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(text: str) -> None:
        raise error

    monkeypatch.setattr(cli, "read_target", stopped)
    result = CliRunner().invoke(app, ["join", "digits"])
    assert result.exit_code == code
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["join"], ["dance"], ["join", "digits", "--port", "x"], ["status"]])
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["join", "--help"], ExitCode.OK),
        (["example", "digits"], ExitCode.OK),
        (["join", INVITE[:-5]], ExitCode.INVITE),
        (["join", "absent.toml"], ExitCode.MANIFEST),
        (["bootstrap", INVITE, "--systemd", "--standby"], ExitCode.OK),
        (["invite", INVITE], ExitCode.OK),
        (["status", INVITE[:-5]], ExitCode.INVITE),
        (["doctor", INVITE[:-5]], ExitCode.INVITE),
        (["plan", "absent.toml"], ExitCode.MANIFEST),
    ],
    ids=lambda value: " ".join(word[:10] for word in value) if isinstance(value, list) else None,
)
def test_what_is_answered_at_once_loads_nothing_heavy(arguments: list[str], code: ExitCode, tmp_path: Path) -> None:
    program = f"""
import sys
from p2p_trainer.cli import app
try:
    app({arguments})
except SystemExit as ended:
    assert ended.code == {int(code)}, ended.code
heavy = {{"torch", "numpy", "scipy", "hivemind", "transformers", "sklearn", "sympy"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
