"""A clock that is corrected, by minutes and backwards: nobody waits for a moment that was only taken for near."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from test_presence import Ended, Records

from peers.clock import Schedule
from peers.life import Life
from peers.rounds import RoundKeeper

SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=2.0, fragments=3)
LEAD_SECONDS = 0.5
CORRECTIONS = (-3600.0, -60.0, 60.0, 3600.0)


class Time:
    """Passes while somebody sleeps; is corrected once, in the middle of it."""

    def __init__(self, correction: float) -> None:
        self.passed, self.offset, self._correction = 10_000.0, 0.0, correction
        self.ends_at = self.passed + 60.0

    def now(self) -> float:
        return self.passed + self.offset

    async def sleep(self, seconds: float) -> None:
        if self.passed >= self.ends_at:
            raise Ended
        self.passed += seconds
        if self.passed > 10_010.0:
            self.offset, self._correction = self.offset + self._correction, 0.0


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_rounds_go_on_at_their_ticks_when_the_clock_has_been_corrected(
    correction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(correction)
    held: list[tuple[float, int, float]] = []

    def spawn(coroutine: Any) -> None:
        coroutine.close()

    keeper: Any = RoundKeeper.__new__(RoundKeeper)
    keeper._run = SimpleNamespace(schedule=SCHEDULE, clock=time, tasks=SimpleNamespace(spawn=spawn))
    keeper._presence = SimpleNamespace(announced=True)
    keeper._lead_seconds = lambda: LEAD_SECONDS

    async def hold(tick: int) -> None:
        raise AssertionError("never awaited")

    def hold_round(tick: int) -> Any:
        held.append((time.passed, tick, SCHEDULE.begins(tick) - time.now()))
        return hold(tick)

    keeper._hold_round = hold_round
    monkeypatch.setattr(asyncio, "sleep", time.sleep)
    with pytest.raises(Ended):
        asyncio.run(keeper.keep_ticks())
    assert all(left <= LEAD_SECONDS for _, _, left in held), "none before its time"
    after = [tick for passed, tick, left in held if passed > 10_010.0 and left > 0]
    assert after == list(range(after[0], after[0] + len(after)))
    assert len(after) >= 50.0 / SCHEDULE.tick_seconds - SCHEDULE.fragments - 1
    assert abs(SCHEDULE.begins(after[-1]) - time.now()) < 2 * SCHEDULE.tick_seconds


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_records_are_renewed_and_others_asked_when_the_clock_has_been_corrected(
    correction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who said nothing for as long as its clock had been ahead would be forgotten by everybody."""
    records, time = Records(), Time(correction)
    records._run.clock = SimpleNamespace(now=time.now, passed=lambda: time.passed)  # type: ignore[misc, assignment]
    records._run.allowance = SimpleNamespace(is_used_up=False)  # type: ignore[misc, assignment]
    records._run.life = Life()  # type: ignore[misc]
    told: list[float] = []

    async def wait_for(waiting: Any, seconds: float) -> None:
        waiting.close()
        await time.sleep(seconds)
        raise asyncio.TimeoutError

    async def nothing() -> None:
        pass

    async def hear() -> None:
        told.append(time.passed)

    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    monkeypatch.setattr(records, "hear", nothing)
    monkeypatch.setattr(records.own, "publish", hear)
    monkeypatch.setattr(records.own, "publish_manifest", nothing)
    monkeypatch.setattr(records._run.tasks, "spawn", lambda coroutine: coroutine.close())
    with pytest.raises(Ended):
        asyncio.run(records.keep(on_news=lambda: None))
    assert len(told) >= 10
    assert max(later - sooner for sooner, later in pairwise(told)) <= 6.0
