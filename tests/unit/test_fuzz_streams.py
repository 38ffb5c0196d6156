"""Streams that carry anything: framing, calls for rounds that nobody knows, and the messages of bases."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import torch
from hostile import anything, pack, play
from hypothesis import given, settings
from hypothesis import strategies as st
from local_bases import BASE, FRAGMENT, each, honest_answer, partial_base, request
from local_rounds import GROUP_ID, Network, peer, plan_for, whole

from peers.base_server import BaseServer
from peers.closing import ClosingTimes
from peers.contribution import Outgoing
from peers.messages import MAX_BODY_BYTES, MAX_HEADER_BYTES, BaseAnswer, BasePieceHeader, BaseRequest, Part, PartHeader
from peers.reducer import Rules
from peers.round import Round
from peers.round_register import REGISTER_SECONDS, ROUNDS_UNKNOWN_PER_PEER, RoundRegister
from peers.transfer import HEADER, TransferFailed
from peers.transport import _END, _LENGTHS, PREFETCHED, _Channel

# Framing


def framed(header: bytes, body: bytes) -> bytes:
    return _LENGTHS.pack(len(header), len(body)) + header + body


stream_pieces = st.lists(
    st.builds(framed, st.binary(min_size=1, max_size=60), st.binary(max_size=300))
    | st.integers(0, 9).map(
        lambda number: framed(Part(PartHeader(group_id=GROUP_ID, part=number)).packed_header(), bytes(number))
    )
    | st.builds(_LENGTHS.pack, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    | st.just(_END)
    | st.binary(max_size=12),
    max_size=14,
).map(b"".join)


def parsed(data: bytes) -> tuple[list[tuple[bytes, bytes]], str]:
    """The messages in a stream and how it ends, as the page of ``transport.py`` has it."""
    found, position = [], 0
    while position + _LENGTHS.size <= len(data):
        header_bytes, body_bytes = _LENGTHS.unpack_from(data, position)
        position += _LENGTHS.size
        if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            return found, "too long"
        if header_bytes == 0:
            return found, "end"
        if position + header_bytes + body_bytes > len(data):
            break
        found.append((data[position : position + header_bytes], data[position + header_bytes :][:body_bytes]))
        position += header_bytes + body_bytes
    return found, "lost"


@settings(max_examples=80, deadline=None)
@given(
    data=stream_pieces, chunk_bytes=st.lists(st.integers(1, 400), min_size=1, max_size=5), before=st.integers(0, 200)
)
def test_any_bytes_in_any_pieces_are_messages_and_one_end(data: bytes, chunk_bytes: list[int], before: int) -> None:
    async def scene() -> None:
        wire = SimpleNamespace(
            paused=False,
            set_protocol=lambda _: None,
            set_write_buffer_limits=lambda high: None,
            is_closing=lambda: True,
        )
        wire.pause_reading = lambda: setattr(wire, "paused", True)
        wire.resume_reading = lambda: setattr(wire, "paused", False)
        reader = SimpleNamespace(_buffer=bytearray(data[:before]), _eof=False, exception=lambda: None)
        channel = _Channel(reader, SimpleNamespace(transport=wire), 5.0)  # type: ignore[arg-type]

        async def feed() -> None:
            rest = memoryview(data)[before:]
            number = 0
            while rest:
                while wire.paused:
                    await asyncio.sleep(0.01)
                room = channel.get_buffer(-1)
                assert len(room) <= MAX_BODY_BYTES
                taken = min(len(room), len(rest), chunk_bytes[number % len(chunk_bytes)])
                room[:taken] = rest[:taken]
                channel.buffer_updated(taken)
                assert len(channel._arrived) <= PREFETCHED
                rest, number = rest[taken:], number + 1
            channel.eof_received()

        feeding = asyncio.create_task(feed())
        got, end = [], "end"
        try:
            async for message in channel.messages(Part):
                got.append(message)
                await asyncio.sleep(0.02)
        except EOFError:
            end = "lost"
        except OSError:
            end = "too long"
        feeding.cancel()
        expected, expected_end = parsed(data)
        assert end == expected_end
        as_sent = [Part.from_parts(header, memoryview(body)) for header, body in expected]
        assert [(one.header, bytes(one.body)) for one in got] == [(one.header, bytes(one.body)) for one in as_sent]

    play(scene())


# Calls for rounds


async def saying(*messages: Part, ends: bool = True) -> AsyncIterator[Part]:
    for message in messages:
        yield message
    if not ends:
        await asyncio.Event().wait()


async def call(register: RoundRegister, stream: AsyncIterator[Part], caller: int) -> int:
    """How many answers there were."""
    async with aclosing(register.answer(stream, peer(caller))) as answers:
        return len([answer async for answer in answers])


def part_of(group_id: bytes, body: bytes = b"") -> Part:
    return Part(PartHeader(group_id=group_id, part=0), body)


def test_masses_of_unknown_groups_and_silent_streams_leave_nothing_behind() -> None:
    callers, waves = 5, 12

    async def scene() -> None:
        register, calls = RoundRegister(), []
        for wave in range(waves):
            for caller in range(callers):
                for number in range(16):
                    name = b"unknown %d %d %d" % (wave, caller, number)
                    calls.append(asyncio.create_task(call(register, saying(part_of(name), ends=False), caller)))
                calls.append(asyncio.create_task(call(register, saying(ends=False), caller)))
                calls.append(asyncio.create_task(call(register, saying(), caller)))
                calls.append(asyncio.create_task(call(register, saying(Part()), caller)))
            await asyncio.sleep(REGISTER_SECONDS / 2)
            # A name is remembered for two waits of its caller, who may be in the third one.
            assert len(register) <= 3 * ROUNDS_UNKNOWN_PER_PEER * callers
        assert sum(await asyncio.gather(*calls)) == 0
        await asyncio.sleep(3 * REGISTER_SECONDS)
        assert len(register) == 0 and not register._guessing

    play(scene())


def test_a_call_before_its_round_is_known_is_answered_and_so_is_one_after_it() -> None:
    plan = plan_for([whole(4, 5)] * 2, 4)

    async def scene() -> None:
        register = RoundRegister()
        body = torch.ones(2).numpy().tobytes()
        early = asyncio.create_task(call(register, saying(part_of(GROUP_ID, body)), 1))
        await asyncio.sleep(REGISTER_SECONDS / 2)
        times = ClosingTimes(grace_seconds=1, deadline_seconds=2)
        current = Round(plan, peer(0), Outgoing.of(torch.zeros(4)), Network(plan).caller(0), times, Rules())  # type: ignore[arg-type]
        register.add(current)
        await current.reducer.add(0, 0, torch.zeros(2))
        assert await early == 1
        assert await call(register, saying(part_of(GROUP_ID, body)), 1) == 0, "a second stream"
        await asyncio.sleep(2 * current.longest_seconds + REGISTER_SECONDS)
        assert len(register) == 0
        assert await call(register, saying(part_of(GROUP_ID, body)), 1) == 0

    play(scene())


def test_a_round_that_is_over_is_held_by_nobody_until_its_last_deadline() -> None:
    """What it sent would take memory for as long: several rounds' at once."""
    plan = plan_for([whole(4, 5)] * 2, 4)

    async def scene() -> None:
        register = RoundRegister()
        times = ClosingTimes(grace_seconds=1, deadline_seconds=2)
        current = Round(plan, peer(0), Outgoing.of(torch.zeros(4)), Network(plan).caller(0), times, Rules())  # type: ignore[arg-type]
        register.add(current)
        current.end()
        await asyncio.sleep(0)
        over = weakref.ref(current)
        del current
        gc.collect()
        assert over() is None and len(register) == 0

    asyncio.run(scene())


