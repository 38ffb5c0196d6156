"""The transport of rounds over real p2p daemons: order, both ways at once, ends, limits, and peers that vanish."""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from hivemind.p2p import P2P, PeerID

from dht_config.address import parse_address
from dht_config.identity import load_or_create_identity
from dht_config.network import NetworkSettings
from peers.daemon import dial_all, start_daemon
from peers.messages import MAX_BODY_BYTES, Average, AverageHeader, Part, PartHeader
from peers.transport import _END, _LENGTHS, PREFETCHED, TRANSPORT_ERRORS, DaemonTransport, _Channel

GROUP_ID = b"a group of this test"
Scene = Callable[[P2P, P2P], Awaitable[None]]


def between_two_daemons(scene: Scene) -> None:
    """Run a scene with two daemons that are connected."""

    async def play() -> None:
        directory = Path(tempfile.mkdtemp(prefix="transport-"))
        daemons: list[P2P] = []
        try:
            for name in ("one", "two"):
                identity = load_or_create_identity(directory / name)
                daemons.append(await start_daemon(NetworkSettings(host="127.0.0.1"), identity.path, directory))
            address = parse_address(str((await daemons[1].get_visible_maddrs(latest=True))[0]))
            await dial_all(daemons[0], [address])
            await asyncio.wait_for(scene(*daemons), 60)
        finally:
            for daemon in daemons:
                await daemon.shutdown()
            shutil.rmtree(directory, ignore_errors=True)

    asyncio.run(play())


async def parts(sizes: Sequence[int]) -> AsyncIterator[Part]:
    for number, size in enumerate(sizes):
        yield Part(PartHeader(group_id=GROUP_ID, part=number), memoryview(bytes([number % 251]) * size))


