"""Fetching from several donors, each of which may do its worst."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from local_bases import claim_of, false_answer, frozen_base, honest_answer, partial_base

from peers import base_fetch
from peers.base_fetch import BYTES_PER_DONOR, DONORS_AT_ONCE, BaseFetcher
from peers.base_server import BaseServer
from peers.donors import DonorRecords
from peers.messages import BaseAnswer, BasePieceHeader, BaseRefusalHeader, BaseRequest, BaseRequestHeader
from peers.transfer import FetchedBase, FrozenBase, PartialBase, Piece

BIG = frozen_base(8, seed=5, size=600_000)  # 4.8 MB: worth all donors at once
Script = Callable[[int, Piece], BaseAnswer | Exception | None]


def honest(base: FrozenBase = BIG) -> Script:
    return lambda number, piece: honest_answer(piece, base)


def lying(number: int, piece: Piece) -> BaseAnswer:
    return false_answer(piece, BIG)


def refusing(*, busy: bool, after: int = 0) -> Script:
    def answer(number: int, piece: Piece) -> BaseAnswer:
        return BaseAnswer(BaseRefusalHeader(busy=busy)) if number >= after else honest_answer(piece, BIG)

    return answer


def failing(error: Exception, after: int) -> Script:
    return lambda number, piece: error if number >= after else honest_answer(piece, BIG)


def ending(after: int) -> Script:
    return lambda number, piece: None if number >= after else honest_answer(piece, BIG)


def elsewhere(number: int, piece: Piece) -> BaseAnswer:
    """Right bytes of the wrong place."""
    return BaseAnswer(BasePieceHeader(start=piece.start + 4), honest_answer(piece, BIG).body)


def too_much(number: int, piece: Piece) -> BaseAnswer:
    return BaseAnswer(BasePieceHeader(start=piece.start), bytes(piece.stop - piece.start + 1))


@dataclass
class Donors:
    """Scripted donors: each answers the n-th request by its script, and only as often as it has turns.

    :param scripts: by name; an exception is raised, None ends the stream
    """

    scripts: dict[str, Script]
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """A donor with a gate answers when it is open."""
    asked: dict[str, list[Piece]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    working: int = 0
    most_working: int = 0
    now: float = 0.0
    on_answer: Callable[[str], None] = lambda donor: None

    def __post_init__(self) -> None:
        self.records = DonorRecords(lambda: self.now)
        self.fetcher = BaseFetcher(self.call, self.records)

    async def call(self, donor: str, requests: AsyncIterator[BaseRequest]) -> AsyncGenerator[BaseAnswer, None]:
        self.calls.append(donor)
        if donor == "unreachable":
            raise ConnectionError("nobody answers")
        return self._answers(donor, requests)

    async def _answers(self, donor: str, requests: AsyncIterator[BaseRequest]) -> AsyncGenerator[BaseAnswer, None]:
        number = 0
        self.working += 1
        self.most_working = max(self.most_working, self.working)
        try:
            async for request in requests:
                assert request.header is not None
                piece = Piece(request.header.start, request.header.stop)
                self.asked.setdefault(donor, []).append(piece)
                await asyncio.sleep(0)
                if donor in self.gates:
                    await self.gates[donor].wait()
                answer = self.scripts[donor](number, piece)
                number += 1
                if isinstance(answer, Exception):
                    raise answer
                if answer is None:
                    return
                self.on_answer(donor)
                yield answer
        finally:
            self.working -= 1

    async def fetch(self, partial: PartialBase, *donors: str) -> FetchedBase | None:
        return await self.fetcher.fetch(partial, list(donors or self.scripts))


def big() -> PartialBase:
    return partial_base(claim_of(BIG), size=600_000)


def assert_right(fetched: FetchedBase | None, base: FrozenBase = BIG) -> FetchedBase:
    assert fetched is not None
    assert fetched.base.numpy().tobytes() + fetched.outer_state.numpy().tobytes() == base.payload
    return fetched


def test_a_big_base_comes_from_several_donors_at_once_and_nothing_twice() -> None:
    async def scene() -> None:
        donors = Donors({name: honest() for name in "abcdef"})
        fetched = assert_right(await donors.fetch(big()))
        assert len(fetched.donors) == DONORS_AT_ONCE == donors.most_working
        assert fetched.bytes_received <= len(BIG.payload) + DONORS_AT_ONCE * 75_000
        assert donors.working == 0, "every stream is closed"

    asyncio.run(scene())


def test_a_small_base_comes_from_one_donor() -> None:
    async def scene() -> None:
        small = frozen_base(size=1000)
        assert len(small.payload) < BYTES_PER_DONOR
        donors = Donors({name: honest(small) for name in "abc"})
        assert_right(await donors.fetch(partial_base(claim_of(small), size=1000)), small)
        assert donors.calls == ["a"]

    asyncio.run(scene())


def test_a_small_base_that_takes_long_is_worth_a_second_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_fetch, "ANOTHER_SECONDS", 0.02)

    async def scene() -> None:
        small = frozen_base(size=1000)
        donors = Donors({"silent": honest(small), "good": honest(small)}, gates={"silent": asyncio.Event()})
        fetched = assert_right(await donors.fetch(partial_base(claim_of(small), size=1000)), small)
        assert (fetched.donors, donors.calls) == (("good",), ["silent", "good"])

    asyncio.run(scene())


def test_a_fast_donor_takes_more_and_a_stalled_one_holds_nobody_up() -> None:
    async def scene() -> None:
        donors = Donors({"stalled": honest(), "fast": honest()}, gates={"stalled": asyncio.Event()})
        fetched = assert_right(await donors.fetch(big()))
        assert fetched.donors == ("fast",)
        assert len(donors.asked["stalled"]) <= base_fetch.FIRST_PIECES_AHEAD

    asyncio.run(scene())


@pytest.mark.parametrize(
    "script",
    [
        failing(ConnectionResetError(), 10),
        failing(EOFError(), 3),
        failing(RuntimeError("whatever"), 1),
        failing(asyncio.CancelledError(), 2),  # type: ignore[arg-type]
        ending(0),
        ending(7),
        refusing(busy=True),
        refusing(busy=False),
        refusing(busy=False, after=5),
        lambda number, piece: BaseAnswer(None),
        elsewhere,
        too_much,
    ],
    ids=[
        *("reset", "end of file", "anything", "cancelled", "empty", "ends", "busy", "gone", "moves on"),
        *("malformed", "elsewhere", "too much"),
    ],
)
def test_whatever_one_donor_does_another_completes_what_it_began(script: Script) -> None:
    async def scene() -> None:
        donors = Donors({"bad": script, "good": honest()})
        fetched = assert_right(await donors.fetch(big(), "unreachable", "bad", "good"))
        assert "good" in fetched.donors
        assert not donors.records.usable("unreachable", BIG.digest)

    asyncio.run(scene())


def test_what_arrived_is_kept_when_all_fail_and_only_the_rest_is_asked_for_again() -> None:
    async def scene() -> None:
        partial = big()
        donors = Donors({"one": ending(20), "two": failing(ConnectionResetError(), 12), "three": honest()})
        assert await donors.fetch(partial, "one", "two") is None
        came = {piece for pieces in donors.asked.values() for piece in pieces}
        here = partial.bytes_here
        assert here > len(BIG.payload) // 4
        assert await donors.fetch(partial, "one", "two") is None, "not asked again at once"
        assert donors.calls == ["one", "two"]
        fetched = assert_right(await donors.fetch(partial, "one", "two", "three"))
        assert set(fetched.donors) == {"one", "two", "three"}
        assert fetched.bytes_received == len(BIG.payload)
        assert len(set(donors.asked["three"]) & came) < len(donors.asked["three"])

    asyncio.run(scene())


def test_one_liar_among_many_spoils_one_attempt_and_is_known_afterwards() -> None:
    async def scene() -> None:
        donors = Donors({"honest": honest(), "liar": lying, "other": honest()})
        partial = big()
        assert_right(await donors.fetch(partial))
        assert partial.liars == {"liar"}
        assert not donors.records.believed("liar")
        assert donors.records.believed("honest") and donors.records.believed("other")
        donors.calls.clear()
        assert_right(await donors.fetch(big()))
        assert "liar" not in donors.calls

    asyncio.run(scene())


def test_even_among_liars_the_only_honest_donor_is_found() -> None:
    async def scene() -> None:
        donors = Donors({"liar": lying, "second": lying, "third": lying, "honest": honest()})
        partial = big()
        assert_right(await donors.fetch(partial))
        assert partial.liars == {"liar", "second", "third"}

    asyncio.run(scene())


def test_liars_alone_are_found_out_one_by_one() -> None:
    async def scene() -> None:
        donors = Donors({"liar": lying, "second": lying})
        partial = big()
        assert await donors.fetch(partial) is None
        assert partial.liars == {"liar", "second"}
        assert await donors.fetch(partial) is None
        assert_right(await Donors({"honest": honest()}).fetch(partial))

    asyncio.run(scene())


def test_after_a_lie_pieces_of_two_donors_are_not_mixed_again() -> None:
    async def scene() -> None:
        donors = Donors({"liar": lying, "dies": honest(), "honest": honest()})
        partial = big()
        donors.on_answer = lambda donor: (
            donors.scripts.update(dies=failing(ConnectionResetError(), 9)) if partial.one_donor else None
        )
        fetched = assert_right(await donors.fetch(partial))
        assert len(fetched.donors) == 1
        assert partial.liars == {"liar"}

    asyncio.run(scene())


def test_a_donor_that_says_nothing_is_given_up_and_limits_are_stretched_only_if_nobody_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base_fetch, "IDLE_SECONDS", 0.05)

    async def scene() -> None:
        donors = Donors({"silent": honest(), "good": honest()}, gates={"silent": asyncio.Event()})
        partial = big()
        for patience in (2, 4, 8, 8):
            assert await donors.fetch(partial, "silent") is None
            assert donors.fetcher._patience == patience
            donors.now += 100
        assert_right(await donors.fetch(partial))
        assert donors.fetcher._patience == 1

    asyncio.run(scene())


def test_a_donor_that_stalls_in_the_middle_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_fetch, "IDLE_SECONDS", 0.05)

    async def scene() -> None:
        donors = Donors({"stalls": honest(), "good": honest()}, gates={"stalls": asyncio.Event()})
        gate = donors.gates["stalls"]
        gate.set()
        donors.on_answer = lambda donor: gate.clear() if len(donors.asked[donor]) > 12 else None
        partial = big()
        assert await donors.fetch(partial, "stalls") is None
        assert 0 < partial.bytes_here < partial.num_bytes
        assert donors.fetcher._patience == 1, "it did deliver"
        assert assert_right(await donors.fetch(partial, "good")).donors == ("stalls", "good")

    asyncio.run(scene())


def test_a_version_that_passed_is_completed_from_the_donor_that_keeps_it_frozen() -> None:
    async def scene() -> None:
        current = {"base": BIG}

        async def freeze(fragment: int) -> FrozenBase:
            return current["base"]

        def holds(header: BaseRequestHeader) -> bool:
            return header.digest == current["base"].digest

        servers = {name: BaseServer(holds, freeze) for name in ("frozen", "never asked")}

        async def call(donor: str, requests: AsyncIterator[BaseRequest]) -> AsyncGenerator[BaseAnswer, None]:
            async def answers() -> AsyncGenerator[BaseAnswer, None]:
                number = 0
                async for answer in servers[donor].answer(requests, "us"):
                    number += 1
                    if number > 30 and current["base"] is BIG:
                        current["base"] = frozen_base(9, seed=6, size=600_000)
                        raise ConnectionResetError("the line failed, and the swarm moved on")
                    yield answer

            return answers()

        records = DonorRecords(lambda: 0.0)
        partial = big()
        assert await BaseFetcher(call, records).fetch(partial, ["frozen"]) is None
        assert partial.senders == ("frozen",)
        fetcher = BaseFetcher(call, DonorRecords(lambda: 0.0))
        assert await fetcher.fetch(partial, ["never asked"]) is None
        assert_right(await fetcher.fetch(partial, ["frozen"]))

    asyncio.run(scene())


def test_progress_is_told_as_pieces_arrive() -> None:
    async def scene() -> None:
        donors = Donors({name: honest() for name in "abc"})
        partial = big()
        told: list[int] = []
        await donors.fetcher.fetch(partial, list("abc"), lambda: told.append(partial.bytes_here))
        assert told == sorted(told)
        assert told[-1] == partial.num_bytes
        assert len(told) >= 64

    asyncio.run(scene())
