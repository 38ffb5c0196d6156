"""Which fragments a peer trains that cannot train all: those that the swarm covers least, by turns.

Every peer decides by itself, from what the others announce. Whoever changes at the same moment sees the same figures; a
peer's own order among equals keeps them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

ROUNDS_A_TURN = 4
"""Rounds of a fragment before a peer thinks about training another one instead, which costs the optimizer's state."""


def by_need(trained: frozenset[int], turns: Sequence[int], coverage: Sequence[float], peer_id: str) -> list[int]:
    """All fragments, those first that need this peer most.

    Least covered first. Of equally covered ones, those that this peer does not train, longest out of training first;
    then those that it trains, the latest first; at last by an order of the peer's own.

    :param turns: when each fragment last began or stopped being trained, in any rising count; below 0 for never
    :param coverage: samples per second of the other peers that train each fragment
    """

    def need(fragment: int) -> tuple[float, bool, int, bytes]:
        here = fragment in trained
        own = hashlib.sha256(f"{peer_id}\n{fragment}".encode()).digest()
        return coverage[fragment], here, -turns[fragment] if here else turns[fragment], own

    return sorted(range(len(coverage)), key=need)


def next_trained(
    trained: frozenset[int], turns: Sequence[int], coverage: Sequence[float], peer_id: str, count: int
) -> frozenset[int]:
    """The ``count`` fragments that need this peer most; parameters as of ``by_need``."""
    return frozenset(by_need(trained, turns, coverage, peer_id)[:count])


class Rotation:
    """One peer's turns. A fragment's turn ends just after a round of its own, when least of its work is pending."""

    def __init__(self, num_fragments: int, trained: frozenset[int], peer_id: str) -> None:
        self.coverage: Sequence[float] = (0.0,) * num_fragments
        """Set from outside whenever the swarm's records change."""
        self._count, self._peer_id = len(trained), peer_id
        self._turns = [0 if fragment in trained else -1 for fragment in range(num_fragments)]
        self._rounds = [0] * num_fragments
        self._now = 0

    def rebased(self, fragment: int, trained: frozenset[int]) -> frozenset[int]:
        """What to train after a fragment moved onto a new base; the same as before if it is nobody's turn.

        :param trained: now
        """
        if fragment not in trained or self._count == len(self._rounds):
            return trained
        self._rounds[fragment] += 1
        if self._rounds[fragment] < ROUNDS_A_TURN:
            return trained
        self._rounds[fragment] = 0
        self._now += 1
        order = by_need(trained, self._turns, self.coverage, self._peer_id)
        wanted = order[: self._count]
        starting = [other for other in wanted if other not in trained]
        if fragment in wanted or not starting:
            return trained
        self._turns[fragment] = self._turns[starting[0]] = self._now
        self._rounds[starting[0]] = 0
        return trained - {fragment} | {starting[0]}
