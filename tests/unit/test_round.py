"""Whole rounds without a daemon: exact averages, and what becomes of a round in which something goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_rounds import (
    GROUP_ID,
    HASTY_SECONDS,
    PATIENT_SECONDS,
    Network,
    committed,
    hold,
    peer,
    plan_for,
    whole,
)

import peers.reducer
import peers.round
from peers.closing import ClosingTimes
from peers.codecs import get_codec
from peers.contribution import Outgoing
from peers.ledger import Ledger, PendingSpan
from peers.messages import Average, AveragedPart, AverageHeader, Part, PartHeader
from peers.reducer import INLINE_ELEMENTS, PartReducer, Rules
from peers.residual import AverageResidual, pack
from peers.round import Round, RoundResult, RoundVoid
from peers.round_plan import RoundPlan, element_samples, receipt_for

PATIENT = ClosingTimes(grace_seconds=PATIENT_SECONDS, deadline_seconds=PATIENT_SECONDS)


def random_contributions(members: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    values = np.random.default_rng(seed).uniform(-1, 1, (members, size)).astype(np.float32)
    return [torch.from_numpy(row) for row in values]


def expected_average(plan: RoundPlan, contributions: Sequence[torch.Tensor]) -> np.ndarray:
    weights = np.zeros((len(plan.members), plan.size))
    for row, member in zip(weights, plan.members, strict=True):
        for span in member.spans:
            row[span.start : span.stop] = span.samples
    total = weights.sum(axis=0)
    values = np.stack([contribution.numpy().astype(np.float64) for contribution in contributions])
    average: np.ndarray = (weights * values).sum(axis=0) / np.where(total == 0, 1, total)
    return average


@settings(max_examples=25)
@given(
    members=st.integers(2, 5),
    size=st.integers(1, 60),
    part_elements=st.integers(1, 20),
    samples=st.lists(st.integers(0, 1000), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_all_members_commit_bit_identical_averages_equal_to_one_weighted_mean(
    members: int, size: int, part_elements: int, samples: list[int], seed: int
) -> None:
    plan = plan_for([whole(size, samples[index]) for index in range(members)], size, part_elements)
    contributions = random_contributions(members, size, seed)
    before = [contribution.clone() for contribution in contributions]
    results = committed(hold(Network(plan), contributions))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    assert len({result.parts for result in map(_hashable, results)}) == 1
    np.testing.assert_allclose(results[0].average.numpy(), expected_average(plan, contributions), atol=1e-6)
    assert all(torch.equal(now, then) for now, then in zip(contributions, before, strict=True))
    assert element_samples(plan, results[0].parts) == size * sum(samples[:members])


@pytest.mark.parametrize("answer_codec", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "int4", "sparse"])
def test_lossy_codecs_still_give_everyone_the_same_average_of_what_was_sent(codec: str, answer_codec: str) -> None:
    size = 3000
    plan = plan_for([whole(size, samples) for samples in (10, 30, 5)], size, 700)
    contributions = random_contributions(3, size)
    network = Network(plan, codec=codec, answer_codec=answer_codec)
    results = committed(hold(network, contributions))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    exact = expected_average(plan, [network.sent[index] for index in range(3)])
    bound = {"float32": 1e-6, "float16": 6e-4, "int8": 1 / 250, "int4": 1 / 13}[answer_codec]
    np.testing.assert_allclose(results[0].average.numpy(), exact, atol=bound)
    for index in range(3):  # a member's own share never travels
        (start, *_), (*_, stop) = zip(*plan.shares[index].parts, strict=True)
        assert torch.equal(network.sent[index][start:stop], contributions[index][start:stop])


def test_each_member_may_have_a_codec_of_its_own() -> None:
    plan = plan_for([whole(5000, count) for count in (80, 40, 20)], 5000, 700, codecs=["int8", "int4", "sparse"])
    network = Network(plan, codec="", answer_codec="int8")
    contributions = random_contributions(3, 5000)
    results = committed(hold(network, contributions))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    own = {index: len(share.parts) for share in plan.shares for index in share.reducers}
    sent = {index: sum(len(part.body) for part in network.lossy[index]) for index in range(3)}
    assert sent[0] > 1.8 * sent[1] > 10 * sent[2] and own.keys() == {0, 1, 2}
    expected = expected_average(plan, [network.sent[index] for index in range(3)])
    # What a codec makes of one's own share is not sent: a reducer counts its own contribution as it is.
    np.testing.assert_allclose(results[0].average.numpy(), expected, atol=0.02)


def test_a_contribution_in_another_codec_than_was_announced_is_left_out() -> None:
    def tamper(sender: int, receiver: int, message: Part | Average) -> Part | Average | None:
        if isinstance(message, Part) and sender == 1:
            return Part(message.header, get_codec("sparse").encode(torch.ones(4)))
        return message

    plan = plan_for([whole(12, 5)] * 3, 12)
    network = Network(plan, tamper=tamper, codec="")
    results = committed(hold(network, random_contributions(3, 12)))
    assert 1 in network.rounds[0].reducer.rejected and 1 in network.rounds[2].reducer.rejected
    assert results[0].parts[0].included == [0, 2]


@pytest.mark.parametrize(("codec", "answer_codec"), [("int8", "int8"), ("int4", "int4"), ("sparse", "int8")])
def test_what_codecs_leave_out_comes_with_later_rounds(codec: str, answer_codec: str) -> None:
    size, rounds = 2000, 60
    plan = plan_for([whole(size, samples) for samples in (10, 30)], size, 500)
    added = random_contributions(2, size)
    residuals: dict[int, AverageResidual] = {}
    progress = [torch.zeros(size) for _ in added]
    total = torch.zeros(size)
    for _ in range(rounds):
        for mine, more in zip(progress, added, strict=True):
            mine += more
        network = Network(plan, codec=codec, answer_codec=answer_codec, residuals=residuals)
        results = committed(hold(network, [mine.clone() for mine in progress]))
        total += results[0].average
        for index, mine in enumerate(progress):
            mine -= network.sent[index]  # as a rebase does
            residuals[index].replace(network.rounds[index].reducer.left_out)
    target = rounds * torch.from_numpy(expected_average(plan, added)).float()
    largest = {"int8": 0.1, "int4": 1.0, "sparse": 45.0}[codec]
    assert float((total - target).abs().max()) < largest, "the error is that of a few rounds, not of all of them"


def test_residuals_follow_elements_when_shares_change() -> None:
    residual = AverageResidual()
    assert residual.of(0, 10) is None
    residual.replace({(4, 8): pack(torch.tensor([1.0, 2.0, 3.0, 4.0]))})
    # Kept as int4: to a fourteenth of the largest.
    torch.testing.assert_close(residual.of(6, 9), torch.tensor([3.0, 4.0, 0.0]), atol=4 / 14, rtol=0)
    assert residual.of(8, 10) is None
    residual.replace({})
    assert residual.of(4, 8) is None


@dataclass
class _Parts:
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]


def _hashable(result: RoundResult) -> _Parts:
    return _Parts(tuple((part.start, part.stop, tuple(part.included)) for part in result.parts))


def test_the_parts_of_a_result_cover_the_fragment_in_order() -> None:
    plan = plan_for([whole(30, 5)] * 3, 30, part_elements=4)
    (result, *_) = committed(hold(Network(plan), random_contributions(3, 30)))
    position = 0
    for part in result.parts:
        assert part.start == position and part.included == [0, 1, 2]
        position = part.stop
    assert position == 30


@pytest.mark.parametrize(("answer_codec", "groups"), [("float32", 1), ("int8", 1), ("int8", 2)])
def test_arithmetic_on_big_parts_leaves_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch, answer_codec: str, groups: int
) -> None:
    where: dict[str, set[int]] = {}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any) -> Any:
            where.setdefault(name, set()).add(threading.get_ident())
            return work(*arguments)

        return watch

    names = {
        peers.reducer._OpenPart: ("add", "add_sum", "average"),
        PartReducer: ("decode", "_encode"),
        Round: ("_encode", "_own_part"),
        peers.round: ("decode_values",),
    }
    for owner, methods in names.items():
        for name in methods:
            monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    members, size = 2 * groups, 4 * (INLINE_ELEMENTS + 1)
    plan = plan_for([whole(size, 5)] * members, size, size, target_group_size=2)
    assert all(stop - start > INLINE_ELEMENTS for share in plan.shares for start, stop in share.parts)
    committed(hold(Network(plan, answer_codec=answer_codec), random_contributions(members, size)))
    expected = {name for methods in names.values() for name in methods} - ({"add_sum"} if groups == 1 else set())
    assert where.keys() == expected
    assert all(threading.get_ident() not in threads for threads in where.values()), where


def test_a_member_knows_how_much_it_sent_and_received() -> None:
    plan = plan_for([whole(8, 5)] * 2, 8, part_elements=2)
    (result, _) = committed(hold(Network(plan), random_contributions(2, 8)))
    # Half of the fragment to the other reducer, and the averages of our own half to the other sender.
    assert result.bytes_sent == 32
    assert result.bytes_received == 32


def test_a_member_learns_how_long_its_parts_took_however_long_its_reducer_waits_for_others() -> None:
    plan = plan_for([whole(4, 5)] * 3, 4)
    contributions = random_contributions(3, 4)

    async def scene() -> list[int]:
        reducer = Round(plan, peer(0), Outgoing.of(contributions[0]), Network(plan).caller(0), PATIENT, Rules())
        running = asyncio.create_task(reducer.run())
        (start, stop), *_ = plan.shares[0].parts

        async def parts(sender: int, pause_seconds: float) -> AsyncIterator[Part]:
            await asyncio.sleep(pause_seconds)
            body = contributions[sender][start:stop].numpy().tobytes()
            yield Part(PartHeader(group_id=GROUP_ID, part=0), body)

        async def received_ms(sender: int, pause_seconds: float) -> int:
            async for answer in reducer.answer(parts(sender, pause_seconds), peer(sender)):
                assert answer.header is not None
                return answer.header.received_ms
            raise AssertionError("no answer")

        took = await asyncio.gather(received_ms(1, 0.0), received_ms(2, 0.2))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return took

    fast, slow = asyncio.run(scene())
    assert 1 <= fast < slow and slow >= 190


def test_weights_may_differ_within_a_contribution() -> None:
    spans = [
        (PendingSpan(start=0, stop=10, samples=80, steps=10), PendingSpan(start=10, stop=24, samples=40, steps=5)),
        whole(24, 20),
        whole(24, 0),
    ]
    plan = plan_for(spans, 24, part_elements=3)
    contributions = random_contributions(3, 24)
    results = committed(hold(Network(plan), contributions))
    np.testing.assert_allclose(results[2].average.numpy(), expected_average(plan, contributions), atol=1e-6)
    assert element_samples(plan, results[0].parts) == 10 * 80 + 14 * 40 + 24 * 20


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_dead_reducer_voids_the_round_for_all(how: str) -> None:
    plan = plan_for([whole(12, 5)] * 3, 12)
    network = Network(plan, wait_seconds=HASTY_SECONDS)
    (network.dead_reducers if how == "dead" else network.silent_reducers).add(1)
    outcomes = hold(network, random_contributions(3, 12))
    for index in (0, 2):
        assert isinstance(outcomes[index], RoundVoid)
        assert str(peer(1))[-6:] in str(outcomes[index])
        assert set(network.rounds[index].failed) == {peer(1)}


def test_a_sender_that_freezes_is_left_out_and_the_others_commit_without_it() -> None:
    plan = plan_for([whole(12, 5), whole(12, 50), whole(12, 15)], 12)
    network = Network(plan, wait_seconds=HASTY_SECONDS, mute_to={(1, 0): 0, (1, 2): 0})
    contributions = random_contributions(3, 12)
    outcomes = hold(network, contributions)
    results = committed(outcomes)
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    expected = (5 * contributions[0] + 15 * contributions[2]) / 20
    for part in results[0].parts:
        where = slice(part.start, part.stop)
        if part.start in range(4, 8):  # its own share, which it reduced itself
            assert part.included == [0, 1, 2]
        else:
            assert part.included == [0, 2]
            torch.testing.assert_close(results[0].average[where], expected[where])
    assert element_samples(plan, results[0].parts) == 12 * 20 + 4 * 50


def test_who_reads_no_answers_is_counted_whole_and_holds_nobody_up() -> None:
    plan = plan_for([whole(24, 5), whole(24, 50), whole(24, 15)], 24, part_elements=2)
    contributions = random_contributions(3, 24)
    first, deaf, last = hold(Network(plan, wait_seconds=HASTY_SECONDS, deaf={1}), contributions)
    assert isinstance(first, RoundResult) and isinstance(last, RoundResult) and isinstance(deaf, RoundVoid)
    assert torch.equal(first.average, last.average)
    assert all(part.included == [0, 1, 2] for part in first.parts)
    np.testing.assert_allclose(first.average.numpy(), expected_average(plan, contributions), atol=1e-6)


def test_a_contribution_that_is_partly_in_is_accounted_for_part_by_part() -> None:
    plan = plan_for([whole(12, 8), whole(12, 8)], 12, part_elements=2)
    network = Network(plan, wait_seconds=HASTY_SECONDS, mute_to={(0, 1): 1})
    # Parts of reducer 1 that only itself delivered have fewer than two contributions: the round is void for both.
    assert all(isinstance(outcome, RoundVoid) for outcome in hold(network, random_contributions(2, 12)))

    plan = plan_for([whole(12, 8), whole(12, 8), whole(12, 8)], 12, part_elements=2)
    network = Network(plan, wait_seconds=HASTY_SECONDS, mute_to={(0, 1): 1})
    results = committed(hold(network, random_contributions(3, 12)))
    receipt = receipt_for(plan, results[0].parts, version=4)
    assert (receipt.version, receipt.tick) == (4, 17)
    entry, held = receipt.ranges_of(peer(0).to_bytes())
    assert entry is not None and entry.samples == 108
    ledger = Ledger.open(12, samples=100).credit(held, entry.samples, entry.steps)
    assert ledger.credited_element_samples() == (12 - 2) * 8  # all but the second part of reducer 1
    assert [piece.samples for piece in ledger.pending(108, 11)] == [0, 8, 0]
    everyone = sum(
        Ledger.open(12, samples=100).credit(ranges, 108, 11).credited_element_samples()
        for ranges in (receipt.ranges_of(peer(index).to_bytes())[1] for index in range(3))
    )
    assert everyone == element_samples(plan, results[0].parts)


def test_a_receipt_of_many_parts_that_hold_the_same_peers_is_one_stretch() -> None:
    plan = plan_for([whole(20_000, 8)] * 2, 20_000, part_elements=2)
    parts = [AveragedPart(start=start, stop=start + 2, included=[0, 1]) for start in range(0, 20_000, 2)]
    parts[3] = AveragedPart(start=6, stop=8, included=[1])
    receipt = receipt_for(plan, parts, version=4)
    assert receipt.ranges_of(peer(0).to_bytes())[1] == [(0, 6), (8, 20_000)]
    assert sum(stop - start for start, stop in receipt.ranges_of(peer(1).to_bytes())[1]) == 20_000


Twist = Callable[[Part], Part]


def renumbered(part: Part) -> Part:
    return Part(PartHeader(group_id=part.header.group_id, part=part.header.part + 1), part.body)


def of_another_group(part: Part) -> Part:
    return Part(PartHeader(group_id=b"another group", part=part.header.part), part.body)


def with_body(values: Sequence[float] | None) -> Twist:
    def twist(part: Part) -> Part:
        body = part.body[:-4] if values is None else np.asarray(values, dtype="<f4").tobytes()
        return Part(part.header, body)

    return twist


@pytest.mark.parametrize(
    "twist",
    [
        renumbered,
        of_another_group,
        with_body([float("nan")] * 4),
        with_body([1e30] * 4),
        with_body([1.0]),
        with_body(None),
    ],
    ids=["out of order", "of another group", "nan", "1e30", "broadcastable", "cut off"],
)
def test_a_sender_of_nonsense_is_left_out_at_once(twist: Twist) -> None:
    def tamper(sender: int, receiver: int, message: Part | Average) -> Part | Average | None:
        return twist(message) if isinstance(message, Part) and sender == 1 else message

    plan = plan_for([whole(12, 5)] * 3, 12)
    network = Network(plan, tamper=tamper)
    contributions = random_contributions(3, 12)
    results = committed(hold(network, contributions))
    assert 1 in network.rounds[0].reducer.rejected and 1 in network.rounds[2].reducer.rejected
    assert results[0].parts[0].included == [0, 2]
    torch.testing.assert_close(results[1].average[:4], (contributions[0] + contributions[2])[:4] / 2)


def test_a_sender_that_ends_early_is_left_out_at_once() -> None:
    def tamper(sender: int, receiver: int, message: Part | Average) -> Part | Average | None:
        late = isinstance(message, Part) and sender == 1 and message.header is not None and message.header.part == 1
        return None if late else message

    plan = plan_for([whole(12, 5)] * 3, 12, part_elements=2)
    results = committed(hold(Network(plan, tamper=tamper), random_contributions(3, 12)))
    assert [part.included for part in results[0].parts[:2]] == [[0, 1, 2], [0, 2]]


@pytest.mark.parametrize(
    "forge",
    [
        lambda answer: Average(
            AverageHeader(part=answer.header.part + 1, included=answer.header.included), answer.body
        ),
        lambda answer: Average(AverageHeader(part=0, included=b"\x00"), answer.body),
        lambda answer: Average(AverageHeader(part=0, included=b"\xff"), answer.body),
        lambda answer: Average(AverageHeader(part=0, included=b"\x03\x00"), answer.body),
        lambda answer: Average(answer.header, answer.body[:-4]),
        lambda answer: Average(answer.header, np.full(4, np.nan, dtype="<f4").tobytes()),
        lambda answer: None,
    ],
    ids=["out of order", "of nobody", "of strangers", "long mask", "cut off", "nan", "missing"],
)
def test_a_reducer_that_answers_wrongly_voids_the_round_for_whom_it_answers(
    forge: Callable[[Average], Average | None],
) -> None:
    def tamper(sender: int, receiver: int, message: Part | Average) -> Part | Average | None:
        return forge(message) if isinstance(message, Average) and sender == 2 and receiver == 0 else message

    plan = plan_for([whole(12, 5)] * 3, 12)
    outcomes = hold(Network(plan, tamper=tamper), random_contributions(3, 12))
    assert isinstance(outcomes[0], RoundVoid) and "answered" in str(outcomes[0])
    assert isinstance(outcomes[1], RoundResult) and isinstance(outcomes[2], RoundResult)
    assert torch.equal(outcomes[1].average, outcomes[2].average)


def test_a_second_stream_of_one_sender_is_not_read() -> None:
    plan = plan_for([whole(4, 5)] * 2, 4)

    async def scene() -> tuple[int, int]:
        contributions = random_contributions(2, 4)
        reducer = Round(plan, peer(0), Outgoing.of(contributions[0]), Network(plan).caller(0), PATIENT, Rules())
        read = 0

        async def parts() -> AsyncIterator[Part]:
            nonlocal read
            read += 1
            yield Part(PartHeader(group_id=GROUP_ID, part=0), contributions[1][:2].numpy().tobytes())
            await asyncio.Event().wait()

        first = reducer.answer(parts(), peer(1))
        pending = asyncio.create_task(first.__anext__())
        while read == 0:
            await asyncio.sleep(0)
        answered = [answer async for answer in reducer.answer(parts(), peer(1))]
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        return len(answered), read

    assert asyncio.run(asyncio.wait_for(scene(), 30)) == (0, 1)


@pytest.mark.parametrize("who", [0, 9], ids=["ourselves", "a stranger"])
def test_nobody_outside_the_group_is_answered(who: int) -> None:
    plan = plan_for([whole(4, 5)] * 2, 4)

    async def scene() -> list[Average]:
        async def parts() -> AsyncIterator[Part]:
            yield Part(PartHeader(group_id=GROUP_ID, part=0), bytes(8))

        reducer = Round(plan, peer(0), Outgoing.of(torch.zeros(4)), Network(plan).caller(0), PATIENT, Rules())
        return [answer async for answer in reducer.answer(parts(), peer(who))]

    assert asyncio.run(asyncio.wait_for(scene(), 30)) == []


def test_a_group_without_us_is_no_round_of_ours() -> None:
    plan = plan_for([whole(4, 5)] * 2, 4)
    with pytest.raises(RoundVoid, match="does not contain this peer"):
        Round(plan, peer(7), Outgoing.of(torch.zeros(4)), Network(plan).caller(0), PATIENT, Rules())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("element", [0, 5, 11])
def test_a_peer_whose_model_diverged_leaves_itself_out_and_breaks_nobodys_base(value: float, element: int) -> None:
    """Or it alone would commit a broken base, which its groupmates then fetch as the round they missed."""
    plan = plan_for([whole(12, 5)] * 3, 12, part_elements=2)
    contributions = random_contributions(3, 12)
    contributions[0][element] = value
    results = committed(hold(Network(plan), contributions))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    assert bool(torch.isfinite(results[0].average).all())
    (part,) = [part for part in results[0].parts if element in range(part.start, part.stop)]
    assert part.included == [1, 2]


@given(
    size=st.integers(1, 30),
    data=st.data(),
)
def test_element_samples_count_each_span_where_its_owner_is_included(size: int, data: st.DataObject) -> None:
    spans = []
    for _ in range(3):
        cut = data.draw(st.integers(0, size))
        rows = [(0, cut, data.draw(st.integers(0, 2**60))), (cut, size, data.draw(st.integers(0, 2**60)))]
        spans.append(
            tuple(
                PendingSpan(start=start, stop=stop, samples=samples, steps=1)
                for start, stop, samples in rows
                if start < stop
            )
        )
    plan = plan_for(spans, size)
    borders = sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=4))})
    parts = [
        AveragedPart(start=start, stop=stop, included=sorted(data.draw(st.sets(st.integers(0, 2)))))
        for start, stop in itertools.pairwise(borders)
    ]
    expected = sum(
        span.samples
        for part in parts
        for element in range(part.start, part.stop)
        for index in part.included
        for span in spans[index]
        if span.start <= element < span.stop
    )
    assert element_samples(plan, parts) == expected


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([50, 50, 5], "was late; the others had nearly all of the weight"),
        ([50, 50, 25], "missed the deadline"),
    ],
)
def test_after_the_grace_only_a_small_part_of_the_weight_is_not_waited_for(samples: list[int], reason: str) -> None:
    plan = plan_for([whole(12, count) for count in samples], 12)
    network = Network(plan, wait_seconds=HASTY_SECONDS, grace_seconds=0.2, mute_to={(2, 0): 0, (2, 1): 0})
    results = committed(hold(network, random_contributions(3, 12)))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    for index in (0, 1):
        assert network.rounds[index].reducer.rejected == {2: reason}


def test_a_peer_that_slept_through_its_round_has_no_result_and_nothing_breaks() -> None:
    """When it wakes, the end of its round comes before anything else that was due."""

    async def scene() -> None:
        plan = plan_for([whole(12, 5)] * 3, 12)
        network = Network(plan, silent_reducers={1, 2})
        for index, contribution in enumerate(random_contributions(3, 12)):
            network.rounds[index] = Round(
                plan,
                peer(index),
                Outgoing.of(contribution),
                network.caller(index),
                PATIENT,
                Rules(),
                residual=lambda a, b: None,
            )
        sleeper = asyncio.create_task(network.rounds[0].run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        network.rounds[0].end()
        with pytest.raises(RoundVoid, match="slept"):
            await sleeper
        assert [answer async for answer in network.rounds[0].answer(_nothing(), peer(1))] == []

    asyncio.run(scene())


def test_an_answer_that_comes_together_with_the_end_of_the_round_is_too_late() -> None:
    """As for a peer that wakes, or that has had no core for long."""
    network = Network(plan_for([whole(12, 5)] * 3, 12))

    def tamper(sender: int, receiver: int, message: Part | Average) -> Part | Average:
        if receiver == 0 and isinstance(message, Average):
            network.rounds[0].end()
        return message

    network.tamper = tamper
    sleeper, *others = hold(network, random_contributions(3, 12))
    assert isinstance(sleeper, RoundVoid) and "slept" in str(sleeper)
    assert all(isinstance(other, RoundResult | RoundVoid) for other in others)


async def _nothing() -> AsyncIterator[Part]:
    return
    yield


@pytest.mark.parametrize("codec", ["float32", "int8", "sparse"])
def test_who_has_no_weight_sends_no_values_and_gets_the_average_all_the_same(codec: str) -> None:
    half = (PendingSpan(start=0, stop=20, samples=0, steps=0), PendingSpan(start=20, stop=40, samples=8, steps=1))
    plan = plan_for([whole(40, 8), whole(40, 0), half], 40, part_elements=5)
    contributions = random_contributions(3, 40)
    contributions[1].zero_()
    contributions[2][:20] = 0.0
    network = Network(plan, codec=codec)
    full, nothing, some = committed(hold(network, contributions))
    assert torch.equal(full.average, nothing.average) and torch.equal(full.average, some.average)
    counted = [network.sent[index] for index in range(3)]
    np.testing.assert_allclose(full.average.numpy(), expected_average(plan, counted), rtol=1e-6, atol=1e-7)
    assert all(sorted(part.included) == [0, 1, 2] for part in full.parts)
    # What it averaged for others is all that left it.
    own = sum(stop - start for share in plan.shares for start, stop in share.parts if 1 in share.reducers)
    assert nothing.bytes_sent == 2 * 4 * own


def test_a_body_may_be_missing_only_where_there_is_no_weight() -> None:
    plan = plan_for([whole(12, 8), whole(12, 8), whole(12, 8)], 12)

    def tamper(sender: int, reducer: int, message: Part | Average) -> Part | Average:
        if sender == 1 and isinstance(message, Part):
            return Part(message.header, b"")
        return message

    outcomes = hold(Network(plan, tamper=tamper, wait_seconds=HASTY_SECONDS), random_contributions(3, 12))
    for outcome in outcomes:
        if isinstance(outcome, RoundResult):
            others = [part for part in outcome.parts if 1 in part.included]
            own = plan.share_of(1)
            assert own is not None
            assert {(part.start, part.stop) for part in others} <= set(own.parts)
