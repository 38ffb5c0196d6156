"""What a fragment's snapshot holds, what is contributed of it, and what is left of it once that is in a base.

``local`` mode: the snapshot is the local parameters. The contribution is their difference from the base; afterwards
progress counts from the snapshot (the reference), or from what a lossy codec made of it.

``gradient`` mode: the snapshot is a sum over samples of negative gradients that are in no base yet. The contribution is
their mean; afterwards what was accepted is taken out of the sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from peers.codecs import Codec
from peers.ledger import PendingSpan


@dataclass(frozen=True, slots=True)
class SentPart:
    """What a lossy codec made of a contribution's elements ``[start, stop)``, as it went: a fraction of their bytes."""

    start: int
    stop: int
    body: bytes | memoryview
    codec: Codec

    def values(self) -> torch.Tensor:
        """What the others decode: float32 ``(stop - start,)``."""
        return self.codec.decode(self.body, self.stop - self.start)


class Outgoing:
    """A contribution, made part by part as it is sent: it takes no memory of its own unless it must be held.

    :param make: new float32 values of elements ``[start, stop)``; called in threads, never twice at a time
    """

    def __init__(self, size: int, make: Callable[[int, int], torch.Tensor]) -> None:
        self.size = size
        self._make = make
        self._lock = threading.Lock()
        self._held: torch.Tensor | None = None

    @classmethod
    def of(cls, values: torch.Tensor) -> Outgoing:
        """One that is there already, float32 ``(size,)``."""
        outgoing = cls(len(values), lambda start, stop: values[start:stop])
        outgoing._held = values
        return outgoing

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)``, not to be written to."""
        with self._lock:
            return self._make(start, stop) if self._held is None else self._held[start:stop]

    def whole(self) -> torch.Tensor:
        """All of it, not to be written to."""
        return self.part(0, self.size)

    def hold(self) -> None:
        """Make all of it now: what it is made from is about to change. Waits for a part that is being made."""
        with self._lock:
            if self._held is None:
                self._held = self._make(0, self.size)


class Contribution(Protocol):
    """How one fragment's snapshot is used. ``snapshot`` and ``base`` are float32 ``(size,)``, changed in place."""

    accumulates: ClassVar[bool]
    """Whether a snapshot adds to what is there; else it is of no use once training stands on the next base."""

    def outgoing(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> Outgoing:
        """What to contribute, float32 ``(size,)``: the direction in which the base should go.

        Zero where no samples are pending: it has no weight there, so it must not look delivered afterwards. Made of
        ``snapshot`` and ``base`` as they are when a part of it is asked for.
        """

    def accepted(
        self,
        snapshot: torch.Tensor,
        base: torch.Tensor,
        held: Iterable[tuple[int, int]],
        sent: Sequence[SentPart],
    ) -> None:
        """The contribution is in the next base in the element ranges ``held`` only.

        :param base: the old one
        :param sent: where a lossy codec changed the contribution on its way; exact elsewhere
        """

    def given_up(self, snapshot: torch.Tensor) -> None:
        """What the snapshot holds is dropped."""


class Difference:
    """``local`` mode."""

    accumulates: ClassVar[bool] = False

    def __init__(self) -> None:
        self._weightless: list[tuple[int, int]] = []

    def outgoing(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> Outgoing:
        weightless = self._weightless = [(span.start, span.stop) for span in spans if not span.samples]

        def make(start: int, stop: int) -> torch.Tensor:
            difference = torch.sub(snapshot[start:stop], base[start:stop])
            for low, high in weightless:
                difference[max(0, low - start) : max(0, high - start)] = 0.0
            return difference

        return Outgoing(len(base), make)

    def accepted(
        self,
        snapshot: torch.Tensor,
        base: torch.Tensor,
        held: Iterable[tuple[int, int]],
        sent: Sequence[SentPart],
    ) -> None:
        position = 0
        for start, stop in sorted(held):
            if position < start:
                snapshot[position:start].copy_(base[position:start])
            position = max(position, stop)
        snapshot[position:].copy_(base[position:])
        for part in sent:
            values = part.values()
            for low, high in held:
                first, last = max(part.start, low), min(part.stop, high)
                if first < last:
                    where = slice(first - part.start, last - part.start)
                    torch.add(base[first:last], values[where], out=snapshot[first:last])
        for start, stop in self._weightless:
            snapshot[start:stop].copy_(base[start:stop])

    def given_up(self, snapshot: torch.Tensor) -> None:
        """The parameters are set to the base, whatever the reference is."""
        self._weightless = []


class GradientSum:
    """``gradient`` mode."""

    accumulates: ClassVar[bool] = True

    def __init__(self) -> None:
        self._spans: Sequence[PendingSpan] = ()

    def outgoing(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> Outgoing:
        counted = self._spans = tuple(spans)

        def make(start: int, stop: int) -> torch.Tensor:
            mean = torch.zeros(stop - start)
            for span in counted:
                low, high = max(start, span.start), min(stop, span.stop)
                if span.samples and low < high:
                    torch.div(snapshot[low:high], float(span.samples), out=mean[low - start : high - start])
            return mean

        return Outgoing(len(base), make)

    def accepted(
        self,
        snapshot: torch.Tensor,
        base: torch.Tensor,
        held: Iterable[tuple[int, int]],
        sent: Sequence[SentPart],
    ) -> None:
        for start, stop in held:
            exact = torch.ones(stop - start, dtype=torch.bool)
            for span in self._spans:
                if not span.samples:
                    exact[max(0, span.start - start) : max(0, span.stop - start)] = False
            for part in sent:
                if part.stop <= start or stop <= part.start:
                    continue
                values = part.values()
                for span in self._spans:
                    first, last = max(start, part.start, span.start), min(stop, part.stop, span.stop)
                    if first < last:
                        exact[first - start : last - start] = False
                        where = slice(first - part.start, last - part.start)
                        snapshot[first:last].sub_(values[where] * float(span.samples))
            snapshot[start:stop][exact] = 0.0

    def given_up(self, snapshot: torch.Tensor) -> None:
        snapshot.zero_()


def shares(global_batch: int, rates: dict[str, float]) -> dict[str, int]:
    """Samples of one outer step for each peer, in proportion to its samples per second; they add up exactly.

    The same on every peer that sees the same rates: largest remainders first, then by peer id.
    """
    total = sum(rates.values())
    if not total > 0:
        rates, total = dict.fromkeys(rates, 1.0), float(len(rates))
    exact = {peer: global_batch * rate / total for peer, rate in rates.items()}
    whole = {peer: int(share) for peer, share in exact.items()}
    by_remainder = sorted(rates, key=lambda peer: (whole[peer] - exact[peer], peer))
    for peer in by_remainder[: global_batch - sum(whole.values())]:
        whole[peer] += 1
    return whole
