"""A peer that wakes up alone: what the others made before they left is not given up for a base of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peers.lineage import Claim
from peers.round import RoundVoid
from peers.rounds import RoundKeeper


class Awake(RoundKeeper):
    """Finds nobody; looking for somebody shows what a serving peer holds."""

    def __init__(self, held: Claim | None) -> None:
        self._bases: Any = SimpleNamespace(better_claim=lambda state: held)

    async def _find_group(self, *arguments: Any) -> tuple[bytes, tuple[Any, ...]]:
        return b"alone", (SimpleNamespace(peer_id="own"),)


def test_who_is_alone_fetches_what_the_others_made_before_it_goes_on() -> None:
    awake = Awake(Claim(version=9, digest=bytes(32), total_samples=900))
    with pytest.raises(RoundVoid, match="others have made the next base"):
        asyncio.run(awake._attempt(0, 0.0, SimpleNamespace(), SimpleNamespace(), {}))  # type: ignore[arg-type]
