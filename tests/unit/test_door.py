"""Getting in: how long answers are waited for, and whether others can dial us."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from peers.clock import SwarmClock
from peers.door import DIAL_PEERS, FAR_WAIT_SECONDS, NEAR_WAIT_SECONDS, answer_seconds, hosts_reached, set_clock
from peers.messages import Ask, Clock, ClockHeader, DialBack, DialedBack, DialedBackHeader
from peers.own_records import RECORD_SECONDS


@pytest.mark.parametrize(
    ("matchmaking_seconds", "measured_seconds", "expected"),
    [
        (1.0, 0.0, 0.5),
        (4.0, 0.05, 2.0),
        (60.0, 0.05, 3.0),
        (1.0, 1.0, 4.0),
        (60.0, 3.0, 12.0),
        (1.0, 100.0, FAR_WAIT_SECONDS),
    ],
)
def test_answers_are_waited_for_as_long_as_they_take(
    matchmaking_seconds: float, measured_seconds: float, expected: float
) -> None:
    assert answer_seconds(matchmaking_seconds, measured_seconds) == expected


def test_no_answer_is_waited_for_longer_than_records_live() -> None:
    assert NEAR_WAIT_SECONDS[1] < FAR_WAIT_SECONDS < RECORD_SECONDS


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + bytes([number]) * 32)


def test_a_clock_that_is_set_twice_at_once_is_set_once() -> None:
    """A line comes back: the search for others asks them for the time while the usual look still waits for some."""
    passed = [50.0]
    clock = SwarmClock(wall=lambda: 1000.0, passed=lambda: passed[0])
    peers = [peer(number) for number in range(3)]

    async def scene() -> None:
        released = asyncio.Event()

        async def rpc_time(request: Ask, timeout: float) -> Clock:
            answer = Clock(ClockHeader(seconds=1600.0 + passed[0] - 50.0))
            await released.wait()
            return answer

        def stub(asked: PeerID) -> Any:
            return SimpleNamespace(rpc_time=rpc_time)

        setting = [asyncio.ensure_future(set_clock(clock, stub, peers, newcomer=False)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        passed[0] += 2.0
        clock.offset_seconds -= 300.0  # also a correction, in the middle of a question
        released.set()
        assert await asyncio.gather(*setting) == [3, 3]

    asyncio.run(scene())
    assert clock.now() == pytest.approx(1602.0, abs=1.0)
    assert clock.round_trip_seconds >= 0.0


@pytest.mark.parametrize(
    ("ahead", "lost", "corrected"),
    [
        ([18_000.0, 18_001.0, 18_002.0], True, 18_001.0),  # a virtual machine was halted for five hours
        ([18_000.0], True, 18_000.0),
        ([18_000.0, 18_001.0, 18_002.0], False, 0.0),
        ([18_000.0, 18_001.0, 4.0], True, 2.0),  # somebody's clock is about ours: the others may be off
        ([], True, 0.0),
    ],
)
def test_a_clock_that_is_hours_off_is_believed_where_nobody_is_heard_of_any_more(
    ahead: list[float], lost: bool, corrected: float
) -> None:
    """All records would be of a time to come, and nobody would ever be heard of again."""
    clock = SwarmClock(wall=lambda: 1e6, passed=lambda: 0.0)

    def stub(asked: PeerID) -> Any:
        async def rpc_time(request: Ask, timeout: float) -> Clock:
            return Clock(ClockHeader(seconds=1e6 + ahead[asked.to_bytes()[-1]]))

        return SimpleNamespace(rpc_time=rpc_time)

    peers = [peer(number) for number in range(len(ahead))]
    asyncio.run(set_clock(clock, stub, peers, newcomer=False, lost=lost))
    assert clock.offset_seconds == pytest.approx(corrected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], ()),
        ([True], ("192.0.2.0",)),
        ([False], None),
        ([True, True, False], None),
        ([None], ()),
        (["silent"], ()),
        (["silent", False], None),
        ([None, False], None),
        (["silent", True, True], ("192.0.2.1", "192.0.2.2")),
        (["nonsense", True], ("192.0.2.1",)),
        ([True] * DIAL_PEERS + [False], ("192.0.2.0", "192.0.2.1", "192.0.2.2")),
    ],
)
def test_all_that_are_asked_and_answer_must_have_reached_us(answers: list[Any], expected: Any) -> None:
    """None: it did not try. Where they reached us is what we announce."""

    def stub(asked: PeerID) -> Any:
        async def rpc_dial_back(request: DialBack, timeout: float) -> DialedBack:
            assert request.header is not None and (request.header.port, request.header.word) == (31337, None)
            number = asked.to_bytes()[-1]
            reached = answers[number]
            if reached == "silent":
                raise ConnectionResetError
            if reached == "nonsense":
                return DialedBack(DialedBackHeader(host="/dns4/elsewhere", reached=True))
            return DialedBack(DialedBackHeader(host=f"192.0.2.{number}", reached=reached))

        return SimpleNamespace(rpc_dial_back=rpc_dial_back)

    peers = [peer(number) for number in range(len(answers))]
    assert asyncio.run(hosts_reached(stub, peers, 31337)) == expected


def test_who_sees_us_inside_our_network_has_no_say_in_whether_a_router_leads_to_us() -> None:
    def stub(asked: PeerID) -> Any:
        async def rpc_dial_back(request: DialBack, timeout: float) -> DialedBack:
            host, reached = (("192.168.0.4", False), ("192.0.2.1", True), ("2001:db8::7", False))[asked.to_bytes()[-1]]
            return DialedBack(DialedBackHeader(host=host, reached=reached))

        return SimpleNamespace(rpc_dial_back=rpc_dial_back)

    def reached(*numbers: int) -> tuple[str, ...] | None:
        asked = [peer(number) for number in numbers]
        return asyncio.run(hosts_reached(stub, asked, 54083, inside={"127.0.0.1", "192.168.0.4"}))

    assert reached(0, 1) == ("192.0.2.1",)
    assert reached(0) == (), "not known"
    assert reached(2, 1) == ("192.0.2.1",), "over IPv6 nobody comes by way of the router"
    assert reached(2) == ()
