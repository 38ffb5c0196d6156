"""Serving bases: what is done per version instead of per request, quotas, and that nothing is kept at rest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import torch
from local_bases import BASE, FRAGMENT, claim_of, each, frozen_base, partial_base, receipt, request

from peers.base_server import (
    IDLE_SECONDS,
    OLD_SECONDS,
    SNAPSHOTS_AT_ONCE,
    STREAMS_AT_ONCE,
    STREAMS_PER_PEER,
    BaseServer,
)
from peers.messages import (
    MAX_RECEIPTS,
    BaseAnswer,
    BaseHeader,
    BasePieceHeader,
    BaseRefusalHeader,
    BaseRequest,
    BaseRequestHeader,
)
from peers.transfer import HEADER, MOST_PIECE_BYTES, FrozenBase, LiveBytes, Piece

PIECE = Piece(100, 1000)


class Donor:
    """A server whose current bases and clock are the test's; counts how often it is asked for a copy."""

    def __init__(self, *bases: FrozenBase) -> None:
        self.current = {FRAGMENT + index: base for index, base in enumerate(bases)}
        self.frozen = 0
        self.now = 1000.0
        self.server = BaseServer(self.holds, self.freeze, lambda: self.now)

    def holds(self, header: BaseRequestHeader) -> bool:
        current = self.current.get(header.fragment)
        return current is not None and current.digest == header.digest

    async def freeze(self, fragment: int) -> FrozenBase:
        self.frozen += 1
        await asyncio.sleep(0)  # a copy takes a while: others ask meanwhile
        return self.current[fragment]

    async def served(self, *requests: BaseRequest, requester: str = "r") -> list[BaseAnswer]:
        """The answers as they arrive: serialised and parsed."""
        arrived = []
        async for answer in self.server.answer(each(requests), requester):
            message = BaseAnswer()
            message.ParseFromString(answer.SerializeToString())
            arrived.append(message)
        return arrived

    async def refusal(self, *requests: BaseRequest, requester: str = "r") -> bool | None:
        """Whether it says that it is busy; None if it serves."""
        answers = await self.served(*requests, requester=requester)
        last = answers[-1].header
        return last.busy if isinstance(last, BaseRefusalHeader) else None


class Requester:
    """Keeps a stream open."""

    def __init__(self, donor: Donor, name: str = "r") -> None:
        self.requests: asyncio.Queue[BaseRequest] = asyncio.Queue()
        self.answers = donor.server.answer(self._asked(), name)

    async def _asked(self) -> AsyncIterator[BaseRequest]:
        while True:
            yield await self.requests.get()

    async def ask(self, base: FrozenBase = BASE, piece: Piece = PIECE, fragment: int = FRAGMENT) -> BaseAnswer:
        self.requests.put_nowait(request(base, piece, fragment=fragment))
        return await self.answers.__anext__()


def test_pieces_and_header_are_served_as_asked_for() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        piece, header = await donor.served(request(piece=PIECE), request())
        assert isinstance(piece.header, BasePieceHeader) and piece.header.start == PIECE.start
        assert piece.body == BASE.payload[PIECE.start : PIECE.stop]
        assert isinstance(header.header, BaseHeader)
        assert header.header.receipts == list(BASE.receipts)
        assert donor.server.bytes_sent == PIECE.stop - PIECE.start

    asyncio.run(scene())


def test_a_version_is_frozen_once_however_many_ask_for_it() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        served = await asyncio.gather(
            *(donor.served(request(piece=PIECE), requester=str(index)) for index in range(STREAMS_AT_ONCE))
        )
        assert all(len(answers) == 1 and answers[0].body for answers in served)
        assert (donor.frozen, donor.server.snapshots) == (1, 1)

    asyncio.run(scene())


def test_a_version_that_has_passed_is_served_on_while_somebody_fetches_it_and_a_while_after() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        slow = Requester(donor)
        await slow.ask()
        donor.current[FRAGMENT] = newer = frozen_base(8, seed=1)
        assert (await donor.served(request(newer, PIECE)))[0].body
        assert donor.frozen == 2
        donor.now += 10 * IDLE_SECONDS
        donor.server.release_idle()
        assert donor.server.snapshots == 1, "the newer one, which nobody fetches, is gone"
        assert (await slow.ask()).body
        await slow.answers.aclose()
        donor.now += IDLE_SECONDS - 1
        donor.server.release_idle()
        again = Requester(donor)
        assert (await again.ask()).body, "its line failed for a moment"
        await again.answers.aclose()
        donor.now += IDLE_SECONDS
        donor.server.release_idle()
        assert donor.server.snapshots == 0, "at rest nothing is kept"
        assert await donor.refusal(request(piece=PIECE)) is False

    asyncio.run(scene())


def test_a_passed_version_is_not_served_for_ever_but_the_current_one_is() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        slow = Requester(donor)
        await slow.ask()
        donor.now += OLD_SECONDS + 1
        assert (await slow.ask()).body
        donor.current[FRAGMENT] = frozen_base(8, seed=1)
        refused = (await slow.ask()).header
        assert isinstance(refused, BaseRefusalHeader) and not refused.busy

    asyncio.run(scene())


