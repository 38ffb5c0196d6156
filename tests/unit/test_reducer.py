"""One reducer: weights per span, refusals before any counter moves, deadlines, and the mean of many."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hivemind.p2p import PeerID
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.ledger import PendingSpan
from peers.messages import indices_of
from peers.reducer import (
    INLINE_ELEMENTS,
    MAX_ABSOLUTE_DIFFERENCE,
    PLAIN,
    Averaged,
    InvalidPart,
    PartReducer,
    Rules,
    decode_values,
)
from peers.round_plan import GroupMember, RoundPlan, Share
from peers.weighting import WEIGHTING_NAMES, get_weighting


def whole(size: int, samples: int) -> tuple[PendingSpan, ...]:
    return (PendingSpan(start=0, stop=size, samples=samples, steps=1 if samples else 0),)


def pieces(*rows: tuple[int, int, int]) -> tuple[PendingSpan, ...]:
    return tuple(PendingSpan(start=start, stop=stop, samples=samples, steps=1) for start, stop, samples in rows)


def encoded(values: list[float] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def values_of(averaged: Averaged) -> np.ndarray:
    return np.frombuffer(averaged.payload, dtype="<f4")


def test_a_round_that_ends_while_a_part_is_encoded_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that swaps: the last deadline comes first."""

    async def scene() -> None:
        encoding, go_on = asyncio.Event(), asyncio.Event()

        async def off_loop(elements: int, work: Any, *arguments: Any) -> Any:
            if getattr(work, "__name__", "") == "_encode":
                encoding.set()
                await go_on.wait()
            return work(*arguments)

        monkeypatch.setattr("peers.reducer.off_loop", off_loop)
        reducer = reducer_of([(0, 4)], [whole(4, 1), whole(4, 1)])
        result = reducer.result(0)
        await reducer.add(0, 0, torch.ones(4))
        last = asyncio.create_task(reducer.add(1, 0, torch.ones(4)))
        await encoding.wait()
        reducer.end()
        go_on.set()
        await last
        with pytest.raises(InvalidPart, match="over"):
            result.result()

    asyncio.run(scene())


def weight_rows(spans: list[tuple[PendingSpan, ...]], size: int) -> np.ndarray:
    """Each member's weight in each element, float64 ``(members, size)``."""
    rows = np.zeros((len(spans), size))
    for member, own in enumerate(spans):
        for span in own:
            rows[member, span.start : span.stop] = span.samples
    return rows


def expected_mean(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=0)
    mean: np.ndarray = (weights * values).sum(axis=0) / np.where(total == 0, 1, total)
    return mean


def reducer_of(
    ranges: Sequence[tuple[int, int]], spans: Sequence[tuple[PendingSpan, ...]], cadences: Sequence[int] = ()
) -> PartReducer:
    """Member 0, that reduces everything for one group."""
    everybody = tuple(range(len(spans)))
    plan = RoundPlan(
        group_id=b"group of a test",
        tick=0,
        fragment=0,
        size=ranges[-1][1],
        parameters=ranges[-1][1],
        members=tuple(
            GroupMember(
                peer_id=PeerID(bytes([index]) * 34),
                spans=own,
                samples=1,
                steps=1,
                cadence=cadences[index] if cadences else 1,
            )
            for index, own in enumerate(spans)
        ),
        groups=(everybody,),
        shares=(Share(reducers=(0,), parts=tuple(ranges)),),
    )
    return PartReducer(plan, 0, Rules(), torch.zeros(plan.size))


async def add(reducer: PartReducer, member: int, part: int, values: list[float] | np.ndarray) -> None:
    await reducer.add(member, part, reducer.decode(member, part, encoded(values)))


def test_two_members_are_averaged_by_their_samples() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2)], [whole(2, 30), whole(2, 10)])
        await add(reducer, 0, 0, [1.0, 2.0])
        assert not reducer.result(0).done()
        await add(reducer, 1, 0, [5.0, -2.0])
        averaged = await reducer.result(0)
        assert values_of(averaged).tolist() == [2.0, 1.0]
        assert averaged.included == {0, 1}
        assert indices_of(averaged.mask, 2) == {0, 1}

    asyncio.run(scene())


@pytest.mark.parametrize("weighting", WEIGHTING_NAMES)
def test_what_was_made_on_bases_of_the_past_weighs_less(weighting: str) -> None:
    """A member of cadence 4 with four times the samples weighs as much as one that is in every round."""
    rules = Rules(weighting=get_weighting(weighting))
    fresh = GroupMember(peer_id=PeerID(b"a" * 34), spans=(), samples=9, steps=9)
    stale = replace(fresh, cadence=4)
    span = PendingSpan(start=0, stop=4, samples=20, steps=5)
    assert rules.value_weight(stale, span) == pytest.approx(rules.value_weight(fresh, span) / 4)
    assert rules.normaliser_terms(stale, span) == pytest.approx(
        [one / 4 for one in rules.normaliser_terms(fresh, span)]
    )


