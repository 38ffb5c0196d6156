"""A member of a round that does anything: what it says in place of what it should; and a clock that jumps."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import msgpack
import numpy as np
import torch
from hypothesis import strategies as st
from local_rounds import GROUP_ID, peer

from peers.closing import ClosingTimes
from peers.codecs import CODEC_NAMES, get_codec
from peers.contribution import Outgoing
from peers.messages import Average, Part, WireMessage
from peers.reducer import InvalidPart, Rules, decode_values
from peers.round import Round, RoundResult, RoundVoid
from peers.round_plan import RoundPlan

HOSTILE = 1
END, FROZEN = b"end", b"frozen"
"""Stand for the end of a stream, and for one that neither goes on nor ends. No message is so short."""
Deed = Callable[[Any, bytes, int], list[bytes]]
"""What becomes of a message: of its codec, its bytes, and its number of values."""
Outcome = RoundResult | RoundVoid
Result = TypeVar("Result")


# A clock that jumps


class _JumpingLoop(asyncio.SelectorEventLoop):
    """It is later only when nothing is left to do but wait: deadlines cost no time, and no machine is slow."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def play(scene: Coroutine[Any, Any, Result]) -> Result:
    """Run a scene without threads or sockets; it fails if anything that nobody handles was raised anywhere in it."""
    unhandled: list[dict[str, Any]] = []
    loop = _JumpingLoop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    gc.freeze()
    try:
        result = loop.run_until_complete(_and_end_the_rest(scene))
        loop.run_until_complete(loop.shutdown_asyncgens())
        gc.collect()  # a task that nobody asked for its exception says so when it goes
        assert not unhandled, unhandled
        return result
    finally:
        gc.unfreeze()
        loop.close()


async def _and_end_the_rest(scene: Coroutine[Any, Any, Result]) -> Result:
    result = await asyncio.wait_for(scene, 10_000)
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    return result


# What a member may do


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=12)
)
anything = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
odd_float32 = st.sampled_from(
    [0.0, -0.0, 1.0, 1e4, -1e4, 1.0001e4, 1e38, 1e-44, 1e-39, *map(float, ("nan", "inf", "-inf"))]
)
FIELDS = ["group_id", "part", "included", "weight", "start", "", "schema_version"]


def pack(fields: Any, body: bytes | memoryview) -> bytes:
    packed = msgpack.packb(fields, use_bin_type=True)
    return struct.pack("<I", len(packed)) + packed + bytes(body)


def unpack(raw: bytes) -> tuple[Any, bytes]:
    (length,) = struct.unpack_from("<I", raw)
    return msgpack.unpackb(raw[4 : 4 + length]), raw[4 + length :]


def _replace_field(name: str, value: Any) -> Deed:
    return lambda codec, raw, size: [pack(unpack(raw)[0] | {name: value}, unpack(raw)[1])]


def _remove_field(name: str) -> Deed:
    def deed(codec: Any, raw: bytes, size: int) -> list[bytes]:
        fields, body = unpack(raw)
        fields.pop(name, None)
        return [pack(fields, body)]

    return deed


def replace_body(body: Callable[[Any, bytes, int], bytes]) -> Deed:
    return lambda codec, raw, size: [pack(unpack(raw)[0], body(codec, raw, size))]


def _random_bytes(seed: int, extra: int) -> Callable[[Any, bytes, int], bytes]:
    return lambda codec, raw, size: np.random.default_rng(seed).bytes(max(0, codec.encoded_bytes(size) + extra))


def encoding(values: Sequence[float], extra: int) -> Callable[[Any, bytes, int], bytes]:
    def body(codec: Any, raw: bytes, size: int) -> bytes:
        row = torch.from_numpy(np.resize(np.asarray(values, dtype="<f4"), max(0, size + extra)).astype(np.float32))
        return row.numpy().tobytes() if codec.lossless else codec.encode(torch.nan_to_num(row))

    return body


def _flip(position: int, bit: int) -> Deed:
    def deed(codec: Any, raw: bytes, size: int) -> list[bytes]:
        changed = bytearray(raw)
        changed[position % len(raw)] ^= 1 << bit
        return [bytes(changed)]

    return deed


def _say(*what: str | bytes) -> Deed:
    """Of "it" the message itself."""
    return lambda codec, raw, size: [
        raw if one == "it" else one for one in what if isinstance(one, bytes) or one == "it"
    ]


