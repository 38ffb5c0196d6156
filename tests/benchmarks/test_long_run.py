"""What the long run says of its curves: ratios of times, seed by seed, and nothing where somebody did not get there."""

from __future__ import annotations

from typing import Any

import pytest
from long_run import CONTENDERS, compare, loss_after

SECONDS = 100.0


def run(contender: str, seed: int, *points: tuple[float, float]) -> dict[str, Any]:
    """:param points: (seconds, loss)"""
    return {"contender": contender, "seed": seed, "curve": [[at, 10 * at, loss] for at, loss in points]}


def runs(seed: int, ours_at_the_end: float = 1.0) -> list[dict[str, Any]]:
    return [
        run("fastest_alone", seed, (0, 5.0), (25, 4.0), (50, 3.0), (100, 2.0)),
        run("ours", seed, (0, 5.0), (20, 4.0), (25, 3.0), (50, 2.0), (100, ours_at_the_end)),
        run("one_machine", seed, (0, 5.0), (40, 1.0), (100, 0.5)),
    ]


def test_how_much_sooner_ours_has_what_the_fastest_peer_alone_has() -> None:
    found = compare(runs(0), SECONDS)
    assert found["seeds"] == [0]
    assert [found[f"loss_{part}"]["mean"] for part in ("0.25", "0.5", "1")] == [4.0, 3.0, 2.0]
    sooner = [found[f"faster_than_alone_{part}"]["mean"] for part in ("0.25", "0.5", "1")]
    assert sooner == pytest.approx([25 / 20, 50 / 25, 100 / 50])
    assert found["of_one_machine"]["mean"] == pytest.approx(0.4), "40 s of our 100 s to our last loss"


def test_seeds_are_compared_each_with_itself_and_only_whole_ones() -> None:
    half = [one for one in runs(1) if one["contender"] != "one_machine"]
    assert compare([*runs(0), *half], SECONDS)["seeds"] == [0]
    found = compare([*runs(0), *runs(1, ours_at_the_end=1.5)], SECONDS)
    assert found["seeds"] == [0, 1]
    assert (found["final_loss_ours"]["least"], found["final_loss_ours"]["greatest"]) == (1.0, 1.5)


def test_a_loss_that_one_seed_did_not_reach_has_no_mean_time() -> None:
    slow = [one for one in runs(1) if one["contender"] != "ours"] + [run("ours", 1, (0, 5.0), (100, 2.5))]
    found = compare([*runs(0), *slow], SECONDS)["faster_than_alone_1"]
    assert found["mean"] is None and found["greatest"] == pytest.approx(2.0)


def test_the_loss_by_a_time_is_that_of_the_last_evaluation() -> None:
    curve = [(0.0, 0.0, 5.0), (50.0, 1.0, 3.0), (51.0, 1.0, 2.0)]
    assert loss_after(curve, 50.0) == 3.0


def test_every_contender_is_compared() -> None:
    assert set(CONTENDERS) == {one["contender"] for one in runs(0)}
