"""A round that cannot begin, since the one before goes on: whether that speaks against our own line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peers.cadence import LATE_IN_A_ROW, Cadence
from peers.clock import Schedule
from peers.rounds import RoundKeeper

SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=1.0, fragments=2)


class Keeper:
    """What ``RoundKeeper`` needs to decide; the fragment is busy all the time."""

    def __init__(self, under_way: Any, *, looking: bool) -> None:
        busy = asyncio.Lock()
        state = SimpleNamespace(index=0, busy=busy, version=3, digest=b"", taken=None)
        self.reasons: list[str] = []
        self.now = 100.0  # every tick has begun
        self.attempted: list[int] = []
        self.cadence = Cadence(SCHEDULE)
        self._run = SimpleNamespace(
            schedule=SCHEDULE,
            fragments=[state],
            allowance=SimpleNamespace(is_used_up=False),
            life=SimpleNamespace(takes_part=True),
            manifest=SimpleNamespace(averaging=SimpleNamespace(matchmaking_seconds=0.4)),
            clock=SimpleNamespace(now=lambda: self.now),
            training=SimpleNamespace(send=lambda event: self.reasons.append(event.fields["reason"])),
        )
        self._presence = SimpleNamespace(cadence=self.cadence, pace=lambda: 1, is_held=lambda tick: True)
        self._under_way = {0: under_way} if under_way is not None else {}
        self._looking = {0} if looking else set()

    def _tell_cadence(self, changed: bool) -> None:
        pass

    def _missed(self, tick: int) -> None:
        self.cadence.missed(tick)

    async def _is_free_in_time(self, tick: int, state: Any) -> bool:
        return await RoundKeeper._is_free_in_time(self, tick, state)  # type: ignore[arg-type]

    async def _attempt_round(self, tick: int, state: Any, report: Any) -> None:
        self.attempted.append(tick)

    def cadence_after_rounds(self) -> int:
        async def hold() -> None:
            async with self._run.fragments[0].busy:
                for tick in range(0, 2 * LATE_IN_A_ROW, 2):
                    await RoundKeeper._hold_round(self, tick)  # type: ignore[arg-type]

        asyncio.run(hold())
        assert len(self.reasons) == LATE_IN_A_ROW and all("still under way" in reason for reason in self.reasons)
        return self.cadence.announced


@pytest.mark.parametrize(
    ("under_way", "looking", "cadence"),
    [
        (None, False, 2),  # a fetch
        (SimpleNamespace(waits_for_others=False), False, 2),
        (SimpleNamespace(waits_for_others=True), False, 1),
        (None, True, 1),  # nobody is to be found, as where our line is down
    ],
)
def test_only_what_our_own_line_holds_up_has_us_take_part_less_often(
    under_way: Any, looking: bool, cadence: int
) -> None:
    assert Keeper(under_way, looking=looking).cadence_after_rounds() == cadence


def test_who_leaves_while_a_base_is_on_its_way_begins_no_round_when_it_has_come() -> None:
    """It has said goodbye: its groupmates would wait for it in vain."""
    keeper = Keeper(None, looking=False)
    keeper.now = SCHEDULE.begins(10) - 60.0

    async def hold() -> None:
        busy = keeper._run.fragments[0].busy
        await busy.acquire()
        round_ = asyncio.create_task(RoundKeeper._hold_round(keeper, 10))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        keeper._run.life = SimpleNamespace(takes_part=False, reason="told to stop")
        busy.release()
        await round_

    asyncio.run(hold())
    assert not keeper.attempted and keeper.reasons == ["told to stop"]


@pytest.mark.parametrize(("left_seconds", "attempted"), [(60.0, [10]), (0.1, [])])
def test_a_base_that_arrives_while_the_others_look_for_each_other_is_in_time(
    left_seconds: float, attempted: list[int]
) -> None:
    """Where it came a moment after we would have begun to, cycle after cycle, a fragment was in no round any more."""
    keeper = Keeper(None, looking=False)
    keeper.now = SCHEDULE.begins(10) - left_seconds

    async def hold() -> None:
        busy = keeper._run.fragments[0].busy
        await busy.acquire()
        round_ = asyncio.create_task(RoundKeeper._hold_round(keeper, 10))  # type: ignore[arg-type]
        if attempted:
            await asyncio.sleep(0)
            busy.release()
        await round_

    asyncio.run(hold())
    assert keeper.attempted == attempted
