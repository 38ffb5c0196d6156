"""Being asked to dial back: only where the asker comes from, seldom, and only the word counts. Real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from dht_config.errors import AddressError, PortInUseError
from peers import dial_back
from peers.dial_back import AT_ONCE, DIALS, REMEMBERED_HOSTS, WINDOW_SECONDS, DialBackDesk, Reached, ask_to_dial_back
from peers.messages import DialBack, DialBackHeader, DialedBack, DialedBackHeader

WORD = b"sixteen bytes ok"
PEERS = [PeerID(b"\x12\x20" + bytes([number]) * 32) for number in range(3)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def desk(*hosts: str, now: Any = lambda: 0.0) -> DialBackDesk:
    async def hosts_of(peer: PeerID) -> Sequence[str]:
        return hosts

    return DialBackDesk(hosts_of, now)


async def answered(asked: DialBackDesk, port: int, word: bytes | None = WORD) -> DialedBackHeader:
    answer = await asked.answer(DialBack(DialBackHeader(port=port, word=word)), PEERS[0])
    assert answer.header is not None
    assert DialedBack.FromString(answer.SerializeToString()).header == answer.header
    return answer.header


def stub_of(desks: dict[PeerID, Any]) -> Any:
    def stub(peer: PeerID) -> Any:
        async def rpc_dial_back(request: DialBack, timeout: float) -> DialedBack:
            if isinstance(desks[peer], Exception):
                raise desks[peer]
            answer: DialedBack = await desks[peer].answer(request, peer)
            return answer

        return SimpleNamespace(rpc_dial_back=rpc_dial_back)

    return stub


def test_whoever_listens_is_reached_and_told_where_it_is_seen() -> None:
    async def scene() -> list[Reached]:
        desks = {PEERS[0]: desk("127.0.0.1"), PEERS[1]: desk(), PEERS[2]: OSError("gone")}
        return await ask_to_dial_back(stub_of(desks), PEERS, "127.0.0.1", free_port())

    assert asyncio.run(scene()) == [
        Reached(peer_id=str(PEERS[0]), host="127.0.0.1", reached=True),
        Reached(peer_id=str(PEERS[1]), host="", reached=None),
    ]


def test_a_port_that_nobody_forwards_is_not_reached() -> None:
    async def scene() -> list[Reached]:
        desks = {PEERS[0]: desk("127.0.0.2")}  # where we seem to be, but do not listen
        return await ask_to_dial_back(stub_of(desks), PEERS[:1], "127.0.0.1", free_port())

    assert asyncio.run(scene()) == [Reached(peer_id=str(PEERS[0]), host="127.0.0.2", reached=False)]


def test_the_second_address_is_tried_too() -> None:
    async def scene() -> DialedBackHeader:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(WORD)
            writer.close()

        async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
            return await answered(desk("127.0.0.2", "127.0.0.1"), server.sockets[0].getsockname()[1])

    assert asyncio.run(scene()) == DialedBackHeader(host="127.0.0.1", reached=True)


def test_without_a_word_a_connection_is_enough() -> None:
    """The daemon listens there, and says nothing that could be told from what another program says."""

    async def scene() -> None:
        port = free_port()
        assert (await answered(desk("127.0.0.1"), port, None)).reached is False
        async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port):
            assert (await answered(desk("127.0.0.1"), port, None)).reached is True

    asyncio.run(scene())


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", WORD[:-1], b"x" * 100_000, None])
def test_another_program_on_the_port_is_no_different_from_none(
    says: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_back, "DIAL_SECONDS", 0.3)

    async def scene() -> DialedBackHeader:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if says is not None:
                writer.write(says)
                writer.close()

        async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
            return await answered(desk("127.0.0.1"), server.sockets[0].getsockname()[1])

    assert asyncio.run(scene()) == DialedBackHeader(host="127.0.0.1", reached=False)


def test_an_address_is_dialled_seldom_and_again_later() -> None:
    moment = 0.0
    asked = desk("127.0.0.1", now=lambda: moment)

    async def scene() -> list[bool | None]:
        return [(await answered(asked, port)).reached for _ in range(DIALS + 2)]

    port = free_port()
    assert asyncio.run(scene()) == [False] * DIALS + [None] * 2
    moment = WINDOW_SECONDS + 1
    assert asyncio.run(scene()) == [False] * DIALS + [None] * 2


def test_few_are_dialled_at_once_and_few_addresses_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = 0
    most = 0

    async def slow(host: str, port: int, word: bytes) -> bool:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        busy -= 1
        return True

    monkeypatch.setattr(dial_back, "hears", slow)

    async def scene() -> int:
        number = iter(range(10**9))

        async def hosts_of(peer: PeerID) -> Sequence[str]:
            one = next(number)
            return [f"10.{one >> 16}.{one >> 8 & 255}.{one & 255}"]

        asked = DialBackDesk(hosts_of, lambda: 0.0)
        await asyncio.gather(*(answered(asked, 1) for _ in range(50)))
        for _ in range(2 * REMEMBERED_HOSTS):
            await answered(asked, 1)
        return len(asked._dialled)

    assert asyncio.run(scene()) <= REMEMBERED_HOSTS
    assert most <= AT_ONCE


def test_a_request_that_does_not_parse_is_not_dialled() -> None:
    answer = asyncio.run(desk("127.0.0.1").answer(DialBack(), PEERS[0]))
    assert answer.header == DialedBackHeader(host="", reached=None)


def test_what_a_peer_calls_an_address_is_checked_before_anybody_sees_it() -> None:
    class Liar:
        async def answer(self, request: DialBack, peer: PeerID) -> DialedBack:
            return DialedBack(DialedBackHeader(host="\x1b[2J", reached=True))

    async def scene() -> list[Reached]:
        return await ask_to_dial_back(stub_of({PEERS[0]: Liar()}), PEERS[:1], "127.0.0.1", free_port())

    assert [answer.host for answer in asyncio.run(scene())] == [""]


def test_a_port_that_is_taken_is_said() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(PortInUseError):
        asyncio.run(ask_to_dial_back(stub_of({}), [], "127.0.0.1", taken.getsockname()[1]))
    with pytest.raises(AddressError):
        asyncio.run(ask_to_dial_back(stub_of({}), [], "203.0.113.7", free_port()))
