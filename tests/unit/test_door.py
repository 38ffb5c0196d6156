"""Getting in: how long answers are waited for."""

from __future__ import annotations

import pytest

from peers.door import FAR_WAIT_SECONDS, NEAR_WAIT_SECONDS, answer_seconds
from peers.presence import RECORD_SECONDS


@pytest.mark.parametrize(
    ("matchmaking_seconds", "measured_seconds", "expected"),
    [
        (1.0, 0.0, 0.5),
        (4.0, 0.05, 2.0),
        (60.0, 0.05, 3.0),
        (1.0, 1.0, 4.0),
        (60.0, 3.0, 12.0),
        (1.0, 100.0, FAR_WAIT_SECONDS),
    ],
)
def test_answers_are_waited_for_as_long_as_they_take(
    matchmaking_seconds: float, measured_seconds: float, expected: float
) -> None:
    assert answer_seconds(matchmaking_seconds, measured_seconds) == expected


def test_no_answer_is_waited_for_longer_than_records_live() -> None:
    assert NEAR_WAIT_SECONDS[1] < FAR_WAIT_SECONDS < RECORD_SECONDS
