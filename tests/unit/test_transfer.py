"""Bases on the wire: what a donor can do wrong, and what the server does per version instead of per request."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest
import torch

from peers.lineage import Claim
from peers.messages import (
    MAX_RECEIPTS,
    AveragedPart,
    BaseAnswer,
    BaseChunkHeader,
    BaseHeader,
    BaseRequestHeader,
    Contributor,
    Receipt,
    extend_history,
)
from peers.outer import NO_HISTORY, base_digest
from peers.transfer import (
    CHUNK_BYTES,
    SNAPSHOTS_KEPT,
    BaseServer,
    FetchedBase,
    FrozenBase,
    TransferFailed,
    receive_base,
)

SIZE = 200_000  # parameters and outer state together are more than one chunk
FRAGMENT = 2


def receipt(version: int, contributors: int = 1, parts: int = 1) -> Receipt:
    return Receipt(
        version=version,
        tick=10 * version,
        contributors=[
            Contributor(peer_id=index.to_bytes(34, "big"), samples=2**40 + index, steps=2**30)
            for index in range(contributors)
        ],
        parts=[AveragedPart(start=start, stop=start + 1, included=list(range(contributors))) for start in range(parts)],
    )


def history_of(receipts: Sequence[Receipt], before: bytes = NO_HISTORY) -> bytes:
    history = before
    for one in receipts:
        history = extend_history(history, one)
    return history


def frozen_base(
    version: int = 7, *, seed: int = 0, fragment: int = FRAGMENT, receipts: Sequence[Receipt] = ()
) -> FrozenBase:
    values = torch.rand(2 * SIZE, generator=torch.Generator().manual_seed(seed))
    total = 3 * SIZE + 11
    history = history_of(receipts)
    digest = base_digest(
        fragment=fragment,
        version=version,
        total_element_samples=total,
        history=history,
        base=values[:SIZE],
        outer_state=values[SIZE:],
    )
    return FrozenBase(
        version=version,
        digest=digest,
        total_element_samples=total,
        history=history,
        history_before=NO_HISTORY,
        payload=values.numpy().tobytes(),
        receipts=tuple(receipts),
    )


BASE = frozen_base(receipts=[receipt(5), receipt(6), receipt(7)])
CLAIM = Claim(version=7, digest=BASE.digest, total_samples=3)


def request(base: FrozenBase = BASE, *, fragment: int = FRAGMENT) -> BaseRequestHeader:
    return BaseRequestHeader(fragment=fragment, version=base.version, digest=base.digest)


async def served(server: BaseServer, asked: BaseRequestHeader) -> list[BaseAnswer]:
    """The answers as they arrive: serialised and parsed."""
    arrived = []
    async for answer in server.answer(asked):
        message = BaseAnswer()
        message.ParseFromString(answer.SerializeToString())
        arrived.append(message)
    return arrived


def answers_for(base: FrozenBase = BASE) -> list[BaseAnswer]:
    async def freeze(fragment: int) -> FrozenBase:
        return base

    return asyncio.run(served(BaseServer(freeze), request(base)))


def receive(answers: Iterable[BaseAnswer], *, claim: Claim = CLAIM, size: int = SIZE) -> FetchedBase:
    async def stream() -> AsyncIterator[BaseAnswer]:
        for answer in answers:
            yield answer

    return asyncio.run(receive_base(stream(), fragment=FRAGMENT, size=size, states=1, claim=claim, donor="d"))


def test_a_base_arrives_bit_for_bit_with_its_receipts() -> None:
    answers = answers_for()
    assert len(answers) == 1 + -(-2 * 4 * SIZE // CHUNK_BYTES)
    fetched = receive(answers)
    assert fetched.base.numpy().tobytes() + fetched.outer_state.numpy().tobytes() == BASE.payload
    assert fetched.claim == CLAIM
    assert fetched.total_element_samples == BASE.total_element_samples
    assert fetched.receipts == BASE.receipts
    assert (fetched.history, fetched.history_before) == (BASE.history, NO_HISTORY)
    assert fetched.bytes_received == len(BASE.payload)


def test_progress_is_told_chunk_by_chunk() -> None:
    lengths: list[int] = []
    answers = answers_for()

    async def stream() -> AsyncIterator[BaseAnswer]:
        for answer in answers:
            yield answer

    asyncio.run(
        receive_base(stream(), fragment=FRAGMENT, size=SIZE, states=1, claim=CLAIM, donor="d", on_bytes=lengths.append)
    )
    assert lengths == [CHUNK_BYTES, len(BASE.payload) - CHUNK_BYTES]


def test_other_bytes_than_announced_are_refused() -> None:
    answers = answers_for()
    body = bytearray(answers[-1].body)
    body[-1] ^= 1
    answers[-1] = BaseAnswer(answers[-1].header, bytes(body))
    with pytest.raises(TransferFailed, match="do not match the announced digest"):
        receive(answers)


@pytest.mark.parametrize("total", [3 * SIZE + 12, 3 * SIZE, 2**70])
def test_a_false_total_of_samples_is_refused(total: int) -> None:
    with pytest.raises(TransferFailed):
        receive(with_header(total_element_samples=total.to_bytes(16, "little")))


def with_header(**changes: object) -> list[BaseAnswer]:
    header, *chunks = answers_for()
    assert isinstance(header.header, BaseHeader)
    return [BaseAnswer(header.header.model_copy(update=changes)), *chunks]


def test_a_base_of_another_total_than_announced_is_refused() -> None:
    """Or a liar could announce the honest digest with a greater total, and win."""
    with pytest.raises(TransferFailed, match="sent a base of 3 samples instead of 4"):
        receive(answers_for(), claim=dataclasses.replace(CLAIM, total_samples=4))


@pytest.mark.parametrize(
    "receipts",
    [
        [receipt(5), receipt(6), receipt(7, contributors=2)],
        [receipt(6), receipt(7)],
        [receipt(4), receipt(5), receipt(6), receipt(7)],
        [],
    ],
    ids=["changed", "left out", "invented", "none"],
)
def test_forged_receipts_are_refused(receipts: list[Receipt]) -> None:
    with pytest.raises(TransferFailed, match="do not match the announced digest"):
        receive(with_header(receipts=receipts))


@pytest.mark.parametrize("versions", [[5, 7], [7, 6, 5], [6, 7, 8], [7, 7]])
def test_receipts_that_are_not_of_the_versions_before_are_refused(versions: list[int]) -> None:
    with pytest.raises(TransferFailed, match="sent receipts of other versions"):
        receive(with_header(receipts=[receipt(version) for version in versions]))


def test_receipts_that_were_left_out_count_through_their_history() -> None:
    """A donor sends only the newest of many: what came before is a hash."""
    header, *chunks = answers_for()
    assert isinstance(header.header, BaseHeader)
    shorter = header.header.model_copy(update={"receipts": [receipt(7)], "history": history_of(BASE.receipts[:2])})
    fetched = receive([BaseAnswer(shorter), *chunks])
    assert fetched.history == BASE.history
    assert fetched.history_before == history_of(BASE.receipts[:2])


def test_the_digest_of_another_fragment_with_the_same_bytes_is_another() -> None:
    other = Claim(version=7, digest=frozen_base(fragment=FRAGMENT + 1).digest, total_samples=3)
    with pytest.raises(TransferFailed, match="do not match the announced digest"):
        receive(answers_for(), claim=other)


def test_another_version_than_announced_is_refused_before_any_byte_of_it() -> None:
    header, *_ = answers_for()

    def stream() -> Iterable[BaseAnswer]:
        yield header
        raise AssertionError("a chunk was read")

    with pytest.raises(TransferFailed, match="sent version 7 instead of 8"):
        receive(stream(), claim=dataclasses.replace(CLAIM, version=8))


def test_too_much_is_refused_before_it_is_kept() -> None:
    answers = answers_for()
    more = BaseAnswer(BaseChunkHeader(offset=len(BASE.payload)), b"1234")
    with pytest.raises(TransferFailed, match="out of order or too much"):
        receive([*answers, more])
    with pytest.raises(TransferFailed, match="out of order or too much"):
        receive(answers, size=SIZE - 1)


def test_too_little_is_refused() -> None:
    with pytest.raises(TransferFailed, match=f"ended after {CHUNK_BYTES} of {len(BASE.payload)} bytes"):
        receive(answers_for()[:-1])
    with pytest.raises(TransferFailed, match=r"ended after \d+ of"):
        receive(answers_for(), size=SIZE + 1)


def test_a_stream_that_ends_at_once_is_a_donor_that_moved_on() -> None:
    with pytest.raises(TransferFailed, match="does not serve this version any more"):
        receive([])


@pytest.mark.parametrize(
    "order", [[0, 2, 1], [1, 0, 2], [1], [0, 0, 1, 2], [0, 1, 1]], ids=["swapped", "late", "headless", "twice", "again"]
)
def test_messages_out_of_order_are_refused(order: list[int]) -> None:
    answers = answers_for()
    with pytest.raises(TransferFailed):
        receive(answers[index] for index in order)


@pytest.mark.parametrize(
    "bad", [BaseAnswer(None), BaseAnswer(BaseChunkHeader(offset=0), b"")], ids=["malformed", "empty"]
)
def test_a_malformed_or_empty_message_is_refused(bad: BaseAnswer) -> None:
    with pytest.raises(TransferFailed):
        receive([answers_for()[0], bad])


class Donor:
    """Counts how often it is asked for a copy of its current base."""

    def __init__(self, *bases: FrozenBase) -> None:
        self.current = {FRAGMENT + index: base for index, base in enumerate(bases)}
        self.frozen = 0
        self.server = BaseServer(self.freeze)

    async def freeze(self, fragment: int) -> FrozenBase:
        self.frozen += 1
        await asyncio.sleep(0)  # a copy takes a while: others ask meanwhile
        return self.current[fragment]


def test_a_version_is_frozen_once_however_many_ask_for_it() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        answers = await asyncio.gather(*(served(donor.server, request()) for _ in range(9)))
        assert all(len(answer) == 3 for answer in answers)
        assert len(await served(donor.server, request())) == 3
        assert donor.frozen == 1
        assert donor.server.bytes_sent == 10 * len(BASE.payload)

    asyncio.run(scene())


def test_a_new_version_is_frozen_anew_and_the_old_one_served_no_more() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        await served(donor.server, request())
        donor.current[FRAGMENT] = frozen_base(8, seed=1)
        assert donor.server.holds(request())
        assert len(await served(donor.server, request())) == 3, "what is frozen is served as long as it is kept"
        assert len(await served(donor.server, request(donor.current[FRAGMENT]))) == 3
        assert donor.frozen == 2
        assert not donor.server.holds(request())
        assert await served(donor.server, request()) == []

    asyncio.run(scene())


def test_nothing_is_served_for_an_unknown_digest_and_the_frozen_base_stays() -> None:
    async def scene() -> None:
        donor = Donor(BASE)
        await served(donor.server, request())
        unknown = request().model_copy(update={"digest": bytes(32)})
        assert not donor.server.holds(unknown)
        assert await served(donor.server, unknown) == []
        frozen = donor.frozen
        assert len(await served(donor.server, request())) == 3
        assert donor.frozen == frozen

    asyncio.run(scene())


def test_only_a_few_snapshots_are_kept() -> None:
    async def scene() -> None:
        bases = [frozen_base(seed=index, fragment=FRAGMENT + index) for index in range(SNAPSHOTS_KEPT + 1)]
        donor = Donor(*bases)
        asked = [request(base, fragment=FRAGMENT + index) for index, base in enumerate(bases)]
        for header in asked:
            await served(donor.server, header)
        assert [donor.server.holds(header) for header in asked] == [False] + [True] * SNAPSHOTS_KEPT

    asyncio.run(scene())


def test_receipts_of_a_big_swarm_still_make_a_header_that_is_accepted() -> None:
    receipts = [receipt(version, contributors=64, parts=32) for version in range(8, 8 + MAX_RECEIPTS)]
    base = frozen_base(receipts[-1].version, receipts=receipts)
    claim = Claim(version=base.version, digest=base.digest, total_samples=3)
    fetched = receive(answers_for(base), claim=claim)
    versions = [receipt.version for receipt in fetched.receipts]
    assert versions == list(range(versions[0], base.version + 1)), "the newest ones, without a gap"
    assert 5 < len(versions) < MAX_RECEIPTS
    assert fetched.history == base.history
