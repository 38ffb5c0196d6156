import json
import logging
import math
import os
import resource
from pathlib import Path

import pytest

from dht_config.errors import DirectoryError
from p2p_trainer.metrics import MetricsWriter, read_metrics


def test_events_come_back_in_order_with_their_time_and_exact_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = iter([1.5, 2.5])
    with MetricsWriter(path, clock=lambda: next(times)) as metrics:
        metrics.write("train", samples=2**53 + 1, loss=0.1 + 0.2)
        metrics.write("leave", reason='said "enough"\n', fragments=[{"fragment": 0, "digest": None}])
    assert read_metrics(path) == [
        {"time": 1.5, "event": "train", "samples": 2**53 + 1, "loss": 0.1 + 0.2},
        {
            "time": 2.5,
            "event": "leave",
            "reason": 'said "enough"\n',
            "fragments": [{"fragment": 0, "digest": None}],
        },
    ]


def test_every_event_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write("join")
    assert [event["event"] for event in read_metrics(tmp_path / "metrics.jsonl")] == ["join"]
    metrics.close()


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write("train", loss=math.nan, deep={"list": [math.inf, (1.0, -math.inf)]})
    (line,) = path.read_text().splitlines()
    event = json.loads(line, parse_constant=pytest.fail)
    assert event["loss"] is None
    assert event["deep"] == {"list": [None, [1.0, None]]}


def test_a_restarted_peer_appends_and_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write("join", restart=0)
        metrics.write("train", samples=8)
    os.truncate(path, path.stat().st_size - 5)
    assert [event["event"] for event in read_metrics(path)] == ["join"]
    with MetricsWriter(path) as metrics:
        metrics.write("join", restart=1)
    assert [event.get("restart") for event in read_metrics(path)] == [0, 1]


def test_torn_characters_and_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "join"}\n[1]\n7\n\n{"event": "\xc3')
    assert read_metrics(path) == [{"event": "join"}]


def test_a_file_that_is_not_there_has_no_events(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_costs_events_and_one_warning_and_writing_goes_on_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(path) as metrics, caplog.at_level(logging.WARNING):
        metrics.write("join")
        try:
            # In the middle of the next line: the first write is cut, the others fail.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
            for samples in range(3):
                metrics.write("train", samples=samples)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        metrics.write("leave")
    assert [event["event"] for event in read_metrics(path)] == ["join", "leave"]
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def test_a_file_that_cannot_be_made_is_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError) as caught:
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")
    assert str(tmp_path / "file" / "metrics.jsonl") in caught.value.problem


def test_events_after_closing_are_dropped(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.close()
    metrics.close()
    metrics.write("train")
    assert read_metrics(tmp_path / "metrics.jsonl") == []
