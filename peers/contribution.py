"""What a fragment's snapshot holds, what is contributed of it, and what is left of it once that is in a base.

``local`` mode: the snapshot is the local parameters. The contribution is their difference from the base; afterwards
progress counts from the snapshot (the reference), or from what a lossy codec made of it.

``gradient`` mode: the snapshot is a sum over samples of negative gradients that are in no base yet. The contribution is
their mean; afterwards what was accepted is taken out of the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Contribution(Protocol):
    """How one fragment's snapshot is used. ``snapshot`` and ``base`` are float32 ``(size,)``, changed in place."""

    accumulates: ClassVar[bool]
    """Whether a snapshot adds to what is there; else it is of no use once training stands on the next base."""

    def values(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> torch.Tensor:
        """What to contribute: a new float32 tensor ``(size,)``, the direction in which the base should go.

        Zero where no samples are pending: it has no weight there, so it must not look delivered afterwards.
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

    def values(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> torch.Tensor:
        difference = torch.sub(snapshot, base)
        self._weightless = [(span.start, span.stop) for span in spans if not span.samples]
        for start, stop in self._weightless:
            difference[start:stop] = 0.0
        return difference

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

    def values(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> torch.Tensor:
        self._spans = tuple(spans)
        mean = torch.zeros_like(snapshot)
        for span in spans:
            if span.samples:
                where = slice(span.start, span.stop)
                torch.div(snapshot[where], float(span.samples), out=mean[where])
        return mean

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
