"""Which of this peer's samples are in the base: invariant 2, every sample counts exactly once.

For each fragment a peer counts the samples it processed while it trained that fragment, since the run began, across
restarts. For every stretch of the fragment the ledger says up to which count its work is accounted for. Accounting
follows parts: a reducer that closes a part without us leaves exactly that stretch pending, and the next contribution
covers it with the weight it is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple


class Counts(NamedTuple):
    """This peer's cumulative work on one fragment: samples processed and inner steps made while it was trained."""

    samples: int = 0
    steps: int = 0

    def after(self, samples: int, steps: int) -> Counts:
        """With so much more of it."""
        return Counts(self.samples + samples, self.steps + steps)

    def furthest(self, *others: Counts) -> Counts:
        """The highest of each."""
        return Counts(
            max(self.samples, *(other.samples for other in others)), max(self.steps, *(other.steps for other in others))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements ``[start, stop)`` of a fragment, and the cumulative counts accounted for in them.

    ``samples`` were either credited (averaged into a base) or dropped; ``credited`` is the part that was credited.
    """

    start: int
    stop: int
    samples: int = 0
    steps: int = 0
    credited: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSpan:
    """What a contribution brings for elements ``[start, stop)``: samples and inner steps not yet in the base."""

    start: int
    stop: int
    samples: int
    steps: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Accounts of one fragment. Values never change; each event makes a new ledger."""

    spans: tuple[Span, ...]

    @classmethod
    def open(cls, size: int, samples: int = 0, steps: int = 0) -> Ledger:
        """A fresh ledger in which everything up to ``samples`` counts as accounted for (and dropped, if not 0)."""
        return cls((Span(start=0, stop=size, samples=samples, steps=steps),))

    @property
    def size(self) -> int:
        return self.spans[-1].stop

    def pending(self, samples: int, steps: int) -> tuple[PendingSpan, ...]:
        """What is pending at cumulative counts ``samples`` and ``steps``, neighbours of equal value merged."""
        merged: list[PendingSpan] = []
        for span in self.spans:
            piece = PendingSpan(
                start=span.start,
                stop=span.stop,
                samples=max(0, samples - span.samples),
                steps=max(0, steps - span.steps),
            )
            if merged and (merged[-1].samples, merged[-1].steps) == (piece.samples, piece.steps):
                merged[-1] = replace(merged[-1], stop=piece.stop)
            else:
                merged.append(piece)
        return tuple(merged)

    def credit(self, ranges: Iterable[tuple[int, int]], samples: int, steps: int) -> Ledger:
        """The base now holds our work up to the cumulative counts in these element ranges."""
        ledger = self
        for start, stop in ranges:
            ledger = ledger._account(start, stop, samples, steps, credited=True)
        return ledger

    def drop(self, samples: int, steps: int) -> Ledger:
        """Give up pending work up to the cumulative counts: it is in no base and never will be."""
        return self._account(0, self.size, samples, steps, credited=False)

    def change_line(self, line: Ledger) -> Ledger:
        """Leave our line of bases for another: what was credited in ours alone is dropped.

        What the other one holds is credited, also what was dropped when we left that line before.

        :param line: the account of our work in it
        """
        return Ledger(
            _merge(
                [
                    replace(span, start=start, stop=stop, credited=min(span.samples, held.credited))
                    for start, stop, (span, held) in _aligned(self, line)
                ]
            )
        )

    def recover(self, before: Ledger, after: Ledger) -> Ledger:
        """Work that was dropped because its fate was not known turns out to be in the base.

        :param before: the account from before it was dropped
        :param after: that account with what was credited since
        """
        return Ledger(
            _merge(
                [
                    replace(
                        span,
                        start=start,
                        stop=stop,
                        credited=min(span.samples, span.credited + late.credited - early.credited),
                    )
                    for start, stop, (span, early, late) in _aligned(self, before, after)
                ]
            )
        )

    def knows(self, ranges: Iterable[tuple[int, int]], samples: int) -> bool:
        """Whether everything up to the cumulative count is accounted for in these element ranges."""
        return all(
            span.samples >= samples
            for start, stop in ranges
            for span in self.spans
            if max(start, span.start) < min(stop, span.stop)
        )

    def _account(self, start: int, stop: int, samples: int, steps: int, *, credited: bool) -> Ledger:
        result: list[Span] = []
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.stop)
            if low >= high:
                result.append(span)
                continue
            if span.start < low:
                result.append(replace(span, stop=low))
            gained = max(0, samples - span.samples)
            result.append(
                Span(
                    start=low,
                    stop=high,
                    samples=span.samples + gained,
                    steps=max(span.steps, steps),
                    credited=span.credited + (gained if credited else 0),
                )
            )
            if high < span.stop:
                result.append(replace(span, start=high))
        return Ledger(_merge(result))

    def credited_element_samples(self) -> int:
        """Sum over elements of the samples credited in them."""
        return sum((span.stop - span.start) * span.credited for span in self.spans)

    def dropped_element_samples(self) -> int:
        return sum((span.stop - span.start) * (span.samples - span.credited) for span in self.spans)

    def pending_element_samples(self, samples: int) -> int:
        return sum((span.stop - span.start) * max(0, samples - span.samples) for span in self.spans)

    def to_json(self) -> list[list[int]]:
        return [[span.start, span.stop, span.samples, span.steps, span.credited] for span in self.spans]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[int]]) -> Ledger:
        return cls(
            tuple(
                Span(start=start, stop=stop, samples=samples, steps=steps, credited=credited)
                for start, stop, samples, steps, credited in rows
            )
        )


def _aligned(*ledgers: Ledger) -> Iterator[tuple[int, int, tuple[Span, ...]]]:
    """The ranges in which no ledger changes, each with every ledger's span there."""
    cuts = sorted({cut for ledger in ledgers for span in ledger.spans for cut in (span.start, span.stop)})
    positions = [0] * len(ledgers)
    for start, stop in pairwise(cuts):
        for index, ledger in enumerate(ledgers):
            while ledger.spans[positions[index]].stop <= start:
                positions[index] += 1
        yield start, stop, tuple(ledger.spans[at] for ledger, at in zip(ledgers, positions, strict=True))


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and (last.samples, last.steps, last.credited) == (span.samples, span.steps, span.credited):
            merged[-1] = replace(last, stop=span.stop)
        else:
            merged.append(span)
    return tuple(merged)