def test_the_average_weighs_a_stale_member_by_its_announced_cadence() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2)], [whole(2, 10), whole(2, 40)], cadences=[1, 4])
        await add(reducer, 0, 0, [1.0, 2.0])
        await add(reducer, 1, 0, [5.0, -2.0])
        assert values_of(await reducer.result(0)).tolist() == [3.0, 0.0]

    asyncio.run(scene())


def test_a_members_weight_may_differ_from_stretch_to_stretch() -> None:
    async def scene() -> None:
        spans = [pieces((0, 3, 10), (3, 6, 30)), whole(6, 10)]
        reducer = reducer_of([(0, 4), (4, 6)], spans)
        for part, size in ((0, 4), (1, 2)):
            await add(reducer, 0, part, [1.0] * size)
            await add(reducer, 1, part, [0.0] * size)
        assert values_of(await reducer.result(0)).tolist() == [0.5, 0.5, 0.5, 0.75]
        assert values_of(await reducer.result(1)).tolist() == [0.75, 0.75]

    asyncio.run(scene())


def test_weight_counts_only_where_a_member_announced_samples() -> None:
    async def scene() -> None:
        spans = [pieces((0, 2, 100)), whole(4, 10)]  # the first member announced nothing for the second half
        reducer = reducer_of([(0, 4)], spans)
        await add(reducer, 0, 0, [1.0, 1.0, 1.0, 1.0])
        await add(reducer, 1, 0, [3.0, 3.0, 3.0, 3.0])
        averaged = values_of(await reducer.result(0))
        assert averaged[2:].tolist() == [3.0, 3.0]
        assert averaged[:2] == pytest.approx([130 / 110] * 2)

    asyncio.run(scene())


def test_elements_in_which_nobody_has_samples_stay_zero_and_finite() -> None:
    async def scene() -> None:
        nobody = reducer_of([(0, 2)], [whole(2, 0), whole(2, 0)])
        some = reducer_of([(0, 2)], [pieces((0, 1, 0), (1, 2, 5)), pieces((0, 1, 0), (1, 2, 5))])
        for reducer in (nobody, some):
            await add(reducer, 0, 0, [7.0, 1.0])
            await add(reducer, 1, 0, [7.0, 3.0])
        assert values_of(await nobody.result(0)).tolist() == [0.0, 0.0]
        assert values_of(await some.result(0)).tolist() == [0.0, 2.0]

    asyncio.run(scene())


@st.composite
def member_spans(draw: st.DrawFn, size: int) -> tuple[PendingSpan, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
    borders = [0, *cuts, size]
    return pieces(*((start, stop, draw(st.integers(0, 10**6))) for start, stop in itertools.pairwise(borders)))


@settings(max_examples=60)
@given(size=st.integers(2, 40), members=st.integers(2, 6), seed=st.integers(0, 2**32), data=st.data())
def test_it_equals_one_weighted_mean_whatever_the_weights_and_the_order(
    size: int, members: int, seed: int, data: st.DataObject
) -> None:
    spans = [data.draw(member_spans(size)) for _ in range(members)]
    split = data.draw(st.integers(1, size - 1))
    ranges = [(0, split), (split, size)]
    values = np.random.default_rng(seed).uniform(-1, 1, (members, size)).astype("<f4")
    errands = [(member, part) for member in range(members) for part in range(2)]
    random.Random(seed).shuffle(errands)

    async def scene() -> np.ndarray:
        reducer = reducer_of(ranges, spans)
        for member, part in errands:
            await add(reducer, member, part, values[member, slice(*ranges[part])])
        results = [await reducer.result(part) for part in range(2)]
        assert all(averaged.included == set(range(members)) for averaged in results)
        return np.concatenate([values_of(averaged) for averaged in results])

    expected = expected_mean(weight_rows(spans, size), values.astype(np.float64))
    np.testing.assert_allclose(asyncio.run(scene()), expected, atol=1e-6)


def test_a_part_that_is_summed_in_a_thread_gives_the_same_mean() -> None:
    size = INLINE_ELEMENTS + 5
    spans = [whole(size, 3), pieces((0, 10, 1), (10, size, 4))]
    values = np.random.default_rng(0).uniform(-1, 1, (2, size)).astype("<f4")

    async def scene() -> Averaged:
        reducer = reducer_of([(0, size)], spans)
        await asyncio.gather(*(add(reducer, member, 0, values[member]) for member in range(2)))
        return await reducer.result(0)

    expected = expected_mean(weight_rows(spans, size), values.astype(np.float64))
    np.testing.assert_allclose(values_of(asyncio.run(scene())), expected, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        encoded([math.nan, 0.0]),
        encoded([0.0, math.inf]),
        encoded([-math.inf, 0.0]),
        encoded([1e30, 0.0]),
        encoded([0.0, -1e30]),
        encoded([0.0, 1.01 * MAX_ABSOLUTE_DIFFERENCE]),
        encoded([1.0]),
        encoded([1.0, 2.0, 3.0]),
        encoded([1.0, 2.0])[:-1],
        b"",
    ],
    ids=["nan", "inf", "-inf", "1e30", "-1e30", "too big", "broadcastable", "too long", "cut off", "empty"],
)
def test_what_cannot_be_counted_is_refused_before_any_counter_moves(body: bytes) -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2)], [whole(2, 1), whole(2, 1), whole(2, 1)])
        await add(reducer, 0, 0, [1.0, 1.0])
        with pytest.raises(InvalidPart):
            reducer.decode(1, 0, body)
        await reducer.leave_out(1, "sent nonsense")
        await add(reducer, 2, 0, [3.0, 3.0])
        averaged = await reducer.result(0)
        assert averaged.included == {0, 2}
        assert values_of(averaged).tolist() == [2.0, 2.0]
        assert reducer.rejected == {1: "sent nonsense"}

    asyncio.run(scene())