bodies = (
    st.builds(_random_bytes, st.integers(0, 2**32), st.sampled_from([0, 0, 0, -1, 1, 4]))
    | st.builds(encoding, st.lists(odd_float32, min_size=1, max_size=6), st.sampled_from([0, 0, 0, 0, -1, 1, 64]))
    | st.binary(max_size=40).map(lambda body: lambda codec, raw, size: body)
)
deeds: st.SearchStrategy[Deed] = (
    st.builds(_replace_field, st.sampled_from(FIELDS), anything)
    | st.builds(_replace_field, st.just("part"), st.integers(-1, 9))
    | st.builds(_replace_field, st.just("included"), st.binary(min_size=1, max_size=1))
    | st.builds(_remove_field, st.sampled_from(FIELDS[:3]))
    | anything.map(lambda header: lambda codec, raw, size: [pack(header, unpack(raw)[1])])
    | st.builds(replace_body, bodies)
    | st.builds(_flip, st.integers(0, 2**16), st.integers(0, 7))
    | st.binary(min_size=6, max_size=60).map(lambda raw: lambda codec, _, size: [raw])
    | st.sampled_from(
        [
            _say(),
            _say("it", "it"),
            _say(END),
            _say("it", END),
            _say("it", END, "it"),
            _say(FROZEN),
            _say("it", FROZEN),
            *(_say("it", *["it"] * 20),),
        ]
    )
)


@dataclass
class Script:
    """What a member does to the messages that it sends: by the other member and the message's number.

    With ``late`` it exchanges each two neighbours.
    """

    deeds: dict[tuple[int, int], Deed]
    alike: bool = False
    """To all as to member 0."""
    late: bool = False
    early: int = 0
    """So many averages it makes up at once, before it has anything to average; the rest follow as they should."""
    hangs_up_after: int | None = None
    """So many averages, as a sender."""

    def at(self, other: int, number: int) -> Deed | None:
        return self.deeds.get((0 if self.alike else other, number))


def scripts(members: int, messages: int, *, alike: bool = False) -> st.SearchStrategy[Script]:
    who = st.just(0) if alike else st.integers(0, members - 1)
    return st.builds(
        Script,
        st.dictionaries(st.tuples(who, st.integers(0, messages - 1)), deeds, min_size=1, max_size=4),
        st.just(alike),
        st.booleans() if not alike else st.just(False),
        st.sampled_from([0, 0, 0, 1, messages, 99]),
        st.sampled_from([None, None, 0, 1, 2]),
    )


async def twisted(
    messages: AsyncIterator[WireMessage],
    script: Script,
    other: int,
    codec: Any,
    sizes: Callable[[Any], int],
    made_up: Sequence[bytes] = (),
) -> AsyncIterator[bytes]:
    """What goes over the wire in the place of these messages, ``FROZEN`` and ``END`` included."""
    held: list[bytes] = []
    number = 0
    for raw in made_up:
        yield raw
    async for message in messages:
        if number < len(made_up):
            number += 1
            continue
        raw = message.SerializeToString()
        deed = script.at(other, number)
        instead = deed(codec, raw, sizes(message.header)) if deed is not None else [raw]
        number += 1
        if script.late and not held:
            held = instead
            continue
        for one in [*instead, *held]:
            yield one
        held = []
    for one in held:
        yield one
    yield END


# A round with it


