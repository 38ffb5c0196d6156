"""One tick's attempts without a network: no round of nothing; a group that lost a reducer meets again in the cycle."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from peers.clock import Schedule
from peers.closing import TransferTimes
from peers.ledger import PendingSpan
from peers.round import RoundVoid
from peers.round_plan import GroupMember
from peers.rounds import RoundKeeper, _Brought, _Lost

SIZE = 12
TICK = 4
SCHEDULE = Schedule(start_seconds=0.0, tick_seconds=3.0, fragments=4)
LEAD_SECONDS = 1.5


def member(index: int, samples: int) -> GroupMember:
    spans = (PendingSpan(start=0, stop=SIZE, samples=samples, steps=1 if samples else 0),)
    return GroupMember(peer_id=PeerID(b"\x12\x20" + bytes([index]) * 32), spans=spans, samples=samples, steps=1)


class Keeper:
    """What ``RoundKeeper`` needs until an all-reduce begins; then nothing more is there."""

    def __init__(self, *samples: int, needed_samples: float = 0.0) -> None:
        self.members = tuple(member(index, count) for index, count in enumerate(samples))
        self.now = SCHEDULE.begins(TICK)
        self.looked_for: list[set[str]] = []
        self._run = SimpleNamespace(
            schedule=SCHEDULE,
            clock=SimpleNamespace(now=lambda: self.now),
            p2p=SimpleNamespace(peer_id=self.members[0].peer_id),
            manifest=SimpleNamespace(
                averaging=SimpleNamespace(target_group_size=16, part_bytes=1 << 20, matchmaking_seconds=LEAD_SECONDS)
            ),
            tasks=SimpleNamespace(spawn=lambda awaitable: awaitable.close()),
        )
        self._presence = SimpleNamespace(
            step_fell_short=False, present=lambda: {"a peer that is absent"}, look_for_dead=self._look_for_dead
        )
        self._bases = SimpleNamespace(better_claim=lambda state: None)
        self._round_times = TransferTimes()
        self._auxiliary = False
        self._needed_samples = needed_samples
        self._looking: set[int] = set()
        self.state: Any = SimpleNamespace(index=0, size=SIZE, parameters=SIZE)
        self.report: dict[str, Any] = {"reason": "", "outcome": "carried", "attempts": 0}

    async def _look_for_dead(self, peers: set[str]) -> None:
        self.looked_for.append(peers)

    async def _find_group(self, *arguments: Any) -> tuple[bytes, tuple[GroupMember, ...]]:
        return b"a group of this test", self.members

    async def _bring(self, *arguments: Any) -> Any:
        return SimpleNamespace(tick=TICK)

    def _next_attempt(self, tick: int) -> float | None:
        return RoundKeeper._next_attempt(self, tick)  # type: ignore[arg-type]

    async def attempt(self) -> None:
        brought: _Brought = await self._bring()
        await RoundKeeper._attempt(self, 0, self.now, self.state, brought, self.report)  # type: ignore[arg-type]


def test_members_without_samples_hold_no_round() -> None:
    keeper = Keeper(0, 0, 0)
    with pytest.raises(RoundVoid, match="nobody in the group has samples"):
        asyncio.run(keeper.attempt())
    assert keeper.report["outcome"] == "carried"


def test_a_step_on_gradients_is_skipped_where_samples_lack() -> None:
    keeper = Keeper(30, 10, needed_samples=0.9 * 48)
    with pytest.raises(RoundVoid, match="the group has 40 of the 43 samples that a step needs"):
        asyncio.run(keeper.attempt())
    assert keeper.report["outcome"] == "skipped" and keeper._presence.step_fell_short
    assert keeper.report["weight_share"] == pytest.approx(30 / 40)


class LosesReducers(Keeper):
    """One whose first attempts of a tick lose a reducer some seconds after they began."""

    def __init__(self, lost: int, after_seconds: float) -> None:
        super().__init__(5, 5, 5)
        self.lost, self.after_seconds = lost, after_seconds
        self.began: list[float] = []

    async def _attempt(self, attempt: int, begins: float, *rest: Any) -> None:
        self.began.append(begins)
        self.now = begins + self.after_seconds
        if attempt < self.lost:
            raise _Lost("reducer 123456 was lost")

    def hold(self) -> None:
        asyncio.run(RoundKeeper._attempt_round(self, TICK, self.state, self.report))  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_group_that_lost_a_reducer_meets_again_in_the_same_cycle(lost: int) -> None:
    keeper = LosesReducers(lost, after_seconds=0.2)
    keeper.hold()
    begins = SCHEDULE.begins(TICK)
    assert keeper.began == [begins + 2 * LEAD_SECONDS * attempt for attempt in range(lost + 1)]
    assert keeper.report["attempts"] == lost + 1
    assert keeper.report["reason"] == "reducer 123456 was lost; the group re-formed"


@pytest.mark.parametrize(("lost", "after_seconds", "attempts"), [(9, 0.2, 3), (9, 9.5, 1)])
def test_without_time_or_after_three_attempts_the_contribution_is_carried(
    lost: int, after_seconds: float, attempts: int
) -> None:
    keeper = LosesReducers(lost, after_seconds)
    with pytest.raises(RoundVoid, match="reducer 123456 was lost"):
        keeper.hold()
    assert keeper.report["attempts"] == attempts and keeper.report["outcome"] == "carried"
