"""What was measured is kept, believed while it holds, and never in the way."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from dht_config.manifest import example_manifest, parse_manifest
from p2p_trainer.hardware import DeviceFacts
from p2p_trainer.planning import probe_cache
from p2p_trainer.planning.plan_facts import Measurement
from p2p_trainer.planning.probe_cache import Entry, ProbeCache, default_cache_directory, key_of
from p2p_trainer.throughput import Throughput

MANIFEST = parse_manifest(example_manifest("digits"), source="a test")
CARD = DeviceFacts(kind="cuda", name="A card", uuid="GPU-1", driver="570.1", total_bytes=10**10, free_bytes=9 * 10**9)


def measured(*micro_batches: int, stopped: str = "done") -> Measurement:
    return Measurement(
        results=tuple(
            Throughput(samples_per_second=10.0 * size, micro_batch=size, measured_seconds=1.0, peak_bytes=100 * size)
            for size in micro_batches
        ),
        stopped=stopped,  # type: ignore[arg-type]
        program_bytes=300,
    )


def key(manifest=MANIFEST, strategy="full", dtype="float32", device=CARD, cores=4.0, threads=None) -> str:  # type: ignore[no-untyped-def]
    return key_of(manifest, 1, strategy, dtype, device, cores=cores, threads=threads)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path / "not" / "there")
    assert cache.read(key()) is None
    entry = Entry(measurement=measured(1, 2, 4), budget_bytes=1000)
    cache.write(key(), entry)
    assert cache.read(key()) == entry
    assert cache.read(key(threads=2)) is None


def test_everything_that_a_measurement_depends_on_is_in_its_key() -> None:
    section = MANIFEST.inner_optimizer
    others = [
        key(strategy="checkpoint"),
        key(dtype="bfloat16"),
        key(cores=2.0),
        key(threads=1),
        key(device=replace(CARD, uuid="GPU-2")),
        key(device=replace(CARD, driver="580.0")),
        key(device=replace(CARD, kind="cpu")),
        key(manifest=MANIFEST.model_copy(update={"model": {"hidden_sizes": [64]}})),
        key(manifest=MANIFEST.model_copy(update={"inner_optimizer": section.model_copy(update={"batch_size": 4})})),
        key_of(MANIFEST, 2, "full", "float32", CARD, cores=4.0, threads=None),
    ]
    assert len({key(), *others}) == len(others) + 1


def test_what_no_measurement_depends_on_is_not() -> None:
    assert key() == key(device=replace(CARD, free_bytes=1, utilisation=0.5))
    assert key() == key(manifest=MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"name": "x"})}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 99}',
        json.dumps(
            {
                "format": 1,
                "results": [],
                "stopped": "done",
                "program_bytes": None,
                "budget_bytes": None,
                "drifted": False,
            }
        ),
        json.dumps(
            {
                "format": 1,
                "results": [{"x": 1}],
                "stopped": "done",
                "program_bytes": None,
                "budget_bytes": None,
                "drifted": False,
            }
        ),
        '{"format": 1, "results": [{"samples_per_second": NaN, "micro_batch": 1, "measured_seconds": 1}], '
        '"stopped": "done", "program_bytes": None, "budget_bytes": null, "drifted": false}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_one_line_and_a_new_measurement(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    cache = ProbeCache(tmp_path, said.append)
    (tmp_path / f"{key()}.json").write_text(text, encoding="latin-1")
    assert cache.read(key()) is None
    (line,) = said
    assert "\n" not in line and line.startswith("Measuring again")
    cache.write(key(), Entry(measurement=measured(1), budget_bytes=None))
    assert cache.read(key()) is not None


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProbeCache(tmp_path / "file" / "below")
    cache.write(key(), Entry(measurement=measured(1), budget_bytes=None))
    with cache.lock():
        pass
    assert cache.read(key()) is None


def test_what_memory_ended_holds_until_there_is_more_of_it() -> None:
    entry = Entry(measurement=measured(1, stopped="memory"), budget_bytes=1000)
    assert entry.holds_for(1000) and entry.holds_for(1199) and entry.holds_for(10)
    assert not entry.holds_for(1201) and not entry.holds_for(None)
    assert Entry(measurement=measured(1), budget_bytes=1000).holds_for(10**9)
    assert Entry(measurement=measured(1, stopped="memory"), budget_bytes=None).holds_for(None)


def test_a_rate_that_drifted_is_measured_again(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path)
    cache.note_drift(key())  # of nothing
    cache.write(key(), Entry(measurement=measured(1), budget_bytes=None))
    cache.note_drift(key())
    entry = cache.read(key())
    assert entry is not None and entry.drifted and not entry.holds_for(None)


def test_a_micro_batch_that_did_not_fit_is_not_tried_again(tmp_path: Path) -> None:
    cache = ProbeCache(tmp_path)
    cache.write(key(), Entry(measurement=measured(1, 2, 4, 8), budget_bytes=1000))
    cache.note_too_big(key(), 4)
    entry = cache.read(key())
    assert entry is not None and [one.micro_batch for one in entry.measurement.results] == [1, 2]
    assert entry.holds_for(1000) and not entry.holds_for(2000)


def test_one_measures_at_a_time_and_who_waits_can_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProbeCache(tmp_path)
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            raise KeyboardInterrupt

    with FileLock(tmp_path / "measuring.lock"), pytest.raises(KeyboardInterrupt), cache.lock(wait):
        raise AssertionError("somebody else measures")
    assert waits == 3
    monkeypatch.setattr(probe_cache, "LOCK_SECONDS", 0.3)
    entered = []
    with FileLock(tmp_path / "measuring.lock"):
        thread = threading.Thread(
            target=lambda: [entered.append(True) for _ in [0] if cache.lock().__enter__() is None]
        )
        thread.start()
        thread.join(30)
    assert entered == [True], "in the end it measures beside him"
    with cache.lock(), pytest.raises(Exception, match="acquired"):
        FileLock(tmp_path / "measuring.lock").acquire(timeout=0)


def test_it_lies_where_such_things_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "p2p-trainer" / "probes"
