"""Cadence: who takes part when, and how a peer comes to its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.cadence import (
    IN_TIME_ROUNDS,
    LATE_IN_A_ROW,
    PROBE_CYCLES,
    PROBE_DOUBLINGS,
    Cadence,
    is_due,
    pace,
    steady,
)
from peers.clock import Schedule
from peers.line import CADENCES, CODECS, SHARE_OF_LINE, CadenceValue, CodecName, LineRate, LineUse
from peers.lineage import Claim, choose_base, in_step

SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=4)
TICKS = st.integers(0, 2**40)
cadences = st.sampled_from(CADENCES)


@given(TICKS, cadences, cadences, st.integers(1, 64))
def test_whoever_takes_part_less_often_meets_all_that_do_more_often(
    tick: int, one: int, other: int, fragments: int
) -> None:
    schedule = Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=fragments)
    if is_due(schedule, tick, max(one, other)):
        assert is_due(schedule, tick, min(one, other))


@given(cadences, st.integers(1, 64), st.integers(0, 1000))
def test_every_fragment_has_one_round_in_so_many(cadence: int, fragments: int, cycle: int) -> None:
    schedule = Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=fragments)
    for fragment in range(fragments):
        ticks = [(cycle + later) * fragments + fragment for later in range(cadence)]
        assert sum(is_due(schedule, tick, cadence) for tick in ticks) == 1


def test_fragments_are_staggered() -> None:
    assert [tick for tick in range(16) if is_due(SCHEDULE, tick, 4)] == [0, 7, 10, 13]


USE = LineUse(up_bytes=100, down_bytes=100, base_bytes=200, tick_seconds=1.0)


def both(bytes_per_second: float) -> LineRate:
    return LineRate(up=bytes_per_second, down=bytes_per_second)


def due(cadence: Cadence, ticks: range) -> list[int]:
    return [tick for tick in ticks if cadence.take_turn(tick)]


def test_it_is_raised_at_once() -> None:
    cadence = Cadence(SCHEDULE)
    assert due(cadence, range(4)) == [0, 1, 2, 3]
    assert cadence.measured(both(50.0), USE, 3)
    assert cadence.announced == 4
    assert due(cadence, range(4, 20)) == [7, 10, 13, 16]


def test_it_is_lowered_a_cycle_after_everybody_could_read_of_it() -> None:
    cadence = Cadence(SCHEDULE)
    cadence.measured(both(50.0), USE, 3)
    assert due(cadence, range(4, 8)) == [7]
    cadence.took_part(7, late=False)
    assert cadence.measured(both(1000.0), USE, 7)
    assert cadence.announced == 1
    # Due at 10 by the old cadence, but that is less than a cycle; at 13 the new one begins.
    assert due(cadence, range(8, 18)) == [10, 13, 14, 15, 16, 17]


def test_it_does_not_go_to_and_fro_with_a_rate_at_the_border() -> None:
    cadence, border = Cadence(SCHEDULE), 100.0 / SHARE_OF_LINE
    assert cadence.measured(both(0.99 * border), USE, 0)
    cadence.took_part(1, late=False)
    assert not cadence.measured(both(1.01 * border), USE, 1)
    assert cadence.measured(both(1.3 * border), USE, 2)


def test_rounds_that_close_without_us_make_us_take_part_less_often() -> None:
    cadence = Cadence(SCHEDULE)
    changes = [cadence.took_part(tick, late=True) for tick in range(2 * LATE_IN_A_ROW)]
    assert changes.count(True) == 2 and cadence.announced == 4
    assert not any(cadence.took_part(tick, late=True) for tick in range(10))


def test_where_the_run_leaves_it_to_us_a_stronger_codec_comes_before_fewer_rounds() -> None:
    cadence = Cadence(SCHEDULE, "auto")
    seen = []
    for tick in range(4 * LATE_IN_A_ROW):
        cadence.took_part(tick, late=True)
        seen.append((cadence.codec, cadence.announced))
    assert list(dict.fromkeys(seen)) == [("int8", 1), ("int4", 1), ("sparse", 1), ("sparse", 2), ("sparse", 4)]
    fixed = Cadence(SCHEDULE, "float32")
    for tick in range(LATE_IN_A_ROW):
        fixed.took_part(tick, late=True)
    assert (fixed.codec, fixed.announced) == ("float32", 2)


def test_a_base_that_comes_too_late_says_nothing_of_what_we_send() -> None:
    cadence = Cadence(SCHEDULE, "auto")
    for tick in range(2 * LATE_IN_A_ROW):
        cadence.missed(tick)
    assert (cadence.codec, cadence.announced) == ("int8", 4)


def test_now_and_then_a_better_codec_is_tried_ever_more_seldom_if_it_does_not_do() -> None:
    cadence = Cadence(SCHEDULE, "auto")
    began, tried = 0, []
    for tick in range(2000):
        if not cadence.probe(tick) and cadence.codec == "int8":
            if began:
                tried.append(tick - began)
            for _ in range(LATE_IN_A_ROW):
                cadence.took_part(tick, late=True)
            began = tick
    assert len(tried) > 3 and tried == sorted(tried)
    assert tried[0] == PROBE_CYCLES * 2 * SCHEDULE.fragments
    assert tried[-1] == PROBE_CYCLES * 2**PROBE_DOUBLINGS * SCHEDULE.fragments


def test_a_known_way_up_decides_the_codec_and_the_other_way_does_not() -> None:
    def use_of(codec: str) -> LineUse:
        return LineUse(
            up_bytes={"int8": 100, "int4": 50, "sparse": 3}[codec], down_bytes=100, base_bytes=200, tick_seconds=1.0
        )

    cadence = Cadence(SCHEDULE, "auto")
    assert not cadence.after_round(3, LineRate(up=70.0, down=1000.0), use_of)
    assert (cadence.codec, cadence.announced) == ("int4", 1)
    assert cadence.after_round(4, LineRate(down=50.0), use_of)
    assert (cadence.codec, cadence.announced) == ("int4", 4)


def test_what_a_person_wishes_is_kept_whatever_is_measured() -> None:
    cadence = Cadence(SCHEDULE, "auto", wished_cadence=2, wished_codec="int4")
    assert due(cadence, range(8)) == [0, 2, 5, 7], "from the first round on"
    for tick, rate in enumerate([LineRate(), both(1.0), both(1e9)] * PROBE_CYCLES * SCHEDULE.fragments):
        assert not cadence.after_round(tick, rate, lambda _: USE)
        assert not cadence.took_part(tick, late=False) and not cadence.probe(tick)
        assert (cadence.codec, cadence.announced) == ("int4", 2)


@given(st.sampled_from(CADENCES), st.sampled_from(CODECS), st.lists(st.booleans(), max_size=200))
def test_rounds_that_close_without_a_peer_count_more_than_its_wish_and_never_change_its_codec(
    wish: CadenceValue, codec: CodecName, late: list[bool]
) -> None:
    cadence = Cadence(SCHEDULE, "auto", wished_cadence=wish, wished_codec=codec)
    for tick, one in enumerate(late):
        cadence.took_part(tick, late=one)
        cadence.probe(tick)
        assert cadence.announced >= wish and cadence.codec == codec
    raised = Cadence(SCHEDULE, "auto", wished_cadence=1, wished_codec=codec)
    assert [raised.took_part(tick, late=True) for tick in range(LATE_IN_A_ROW)][-1]
    found = [tick for tick in range(1000) if raised.probe(tick)]
    assert raised.announced == 1 and len(found) == 1, "a probe finds the way back, and stays there"


def test_a_wish_for_a_codec_means_nothing_where_the_run_has_one_for_all() -> None:
    assert Cadence(SCHEDULE, "float16", wished_codec="sparse").codec == "float16"


def test_one_late_round_in_between_changes_nothing() -> None:
    cadence = Cadence(SCHEDULE)
    assert not any(cadence.took_part(tick, late=bool(tick % LATE_IN_A_ROW)) for tick in range(20))
    assert cadence.announced == 1


def test_after_rounds_in_time_we_take_part_more_often_again_unless_our_line_is_known_to_be_slow() -> None:
    cadence = Cadence(SCHEDULE)
    for tick in range(2 * LATE_IN_A_ROW):
        cadence.took_part(tick, late=True)
    assert not cadence.unlimited(20)
    for tick in range(IN_TIME_ROUNDS):
        cadence.took_part(tick, late=False)
    assert not cadence.measured(both(1.0), USE, 30), "it is at its highest already"
    assert cadence.unlimited(30)
    assert cadence.announced == 2


def test_a_base_that_comes_too_late_between_rounds_in_time_keeps_nobody_slow() -> None:
    cadence = Cadence(SCHEDULE)
    for tick in range(2 * LATE_IN_A_ROW):
        cadence.missed(tick)
    assert cadence.announced == 4
    for tick in range(IN_TIME_ROUNDS):
        cadence.missed(tick)
        cadence.took_part(tick, late=False)
    assert cadence.unlimited(30) and cadence.announced == 2


def test_a_lower_cadence_is_tried_now_and_then_and_more_seldom_each_time() -> None:
    cadence = Cadence(SCHEDULE)
    tried = []
    for tick in range(1000):
        if cadence.probe(tick):
            tried.append(tick)
        if cadence.announced < 4:
            cadence.measured(both(1.0), USE, tick)  # nothing has changed
    assert tried[0] == PROBE_CYCLES * SCHEDULE.fragments
    waits = [later - one for one, later in pairwise(tried)]
    assert waits == sorted(waits) and waits[1] == 2 * waits[0] and waits[-1] == 2**PROBE_DOUBLINGS * tried[0]
    assert not Cadence(SCHEDULE).probe(10**6), "there is nothing below 1"


def test_the_base_that_the_next_round_starts_from_is_fetched_and_no_other() -> None:
    cadence = Cadence(SCHEDULE)
    assert cadence.wants_base(0, known_since=0.0, now=100.0), "in every round: at once"
    cadence.measured(both(50.0), USE, 0)
    # Fragment 0: others hold rounds at 4, 8 and 12, this peer its next one at 16.
    assert not any(cadence.wants_base(0, known_since=now, now=now) for now in (1.0, 4.5, 8.5, 11.9))
    assert not cadence.wants_base(0, known_since=8.5, now=12.1), "the round of 12 is about to make a newer one"
    assert cadence.wants_base(0, known_since=12.3, now=12.4), "that is it"
    assert cadence.wants_base(0, known_since=8.5, now=13.5), "there was no newer one"


def claim(version: int, line: bytes = b"a") -> Claim:
    return Claim(version=version, digest=line * 31 + bytes([version]), total_samples=100 * version)


def test_peers_that_skip_rounds_do_not_hold_the_swarm_at_their_base() -> None:
    """Most are fast and go on; two slow ones follow when it is their turn, and nobody follows them back."""
    claims = {"fast 1": claim(12), "fast 2": claim(12), "slow": claim(10)}
    pace_of = {"fast 1": 1, "fast 2": 1, "slow": 4}
    assert choose_base(claim(10), in_step(claims, pace_of), possible_versions=20) == claim(12)
    # One fast peer missed a round, and two slow ones are still where it is.
    claims["slow 2"], claims["fast 3"] = claim(10), claim(12)
    votes = in_step(claims, {**pace_of, "slow 2": 4, "fast 3": 1})
    assert set(votes) == {"fast 1", "fast 2", "fast 3"}


def test_slow_peers_that_are_ahead_count() -> None:
    """A fast peer that missed the answers of a round learns of it from slow ones that have them."""
    claims = {"fast 1": claim(10), "fast 2": claim(10), "fast 3": claim(11), "slow 1": claim(11), "slow 2": claim(9)}
    votes = in_step(claims, {"fast 1": 1, "fast 2": 1, "fast 3": 1, "slow 1": 4, "slow 2": 4})
    assert set(votes) == {"fast 1", "fast 2", "fast 3", "slow 1"}


def test_one_peer_that_says_it_is_fast_does_not_decide_for_the_slow_ones() -> None:
    claims = {"hostile": claim(15, b"h"), "slow 1": claim(10), "slow 2": claim(10)}
    votes = in_step(claims, {"hostile": 1, "slow 1": 4, "slow 2": 4})
    assert votes == claims
    assert choose_base(claim(10), votes, possible_versions=20) is None


@given(st.lists(cadences, min_size=1, max_size=9))
def test_most_peers_are_steady(announced: list[int]) -> None:
    everyone = {str(number): cadence for number, cadence in enumerate(announced)}
    most = pace(announced)
    assert 2 * len(steady(everyone)) > len(everyone)
    assert 2 * sum(cadence < most for cadence in announced) <= len(announced), (
        "and with fewer rounds skipped, they are not"
    )


@pytest.mark.parametrize("value", CADENCES)
def test_where_all_have_one_cadence_every_claim_counts(value: int) -> None:
    claims = {"a": claim(3), "b": claim(2), "c": claim(1)}
    assert in_step(claims, dict.fromkeys(claims, value)) == claims


def test_nobody_is_steady_of_none() -> None:
    assert in_step({}, {}) == {}
