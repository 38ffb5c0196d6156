"""The machine as a record: what is free counts, and nobody's refusal takes a figure that somebody else has."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from p2p_trainer import hardware
from p2p_trainer.hardware import agreed_memory, read_device, read_hardware
from p2p_trainer.limits import read_limits
from p2p_trainer.nvml import CardFacts


def card(total: int | None, free: int | None) -> CardFacts:
    return CardFacts(uuid="GPU-1", total_bytes=total, free_bytes=free)


@pytest.mark.parametrize(
    ("torch_memory", "nvml_card", "agreed"),
    [
        ((24, 6), card(24, 5), (24, 5)),
        ((24, 4), card(24, 5), (24, 4)),
        ((5, 4), card(80, 60), (5, 4)),  # a MIG instance of which NVML knows the whole card
        ((5, None), card(80, 60), (5, 5)),
        ((24, 6), card(None, None), (24, 6)),
        ((24, 6), None, (24, 6)),
        ((None, None), card(24, 5), (24, 5)),
        ((24, 0), card(24, 5), (24, 0)),
        ((None, None), None, (None, None)),
    ],
)
def test_the_smaller_figure_counts(
    torch_memory: tuple[int | None, int | None], nvml_card: CardFacts | None, agreed: tuple[int | None, int | None]
) -> None:
    assert agreed_memory(*torch_memory, nvml_card) == agreed


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    machine = read_hardware(torch.device("cpu"), tmp_path / "not" / "there" / "yet")
    assert machine.device.kind == "cpu" and machine.device.name
    assert machine.device.free_bytes is not None and machine.device.total_bytes is not None
    assert 0 < machine.device.free_bytes <= machine.device.total_bytes
    assert machine.limits.cores > 0 and machine.limits.open_files > 0
    assert machine.disk_free_bytes is not None and machine.disk_free_bytes > 0


def test_the_processor_has_a_name_that_fits_a_profile_also_without_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, limits = torch.device("cpu"), read_limits()
    assert 0 < len(read_device(cpu, limits).name) <= 64
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    assert 0 < len(read_device(cpu, limits).name) <= 64


def test_a_machine_can_be_written_into_metrics(tmp_path: Path) -> None:
    machine = read_hardware(torch.device("cpu"), tmp_path)
    assert json.loads(json.dumps(asdict(machine)))["device"]["kind"] == "cpu"