def test_what_nobody_announced_is_refused_and_costs_no_copy() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        for unknown in (request(frozen_base(9, seed=3)), request(fragment=200)):
            assert await donor.refusal(unknown) is False
        assert donor.frozen == donor.server.snapshots == 0

    asyncio.run(scene())


def test_a_base_that_moves_on_while_it_is_frozen_is_refused() -> None:
    async def scene() -> None:
        donor = Donor(BASE)

        async def freeze(fragment: int) -> FrozenBase:
            return frozen_base(8, seed=1)

        donor.server = BaseServer(donor.holds, freeze)
        assert await donor.refusal(request()) is False
        assert donor.server.snapshots == 0

    asyncio.run(scene())


@pytest.mark.parametrize(
    "bad",
    [
        BaseRequest(None),
        request(piece=Piece(5, 4)),
        request(piece=Piece(0, MOST_PIECE_BYTES + 1)),
        request(piece=Piece(len(BASE.payload) - 1, len(BASE.payload) + 1)),
        request(frozen_base(9, seed=3), PIECE),
    ],
    ids=["malformed", "backwards", "too much at once", "past the end", "of another base"],
)
def test_a_request_out_of_bounds_ends_the_stream(bad: BaseRequest) -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        assert len(await donor.served(request(piece=PIECE), bad, request())) == 1
        assert len(await donor.served(request(), request(piece=PIECE))) == 2

    asyncio.run(scene())


def test_a_requester_has_a_few_streams_and_all_together_some_more() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        greedy = [Requester(donor, "greedy") for _ in range(STREAMS_PER_PEER)]
        for stream in greedy:
            assert (await stream.ask()).body
        assert await donor.refusal(request(), requester="greedy") is True
        others = [Requester(donor, str(index)) for index in range(STREAMS_AT_ONCE - STREAMS_PER_PEER)]
        for stream in others:
            assert (await stream.ask()).body
        assert await donor.refusal(request(), requester="one more") is True
        await greedy[0].answers.aclose()
        assert await donor.refusal(request(), requester="one more") is None
        assert donor.frozen == 1

    asyncio.run(scene())


def test_memory_for_snapshots_is_bounded_and_those_in_use_stay() -> None:
    async def scene() -> None:
        bases = [frozen_base(seed=index, fragment=FRAGMENT + index) for index in range(SNAPSHOTS_AT_ONCE + 2)]
        donor = Donor(*bases)
        streams = []
        for index in range(SNAPSHOTS_AT_ONCE):
            streams.append(Requester(donor, str(index)))
            assert (await streams[-1].ask(bases[index], fragment=FRAGMENT + index)).body
        extra = request(bases[-1], PIECE, fragment=FRAGMENT + len(bases) - 1)
        assert await donor.refusal(extra) is True
        await streams[2].answers.aclose()
        assert await donor.refusal(extra) is None
        assert donor.server.snapshots == SNAPSHOTS_AT_ONCE
        for index in set(range(SNAPSHOTS_AT_ONCE)) - {2}:
            assert (await streams[index].ask(bases[index], fragment=FRAGMENT + index)).body
        frozen = donor.frozen
        async with aclosing(Requester(donor).answers):
            await donor.served(request(bases[2], fragment=FRAGMENT + 2))
        assert donor.frozen == frozen + 1, "the one that nobody used made room"

    asyncio.run(scene())


def test_receipts_of_a_big_swarm_still_make_a_header_that_is_accepted() -> None:
    async def scene() -> None:
        receipts = [receipt(version, contributors=64, parts=32) for version in range(8, 8 + MAX_RECEIPTS)]
        base = frozen_base(receipts[-1].version, receipts=receipts)
        (answer,) = await Donor(base).served(request(base))
        partial = partial_base(claim_of(base))
        assert partial.ask("d") == HEADER
        partial.put("d", answer)
        assert isinstance(answer.header, BaseHeader)
        versions = [one.version for one in answer.header.receipts]
        assert versions == list(range(versions[0], base.version + 1)), "the newest ones, without a gap"
        assert 5 < len(versions) < MAX_RECEIPTS

    asyncio.run(scene())


def test_a_base_that_changes_is_copied_for_whoever_fetches_it_and_not_kept_for_anybody_else() -> None:
    async def scene() -> None:
        base, outer_state = torch.rand(2000), torch.rand(1, 2000)
        live = dataclasses.replace(BASE, payload=LiveBytes(base, outer_state))
        expected = live.payload[:]
        donor = Donor(live)
        requester = Requester(donor)
        assert (await requester.ask(live, Piece(0, 500))).body == expected[:500]
        await donor.server.before_change(live.digest)
        base.zero_()
        assert (await requester.ask(live, Piece(500, 900))).body == expected[500:900]
        await requester.answers.aclose()
        await donor.server.before_change(live.digest)
        assert donor.server.snapshots == 0

    asyncio.run(scene())
