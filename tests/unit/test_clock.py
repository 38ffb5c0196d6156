"""Swarm time: offsets, the median, ticks, and the clocks that hivemind binds by name."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator

import hivemind.averaging.matchmaking
import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.utils.timed_storage
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.clock import ClockSample, Schedule, SwarmClock, best_offset, correction, measure_offset

moments = st.floats(0, 1e6)
schedules = st.builds(
    Schedule,
    start_seconds=st.floats(1.7e9, 1.9e9),
    tick_seconds=st.floats(0.1, 3600),
    fragments=st.integers(1, 256),
)


def test_a_clock_sample_takes_the_way_there_to_be_as_long_as_the_way_back() -> None:
    sample = ClockSample(sent=100.0, answered=110.5, received=101.0)
    assert sample.round_trip_seconds == 1.0
    assert sample.offset_seconds == 10.0


def test_the_sample_with_the_shortest_round_trip_counts() -> None:
    slow = ClockSample(sent=0.0, answered=9.0, received=4.0)
    quick = ClockSample(sent=10.0, answered=15.1, received=10.2)
    assert best_offset([slow, quick, slow]) == pytest.approx(5.0)


def test_measuring_finds_the_offset_of_a_peer_that_answers_with_delays() -> None:
    ours = iter([0.0, 3.0, 10.0, 10.2, 20.0, 25.0])
    theirs = iter([1002.9, 1010.1, 1020.2])

    async def ask() -> float:
        return next(theirs)

    assert asyncio.run(measure_offset(ask, lambda: next(ours))) == pytest.approx(1000.0)


def test_a_newcomer_takes_the_others_time_and_has_no_vote() -> None:
    assert correction([120.0], newcomer=True) == 120.0
    assert correction([-3.0, 120.0, 121.0], newcomer=True) == 120.0


def test_two_clocks_meet_halfway() -> None:
    assert correction([-50.0], newcomer=False) == -25.0
    assert correction([50.0], newcomer=False) == 25.0


@given(ahead=st.floats(-3600, 3600), others=st.integers(2, 7))
def test_a_clock_that_only_one_peer_answers_comes_to_the_swarms_time(ahead: float, others: int) -> None:
    """Its partner hears of many, and so does not move."""
    for _ in range(24):
        assert correction([ahead, *[0.0] * others], newcomer=False) == 0.0
        ahead += correction([-ahead], newcomer=False)
    assert abs(ahead) < 0.001


def test_nobody_asked_corrects_nothing() -> None:
    assert correction([], newcomer=True) == correction([], newcomer=False) == 0.0


@given(
    honest=st.lists(st.floats(-5, 5), min_size=1, max_size=9),
    lies=st.lists(st.floats(-1e9, 1e9), max_size=8),
    newcomer=st.booleans(),
)
def test_a_minority_of_lying_clocks_cannot_move_the_median_beyond_the_honest_ones(
    honest: list[float], lies: list[float], newcomer: bool
) -> None:
    lies = lies[: max(0, len(honest) - 1)]
    votes = honest if newcomer else [0.0, *honest]
    assert min(votes) <= correction([*lies, *honest], newcomer=newcomer) <= max(votes)


@given(offsets=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_the_correction_is_somebodys_clock_and_never_a_mean(offsets: list[float]) -> None:
    assert correction(offsets, newcomer=True) == statistics.median_low(offsets)


@given(schedule=schedules, tick=st.integers(0, 10**6))
def test_half_a_tick_after_its_beginning_a_tick_is_the_current_one(schedule: Schedule, tick: int) -> None:
    assert schedule.tick_at(schedule.begins(tick) + schedule.tick_seconds / 2) == tick


@given(schedule=schedules, after=moments)
def test_the_next_tick_is_less_than_one_tick_away(schedule: Schedule, after: float) -> None:
    now = schedule.start_seconds + after
    rounding = 1e-5
    assert now - rounding <= schedule.begins(schedule.next_tick(now)) <= now + schedule.tick_seconds + rounding


def test_a_peer_that_stops_answering_is_measured_by_what_it_answered() -> None:
    def measured(*answers: float | None) -> float | None:
        left = iter(answers)

        async def ask() -> float | None:
            return next(left)

        return asyncio.run(measure_offset(ask, lambda: 1000.0))

    assert measured(1007.0, None) == 7.0
    assert measured(None) is None


def test_before_the_start_the_next_tick_is_the_first() -> None:
    schedule = Schedule(start_seconds=1000.0, tick_seconds=2.0, fragments=3)
    assert schedule.next_tick(10.0) == 0
    assert schedule.next_tick(1000.0) == 1
    assert schedule.next_tick(999.0) == 0


def test_ticks_go_round_the_fragments() -> None:
    schedule = Schedule(start_seconds=0.0, tick_seconds=2.0, fragments=3)
    assert [schedule.fragment(tick) for tick in range(5)] == [0, 1, 2, 0, 1]
    assert schedule.cycle_seconds == 6.0


@given(schedule=schedules, tick=st.integers(0, 10**5))
def test_an_honest_base_of_any_fragment_is_always_possible(schedule: Schedule, tick: int) -> None:
    rounds_held = len(range(schedule.fragment(tick), tick + 1, schedule.fragments))
    possible = schedule.possible_versions(schedule.begins(tick) + schedule.tick_seconds / 2)
    assert rounds_held <= possible <= rounds_held + 1


def test_before_the_start_a_base_of_version_one_is_the_most_that_is_possible() -> None:
    assert Schedule(start_seconds=1000.0, tick_seconds=1.0, fragments=2).possible_versions(0.0) <= 1


@pytest.fixture
def hivemind_clocks() -> Iterator[None]:
    """Gives hivemind its own clock back."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("hivemind.") and hasattr(module, "get_dht_time"):
            module.get_dht_time = time.time