# Messages of bases


def fields_of(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = message.header.model_dump()
    return fields


names = st.sampled_from(["start", "stop", "version", "digest", "fragment", "history", "receipts", "busy", "", "part"])
changes = st.dictionaries(names, anything | st.integers(-1, 2**41), max_size=2)


@settings(max_examples=60, deadline=None)
@given(change=changes, header=st.none() | anything, body=st.none() | st.binary(max_size=64), first=st.booleans())
def test_any_answer_of_a_donor_is_taken_or_is_its_failure(
    change: dict[str, Any], header: Any, body: bytes | None, first: bool
) -> None:
    partial = partial_base()
    asked = partial.ask("donor")
    assert asked == HEADER
    if not first:
        partial.put("donor", honest_answer(asked))
        asked = partial.ask("donor")
        assert asked is not None
    honest = honest_answer(asked)
    fields = fields_of(honest) | change if header is None else header
    answer = BaseAnswer()
    answer.ParseFromString(pack(fields, honest.body if body is None else body))
    try:
        taken = partial.put("donor", answer)
    except TransferFailed as error:
        assert str(error)
    else:
        assert taken == asked.stop - asked.start
        assert isinstance(answer.header, BasePieceHeader) == (not first)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(changes, st.none() | anything | st.binary(max_size=40)), min_size=1, max_size=4),
)
def test_any_request_for_a_base_is_served_or_ends_its_stream(asked: list[tuple[dict[str, Any], Any]]) -> None:
    async def scene() -> None:
        async def freeze(fragment: int) -> Any:
            assert fragment == FRAGMENT
            return BASE

        server = BaseServer(lambda header: header.digest == BASE.digest and header.fragment == FRAGMENT, freeze)
        requests = []
        for change, other in asked:
            fields = fields_of(request()) | change if other is None else other
            requests.append(BaseRequest.FromString(other if isinstance(other, bytes) else pack(fields, b"")))
        answers = [answer async for answer in server.answer(each(requests), "somebody")]  # type: ignore[arg-type]
        assert len(answers) <= len(requests)
        assert not server._streams

    play(scene())
