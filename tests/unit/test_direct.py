"""Direct connections, with real sockets and TLS: who is let in, what garbage does, and when the daemon is used instead.

The daemon's place is taken by ``Rumour``, which passes calls on within this process and knows who called; two tests at
the end use real daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hivemind.p2p import P2P, PeerID
from hypothesis import given, settings
from hypothesis import strategies as st

from dht_config.address import parse_address
from dht_config.identity import load_or_create_identity
from dht_config.network import NetworkSettings
from peers import direct as direct_module
from peers.daemon import dial_all, ip_in, start_daemon
from peers.direct import (
    AVOID_SECONDS,
    TICKET_SECONDS,
    TICKETS,
    WAY_SECONDS,
    DirectTransport,
    NotAdmitted,
    Tickets,
    _dial,
    _enter,
    _Way,
    listen_next_to,
)
from peers.messages import (
    MAX_BODY_BYTES,
    Average,
    AverageHeader,
    DirectOffer,
    DirectOfferHeader,
    Part,
    PartHeader,
)
from peers.transport import CALLS_PER_PEER, TRANSPORT_ERRORS, Calls, DaemonTransport

GROUP_ID = b"a group of this test"
WRITE_SECONDS = 5.0


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + bytes([number]) * 32)


async def parts(sizes: Sequence[int]) -> AsyncIterator[Part]:
    for number, size in enumerate(sizes):
        yield Part(PartHeader(group_id=GROUP_ID, part=number), memoryview(bytes([number % 251]) * size))


async def one_and_no_more() -> AsyncIterator[Part]:
    async for part in parts([1]):
        yield part
    await asyncio.Event().wait()


async def echo(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
    async for part in stream:
        assert part.header is not None
        yield Average(AverageHeader(part=part.header.part, included=b"\x03"), part.body)


class Rumour:
    """What ``DirectTransport`` needs of a daemon, within one process: calls by name, with the caller's identity."""

    def __init__(self, me: PeerID, swarm: dict[PeerID, Rumour]) -> None:
        self.me, self.swarm = me, swarm
        swarm[me] = self
        self.handlers: dict[str, Any] = {}
        self.write_seconds = WRITE_SECONDS
        self.calls = Calls(WRITE_SECONDS)
        self.called: list[str] = []
        self.hosts = ["/ip4/127.0.0.1/tcp/4001"]
        self.change: Callable[[DirectOfferHeader], DirectOfferHeader] = lambda header: header

    async def call(
        self, other: PeerID, name: str, requests: AsyncIterator[Any], kind: Any
    ) -> AsyncGenerator[Any, None]:
        self.called.append(name)
        if other not in self.swarm or name not in self.swarm[other].handlers:
            raise ConnectionError("nobody answers")
        answers = self.swarm[other].handlers[name](requests, self.me)

        async def passed_on() -> AsyncGenerator[Any, None]:
            async with aclosing(answers):
                async for answer in answers:
                    yield DirectOffer(self.change(answer.header)) if kind is DirectOffer else answer

        return passed_on()

    async def serve(self, name: str, handler: Any, request_type: type[Any]) -> None:
        self.handlers[name] = handler

    async def list_peers(self) -> list[Any]:
        return [SimpleNamespace(peer_id=other, addrs=self.hosts) for other in self.swarm]


Scene = Callable[["Pair"], Awaitable[None]]


class Pair:
    """Two peers; ``one`` calls ``two``."""

    def __init__(self, host: str) -> None:
        swarm: dict[PeerID, Rumour] = {}
        self.rumours = [Rumour(peer(number), swarm) for number in (1, 2)]
        self.one, self.two = (
            DirectTransport(rumour, rumour, listen_next_to(host, 0))  # type: ignore[arg-type]
            for rumour in self.rumours
        )

    @property
    def by_daemon(self) -> list[str]:
        """Names of the calls for which ``one`` needed the daemon."""
        return self.rumours[0].called

    async def offer(self, number: int = 1) -> DirectOfferHeader:
        """As ``two`` tells it to a peer."""
        rumour = Rumour(peer(number), self.rumours[0].swarm) if number > 2 else self.rumours[number - 1]
        asker = DirectTransport(rumour, rumour, listen_next_to("127.0.0.1", 0))  # type: ignore[arg-type]
        header = await asker._ask(peer(2))
        await asker.close()
        rumour.called.clear()
        assert header is not None
        return header

    async def way_found(self) -> None:
        """Call once, which goes through the daemon, until the way to ``two`` is looked for no longer."""
        answers = await self.one.call(peer(2), "echo", parts([3]), Average)
        assert [len(answer.body) async for answer in answers] == [3]
        while len(self.one._tasks) > 1:
            await asyncio.sleep(0)

    def way(self) -> _Way:
        return self.one._ways[peer(2)]


