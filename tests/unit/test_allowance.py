"""What a volunteer lets a peer move: a rate, a day's worth, and what follows from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from p2p_trainer.machines import read_rate
from p2p_trainer.settings import SettingsError, load_settings
from peers.allowance import DAY_SECONDS, KEPT_BYTES, Allowance, MeteredTransport
from peers.line import LineRate
from peers.messages import Average, AverageHeader, Part, PartHeader

PEER = PeerID(b"p" * 34)
MORNING = 20_000 * DAY_SECONDS + 1000.0


class Day:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = MORNING

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def day() -> Day:
    return Day()


def test_without_limits_nothing_is_counted_or_waited_for(tmp_path: Path, day: Day) -> None:
    allowance = Allowance(tmp_path / "traffic.json", day)
    asyncio.run(allowance.may_send(10**12))
    allowance.keep()
    assert allowance.rate == LineRate() and not allowance.is_used_up
    assert not list(tmp_path.iterdir())


def test_a_day_is_over_when_its_bytes_are_moved_and_another_begins_at_midnight(tmp_path: Path, day: Day) -> None:
    allowance = Allowance(tmp_path / "traffic.json", day, daily_bytes=1000)
    allowance.moved(600)
    assert not allowance.is_used_up
    asyncio.run(allowance.may_send(400))
    assert allowance.is_used_up
    day.now = MORNING - MORNING % DAY_SECONDS + DAY_SECONDS
    assert not allowance.is_used_up
    allowance.moved(999)
    assert not allowance.is_used_up


def test_what_is_left_is_spread_over_the_rest_of_the_day(tmp_path: Path, day: Day) -> None:
    allowance = Allowance(tmp_path / "traffic.json", day, daily_bytes=10**10, up_bytes_per_second=1e6)
    left_seconds = DAY_SECONDS - 1000
    assert allowance.rate.down == pytest.approx(10**10 / 2 / left_seconds)
    assert allowance.rate.up == allowance.rate.down < 1e6
    allowance.moved(10**10 // 2)
    assert allowance.rate.down == pytest.approx(10**10 / 4 / left_seconds)
    day.now += left_seconds - 60
    assert allowance.rate.up == 1e6, "a minute before midnight the limit for the way up is what is left"


def test_the_days_count_survives_a_restart_but_not_the_night(tmp_path: Path, day: Day) -> None:
    path = tmp_path / "traffic.json"
    before = Allowance(path, day, daily_bytes=2 * KEPT_BYTES)
    before.moved(KEPT_BYTES)
    assert path.exists(), "kept now and then, also if nobody says goodbye"
    before.moved(KEPT_BYTES - 1)
    before.keep()
    after = Allowance(path, day, daily_bytes=2 * KEPT_BYTES)
    after.moved(1)
    assert after.is_used_up
    day.now += DAY_SECONDS
    assert not Allowance(path, day, daily_bytes=2 * KEPT_BYTES).is_used_up


def test_a_count_that_is_used_up_is_written_once_and_then_now_and_then(
    tmp_path: Path, day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr("peers.allowance.write_note", lambda path, value: written.append(value["bytes"]))
    allowance = Allowance(tmp_path / "traffic.json", day, daily_bytes=1000)
    for _ in range(20):
        allowance.moved(100)
    assert written == [1000]
    allowance.moved(KEPT_BYTES)
    assert written == [1000, 2000 + KEPT_BYTES]
    day.now += DAY_SECONDS
    for _ in range(20):
        allowance.moved(100)
    assert written[2:] == [1000]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"day": "x", "bytes": -1}', '{"bytes": "many"}', "\x00"])
def test_a_count_that_cannot_be_read_is_none(tmp_path: Path, day: Day, text: str) -> None:
    (tmp_path / "traffic.json").write_text(text)
    assert not Allowance(tmp_path / "traffic.json", day, daily_bytes=1).is_used_up


def test_a_count_that_cannot_be_written_stops_nobody(tmp_path: Path, day: Day) -> None:
    allowance = Allowance(tmp_path / "missing" / "traffic.json", day, daily_bytes=10)
    allowance.moved(10)
    assert allowance.is_used_up


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=20), st.floats(1e3, 1e9))
def test_bodies_go_at_the_allowed_rate_and_the_first_at_once(bodies: list[int], rate: float) -> None:
    async def scene() -> list[float]:
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        allowance = Allowance(Path("nowhere"), lambda: MORNING, up_bytes_per_second=rate)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("peers.allowance.asyncio.sleep", sleep)
            for body in bodies:
                await allowance.may_send(body)
        return waits

    waits = asyncio.run(scene())
    assert waits[0] == 0
    ahead = 0.0
    for wait, body in zip(waits, bodies, strict=True):
        assert wait == pytest.approx(ahead, abs=1.0), "each waits until those before it would have gone"
        ahead += body / rate


class Echo:
    """A transport that answers every part with its own body, through what is served."""

    def __init__(self) -> None:
        self.handler: Any = None

    async def call(self, peer: PeerID, name: str, requests: Any, answer_type: Any) -> AsyncGenerator[Any, None]:
        async def answers() -> AsyncGenerator[Any, None]:
            async for answer in self.handler(requests, peer):
                yield answer

        return answers()

    async def serve(self, name: str, handler: Any, request_type: Any) -> None:
        self.handler = handler


async def echo(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
    async for part in stream:
        yield Average(AverageHeader(part=0, included=b"\x01"), part.body)


async def parts(count: int, size: int) -> AsyncIterator[Part]:
    for number in range(count):
        yield Part(PartHeader(group_id=b"a group of ours", part=number), bytes(size))


def test_both_ways_of_calls_and_of_what_is_served_count(tmp_path: Path, day: Day) -> None:
    ours = Allowance(tmp_path / "ours.json", day, daily_bytes=10**6)
    theirs = Allowance(tmp_path / "theirs.json", day, daily_bytes=500)

    async def scene() -> list[int]:
        wire = Echo()
        await MeteredTransport(wire, theirs).serve("echo", echo, Part)
        answers = await MeteredTransport(wire, ours).call(PEER, "echo", parts(3, 100), Average)
        return [len(answer.body) async for answer in answers]

    assert asyncio.run(scene()) == [100, 100, 100]
    assert theirs.is_used_up
    ours.moved(10**6 - 600 - 1)
    assert not ours.is_used_up
    ours.moved(1)
    assert ours.is_used_up
    assert asyncio.run(scene()) == [], "who has used up its day answers nobody"


@pytest.mark.parametrize(("text", "bits"), [("800k", 8e5), ("50M", 5e7), (" 1.5G ", 1.5e9), ("2Mbit/s", 2e6)])
def test_a_rate_is_read(text: str, bits: float) -> None:
    assert read_rate(text) == bits


@pytest.mark.parametrize("flags", [{"upload_limit": "fast"}, {"upload_limit": "0M"}, {"daily_traffic": "10"}])
def test_a_limit_that_is_none_is_refused_by_the_name_of_its_flag(flags: dict[str, str]) -> None:
    (name,) = flags
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}: .* cannot be used"):
        load_settings(flags)


def test_limits_are_numbers_to_the_session() -> None:
    settings = load_settings({"upload_limit": "8M", "daily_traffic": "1G"})
    assert settings.up_bytes_per_second == 1e6 and settings.daily_bytes == 2**30
    assert load_settings({}).up_bytes_per_second is None
