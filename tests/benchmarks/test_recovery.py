"""What ``recovery.py`` makes of what the peers wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import recovery
from side_by_side_scenes import OURS

SPEED = 15
FROZEN, CUT, KILLED = recovery.faults()
END = KILLED.at + recovery.REST_SECONDS


def away(at: float) -> bool:
    return any(fault.at < at < (END if fault.until is None else fault.until) for fault in recovery.faults())


def written(path: Path, events: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def steps(late_after_cut: float, struck: bool) -> list[dict[str, Any]]:
    """A step a second, an epoch every four; after the cut nobody does anything for a while."""
    done, events = 0, []
    for second in range(1, int(END)):
        waits = CUT.at < second < CUT.at + late_after_cut
        if waits or (struck and away(second)):
            continue
        done += SPEED
        rounds = second // 4
        events.append(
            {"event": "step", "time": second, "processed_samples": done, "rejected_samples": 0, "rounds": rounds}
        )
    return events


def rounds(struck: bool) -> list[dict[str, Any]]:
    return [
        {"event": "round", "time": float(second), "outcome": "committed", "fragment": second % 4, "group_size": 4}
        | {"weight": 4 * SPEED, "late_share": 0.0}
        for second in range(1, int(END))
        if not (struck and away(second))
    ]


def report(tmp_path: Path, contender: str, events: Callable[[bool], list[dict[str, Any]]]) -> dict[str, Any]:
    paths = {name: written(tmp_path / name, events(name == "d")) for name in ("a", "b", "c", "d")}
    names = [peer.name for peer in recovery.parse_peers(recovery.PEERS)]
    return recovery.report(contender, dict(zip(names, paths.values(), strict=True)), 0.0, END)


def test_a_rival_that_stands_still_for_a_while_needs_as_long_to_its_full_rate(tmp_path: Path) -> None:
    found = report(tmp_path, "hivemind_sync", lambda struck: steps(8.0, struck))
    frozen, cut, killed = found["faults"]
    assert found["calm_credited_share"] == pytest.approx(1.0, abs=0.05)
    assert frozen["seconds_to_full_rate"] <= 1.0 and killed["seconds_to_full_rate"] <= 1.0
    assert 5.0 <= cut["seconds_to_full_rate"] <= 8.0, "9 of 10 samples of a window are there a little earlier"
    assert 0.0 < frozen["seconds_to_first_credit"] <= 4.0, "its next epoch"
    assert killed["seconds_to_first_credit"] is None
    recovery.print_table([found])


def test_ours_are_credited_by_their_rounds(tmp_path: Path) -> None:
    found = report(tmp_path, OURS, rounds)
    assert found["calm_credited_share"] == pytest.approx(1.0, abs=0.1)
    assert all(fault["seconds_to_full_rate"] <= 1.0 for fault in found["faults"])
    assert [fault["seconds_to_first_credit"] for fault in found["faults"]] == [1.0, 1.0, None]