@pytest.mark.parametrize("part", [-1, 1, 2**20])
def test_a_part_that_does_not_exist_is_refused(part: int) -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2)], [whole(2, 1), whole(2, 1)])
        with pytest.raises(InvalidPart, match=f"part {part} of 1"):
            reducer.decode(1, part, encoded([1.0, 1.0]))

    asyncio.run(scene())


def test_the_largest_allowed_difference_is_allowed() -> None:
    assert decode_values(PLAIN, encoded([MAX_ABSOLUTE_DIFFERENCE, -MAX_ABSOLUTE_DIFFERENCE]), 2).tolist() == [1e4, -1e4]


def test_decoding_reads_writable_and_read_only_buffers_of_any_kind() -> None:
    body = encoded([1.0, -2.0])
    for buffer in (body, bytearray(body), memoryview(body), memoryview(bytearray(b"1234" + body))[4:]):
        values = decode_values(PLAIN, buffer, 2)
        assert values.dtype == torch.float32
        assert values.tolist() == [1.0, -2.0]


def test_the_deadline_closes_a_part_without_the_late_one_and_says_who_is_in() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2), (2, 4)], [whole(4, 1)] * 3)
        for member in (0, 1):
            for part in (0, 1):
                await add(reducer, member, part, [float(member)] * 2)
        await add(reducer, 2, 0, [2.0, 2.0])
        await reducer.close()
        first, second = await reducer.result(0), await reducer.result(1)
        assert first.included == {0, 1, 2} and values_of(first).tolist() == [1.0, 1.0]
        assert second.included == {0, 1} and values_of(second).tolist() == [0.5, 0.5]
        assert indices_of(second.mask, 3) == {0, 1}
        assert reducer.rejected == {2: "missed the deadline"}
        await add(reducer, 2, 1, [99.0, 99.0])  # too late: the bytes that others already have do not change
        assert values_of(await reducer.result(1)).tolist() == [0.5, 0.5]

    asyncio.run(scene())


def test_fewer_than_the_minimum_have_no_average() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2)], [whole(2, 1)] * 3)
        await add(reducer, 0, 0, [1.0, 1.0])
        await reducer.close()
        with pytest.raises(InvalidPart, match=r"only 1 contribution\(s\) arrived"):
            await reducer.result(0)
        await add(reducer, 1, 0, [1.0, 1.0])
        with pytest.raises(InvalidPart):
            await reducer.result(0)

    asyncio.run(scene())


def test_leaving_everyone_else_out_voids_the_part_at_once() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 2)], [whole(2, 1)] * 3)
        await add(reducer, 0, 0, [1.0, 1.0])
        await reducer.leave_out(1, "gone")
        assert not reducer.result(0).done()
        await reducer.leave_out(2, "gone")
        with pytest.raises(InvalidPart):
            await reducer.result(0)

    asyncio.run(scene())


def test_leaving_a_member_out_keeps_what_it_already_delivered() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 1), (1, 2)], [whole(2, 1)] * 3)
        for member in (0, 1):
            await add(reducer, member, 0, [float(member)])
            await add(reducer, member, 1, [float(member)])
        await add(reducer, 2, 0, [5.0])
        await reducer.leave_out(2, "was lost")
        assert (await reducer.result(0)).included == {0, 1, 2}
        assert (await reducer.result(1)).included == {0, 1}
        await add(reducer, 2, 1, [5.0])
        assert (await reducer.result(1)).included == {0, 1}

    asyncio.run(scene())


def test_a_member_counts_once_however_often_it_sends() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 1)], [whole(1, 1)] * 2)
        for _ in range(3):
            await add(reducer, 0, 0, [4.0])
        await add(reducer, 1, 0, [0.0])
        assert values_of(await reducer.result(0)).tolist() == [2.0]

    asyncio.run(scene())


def test_a_cancelled_reader_does_not_cancel_the_average_for_the_others() -> None:
    async def scene() -> None:
        reducer = reducer_of([(0, 1)], [whole(1, 1)] * 2)

        async def read() -> Averaged:
            return await asyncio.shield(reducer.result(0))

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await add(reducer, 0, 0, [1.0])
        await add(reducer, 1, 0, [3.0])
        assert values_of(await reducer.result(0)).tolist() == [2.0]

    asyncio.run(scene())
