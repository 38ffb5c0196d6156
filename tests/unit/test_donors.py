"""Whom to ask, and whose announcements to believe."""

from __future__ import annotations

from peers.donors import (
    BUSY_SECONDS,
    DISBELIEF_SECONDS,
    FAILURE_SECONDS,
    FAILURES_BELIEVED,
    FORGOTTEN_SECONDS,
    LIE_SECONDS,
    DonorRecords,
)

ONE, OTHER = b"1" * 32, b"2" * 32


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_donor_that_was_busy_or_failed_is_asked_for_the_same_base_later_and_for_others_now() -> None:
    clock = Clock()
    records = DonorRecords(clock)
    records.was_busy("busy", ONE)
    records.failed("failed", ONE)
    for donor, seconds in (("busy", BUSY_SECONDS), ("failed", FAILURE_SECONDS)):
        assert not records.usable(donor, ONE)
        assert records.usable(donor, OTHER) and records.believed(donor)
        clock.now = 50.0 + seconds
        assert records.usable(donor, ONE)


def test_a_liar_is_asked_for_nothing_and_believed_nothing_for_a_long_time() -> None:
    clock = Clock()
    records = DonorRecords(clock)
    records.lied("liar")
    clock.now += LIE_SECONDS - 1
    assert not records.usable("liar", ONE) and not records.believed("liar")
    clock.now += 1
    assert records.usable("liar", ONE) and records.believed("liar")


def test_a_donor_that_never_delivers_is_not_believed_for_a_while() -> None:
    clock = Clock()
    records = DonorRecords(clock)
    for number in range(FAILURES_BELIEVED):
        assert records.believed("absent")
        records.failed("absent", ONE)
        if number == 3:
            records.delivered("absent")
    assert records.believed("absent"), "a piece makes up for failures"
    for _ in range(4):
        records.failed("absent", ONE)
    assert not records.believed("absent")
    clock.now += DISBELIEF_SECONDS
    assert records.believed("absent")
    records.failed("absent", ONE)
    assert records.believed("absent"), "it is counted anew"


def test_liars_are_forgotten_when_their_time_is_over() -> None:
    clock = Clock()
    records = DonorRecords(clock)
    for number in range(100):
        records.lied(f"liar {number}")
        clock.now += LIE_SECONDS / 2
    assert len(records._liars) == 2


def test_failures_of_long_ago_are_forgotten() -> None:
    clock = Clock()
    records = DonorRecords(clock)
    for number in range(100):
        records.failed(f"donor {number}", ONE)
        clock.now += FORGOTTEN_SECONDS / 2
    assert len(records._failures) == 2
    for _ in range(2 * FAILURES_BELIEVED):
        records.failed("seldom", ONE)
        clock.now += FORGOTTEN_SECONDS
    assert records.believed("seldom")
