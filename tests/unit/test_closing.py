"""When rounds close, and who is not trusted to reduce: pure functions of measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.closing import Reliability, TransferTimes, announced_seconds, closing_times, usual_most

seconds = st.none() | st.floats(0, 1e4)


@given(arrival=seconds, whole=seconds, announced=st.floats(0, 1e6), cycle=st.floats(0.1, 1e5))
def test_the_grace_ends_before_the_deadline_and_that_within_a_cycle(
    arrival: float | None, whole: float | None, announced: float, cycle: float
) -> None:
    times = closing_times(arrival, whole, announced, cycle)
    assert 0.5 <= times.grace_seconds <= times.deadline_seconds <= max(0.5, cycle)
    if whole is not None:
        assert times.deadline_seconds >= min(2 * whole, cycle)


def test_closing_times_follow_what_was_measured() -> None:
    unknown = closing_times(None, None, 0.0, 10.0)
    assert (unknown.grace_seconds, unknown.deadline_seconds) == (5.0, 5.0)
    known = closing_times(0.8, 1.0, 0.0, 10.0)
    assert (known.grace_seconds, known.deadline_seconds) == (0.8, 2.5)
    assert closing_times(0.8, 1.0, 3.0, 10.0).deadline_seconds == 6.5, "a slower line is in this group"
    assert closing_times(0.8, 60.0, 0.0, 10.0).deadline_seconds == 10.0


def test_the_slowest_announced_transfer_counts_each_with_its_own_bytes() -> None:
    assert announced_seconds([]) == announced_seconds([(1000, 0)]) == 0.0
    assert announced_seconds([(125_000, 1000), (1_000_000, 16_000), (10**9, 0)]) == 1.0


def test_one_slow_round_is_an_outlier() -> None:
    assert usual_most([1.0, 1.0, 1.0, 9.0]) == 1.0
    assert usual_most([3.0, 4.0, 5.0]) == 7.0


def test_more_bytes_take_longer_and_fewer_do_not_take_less() -> None:
    times = TransferTimes()
    assert times.expected_seconds(100) is None
    for _ in range(3):
        times.note(100, 2.0)
    assert times.expected_seconds(100) == times.expected_seconds(1) == 2.0
    assert times.expected_seconds(300) == pytest.approx(6.0)


def test_distrust_grows_with_failures_in_a_row_and_ends_with_an_answer() -> None:
    reducers = Reliability(40.0, doublings=6)
    reducers.failed(b"a", 0.0)
    assert reducers.distrusted(39.0) == (b"a",) and reducers.distrusted(41.0) == ()
    reducers.failed(b"a", 50.0)
    assert reducers.distrusted(129.0) == (b"a",) and reducers.distrusted(131.0) == ()
    for _ in range(20):
        reducers.failed(b"a", 200.0)
    assert reducers.distrusted(200.0 + 64 * 40 - 1) == (b"a",) and reducers.distrusted(200.0 + 64 * 40 + 1) == ()
    reducers.answered(b"a")
    assert reducers.distrusted(200.0) == ()
    reducers.failed(b"b", 0.0)
    reducers.forget(known=set(), now=20.0)
    assert reducers.distrusted(20.0) == (b"b",), "leaving and coming back is no way out"
    reducers.forget(known=set(), now=50.0)
    reducers.failed(b"b", 60.0)
    assert reducers.distrusted(101.0) == ()
