"""Invariant 2 in integers: for every element, credited + dropped + pending is what was processed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from peers.ledger import Ledger, PendingSpan, Span

SIZE = 12


@dataclass
class Event:
    """Work done, then perhaps a credit of ranges or a drop, as of a snapshot that may lie in the past."""

    kind: str
    samples: int
    ranges: list[tuple[int, int]]
    age: int


ranges = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=4)
events = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from(["credit", "drop", "nothing"]),
        samples=st.integers(0, 50),
        ranges=ranges,
        age=st.integers(0, 60),
    ),
    max_size=12,
)


def per_element(ledger: Ledger, processed: int) -> list[tuple[int, int, int]]:
    """(credited, dropped, pending) of every element."""
    rows: list[tuple[int, int, int]] = []
    for span in ledger.spans:
        pending = ledger.pending(processed, processed)
        (piece,) = [piece for piece in pending if piece.start <= span.start and span.stop <= piece.stop]
        rows += [(span.credited, span.samples - span.credited, piece.samples)] * (span.stop - span.start)
    return rows


@given(events)
def test_nothing_is_lost_or_counted_twice_whatever_happens(history: list[Event]) -> None:
    ledger, processed = Ledger.open(SIZE), 0
    expected = [[0, 0] for _ in range(SIZE)]  # credited, dropped: the plain bookkeeping, element by element
    for event in history:
        processed += event.samples
        snapshot = max(0, processed - event.age)
        if event.kind == "credit":
            ledger = ledger.credit(event.ranges, snapshot, snapshot)
            for start, stop in event.ranges:
                for element in range(start, stop):
                    expected[element][0] += max(0, snapshot - sum(expected[element]))
        elif event.kind == "drop":
            ledger = ledger.drop(snapshot, snapshot)
            for row in expected:
                row[1] += max(0, snapshot - sum(row))
        rows = per_element(ledger, processed)
        assert [[credited, dropped] for credited, dropped, _ in rows] == expected
        assert all(credited + dropped + pending == processed for credited, dropped, pending in rows)
        assert ledger.credited_element_samples() == sum(row[0] for row in expected)
        assert ledger.dropped_element_samples() == sum(row[1] for row in expected)
        assert (
            ledger.credited_element_samples()
            + ledger.dropped_element_samples()
            + ledger.pending_element_samples(processed)
            == processed * SIZE
        )


@given(events)
def test_spans_stay_contiguous_and_neighbours_differ(history: list[Event]) -> None:
    ledger, processed = Ledger.open(SIZE), 0
    for event in history:
        processed += event.samples
        ledger = ledger.credit(event.ranges, processed, processed)
        assert ledger.spans[0].start == 0 and ledger.size == SIZE
        for left, right in zip(ledger.spans, ledger.spans[1:], strict=False):
            assert left.stop == right.start
            assert (left.samples, left.steps, left.credited) != (right.samples, right.steps, right.credited)
        pending = ledger.pending(processed + 1, processed + 1)
        assert pending[0].start == 0 and pending[-1].stop == SIZE
        for before, after in itertools.pairwise(pending):
            assert before.stop == after.start
            assert (before.samples, before.steps) != (after.samples, after.steps)


@given(events)
def test_a_ledger_survives_json(history: list[Event]) -> None:
    ledger = Ledger.open(SIZE, samples=3, steps=1)
    for event in history:
        ledger = ledger.credit(event.ranges, event.samples, event.samples // 2)
    assert Ledger.from_json(ledger.to_json()) == ledger


@given(st.lists(st.integers(1, SIZE - 1), unique=True), st.integers(1, 1000))
def test_crediting_the_pieces_is_crediting_the_whole(cuts: list[int], samples: int) -> None:
    borders = [0, *sorted(cuts), SIZE]
    pieces = list(itertools.pairwise(borders))
    whole = Ledger.open(SIZE).credit([(0, SIZE)], samples, 7)
    assert Ledger.open(SIZE).credit(pieces, samples, 7) == whole
    assert len(whole.spans) == 1


def test_crediting_twice_is_crediting_once() -> None:
    once = Ledger.open(SIZE).credit([(2, 8)], 40, 5)
    assert once.credit([(2, 8)], 40, 5) == once
    assert once.credit([(0, SIZE), (2, 8)], 40, 5).credited_element_samples() == SIZE * 40


def test_a_part_that_closed_without_us_is_due_with_its_full_weight_next_time() -> None:
    ledger = Ledger.open(10).credit([(0, 4)], 80, 10)
    assert ledger.pending(120, 15) == (
        PendingSpan(start=0, stop=4, samples=40, steps=5),
        PendingSpan(start=4, stop=10, samples=120, steps=15),
    )
    assert ledger.credit([(0, 10)], 120, 15) == Ledger((Span(start=0, stop=10, samples=120, steps=15, credited=120),))


def test_what_was_dropped_is_never_credited_later() -> None:
    ledger = Ledger.open(10).drop(50, 5).credit([(0, 10)], 70, 7)
    assert (ledger.dropped_element_samples(), ledger.credited_element_samples()) == (500, 200)


def test_a_ledger_opened_late_counts_the_time_before_as_dropped() -> None:
    ledger = Ledger.open(10, samples=30, steps=3)
    assert ledger.dropped_element_samples() == 300
    assert ledger.pending_element_samples(30) == 0


def test_a_range_outside_the_fragment_changes_nothing() -> None:
    ledger = Ledger.open(10)
    assert ledger.credit([(10, 99), (-5, 0), (7, 3)], 50, 5) == ledger


@given(events, events)
def test_leaving_a_line_of_bases_drops_what_it_credited_since_and_nothing_else(
    before: list[Event], after: list[Event]
) -> None:
    ancestor, processed = Ledger.open(SIZE), 0
    for event in before:
        processed += event.samples
        ancestor = ancestor.credit(event.ranges, max(0, processed - event.age), processed)
    ledger = ancestor
    for event in after:
        processed += event.samples
        snapshot = max(0, processed - event.age)
        if event.kind == "drop":
            ledger = ledger.drop(snapshot, snapshot)
        else:
            ledger = ledger.credit(event.ranges, snapshot, snapshot)
    left = ledger.change_line(ancestor)
    then, now = per_element(ancestor, processed), per_element(left, processed)
    assert [row[0] for row in now] == [row[0] for row in then]
    assert [row[2] for row in now] == [row[2] for row in per_element(ledger, processed)]
    assert all(sum(row) == processed for row in now)


def test_a_ledger_knows_what_is_accounted_for_in_every_element_of_a_range() -> None:
    ledger = Ledger.open(10).credit([(0, 6)], 50, 5).drop(20, 2)
    assert ledger.knows([(0, 6)], 50)
    assert ledger.knows([(0, 10)], 20)
    assert not ledger.knows([(5, 7)], 21)
    assert not ledger.knows([(0, 1), (9, 10)], 50)
    assert ledger.knows([], 99)
