"""What a peer makes of its line: how strongly it encodes, how often it takes part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht_config.manifest import AveragingSection
from peers.clock import Schedule
from peers.line import (
    CODECS,
    FORGOTTEN_ROUNDS,
    LEAST_SECONDS,
    MEASURABLE_BYTES,
    SHARE_OF_LINE,
    CodecName,
    LineRate,
    LineUse,
    LinkRate,
    RateMeter,
    announced_megabits,
    least_codec,
    limiting,
    line_use,
    next_codec,
)

USE = LineUse(up_bytes=100, down_bytes=100, base_bytes=200, tick_seconds=1.0)
rates = st.floats(1e-3, 1e12)
SIZE = 4096 * 1000
SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=2.0, fragments=4)


def of_a_run(codec: str) -> LineUse:
    """A fragment of four million parameters; averages and bases come down as they are."""
    averaging = AveragingSection(codec="auto", answer_codec="int8")
    return line_use(averaging, SCHEDULE, codec=codec, size=SIZE, base_bytes=8 * SIZE)


def megabits(up: float, down: float = math.inf) -> LineRate:
    return LineRate(up=up * 125_000, down=down * 125_000)


def test_a_line_that_carries_every_round_takes_part_in_all() -> None:
    assert USE.least_cadence(LineRate()) == 1, "nothing is known of it"
    assert USE.least_cadence(LineRate(up=1000.0, down=1000.0)) == 1
    assert USE.least_cadence(LineRate(up=100.0 / SHARE_OF_LINE, down=100.0 / SHARE_OF_LINE)) == 1


def test_a_far_peer_takes_part_less_often_where_cycles_are_short_and_its_line_is_not_busier_for_it() -> None:
    short = replace(USE, cycle_seconds=2.0)
    fast = LineRate(up=1e6, down=1e6)
    cadences = [short.least_cadence(replace(fast, round_trip_seconds=seconds)) for seconds in (0.0, 0.5, 0.6, 1.2, 9.0)]
    assert cadences == [1, 1, 2, 4, 4], "three round trips, of 80 % of a cycle"
    assert short.share(replace(fast, round_trip_seconds=9.0), 1) == short.share(fast, 1)
    assert replace(USE, cycle_seconds=60.0).least_cadence(replace(fast, round_trip_seconds=9.0)) == 1


def test_a_skipped_round_costs_a_base_on_the_way_down_before_the_next() -> None:
    assert USE.least_cadence(LineRate(up=124.0, down=124.0)) == 4, "half of (100 + 200) is more than 100"
    assert USE.least_cadence(LineRate(up=124.0, down=1000.0)) == 2, "nothing more goes up"
    assert replace(USE, base_bytes=0).least_cadence(LineRate(up=124.0, down=124.0)) == 2
    assert USE.least_cadence(LineRate(up=1.0, down=1.0)) == 4, "there is nothing above"


@given(rates, rates, st.integers(1, 2**40), st.integers(1, 2**40), st.integers(0, 2**40))
def test_a_faster_line_never_takes_part_less_often(one: float, other: float, up: int, down: int, base: int) -> None:
    slow, fast = sorted((one, other))
    use = LineUse(up_bytes=up, down_bytes=down, base_bytes=base, tick_seconds=1.0)
    for rate in (LineRate(up=fast, down=slow), LineRate(up=slow, down=fast), LineRate(up=fast, down=fast)):
        assert use.least_cadence(rate) <= use.least_cadence(LineRate(up=slow, down=slow))


@pytest.mark.parametrize(
    ("up", "codec"), [(math.inf, "int8"), (100, "int8"), (12, "int4"), (1, "sparse"), (0.01, "int8")]
)
def test_the_way_up_decides_how_strongly_to_encode(up: float, codec: str) -> None:
    """At the last one no codec helps: what is left is the one that loses least."""
    assert least_codec(megabits(up), of_a_run) == codec


def test_a_codec_does_not_help_the_way_down() -> None:
    assert least_codec(megabits(100, down=2), of_a_run) == "int8"


@given(rates, rates, st.sampled_from(CODECS))
def test_the_next_codec_is_the_one_needed_or_stays_between_it_and_what_is_used(
    up: float, down: float, now: CodecName
) -> None:
    rate = LineRate(up=up, down=down)
    chosen, needed = next_codec(now, rate, of_a_run), least_codec(rate, of_a_run)
    positions = sorted((CODECS.index(needed), CODECS.index(now)))
    assert positions[0] <= CODECS.index(chosen) <= positions[1]
    if CODECS.index(needed) > CODECS.index(now):
        assert chosen == needed, "a line that is too slow does not wait"


def border(use: Callable[[str], LineUse]) -> float:
    """The lowest way up, in bytes a second, at which int8 takes part in every round."""
    one = use("int8")
    return one.up_bytes / one.tick_seconds / SHARE_OF_LINE


def test_a_rate_at_the_border_does_not_change_the_codec_to_and_fro() -> None:
    assert next_codec("int8", LineRate(up=0.99 * border(of_a_run)), of_a_run) == "int4"
    assert next_codec("int4", LineRate(up=1.01 * border(of_a_run)), of_a_run) == "int4"
    assert next_codec("int4", LineRate(up=1.3 * border(of_a_run)), of_a_run) == "int8"


def test_what_came_is_measured_in_the_stretch_in_which_most_came() -> None:
    meter = RateMeter()
    meter.came(100.0, 500_000)
    assert not meter.rate.is_known, "where it began is not known"
    for moment in (101.0, 101.1, 101.2, 101.3, 101.4, 110.0, 110.0):
        meter.came(moment, 500_000)
    assert meter.rate.down == pytest.approx(4 * 500_000 / 0.4), "neither what came before, nor what had waited after"
    assert math.isinf(meter.rate.up)


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 10**7)), min_size=1, max_size=30))
def test_no_stretch_is_faster_than_what_its_bytes_could_have_taken(steps: list[tuple[float, int]]) -> None:
    meter, now, moments = RateMeter(), 0.0, []
    for pause, size in steps:
        now += pause
        meter.came(now, size)
        moments.append((now, size))
    possible = [math.inf]
    for first in range(len(moments)):
        for last in range(first + 1, len(moments)):
            seconds = moments[last][0] - moments[first][0]
            total = sum(size for _, size in moments[first + 1 : last + 1])
            if seconds >= LEAST_SECONDS and total >= MEASURABLE_BYTES:
                possible.append(total / seconds)
    assert meter.rate.down in [pytest.approx(one) for one in possible]


def test_the_way_up_is_what_reducers_say_and_the_slowest_of_them_counts() -> None:
    """All parts go at once over one line."""
    meter = RateMeter()
    meter.arrived("one", 30_000, 0.1)
    assert not meter.rate.is_known
    meter.arrived("one", 60_000, 0.2)
    meter.arrived("other", 60_000, 0.4)
    assert meter.rate == LineRate(up=120_000 / 0.4)
    meter.arrived("one", 10**9, 0.0)
    assert meter.rate == LineRate(up=120_000 / 0.4), "it did not say"


def test_of_several_reducers_one_that_says_it_took_long_is_not_believed() -> None:
    meter = RateMeter()
    for reducer, seconds in (("one", 0.4), ("other", 0.4), ("liar", 100.0)):
        meter.arrived(reducer, 40_000, seconds)
    assert meter.rate == LineRate(up=120_000 / 0.4)


def test_a_line_is_announced_when_its_way_up_is_known_and_never_above_what_is_allowed() -> None:
    assert announced_megabits(megabits(math.inf, 50), LineRate()) is None, "it may be slow upwards"
    assert announced_megabits(megabits(5, 50), LineRate()) == pytest.approx(5)
    assert announced_megabits(megabits(5, math.inf), megabits(1)) == pytest.approx(1)
    assert announced_megabits(LineRate(), LineRate()) is None
    assert announced_megabits(megabits(1e9), LineRate()) == 1e6


def test_one_reducer_that_lies_about_the_way_up_is_outvoted() -> None:
    link = LinkRate()
    for up in (1e6, 1e6, 1e12, 1e6, 1.0):
        link.note(LineRate(up=up))
    assert link.rate.up == 1e6


def test_each_way_is_known_by_itself_and_the_slower_one_is_told() -> None:
    link = LinkRate()
    link.note(LineRate(down=10e6))
    assert link.rate == LineRate(down=10e6) and link.megabits_per_second == pytest.approx(80)
    link.note(LineRate(up=1e6, down=5e6))
    assert link.rate == LineRate(up=1e6, down=10e6) and link.megabits_per_second == pytest.approx(8)


def test_a_way_that_was_not_measured_for_long_is_tried_again() -> None:
    """A sparse contribution is too small to measure a line with: without this a peer would send no other any more."""
    link = LinkRate()
    link.note(LineRate(up=1e4, down=1e6))
    for _ in range(FORGOTTEN_ROUNDS - 1):
        link.note(LineRate(down=1e6))
        assert link.rate.up == 1e4
    link.note(LineRate(down=1e6))
    assert link.rate == LineRate(down=1e6)


def test_only_a_line_that_is_slow_beside_the_others_is_what_limits_a_round() -> None:
    known = megabits(10, 10)
    assert limiting(known, known, others_kilobits=100_000) == known
    assert limiting(known, known, others_kilobits=15_000) == LineRate()
    assert limiting(LineRate(), known, others_kilobits=100_000) == LineRate(), "this round says nothing"
    assert limiting(LineRate(down=1e6), known, others_kilobits=100_000) == known, "one way is enough"
