"""What programs read from ``--json``: the main events, a line each, and not every second."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from p2p_trainer.json_lines import TRAIN_SECONDS, JsonLines
from p2p_trainer.metrics import MetricsWriter, read_metrics


def test_the_main_events_come_as_they_stand_in_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, listener=JsonLines().event) as metrics:
        for event in ("join", "throughput", "training_started", "account", "round", "leave"):
            metrics.write(event, loss=float("nan"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["join", "round", "leave"]
    assert lines == [event for event in read_metrics(path) if event["event"] in ("join", "round", "leave")]


def test_training_is_reported_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    lines = JsonLines()
    for second in range(26):
        lines.event({"time": 100.0 + second, "event": "train", "samples": second})
    shown = [json.loads(line)["samples"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [0, int(TRAIN_SECONDS), 2 * int(TRAIN_SECONDS)]


def test_a_reader_that_is_gone_does_not_end_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    lines = JsonLines()
    for _ in range(2):
        lines.write({"event": "round"})