async def echo(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
    async for part in stream:
        assert part.header is not None
        yield Average(AverageHeader(part=part.header.part, included=b"\x03"), part.body)


def test_messages_of_all_sizes_come_in_order_and_unchanged_while_as_many_go_back() -> None:
    sizes = [0, 1, 3, 2 * 2**20, *(7 * number for number in range(200)), MAX_BODY_BYTES, 5]

    async def scene(one: P2P, two: P2P) -> None:
        await DaemonTransport(two, "space", 30).serve("echo", echo, Part)
        answers = await DaemonTransport(one, "space", 30).call(two.peer_id, "echo", parts(sizes), Average)
        got = [(answer.header, bytes(answer.body)) async for answer in answers]
        assert [header.part for header, _ in got if header is not None] == list(range(len(sizes)))
        assert [body for _, body in got] == [bytes([number % 251]) * size for number, size in enumerate(sizes)]

    between_two_daemons(scene)


def test_a_body_arrives_in_memory_that_arithmetic_can_use_as_it_is() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        await DaemonTransport(two, "space", 30).serve("echo", echo, Part)
        answers = await DaemonTransport(one, "space", 30).call(two.peer_id, "echo", parts([4096]), Average)
        (answer,) = [answer async for answer in answers]
        assert isinstance(answer.body, memoryview) and not answer.body.readonly

    between_two_daemons(scene)


def test_callers_are_known_by_their_peer_id() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        callers = []

        async def note(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            callers.append(remote_id)
            async for answer in echo(stream, remote_id):
                yield answer

        await DaemonTransport(two, "space", 30).serve("echo", note, Part)
        answers = await DaemonTransport(one, "space", 30).call(two.peer_id, "echo", parts([1]), Average)
        assert len([answer async for answer in answers]) == 1
        assert callers == [one.peer_id]

    between_two_daemons(scene)


def test_a_call_that_nobody_serves_is_a_transport_error() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        with pytest.raises(TRANSPORT_ERRORS):
            await DaemonTransport(one, "space", 30).call(two.peer_id, "echo", parts([1]), Average)

    between_two_daemons(scene)


def test_a_peer_that_dies_ends_its_calls_with_a_transport_error() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        await DaemonTransport(two, "space", 30).serve("echo", echo, Part)

        async def one_and_no_more() -> AsyncIterator[Part]:
            async for part in parts([1]):
                yield part
            await asyncio.Event().wait()

        answers = await DaemonTransport(one, "space", 30).call(two.peer_id, "echo", one_and_no_more(), Average)
        await answers.__anext__()
        await two.shutdown()
        with pytest.raises(TRANSPORT_ERRORS):
            await answers.__anext__()

    between_two_daemons(scene)


def test_a_caller_that_hangs_up_ends_the_stream_with_a_transport_error() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def watch(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            try:
                async for answer in echo(stream, remote_id):
                    yield answer
                ended.set_result(None)
            except TRANSPORT_ERRORS as error:
                ended.set_result(error)

        async def one_and_no_more() -> AsyncIterator[Part]:
            async for part in parts([1]):
                yield part
            await asyncio.Event().wait()

        await DaemonTransport(two, "space", 30).serve("echo", watch, Part)
        call = await DaemonTransport(one, "space", 30).call(two.peer_id, "echo", one_and_no_more(), Average)
        async with aclosing(call) as answers:
            await answers.__anext__()
        assert isinstance(await ended, TRANSPORT_ERRORS)

    between_two_daemons(scene)


@pytest.mark.parametrize("lengths", [(10, MAX_BODY_BYTES + 1), (2**32 - 1, 0)])
def test_a_message_longer_than_allowed_is_refused_before_it_is_read(lengths: tuple[int, int]) -> None:
    async def scene(one: P2P, two: P2P) -> None:
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        async def watch(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            try:
                async for _ in stream:
                    raise AssertionError("a message came out of it")
                yield Average()
            except TRANSPORT_ERRORS as error:
                failed.set_result(error)

        await DaemonTransport(two, "space", 30).serve("watch", watch, Part)
        _, _, writer = await one.call_binary_stream_handler(two.peer_id, "space::watch")
        writer.write(struct.pack("<II", *lengths))
        assert "bytes" in str(await failed)
        writer.close()

    between_two_daemons(scene)


def test_a_header_that_does_not_parse_is_a_message_without_one() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        got: asyncio.Future[Part] = asyncio.get_running_loop().create_future()

        async def watch(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            async for part in stream:
                got.set_result(part)
                yield Average(AverageHeader(part=0, included=b"\x01"))

        await DaemonTransport(two, "space", 30).serve("watch", watch, Part)
        _, _, writer = await one.call_binary_stream_handler(two.peer_id, "space::watch")
        writer.write(struct.pack("<II", 3, 2) + b"\xc1\xc1\xc1" + b"xy")
        assert (await got).header is None
        writer.close()

    between_two_daemons(scene)


def test_a_peer_that_stops_reading_is_given_up() -> None:
    async def scene(one: P2P, two: P2P) -> None:
        given_up = asyncio.Event()

        async def flood(stream: AsyncIterator[Part], remote_id: PeerID) -> AsyncGenerator[Average, None]:
            try:
                while True:
                    yield Average(AverageHeader(part=0, included=b"\x01"), bytes(2**20))
            finally:
                given_up.set()

        await DaemonTransport(two, "space", 0.5).serve("flood", flood, Part)
        _, _, writer = await one.call_binary_stream_handler(two.peer_id, "space::flood")
        await asyncio.wait_for(given_up.wait(), 30)
        writer.close()

    between_two_daemons(scene)


async def buffered(reader: asyncio.StreamReader, least_bytes: int) -> None:
    """Until so much has arrived that nobody has read."""
    while len(reader._buffer) < least_bytes:  # type: ignore[attr-defined]
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 4, 6, 40])
def test_messages_that_were_there_before_the_take_over_all_arrive(count: int) -> None:
    async def scene() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        for number in range(count):
            header = Part(PartHeader(group_id=b"a group of a test", part=number), b"").packed_header()
            theirs.sendall(_LENGTHS.pack(len(header), 150) + header + bytes(150))
        theirs.sendall(_END)
        await buffered(reader, count * 150)
        channel = _Channel(reader, writer, 5.0)
        assert [message.header.part async for message in channel.messages(Part)] == list(range(count))
        channel.close()
        theirs.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_one_message_is_read_until_a_second_one_is_asked_for_and_then_a_few_ahead() -> None:
    async def scene() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        for number in range(3 * PREFETCHED):
            header = Part(PartHeader(group_id=b"a group of a test", part=number), b"").packed_header()
            theirs.sendall(_LENGTHS.pack(len(header), 150) + header + bytes(150))
        await buffered(reader, 3 * PREFETCHED * 150)
        channel = _Channel(reader, writer, 5.0)
        ahead = [len(channel._arrived)]
        async with aclosing(channel.messages(Part)) as messages:
            for _ in range(4):
                await messages.__anext__()
                ahead.append(len(channel._arrived))
        assert ahead == [1, 0, PREFETCHED, PREFETCHED, PREFETCHED]
        channel.close()
        theirs.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


@pytest.mark.parametrize("body", [b"\xff" * 8 + b"x", _END + b"x"])
def test_bytes_after_the_end_or_an_absurd_length_do_not_hold_up_the_process(body: bytes) -> None:
    async def scene() -> list[Part]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.sendall(body)
        await buffered(reader, len(body))
        channel = _Channel(reader, writer, 5.0)
        try:
            return [message async for message in channel.messages(Part)]
        finally:
            channel.close()
            theirs.close()

    if body.startswith(_END):
        assert asyncio.run(asyncio.wait_for(scene(), 10)) == []
    else:
        with pytest.raises(OSError, match="a message of"):
            asyncio.run(asyncio.wait_for(scene(), 10))
