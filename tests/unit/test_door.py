"""Getting in: how long answers are waited for, and whether others can dial us."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2PContext, PeerID

from peers.clock import SwarmClock
from peers.door import DIAL_PEERS, FAR_WAIT_SECONDS, NEAR_WAIT_SECONDS, answer_seconds, can_be_dialled
from peers.messages import DialAnswer, DialAnswerHeader, DialRequest, DialRequestHeader
from peers.presence import RECORD_SECONDS
from peers.servicer import SwarmServicer


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


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], True),
        ([True], True),
        ([False], False),
        ([True, True, False], False),
        ([None], True),
        ([None, False], False),
        ([True] * DIAL_PEERS + [False], True),
    ],
)
def test_all_that_are_asked_and_answer_must_have_reached_us(answers: list[bool | None], expected: bool) -> None:
    """None: it does not answer, or does not know the question."""

    def stub(asked: PeerID) -> Any:
        async def rpc_dial(request: DialRequest, timeout: float) -> DialAnswer:
            assert request.header is not None and request.header.port == 31337
            reached = answers[asked.to_bytes()[-1]]
            if reached is None:
                raise ConnectionResetError
            return DialAnswer(DialAnswerHeader(reached=reached))

        return SimpleNamespace(rpc_dial=rpc_dial)

    peers = [peer(number) for number in range(len(answers))]
    assert asyncio.run(can_be_dialled(stub, peers, 31337)) is expected


def test_whoever_asks_is_dialled_where_its_call_comes_from_and_nobody_else() -> None:
    servicer = SwarmServicer(SwarmClock())

    async def list_peers() -> list[Any]:
        return [
            SimpleNamespace(peer_id=peer(1), addrs=["/ip4/127.0.0.1/tcp/9"]),
            SimpleNamespace(peer_id=peer(2), addrs=["/ip4/192.0.2.1/tcp/9/p2p/QmX/p2p-circuit"]),
        ]

    async def reached(asker: int, port: int) -> bool:
        context = P2PContext(handle_name="rpc_dial", local_id=peer(9), remote_id=peer(asker))
        answer = await servicer.rpc_dial(DialRequest(DialRequestHeader(port=port)), context)
        assert answer.header is not None
        return bool(answer.header.reached)

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(ValueError):
                await reached(1, port)  # before there is a daemon
            servicer.p2p = SimpleNamespace(list_peers=list_peers)
            assert await reached(1, port)
            assert not await reached(2, port), "through a relay"
            assert not await reached(3, port), "not connected"
        assert not await reached(1, port), "nobody listens any more"
        with pytest.raises(ValueError):
            await servicer.rpc_dial(DialRequest(), P2PContext("rpc_dial", peer(9), peer(1)))

    asyncio.run(scene())