def play(scene: Scene, host: str = "127.0.0.1") -> None:
    """The scene, after which no thread, task or socket of ours may be left."""

    async def whole() -> None:
        pair = Pair(host)
        await pair.one.start()
        await pair.two.start()
        await pair.two.serve("echo", echo, Part)
        try:
            await asyncio.wait_for(scene(pair), 30)
        finally:
            await pair.one.close()
            await pair.two.close()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    threads, before = threading.active_count(), open_sockets()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(whole())
    finally:
        asyncio.set_event_loop_policy(None)
    gc.collect()
    assert threading.active_count() == threads
    assert open_sockets() <= before


def open_sockets() -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


async def exchanged(pair: Pair, sizes: Sequence[int] = (3, 0, 70_000)) -> None:
    answers = await pair.one.call(peer(2), "echo", parts(sizes), Average)
    got = [bytes(answer.body) async for answer in answers]
    assert got == [bytes([number % 251]) * size for number, size in enumerate(sizes)]


# Calls


def test_the_first_call_goes_through_the_daemon_and_later_ones_directly() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        assert pair.by_daemon == ["echo", "direct"]
        await exchanged(pair, [0, 1, 3, 2 * 2**20, *(7 * number for number in range(200)), MAX_BODY_BYTES, 5])
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct"]

    play(scene)


def test_it_works_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")

    async def scene(pair: Pair) -> None:
        pair.rumours[0].hosts = ["/ip6/::1/tcp/4001"]
        await pair.way_found()
        assert pair.way().host == "::1"
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct"]

    play(scene, "::1")


