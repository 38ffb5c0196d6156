"""Requests to training: what comes too late serves the next round, and is asked for earlier from then on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from peers.pipe import SnapshotTaken, TakeSnapshot
from peers.training_link import TrainingLink


def test_a_snapshot_that_comes_too_late_serves_the_next_round() -> None:
    async def scene() -> None:
        asked: list[Any] = []
        link, state = TrainingLink(asked.append), SimpleNamespace(index=3, late=None, taken=None)
        assert await link.snapshot(state, 0.01) is None  # type: ignore[arg-type]
        assert await link.snapshot(state, 0.01) is None  # type: ignore[arg-type]
        assert asked == [TakeSnapshot(3)], "it is asked for once"
        taken = SnapshotTaken(fragment=3, samples=8, steps=1)
        link.answered(taken)
        await asyncio.sleep(0)
        assert await link.snapshot(state, 0.01) == taken  # type: ignore[arg-type]
        assert state.late is None

    asyncio.run(scene())


def test_it_is_known_how_long_training_takes_to_answer() -> None:
    async def scene() -> None:
        link, state = TrainingLink(lambda _: None), SimpleNamespace(index=0, late=None, taken=None)
        assert link.snapshot_seconds == 0.0
        waiting = asyncio.create_task(link.snapshot(state, 60.0))  # type: ignore[arg-type]
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)
        link.answered(SnapshotTaken(fragment=0, samples=8, steps=1))
        assert await waiting is not None
        assert 0.05 <= link.snapshot_seconds <= asyncio.get_running_loop().time() - began

    asyncio.run(scene())
