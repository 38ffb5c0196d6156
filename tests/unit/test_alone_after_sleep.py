"""A peer that wakes up alone, or meets others again: what somebody made is not given up for a base of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from peers.lineage import Claim
from peers.round import RoundVoid
from peers.rounds import RoundKeeper


class Awake(RoundKeeper):
    """Finds nobody; looking for somebody shows what a serving peer holds."""

    def __init__(self, held: Claim | None) -> None:
        self._bases: Any = SimpleNamespace(better_claim=lambda state: held)
        self._looking = set[int]()

    async def _find_group(self, *arguments: Any) -> tuple[bytes, tuple[Any, ...]]:
        return b"alone", (SimpleNamespace(peer_id="own"),)


def test_whoever_may_have_the_base_of_an_earlier_attempt_is_asked_before_the_next() -> None:
    """It is in no group any more, and its word may not have come to those that meet again."""
    has_it, lost = (PeerID(b"\x12\x20" + bytes([number]) * 32) for number in (1, 2))
    awake = Awake(Claim(version=9, digest=bytes(32), total_samples=900))
    asked: list[str] = []

    async def refresh(ask: Collection[str]) -> None:
        asked.extend(ask)

    awake._presence = SimpleNamespace(refresh=refresh)  # type: ignore[assignment]
    awake._reducers = SimpleNamespace(distrusted=lambda now: (lost.to_bytes(),))  # type: ignore[assignment]
    awake._unfaithful = SimpleNamespace(distrusted=lambda now: ())  # type: ignore[assignment]
    awake._run = SimpleNamespace(clock=SimpleNamespace(passed=lambda: 0.0))  # type: ignore[assignment]
    state: Any = SimpleNamespace(index=0, unresolved_mates=frozenset({"own", str(has_it), str(lost)}))
    with pytest.raises(RoundVoid, match="others have made the next base"):
        asyncio.run(awake._attempt(1, 0.0, state, SimpleNamespace(), {}))  # type: ignore[arg-type]
    assert sorted(asked) == sorted(["own", str(has_it)])


def test_who_is_alone_fetches_what_the_others_made_before_it_goes_on() -> None:
    awake = Awake(Claim(version=9, digest=bytes(32), total_samples=900))
    with pytest.raises(RoundVoid, match="others have made the next base"):
        asyncio.run(awake._attempt(0, 0.0, SimpleNamespace(index=0), SimpleNamespace(), {}))  # type: ignore[arg-type]
