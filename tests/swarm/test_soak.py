"""The soak's own arithmetic, quick: a verdict that cannot fail would be none. And a short soak, as CI plays it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import soak
import soak_figures as figures
from preloaded import Preloaded
from soak_figures import Credit, Held, Stay, Swarmwide
from soak_schedule import AWAY_PART, COMEBACK_SECONDS, SECONDS_OF, Schedule, make_schedule

SCHEDULES = [
    make_schedule(seed, minutes, peers) for seed in range(8) for minutes, peers in ((1.5, 4), (10, 8), (30, 12))
]
MEGABYTE = 1 << 20


# --------------------------------------------------------------------------- the schedule


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert make_schedule(7, 10, 12) == make_schedule(7, 10, 12)
    others = [make_schedule(8, 10, 12), make_schedule(7, 11, 12), make_schedule(7, 10, 11)]
    assert make_schedule(7, 10, 12) not in others
    assert make_schedule(7, 10, 12).as_json()["faults"][0].keys() == {"kind", "peer", "at", "until"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_spares_the_first_peer_keeps_most_there_and_has_all_back_in_time(schedule: Schedule) -> None:
    faults = schedule.faults
    assert faults and all(fault.peer != schedule.first[0] for fault in faults)
    assert {fault.peer for fault in faults if fault.kind == "join"} == set(schedule.late)
    for fault in faults:
        low, high = SECONDS_OF[fault.kind]
        assert schedule.calm_seconds <= fault.at <= fault.until <= schedule.seconds - 29
        assert fault.until - fault.at <= high + 0.1 and (low == 0) <= (fault.until == fault.at)
        away = {one.peer for one in faults if one.kind != "join" and one.at <= fault.at < one.until}
        assert len(away) <= AWAY_PART * (len(schedule.first) + len(schedule.late))
    for name in (*schedule.first, *schedule.late):
        own = [fault for fault in faults if fault.peer == name]
        assert [fault.kind for fault in own].count("join") == (name in schedule.late)
        for earlier, later in pairwise(own):
            assert later.kind != "join" and later.at > earlier.until + COMEBACK_SECONDS - 0.2


def test_a_long_soak_plays_every_kind() -> None:
    assert {fault.kind for fault in make_schedule(1, 10, 8).faults} == set(SECONDS_OF)


def test_a_soak_of_too_few_peers_or_minutes_is_refused() -> None:
    for minutes, peers in ((10, 3), (0.5, 8)):
        with pytest.raises(ValueError, match="too few"):
            make_schedule(1, minutes, peers)


# --------------------------------------------------------------------------- bases and accounts


def committed(version: int, digest: str, at: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {
        "event": "round",
        "time": at,
        "outcome": "committed",
        "fragment": 0,
        "version": version,
        "digest": digest,
        "weight": 10,
        "late_share": 0.0,
        **fields,
    }


def test_a_fork_is_found_wherever_it_is() -> None:
    agreed = {"a": [committed(1, "x"), committed(2, "y")], "b": [committed(1, "x")]}
    assert figures.digest_conflicts(agreed) == (1, [])
    fetched = {"event": "rebase", "time": 0.0, "fragment": 0, "to_version": 2, "digest": "z"}
    for wrong in (committed(2, "z"), fetched):
        compared, conflicts = figures.digest_conflicts({**agreed, "c": [wrong]})
        assert compared == 2 and conflicts == ["fragment 0 version 2: y on a, z on c"]
    within_one_peer = figures.digest_conflicts({"a": [committed(1, "x"), committed(1, "y")]})
    assert within_one_peer[1], "a peer that came back on another line"
    assert figures.digest_conflicts({"a": [committed(1, "x")], "b": [committed(2, "y")]}) == (0, [])
    assert figures.digest_conflicts({"a": [committed(1, "x", outcome="skipped")], "b": [committed(1, "y")]}) == (0, [])


def leave(**fields: Any) -> dict[str, Any]:
    return {
        "credited_samples": 80.0,
        "pending_samples": 15.0,
        "dropped_samples": 5.0,
        "trained_samples": 100.0,
        "processed_samples": 100,
        "exact": True,
        **fields,
    }


def test_lost_and_invented_samples_are_found_and_so_is_a_goodbye_that_never_came() -> None:
    assert figures.broken_accounts({"a": leave()}) == []
    for wrong in ({"credited_samples": 79.0}, {"pending_samples": 16.0}, {"exact": False}, {"processed_samples": 99}):
        (line,) = figures.broken_accounts({"a": leave(), "b": leave(**wrong)})
        assert line.startswith("the samples of b do not add up")
    for wrong_leave in (None, {"reason": "the device stopped"}):
        assert figures.broken_accounts({"a": wrong_leave}) == ["a ended without closing its accounts"]


def test_a_loss_must_fall_and_stay_down() -> None:
    falling = [(float(at), 2.0 - at / 100) for at in range(100)]
    assert figures.broken_loss(falling) == []
    assert "did not fall" in figures.broken_loss([(at, 3 - loss) for at, loss in falling])[0]
    assert "rose again" in figures.broken_loss([*falling, *((100.0 + at, 1.6) for at in range(30))])[0]
    assert "not evaluated" in figures.broken_loss([(0.0, 1.0)])[0]
    assert "not evaluated" in figures.broken_loss([])[0]


# --------------------------------------------------------------------------- recovery


def swarm(gap: tuple[float, float] = (0.0, 0.0), peers: int = 4) -> Swarmwide:
    """Peers of 10 samples/s, each credited every second but in the gap, in which nobody is."""
    names = [f"p{number}" for number in range(peers)]
    times = [float(at) for at in range(1, 101) if not gap[0] < at <= gap[1]]
    return Swarmwide(
        credits=[Credit(at=at, peer=name, samples=10.0) for at in times for name in names],
        stays=[Stay(peer=name, begin=0.0, end=100.0) for name in names],
        rates=dict.fromkeys(names, 10.0),
        window_seconds=8.0,
        step_seconds=1.0,
    )


def test_the_full_rate_is_back_when_nothing_is_missing_any_more() -> None:
    assert swarm().usual_share(0.0, 40.0) == 1.0
    assert swarm().seconds_to_full(30.0, 1.0, 100.0) == 0.0
    assert swarm(gap=(30.0, 50.0)).seconds_to_full(30.0, 1.0, 100.0) == 20.0
    assert swarm(gap=(30.0, 100.0)).seconds_to_full(30.0, 1.0, 100.0) is None
    assert swarm(gap=(30.0, 50.0)).seconds_to_credit("p1", 32.0) == 19.0
    assert swarm(gap=(30.0, 100.0)).seconds_to_credit("p1", 32.0) is None


def test_a_peer_that_is_away_is_not_missed_and_one_that_should_be_there_is() -> None:
    whole = swarm()
    without_p0 = [one for one in whole.credits if one.peer != "p0" or one.at <= 30]
    missed = Swarmwide(credits=without_p0, stays=whole.stays, rates=whole.rates, window_seconds=8.0, step_seconds=1.0)
    assert missed.seconds_to_full(30.0, 1.0, 100.0) is None
    away = [*whole.stays[1:], *figures.stays("p0", [0.0], [(30.0, 200.0)], 100.0)]
    excused = Swarmwide(credits=without_p0, stays=away, rates=whole.rates, window_seconds=8.0, step_seconds=1.0)
    assert excused.seconds_to_full(30.0, 1.0, 100.0) == 0.0


def test_a_stay_ends_with_a_fault_and_begins_when_that_is_undone_or_with_the_next_start() -> None:
    def of(starts: list[float], faults: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(stay.begin, stay.end) for stay in figures.stays("a", starts, faults, 100.0)]

    assert of([5.0], []) == [(5.0, 100.0)]
    assert of([5.0], [(20.0, 30.0)]) == [(5.0, 20.0), (30.0, 100.0)]
    assert of([5.0, 42.0], [(20.0, 30.0), (60.0, 70.0)]) == [(5.0, 20.0), (42.0, 60.0), (70.0, 100.0)]
    assert of([5.0], [(20.0, 300.0)]) == [(5.0, 20.0)]
    assert of([], []) == []


def test_samples_count_as_far_as_their_parts_did_and_rounds_that_came_to_nothing_do_not() -> None:
    events = {
        "a": [committed(1, "x", 3.0, late_share=0.5), committed(2, "x", 4.0, outcome="carried"), {"event": "train"}]
    }
    assert figures.credits(events, 2) == [Credit(at=3.0, peer="a", samples=2.5)]


def test_a_swarm_that_stays_slow_and_a_peer_that_stays_away_are_broken_promises() -> None:
    row = {
        "kind": "kill",
        "peer": "a",
        "at": 30.0,
        "seconds_to_full_rate": 4.0,
        "seconds_to_first_credit": 9.0,
        "note": "",
    }
    assert figures.broken_recoveries([row]) == []
    assert "full rate" in figures.broken_recoveries([{**row, "seconds_to_full_rate": None}])[0]
    assert "not credited" in figures.broken_recoveries([{**row, "seconds_to_first_credit": None}])[0]
    nothing = {**row, "seconds_to_full_rate": None, "seconds_to_first_credit": None, "note": "there are no lines here"}
    assert figures.broken_recoveries([nothing]) == []


def test_a_part_that_fails_although_nobody_did_anything_to_it_is_found() -> None:
    def fault(at: float) -> dict[str, Any]:
        return {"event": "fault", "time": at, "reason": "frozen"}

    events = {"a": [{"event": "start", "time": 1.0}, fault(30.0)], "b": []}
    assert figures.unasked_faults(events, [("a", 10.0)]) == []
    assert figures.unasked_faults(events, [("a", 10.0), ("b", 10.0)]) == [], "thawed before anybody noticed"
    for struck in ([], [("b", 10.0)], [("a", 31.0)]):
        assert figures.unasked_faults(events, struck) == ["a failed by itself: frozen"]
    assert len(figures.unasked_faults({"a": [fault(30.0), fault(60.0)]}, [("a", 10.0)])) == 1


def test_medians_are_of_what_came_about() -> None:
    def row(kind: str, full: float | None, own: float | None, note: str = "") -> dict[str, Any]:
        return {"kind": kind, "seconds_to_full_rate": full, "seconds_to_first_credit": own, "note": note}

    rows = [
        row("kill", 1.0, 10.0),
        row("kill", 3.0, None),
        row("kill", None, None, "not there"),
        row("join", None, None),
    ]
    assert figures.by_kind(rows) == {
        "join": {"times": 1, "seconds_to_full_rate": None, "seconds_to_first_credit": None},
        "kill": {"times": 2, "seconds_to_full_rate": 2.0, "seconds_to_first_credit": 10.0},
    }


# --------------------------------------------------------------------------- what processes hold


def life(seconds: int, per_second: dict[str, float]) -> dict[str, Any]:
    return figures.growth(
        [
            Held(
                at=float(at),
                rss_bytes=int(100 * MEGABYTE + per_second.get("rss", 0.0) * at),
                descriptors=int(30 + per_second.get("descriptors", 0.0) * at),
                threads=int(9 + per_second.get("threads", 0.0) * at),
            )
            for at in range(0, seconds, 5)
        ]
    )


def test_what_grows_is_not_level_and_what_only_fills_up_at_first_is() -> None:
    level = life(600, {})
    assert level["level"] is True and level["start"] == {"rss_mb": 104.9, "descriptors": 30, "threads": 9}
    for what in ({"rss": MEGABYTE / 10}, {"descriptors": 0.1}, {"threads": 0.05}):
        grown = life(600, what)
        assert grown["level"] is False and len(grown["grown"]) == 1
    held = [Held(at=5.0 * n, rss_bytes=MEGABYTE * min(100, 10 + 20 * n), descriptors=30, threads=9) for n in range(120)]
    assert figures.growth(held)["level"] is True


def test_what_rounds_hold_while_they_are_under_way_is_no_growth() -> None:
    def of_a_swarm(members: int, lost: float) -> bool:
        """It becomes larger in mid-life, and each second look falls into a round."""
        held = [
            Held(
                at=5.0 * n,
                rss_bytes=100 * MEGABYTE,
                descriptors=int(26 + lost * n + (members * (n > 60) if n % 2 else 0)),
                threads=5,
            )
            for n in range(120)
        ]
        return bool(figures.growth(held)["level"])

    assert of_a_swarm(members=20, lost=0.0)
    assert not of_a_swarm(members=20, lost=0.2)


def test_a_short_life_is_not_judged_and_memory_only_in_a_longer_one() -> None:
    assert life(100, {"descriptors": 1.0})["level"] is None
    assert life(150, {"descriptors": 1.0})["level"] is False
    assert life(150, {"rss": MEGABYTE})["level"] is True
    assert life(5, {})["level"] is None


# --------------------------------------------------------------------------- the thing itself


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_a_short_soak_is_well(tmp_path: Path, preloaded: Preloaded | None) -> None:
    report = soak.soak(make_schedule(seed=1, minutes=1.5, peers=4), tmp_path, preloaded=preloaded)
    assert not report["broken"]
    assert report["digests_agree"] and report["samples_add_up"] and report["leftover_processes"] == 0
    assert report["loss_end"] < report["loss_start"]
    assert len(report["recoveries"]) == len(report["schedule"]["faults"])