def test_installing_makes_the_dht_and_matchmaking_follow_swarm_time(hivemind_clocks: None) -> None:
    clock = SwarmClock(wall=lambda: 1000.0, passed=lambda: 0.0)
    clock.offset_seconds = 234.0
    clock.install()
    for module in (
        hivemind.averaging.matchmaking,
        hivemind.dht.node,
        hivemind.dht.protocol,
        hivemind.utils.timed_storage,
    ):
        assert module.get_dht_time() == 1234.0
    clock.offset_seconds = -1000.0
    assert hivemind.utils.timed_storage.get_dht_time() == 0.0


def test_installed_swarm_time_decides_what_has_expired(hivemind_clocks: None) -> None:
    clock = SwarmClock(wall=lambda: 1000.0, passed=lambda: 0.0)
    clock.install()
    storage = hivemind.utils.timed_storage.TimedStorage()
    assert storage.store("key", "value", expiration_time=1500.0)
    assert storage.get("key") is not None
    clock.offset_seconds = 600.0
    assert storage.get("key") is None


def test_whatever_is_done_to_the_machines_clock_swarm_time_only_passes() -> None:
    wall, passed = [1000.0], [50.0]
    clock = SwarmClock(wall=lambda: wall[0], passed=lambda: passed[0])
    for jump in (300.0, -600.0, 1e6):
        wall[0] += jump
        passed[0] += 1.0
        assert clock.now() == 1000.0 + passed[0] - 50.0


def test_corrections_do_not_change_how_long_something_took() -> None:
    passed = [50.0]
    clock = SwarmClock(wall=lambda: 1000.0, passed=lambda: passed[0])
    began = clock.passed()
    clock.offset_seconds += 3600.0
    passed[0] += 2.0
    assert clock.passed() - began == 2.0


def test_swarm_time_is_this_machines_and_passes_as_fast() -> None:
    clock = SwarmClock()
    before = time.time()
    assert abs(clock.now() - before) < 0.5
