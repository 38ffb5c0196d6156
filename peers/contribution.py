"""What a fragment's snapshot holds, what is contributed of it, and what is left of it once that is in a base.

``local`` mode: the snapshot is the local parameters. The contribution is their difference from the base; afterwards
progress counts from the snapshot (the reference), or from what a lossy codec made of it.

``gradient`` mode: the snapshot is a sum over samples of negative gradients that are in no base yet. The contribution is
their mean; afterwards what was accepted is taken out of the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from peers.ledger import PendingSpan


class Contribution(Protocol):
    """How one fragment's snapshot is used. ``snapshot`` and ``base`` are float32 ``(size,)``, changed in place."""

    def values(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> torch.Tensor:
        """What to contribute: a new float32 tensor ``(size,)``, the direction in which the base should go."""

    def sent(self, snapshot: torch.Tensor, base: torch.Tensor, start: int, stop: int, decoded: torch.Tensor) -> None:
        """A lossy codec made ``decoded`` of the contribution's elements ``[start, stop)``."""

    def accepted(self, snapshot: torch.Tensor, base: torch.Tensor, held: Iterable[tuple[int, int]]) -> None:
        """The contribution is in the next base in the element ranges ``held`` only; ``base`` is the old one."""

    def given_up(self, snapshot: torch.Tensor) -> None:
        """What the snapshot holds is dropped."""


class Difference:
    """``local`` mode."""

    def values(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> torch.Tensor:
        return torch.sub(snapshot, base)

    def sent(self, snapshot: torch.Tensor, base: torch.Tensor, start: int, stop: int, decoded: torch.Tensor) -> None:
        torch.add(base[start:stop], decoded, out=snapshot[start:stop])

    def accepted(self, snapshot: torch.Tensor, base: torch.Tensor, held: Iterable[tuple[int, int]]) -> None:
        position = 0
        for start, stop in sorted(held):
            if position < start:
                snapshot[position:start].copy_(base[position:start])
            position = max(position, stop)
        snapshot[position:].copy_(base[position:])

    def given_up(self, snapshot: torch.Tensor) -> None:
        """The parameters are set to the base, whatever the reference is."""


class GradientSum:
    """``gradient`` mode."""

    def __init__(self) -> None:
        self._spans: Sequence[PendingSpan] = ()
        self._decoded: list[tuple[int, int, torch.Tensor]] = []

    def values(self, snapshot: torch.Tensor, base: torch.Tensor, spans: Sequence[PendingSpan]) -> torch.Tensor:
        self._spans, self._decoded = tuple(spans), []
        mean = torch.zeros_like(snapshot)
        for span in spans:
            if span.samples:
                where = slice(span.start, span.stop)
                torch.div(snapshot[where], float(span.samples), out=mean[where])
        return mean

    def sent(self, snapshot: torch.Tensor, base: torch.Tensor, start: int, stop: int, decoded: torch.Tensor) -> None:
        self._decoded.append((start, stop, decoded))

    def accepted(self, snapshot: torch.Tensor, base: torch.Tensor, held: Iterable[tuple[int, int]]) -> None:
        for start, stop in held:
            exact = torch.ones(stop - start, dtype=torch.bool)
            for low, high, decoded in self._decoded:
                for span in self._spans:
                    first, last = max(start, low, span.start), min(stop, high, span.stop)
                    if first < last:
                        exact[first - start : last - start] = False
                        snapshot[first:last].sub_(decoded[first - low : last - low] * float(span.samples))
            snapshot[start:stop][exact] = 0.0
        self._decoded = []

    def given_up(self, snapshot: torch.Tensor) -> None:
        snapshot.zero_()
        self._decoded = []


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