def test_callers_are_known_by_the_peer_id_that_the_daemon_knows() -> None:
    async def scene(pair: Pair) -> None:
        callers = []

        async def note(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            callers.append(remote_id)
            async for answer in echo(stream, remote_id):
                yield answer

        await pair.two.serve("echo", note, Part)
        await pair.way_found()
        await exchanged(pair)
        assert callers == [peer(1), peer(1)]

    play(scene)


def test_answers_that_nobody_reads_for_a_while_are_all_there_when_the_callee_is_done() -> None:
    async def scene(pair: Pair) -> None:
        done = asyncio.Event()

        async def flood(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            async for _ in stream:
                pass
            for number in range(40):
                yield Average(AverageHeader(part=number, included=b"\x01"), bytes(4000))
            done.set()

        await pair.two.serve("flood", flood, Part)
        await pair.way_found()
        answers = await pair.one.call(peer(2), "flood", parts([1]), Average)
        await done.wait()
        assert [answer.header.part async for answer in answers] == list(range(40))
        assert "flood" not in pair.by_daemon

    play(scene)


def test_a_caller_that_hangs_up_ends_the_call_with_a_transport_error_and_keeps_its_way() -> None:
    async def scene(pair: Pair) -> None:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def watch(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            try:
                async for answer in echo(stream, remote_id):
                    yield answer
                ended.set_result(None)
            except TRANSPORT_ERRORS as error:
                ended.set_result(error)

        await pair.two.serve("watch", watch, Part)
        await pair.way_found()
        async with aclosing(await pair.one.call(peer(2), "watch", one_and_no_more(), Average)) as answers:
            await answers.__anext__()
        assert isinstance(await ended, TRANSPORT_ERRORS)
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct"]

    play(scene)


def test_a_callee_that_goes_away_in_a_call_is_a_transport_error_and_is_avoided() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        answers = await pair.one.call(peer(2), "echo", one_and_no_more(), Average)
        await answers.__anext__()
        await pair.two.close()
        with pytest.raises(TRANSPORT_ERRORS):
            await answers.__anext__()
        assert pair.way().offer is None
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo"]

    play(scene)


def test_a_call_that_is_given_up_while_it_waits_makes_the_way_avoided() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        answers = await pair.one.call(peer(2), "echo", one_and_no_more(), Average)
        await answers.__anext__()
        waiting = asyncio.ensure_future(answers.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pair.way().offer is None

    play(scene)


@pytest.mark.parametrize("garbage", [b"\xff" * 8 + b"x", b"\0" * 4 + b"\1", b"\3\0\0\0\2\0\0\0\xc1\xc1\xc1xy"])
def test_garbage_after_the_welcome_is_what_it_is_over_the_daemon(garbage: bytes) -> None:
    async def scene(pair: Pair) -> None:
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def watch(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            try:
                async for part in stream:
                    ended.set_result(part.header)
                    return
            except TRANSPORT_ERRORS as error:
                ended.set_result(error)
            yield Average()

        await pair.two.serve("watch", watch, Part)
        _, writer = await _enter("127.0.0.1", await pair.offer(), "watch")
        writer.write(garbage)
        if len(garbage) == 5:
            writer.close()  # in the middle of the lengths
        found = await ended
        assert found is None or isinstance(found, TRANSPORT_ERRORS)
        writer.transport.abort()

    play(scene)


# Who is let in


def test_a_ticket_opens_the_door_for_the_peer_it_was_given_to() -> None:
    async def scene(pair: Pair) -> None:
        callers = []

        async def note(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            callers.append(remote_id)
            async for answer in echo(stream, remote_id):
                yield answer

        await pair.two.serve("note", note, Part)
        for number in (1, 7):
            reader, writer = await _enter("127.0.0.1", await pair.offer(number), "note")
            writer.write(b"\0" * 8)
            await reader.read(8)
            writer.transport.abort()
        while len(callers) < 2:
            await asyncio.sleep(0)
        assert callers == [peer(1), peer(7)]

    play(scene)


@pytest.mark.parametrize("case", ["another ticket", "another name", "expired"])
def test_nobody_else_gets_in(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(pair: Pair) -> None:
        offer, name = await pair.offer(), "echo"
        if case == "another ticket":
            offer = offer.model_copy(update={"ticket": bytes(32)})
        elif case == "another name":
            name = "dance"
        else:
            pair.two._tickets._now = lambda: 1e12
        with pytest.raises((OSError, EOFError)):
            await _enter("127.0.0.1", offer, name)

    play(scene)


def test_a_caller_whose_ticket_is_not_taken_uses_the_daemon_at_once_and_for_a_while() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        pair.two._tickets = Tickets()  # as after a restart
        await exchanged(pair)
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo", "echo"]

    play(scene)


def test_another_certificate_than_the_announced_one_gets_no_ticket() -> None:
    async def scene(pair: Pair) -> None:
        offer = (await pair.offer()).model_copy(update={"fingerprint": bytes(32)})
        with pytest.raises(NotAdmitted, match="another certificate"):
            await _dial("127.0.0.1", offer)
        pair.rumours[0].change = lambda header: header.model_copy(update={"fingerprint": bytes(32)})
        await pair.way_found()
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo"]

    play(scene)


def test_tls_before_1_3_is_refused() -> None:
    async def scene(pair: Pair) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", (await pair.offer()).port, ssl=context)

    play(scene)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_ticket_is_the_peers_own_stays_the_same_for_half_its_life_and_then_changes() -> None:
    clock = Clock()
    tickets = Tickets(clock)
    first, other = tickets.give(peer(1)), tickets.give(peer(2))
    assert first is not None and other is not None and first != other and len(first) == 32
    assert tickets.holder(first) == peer(1) and tickets.holder(other) == peer(2)
    clock.seconds = TICKET_SECONDS / 2 - 1
    assert tickets.give(peer(1)) == first
    clock.seconds = TICKET_SECONDS / 2
    second = tickets.give(peer(1))
    assert second is not None and second != first
    assert tickets.holder(first) is None and tickets.holder(second) == peer(1)
    clock.seconds = TICKET_SECONDS
    assert tickets.holder(other) is None and tickets.holder(second) == peer(1)


def test_no_more_tickets_are_out_than_allowed() -> None:
    clock = Clock()
    tickets = Tickets(clock)
    for number in range(TICKETS):
        assert tickets.give(PeerID(number.to_bytes(34, "big"))) is not None
    assert tickets.give(peer(255)) is None
    clock.seconds = TICKET_SECONDS
    assert tickets.give(peer(255)) is not None


@given(st.binary(max_size=64))
def test_random_bytes_are_nobodys_ticket(shown: bytes) -> None:
    tickets = Tickets()
    tickets.give(peer(1))
    assert tickets.holder(shown) is None


# Strangers


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=8), st.lists(st.binary(max_size=300), max_size=8))
def test_garbage_before_and_after_the_handshake_is_cut_off_and_the_door_stays_open(
    before: list[bytes], after: list[bytes]
) -> None:
    async def scene(pair: Pair) -> None:
        offer = await pair.offer()
        for garbage in before:
            reader, writer = await asyncio.open_connection("127.0.0.1", offer.port)
            writer.write(garbage)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        for garbage in after:
            reader, writer = await _dial("127.0.0.1", offer)
            writer.write(garbage + bytes(300))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.transport.abort()
        await pair.way_found()
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct"]

    play(scene)


@pytest.mark.parametrize("with_tls", [False, True])
def test_connections_that_say_nothing_are_bounded_in_number_and_time(
    with_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_module, "IDENTIFY_SECONDS", 0.5)

    async def scene(pair: Pair) -> None:
        offer = await pair.offer()
        pair.two._strangers = asyncio.Semaphore(3)
        silent = []
        for _ in range(10):
            dialling = _dial("127.0.0.1", offer) if with_tls else asyncio.open_connection("127.0.0.1", offer.port)
            silent.append(asyncio.ensure_future(dialling))
        most = 0
        while sum(task.done() for task in silent) < 10 or pair.two._strangers.locked():
            most = max(most, len(pair.two._tasks) - 1)
            await asyncio.sleep(0.01)
        assert most <= 4  # the one that accepts had a place before the semaphore was changed
        for task in silent:
            with contextlib.suppress(OSError):
                reader, writer = await task
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.transport.abort()
        await pair.way_found()
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct"]

    play(scene)


def test_a_slow_hello_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_module, "IDENTIFY_SECONDS", 0.5)

    async def scene(pair: Pair) -> None:
        offer = await pair.offer()
        reader, writer = await _dial("127.0.0.1", offer)
        ended = asyncio.ensure_future(reader.read())
        for byte in offer.ticket:
            writer.write(bytes([byte]))
            await asyncio.wait({ended}, timeout=0.1)
            if ended.done():
                break
        assert ended.done()
        with contextlib.suppress(ConnectionError):
            assert await ended == b""
        writer.transport.abort()

    play(scene)


def test_calls_of_one_peer_at_once_are_bounded() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        calls = [await pair.one.call(peer(2), "echo", one_and_no_more(), Average) for _ in range(CALLS_PER_PEER + 1)]
        outcomes = [asyncio.ensure_future(answers.__anext__()) for answers in calls]
        done = await asyncio.gather(*outcomes, return_exceptions=True)
        refused = [outcome for outcome in done if isinstance(outcome, BaseException)]
        assert len(refused) == 1 and isinstance(refused[0], TRANSPORT_ERRORS)
        for answers in calls:
            await answers.aclose()

    play(scene)


# When the daemon is used


def test_a_port_that_refuses_is_given_up_for_a_while_and_no_call_notices() -> None:
    async def scene(pair: Pair) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        pair.rumours[0].change = lambda header: header.model_copy(update={"port": free})
        await pair.way_found()
        for _ in range(3):
            await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo", "echo", "echo"]
        left = pair.way().until - asyncio.get_running_loop().time()
        assert pair.way().offer is None and AVOID_SECONDS - 60 < left <= AVOID_SECONDS

    play(scene)


def test_a_port_that_swallows_everything_holds_up_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_module, "DIAL_SECONDS", 0.3)

    async def scene(pair: Pair) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            pair.rumours[0].change = lambda header: header.model_copy(update={"port": mute.getsockname()[1]})
            await exchanged(pair)
            await exchanged(pair)  # while the search goes on
            await pair.way_found()
            assert pair.way().offer is None
            assert pair.by_daemon.count("direct") == 1

    play(scene)


def test_a_peer_that_listens_no_longer_is_called_through_the_daemon_at_once() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        await pair.two.close()
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo"]

    play(scene)


def test_a_peer_without_a_direct_port_is_called_through_the_daemon() -> None:
    async def scene(pair: Pair) -> None:
        del pair.rumours[1].handlers["direct"]
        await pair.way_found()
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo"]

    play(scene)


def test_a_way_is_looked_for_again_when_it_is_old() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        now = asyncio.get_running_loop().time()
        assert now < pair.way().until <= now + WAY_SECONDS
        pair.one._ways[peer(2)] = _Way(host=pair.way().host, offer=pair.way().offer, until=0.0)
        await pair.way_found()
        assert pair.by_daemon == ["echo", "direct", "echo", "direct"]
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct", "echo", "direct"]

    play(scene)


def test_the_way_to_a_peer_that_is_elsewhere_now_is_forgotten_and_looked_for_again() -> None:
    async def scene(pair: Pair) -> None:
        await pair.way_found()
        pair.one.forget(str(peer(1)))
        await exchanged(pair)
        assert pair.by_daemon == ["echo", "direct"], "it was another"
        pair.one.forget(str(peer(2)))
        await pair.way_found()
        assert pair.by_daemon == ["echo", "direct", "echo", "direct"]

    play(scene)


@pytest.mark.parametrize(
    ("multiaddr", "host"),
    [
        ("/ip4/203.0.113.7/tcp/31337", "203.0.113.7"),
        ("/ip6/2001:db8::1/tcp/31337/p2p/QmX", "2001:db8::1"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/QmX/p2p-circuit", None),
        ("/ip6zone/eth0/ip6/fe80::1/tcp/1", None),
        ("/unix/tmp/x", None),
        ("", None),
    ],
)
def test_only_addresses_of_direct_connections_are_dialled(multiaddr: str, host: str | None) -> None:
    assert ip_in(multiaddr) == host


def test_the_given_port_is_used_if_it_is_free_and_any_other_if_not() -> None:
    with listen_next_to("127.0.0.1", 0) as first:
        taken = first.getsockname()[1]
        with listen_next_to("127.0.0.1", taken) as second:
            assert second.getsockname()[1] not in (0, taken)
    with listen_next_to("127.0.0.1", taken) as again:
        assert again.getsockname()[1] == taken


# With real daemons


def test_between_two_daemons_the_second_call_is_direct_and_ends_like_one_through_the_daemon() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        pair = [
            DirectTransport(p2p, DaemonTransport(p2p, "space", WRITE_SECONDS), listen_next_to("127.0.0.1", 0))
            for p2p in (one, two)
        ]
        try:
            for transport in pair:
                await transport.start()
            callers = []

            async def note(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
                callers.append(remote_id)
                async for answer in echo(stream, remote_id):
                    yield answer

            await pair[1].serve("echo", note, Part)
            for _ in range(2):
                answers = await pair[0].call(two.peer_id, "echo", parts([5, 2**20]), Average)
                assert [len(answer.body) async for answer in answers] == [5, 2**20]
                while len(pair[0]._tasks) > 1:
                    await asyncio.sleep(0.01)
            assert pair[0]._ways[two.peer_id].offer is not None
            assert callers == [one.peer_id, one.peer_id]
            answers = await pair[0].call(two.peer_id, "echo", one_and_no_more(), Average)
            await answers.__anext__()
            await pair[1].close()
            with pytest.raises(TRANSPORT_ERRORS):
                await answers.__anext__()
        finally:
            for transport in pair:
                await transport.close()

    async def whole() -> None:
        directory = Path(tempfile.mkdtemp(prefix="direct-"))
        daemons: list[P2P] = []
        try:
            for name in ("one", "two"):
                identity = load_or_create_identity(directory / name)
                daemons.append(await start_daemon(NetworkSettings(host="127.0.0.1"), identity.path, directory))
            await dial_all(daemons[0], [parse_address(str((await daemons[1].get_visible_maddrs(latest=True))[0]))])
            await asyncio.wait_for(scene(*daemons), 60)
        finally:
            for daemon in daemons:
                await daemon.shutdown()
            shutil.rmtree(directory, ignore_errors=True)

    asyncio.run(whole())