class _Watched(Round):
    """Says what became of its duties, and keeps its parts when it is over."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.failures: list[BaseException] = []
        self.parts_reduced = [*self.reducer.parts]

    def _duty_done(self, duty: asyncio.Task[None]) -> None:
        if not duty.cancelled() and duty.exception() is not None:
            self.failures.append(duty.exception())  # type: ignore[arg-type]
        super()._duty_done(duty)


@dataclass
class HostileNetwork:
    """Carries the messages of one round; whatever member ``HOSTILE`` sends is what its scripts make of it."""

    plan: RoundPlan
    parts: Script
    averages: Script
    codec: str = "float32"
    answer_codec: str = "float32"
    weird_calls: Sequence[tuple[int, Sequence[bytes]]] = ()
    """Calls of the hostile member besides: whom, and what it says."""
    seed: int = 0
    """Of how long arithmetic takes."""
    rounds: dict[int, _Watched] = field(default_factory=dict)
    brought: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    """By sender, reducer and part: the values that the reducer may have counted."""

    def caller(self, sender: int) -> Callable[[Any, AsyncIterator[Part]], Awaitable[AsyncIterator[Average]]]:
        async def call(reducer_id: Any, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
            reducer = self.plan.index(reducer_id)
            assert reducer is not None
            return self._exchange(sender, reducer, parts)

        return call

    def _size(self, reducer: int, part: int) -> int:
        share = self.plan.share_of(reducer)
        assert share is not None
        start, stop = share.parts[part % len(share.parts)]
        return stop - start

    async def _exchange(self, sender: int, reducer: int, parts: AsyncIterator[Part]) -> AsyncIterator[Average]:
        wire: asyncio.Queue[bytes] = asyncio.Queue(maxsize=2)
        honest = Script({})
        relays = self.plan.group_of(sender) != self.plan.group_of(reducer)
        sending = twisted(
            parts,
            self.parts if sender == HOSTILE else honest,
            reducer,
            get_codec("float32" if relays else self.codec),
            lambda header: self._size(reducer, header.part),
        )

        async def pump() -> None:
            async for raw in sending:
                await wire.put(raw)

        async def arriving() -> AsyncIterator[Part]:
            number = 0
            expected = self.rounds[reducer].reducer.expected_from(sender)
            while (raw := await wire.get()) != END:
                if raw == FROZEN:
                    await asyncio.Event().wait()
                message = Part.FromString(raw)
                if number < len(expected) and self._note(sender, reducer, expected[number], message, relays):
                    number += 1
                yield message

        pumping = asyncio.create_task(pump())
        answers = twisted(
            self.rounds[reducer].answer(arriving(), peer(sender)),
            self.averages if reducer == HOSTILE else honest,
            sender,
            get_codec(self.answer_codec),
            lambda header: self._size(reducer, header.part),
            self._made_up(sender) if reducer == HOSTILE else (),
        )
        number = 0
        try:
            async for raw in answers:
                if sender == HOSTILE and number == self.parts.hangs_up_after:
                    raise ConnectionResetError("hung up")
                number += 1
                if raw == FROZEN:
                    await asyncio.Event().wait()
                if raw == END:
                    return
                yield Average.FromString(raw)
        finally:
            pumping.cancel()
            await answers.aclose()  # type: ignore[attr-defined]

    def _made_up(self, sender: int) -> list[bytes]:
        codec, expected = get_codec(self.answer_codec), self.rounds[HOSTILE].reducer.expected_from(sender)
        return [
            pack({"part": part, "included": b"\x05"}, codec.encode(torch.full((self._size(HOSTILE, part),), 0.5)))
            for part in expected[: self.averages.early]
        ]

    def _note(self, sender: int, reducer: int, part: int, message: Part, relays: bool) -> bool:
        """Whether a message is the next part, as far as its reducer can tell."""
        header = message.header
        if header is None or header.part != part or header.group_id != self.plan.group_id or relays:
            return False
        try:
            values = decode_values(get_codec(self.codec), message.body, self._size(reducer, part))
        except InvalidPart:
            return False
        self.brought.setdefault((sender, reducer, part), values.clone())
        return True

    async def hold(self, contributions: Sequence[torch.Tensor]) -> list[Outcome]:
        """For each member its result or why it has none. Every duty of every member is at an end, as it should be."""
        self._dice = random.Random(self.seed)
        times = ClosingTimes(grace_seconds=3.0, deadline_seconds=5.0)
        rules = Rules(codec=get_codec(self.codec), answer_codec=get_codec(self.answer_codec))
        for index, contribution in enumerate(contributions):
            self.rounds[index] = _Watched(
                self.plan,
                peer(index),
                Outgoing.of(contribution),
                self.caller(index),
                times,
                rules,
                residual=lambda start, stop: None,
            )
        with mock.patch("peers.reducer.INLINE_ELEMENTS", 0), mock.patch("asyncio.to_thread", self._in_a_moment):
            return await self._hold()

    async def _in_a_moment(self, work: Callable[..., Result], *arguments: Any) -> Result:
        await asyncio.sleep(self._dice.choice([0.0, 0.001, 0.01, 0.1]))
        return work(*arguments)

    async def _hold(self) -> list[Outcome]:
        odd = [asyncio.create_task(self._weird_call(*call)) for call in self.weird_calls]
        outcomes = await asyncio.gather(*(one.run() for one in self.rounds.values()), return_exceptions=True)
        duties = [duty for one in self.rounds.values() for duty in one._duties]
        await asyncio.gather(*duties, return_exceptions=True)
        for one in self.rounds.values():
            assert all(isinstance(error, RoundVoid) for error in one.failures), one.failures
        odd += [asyncio.create_task(self._weird_call(*call)) for call in self.weird_calls]  # it is over
        await asyncio.gather(*odd)
        for outcome in outcomes:
            assert isinstance(outcome, RoundResult | RoundVoid), repr(outcome)
        return outcomes  # type: ignore[return-value]

    async def _weird_call(self, reducer: int, raws: Sequence[bytes]) -> None:
        async def stream() -> AsyncIterator[Part]:
            for raw in raws:
                await asyncio.sleep(0)
                yield Part.FromString(raw)

        await asyncio.sleep(0.01)  # its own stream was there before
        async for _ in self.rounds[reducer].answer(stream(), peer(HOSTILE)):
            pass


def weird_calls(members: int) -> st.SearchStrategy[list[tuple[int, list[bytes]]]]:
    parts = st.builds(
        lambda part, body: pack({"group_id": GROUP_ID, "part": part, "included": b""}, body),
        st.integers(0, 3),
        st.binary(max_size=20),
    )
    raws = st.lists(parts | st.binary(max_size=30), max_size=3)
    others = st.integers(0, members - 1).filter(lambda index: index != HOSTILE)
    return st.lists(st.tuples(others, raws), max_size=2)


codec_names = st.sampled_from(CODEC_NAMES)
answer_codec_names = st.sampled_from([name for name in CODEC_NAMES if name != "sparse"])
