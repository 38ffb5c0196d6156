"""Proposals for new runs: what they promise of ticks, codecs and traffic, and that every peer can read them."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dht_config.errors import ExitCode
from dht_config.manifest import load_manifest, parse_manifest
from p2p_trainer.cli import app
from p2p_trainer.manifest_template import manifest_text
from p2p_trainer.proposal import STEPS_A_CYCLE, Wishes, forecast_lines, propose, shape_of
from p2p_trainer.run_model import check_model
from p2p_trainer.target import manifest_target
from p2p_trainer.traffic import cycle_bytes

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)

pytestmark = pytest.mark.usefixtures("untouched")

wishes = st.builds(
    Wishes,
    name=st.just("a-run"),
    task=st.sampled_from(["text", "digits", "somebody-elses"]),
    parameters=st.integers(10**4, 10**10),
    volunteers=st.integers(1, 2000),
    slowest_up_bits_per_second=st.floats(1e5, 1e10),
    fastest_samples_per_second=st.none() | st.floats(1e-3, 1e5),
    sequence_length=st.integers(8, 8192),
    batch_size=st.integers(1, 256),
)


@given(wishes)
def test_every_proposal_is_a_manifest_and_keeps_its_rules(wish: Wishes) -> None:
    proposal = propose(wish, wish.parameters if wish.task == "somebody-elses" else None)
    manifest = parse_manifest(manifest_text(proposal, NOW), "the proposal")
    assert (manifest.run.tick_seconds, manifest.run.fragments) == (proposal.tick_seconds, proposal.fragments)
    assert (manifest.averaging.codec, manifest.averaging.answer_codec) == (
        proposal.codec_setting,
        proposal.answer_codec,
    )
    assert manifest.run.start < NOW
    assert all(forecast_lines(proposal))
    if proposal.tick_seconds == 3600:
        return  # the longest that a manifest allows; the forecast says what it means
    assert proposal.cycle_seconds >= STEPS_A_CYCLE * proposal.step_seconds * 0.999
    line_seconds = 8 * proposal.cycle_bytes / wish.slowest_up_bits_per_second
    assert proposal.cycle_seconds >= 2 * line_seconds * 0.999
    # No longer than one of the rules asks for, but for rounding up to a tenth of a second.
    if proposal.binding == "line":
        assert proposal.cycle_seconds <= 2 * line_seconds + 0.1 * proposal.fragments + 1e-6
    elif proposal.binding == "steps":
        assert proposal.cycle_seconds <= STEPS_A_CYCLE * proposal.step_seconds + 0.1 * proposal.fragments + 1e-6


@given(st.integers(10**5, 10**10))
def test_a_shape_is_near_the_size_that_was_asked_for(parameters: int) -> None:
    assert abs(math.log(shape_of(parameters).parameters / parameters)) < 0.5


@pytest.mark.parametrize("parameters", [30_000, 10**6, 10**7, 10**9])
def test_the_forecast_counts_the_parameters_that_the_model_has(parameters: int) -> None:
    wish = Wishes(name="a", task="text", parameters=parameters, volunteers=8, slowest_up_bits_per_second=1e7)
    proposal = propose(wish)
    target = manifest_target(parse_manifest(manifest_text(proposal, NOW), "the proposal"))
    assert target.manifest is not None and target.task is not None
    assert check_model(target.manifest, target.task).num_elements == proposal.parameters


def proposed(**changed: object) -> tuple[str, str]:
    defaults = {"name": "a", "task": "text", "parameters": 10**8, "volunteers": 8}
    proposal = propose(Wishes(**{**defaults, **changed}))  # type: ignore[arg-type]
    return proposal.codec, proposal.binding


def test_lines_choose_the_codec_and_steps_the_clock_where_lines_suffice() -> None:
    assert proposed(slowest_up_bits_per_second=2e8)[0] == "int8"
    assert proposed(slowest_up_bits_per_second=5e7)[0] == "int4"
    assert proposed(slowest_up_bits_per_second=5e6) == ("sparse", "line")
    assert proposed(slowest_up_bits_per_second=1e9, fastest_samples_per_second=0.5) == ("float32", "steps")
    assert proposed(slowest_up_bits_per_second=1e9, parameters=10**5) == ("float32", "ticks")


def test_traffic_of_a_cycle_by_hand() -> None:
    assert cycle_bytes("float32", "float32", [1000, 1000], 2) == 2 * 4 * 2000 / 2
    assert cycle_bytes("float32", "float32", [1000], 10) == 2 * 4 * 1000 * 9 / 10


def test_new_writes_a_manifest_from_flags_and_never_over_another(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["new", "my-run", "--parameters", "1M", "--volunteers", "20", "--slowest-up", "5M"]
    )
    assert result.exit_code == 0, result.output
    assert load_manifest(tmp_path / "my-run.toml").run.name == "my-run"
    assert "GB up and as much down a day" in result.stdout
    assert "p2p-trainer bootstrap my-run.toml" in result.stdout
    again = CliRunner().invoke(app, ["new", "my-run"])
    assert again.exit_code == int(ExitCode.DIRECTORY) and "is there already" in again.stderr


def test_new_for_the_digits_forecasts_their_own_model() -> None:
    result = CliRunner().invoke(app, ["new", "small", "--task", "digits", "--out", "-"])
    assert result.exit_code == 0, result.output
    manifest = parse_manifest(result.stdout, "printed")
    target = manifest_target(manifest)
    assert target.task is not None
    assert f"{check_model(manifest, target.task).num_elements:,} parameters" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["My Run"], ExitCode.MANIFEST, "lower-case"),
        (["a", "--task", "nobodys"], ExitCode.MANIFEST, "no such task"),
        (["a", "--parameters", "many"], ExitCode.USAGE, "--parameters: 'many'"),
        (["a", "--parameters", "3"], ExitCode.USAGE, "--parameters"),
        (["a", "--slowest-up", "0"], ExitCode.USAGE, "--slowest-up"),
        (["a", "--volunteers", "0"], ExitCode.USAGE, "--volunteers"),
        (["a", "--fastest", "nan"], ExitCode.USAGE, "--fastest"),
        (["a", "--out", "none/a.toml"], ExitCode.DIRECTORY, "cannot be written"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(arguments: list[str], code: ExitCode, says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", *arguments])
    assert result.exit_code == int(code), result.output
    assert says in result.stderr and result.stderr.count("\n") == 1
    assert list(tmp_path.glob("*.toml")) == []


def test_in_a_terminal_it_asks_for_what_no_flag_says(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        command = [sys.executable, "-m", "p2p_trainer", "new", "asked", "--volunteers", "12"]
        asking = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path)
        os.write(controller, b"digits\n5M\n")  # the task and the lines: digits have their own size
        assert asking.wait(120) == 0
        said = os.read(controller, 1 << 16).decode()
    finally:
        os.close(controller)
        os.close(terminal)
    assert "Task (" in said and "slowest tenth" in said
    assert "How many volunteers" not in said and "parameters [" not in said
    assert load_manifest(tmp_path / "asked.toml").task.name == "digits"
