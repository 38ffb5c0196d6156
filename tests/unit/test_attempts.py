"""When peers look for each other: the same moments on every peer, and none that comes too late."""

from __future__ import annotations

import math

import pytest

from peers.attempts import DEFERENCE_SECONDS, next_attempt, search_times, telling_seconds

LEAD, CYCLE = 1.5, 12.0


def test_who_found_nobody_offers_to_begin_later_but_gives_up_no_later() -> None:
    usual, deferring = (search_times(100.0, LEAD, CYCLE, found_nobody=found) for found in (False, True))
    assert (usual.scheduled, deferring.scheduled) == (100.0, 100.0 + DEFERENCE_SECONDS)
    assert usual.deadline == deferring.deadline == 101.5


def test_who_would_tell_a_big_group_for_too_long_leaves_the_lead_to_others() -> None:
    kilobyte_line, unknown = 125_000.0, math.inf
    few, many = telling_seconds(3, kilobyte_line), telling_seconds(30, kilobyte_line)
    assert search_times(100.0, LEAD, CYCLE, found_nobody=False, telling_seconds=few).scheduled == 100.0
    deferring = search_times(100.0, LEAD, CYCLE, found_nobody=False, telling_seconds=many)
    assert deferring == search_times(100.0, LEAD, CYCLE, found_nobody=True)
    assert telling_seconds(200, unknown) == 0.0


def test_a_search_ends_well_before_the_fragments_next_round() -> None:
    assert search_times(100.0, 10.0, CYCLE, found_nobody=False).deadline == 103.0


@pytest.mark.parametrize("failed_at", [100.1, 100.8, 101.4])
def test_all_that_fail_between_two_moments_meet_again_at_the_same_one(failed_at: float) -> None:
    assert next_attempt(100.0, failed_at, LEAD, CYCLE, 0.5) == 103.0


def test_there_is_time_to_look_before_the_next_attempt() -> None:
    for tenths in range(1, 60):
        now = 100.0 + tenths / 10
        again = next_attempt(100.0, now, LEAD, CYCLE, 0.0)
        assert again is not None and again - now >= LEAD - 1e-9


def test_there_is_no_attempt_that_would_reach_into_the_next_round() -> None:
    assert next_attempt(100.0, 107.0, LEAD, CYCLE, 0.5) == 109.0
    assert next_attempt(100.0, 107.0, LEAD, CYCLE, 2.0) is None
    assert next_attempt(100.0, 110.0, LEAD, CYCLE, 0.0) is None
