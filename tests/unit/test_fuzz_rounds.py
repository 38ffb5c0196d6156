"""Whole rounds with a member that does anything: it is left out with a reason, and the others go on.

Deadlines cost no time here (``hostile.play``). What these rounds do not show, because nothing stops it: a reducer that
sends different averages, each of them plausible, to different members. Their bases then differ, and so do the digests
that they announce: who has the rarer one fetches the other (``lineage.py``), and learns who it was (``rivals.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hostile import (
    HOSTILE,
    HostileNetwork,
    Outcome,
    Script,
    answer_codec_names,
    codec_names,
    encoding,
    play,
    replace_body,
    scripts,
    weird_calls,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from local_rounds import GROUP_ID, peer, plan_for, whole

from peers.ledger import PendingSpan
from peers.reducer import BY_SAMPLES, MAX_ABSOLUTE_AVERAGE, InvalidPart, PartReducer, Rules, off_loop
from peers.round import RoundResult
from peers.round_plan import GroupMember, RoundPlan, plan_round

SIZE = 37
seeds = st.integers(0, 2**32)


def plan_of(samples: Sequence[int], *, distrusted: bool, groups_of: int = 64, part_elements: int = 4) -> RoundPlan:
    """:param distrusted: whether the hostile member is a reducer no more, since the others have seen it fail"""
    reports = (peer(HOSTILE).to_bytes(),) if distrusted else ()
    plan = plan_round(
        group_id=GROUP_ID,
        tick=17,
        fragment=0,
        size=SIZE,
        members=[
            GroupMember(peer_id=peer(index), spans=whole(SIZE, count), samples=2**60, steps=5, distrusted=reports)
            for index, count in enumerate(samples)
        ],
        target_group_size=groups_of,
        part_elements=part_elements,
    )
    assert (plan.share_of(HOSTILE) is None) == distrusted
    return plan


def samples_of(members: int) -> st.SearchStrategy[list[int]]:
    """Mostly the hostile member has nearly all of the weight, in every way in which a float32 is rounded."""
    others = st.lists(st.sampled_from([0, 0, 1, 30, 1000]), min_size=members - 1, max_size=members - 1)
    hostile = st.integers(1, 2**26) | st.sampled_from([0, 1, 70, 2**60])
    return st.builds(lambda rest, own: [*rest[:HOSTILE], own, *rest[HOSTILE:]], others, hostile)


def contributions_of(members: int) -> list[torch.Tensor]:
    values = np.random.default_rng(3).uniform(-1, 1, (members, SIZE)).astype(np.float32)
    return [torch.from_numpy(row) for row in values]


def held(outcomes: Sequence[Outcome]) -> dict[int, RoundResult]:
    """Results of honest members, by index."""
    return {
        index: outcome
        for index, outcome in enumerate(outcomes)
        if index != HOSTILE and isinstance(outcome, RoundResult)
    }


def doubtful(plan: RoundPlan) -> set[tuple[int, int]]:
    """The elements of the share that the hostile member reduces, if any: there it may say what it wants."""
    share = plan.share_of(HOSTILE)
    return set() if share is None else set(share.parts)


def bits(result: RoundResult, but: set[tuple[int, int]]) -> str:
    """Everything that members must have alike, in all parts but these."""
    return repr(
        [
            (part.start, part.included, result.average[part.start : part.stop].numpy().tobytes())
            for part in result.parts
            if (part.start, part.stop) not in but
        ]
    )


def check(network: HostileNetwork, contributions: Sequence[torch.Tensor], results: dict[int, RoundResult]) -> None:
    """Finite everywhere; where honest reducers made it, alike and the weighted mean over whom the parts name."""
    plan = network.plan
    error = {"float32": 1e-6, "float16": 1e-3, "int8": 1 / 250, "int4": 1 / 13}[network.answer_codec]
    for result in results.values():
        assert float(result.average.abs().max()) <= MAX_ABSOLUTE_AVERAGE  # false for NaN
    assert len({bits(result, doubtful(plan)) for result in results.values()}) <= 1
    for group in plan.groups:
        if HOSTILE not in group:  # what it says to one of them, that one tells the others
            assert len({bits(result, set()) for index, result in results.items() if index in group}) <= 1
    for result in list(results.values())[:1]:
        for part in result.parts:
            if (part.start, part.stop) in doubtful(plan):
                continue
            total, mean, most = 0, np.zeros(part.stop - part.start), 0.0
            for index in part.included:
                if not plan.members[index].spans[0].samples:
                    continue  # it sent no values
                values = brought(network, contributions, index, part.start, part.stop)
                total += plan.members[index].spans[0].samples
                mean += plan.members[index].spans[0].samples * values
                most = max(most, float(np.abs(values).max()))
            got = result.average[part.start : part.stop].numpy()
            np.testing.assert_allclose(got, mean / max(1, total), rtol=0, atol=error * max(1.0, most))


def brought(
    network: HostileNetwork, contributions: Sequence[torch.Tensor], index: int, start: int, stop: int
) -> np.ndarray:
    """What a member's group reducer counted of it in these elements, float64."""
    plan = network.plan
    share = next(share for share in plan.shares if (start, stop) in share.parts)
    reducer = share.reducers[plan.group_of(index)]
    values = contributions[index][start:stop]
    if index != reducer:
        values = network.brought[index, reducer, share.parts.index((start, stop))]
    mean: np.ndarray = values.numpy().astype(np.float64)
    return mean


def assert_left_out_or_counted(network: HostileNetwork) -> None:
    """At every reducer of its group."""
    for index in network.plan.groups[network.plan.group_of(HOSTILE)]:
        reducer = network.rounds[index].reducer
        for part in network.rounds[index].parts_reduced if index != HOSTILE else ():
            assert HOSTILE in part.included or reducer.rejected.get(HOSTILE), index


@settings(max_examples=40, deadline=None)
@given(
    samples=samples_of(4),
    script=scripts(4, 4),
    codec=codec_names,
    answer_codec=answer_codec_names,
    calls=weird_calls(4),
    seed=seeds,
)
def test_whatever_a_sender_says_the_others_commit(
    samples: list[int], script: Script, codec: str, answer_codec: str, calls: list, seed: int
) -> None:
    plan = plan_of(samples, distrusted=True)
    network = HostileNetwork(plan, script, Script({}), codec, answer_codec, calls, seed)
    contributions = contributions_of(4)
    results = held(play(network.hold(contributions)))
    assert set(results) == {0, 2, 3}
    check(network, contributions, results)
    assert_left_out_or_counted(network)


@settings(max_examples=40, deadline=None)
@given(
    samples=samples_of(4),
    parts=scripts(4, 3),
    averages=scripts(4, 3) | scripts(4, 3, alike=True),
    codec=codec_names,
    answer_codec=answer_codec_names,
    calls=weird_calls(4),
    seed=seeds,
)
def test_whatever_a_reducer_says_the_others_have_finite_results_or_none(
    samples: list[int],
    parts: Script,
    averages: Script,
    codec: str,
    answer_codec: str,
    calls: list,
    seed: int,
) -> None:
    plan = plan_of(samples, distrusted=False)
    network = HostileNetwork(plan, parts, averages, codec, answer_codec, calls, seed)
    contributions = contributions_of(4)
    results = held(play(network.hold(contributions)))
    check(network, contributions, results)
    if averages.alike:
        assert len({result.average.numpy().tobytes() for result in results.values()}) <= 1


@settings(max_examples=40, deadline=None)
@given(
    samples=samples_of(6),
    parts=scripts(6, 3),
    averages=scripts(6, 3),
    codec=codec_names,
    answer_codec=answer_codec_names,
    distrusted=st.booleans(),
    seed=seeds,
)
def test_whatever_a_member_of_several_groups_says_the_rest_of_the_average_is_right(
    samples: list[int],
    parts: Script,
    averages: Script,
    codec: str,
    answer_codec: str,
    distrusted: bool,
    seed: int,
) -> None:
    plan = plan_of(samples, distrusted=distrusted, groups_of=3, part_elements=3)
    network = HostileNetwork(plan, parts, averages, codec, answer_codec, seed=seed)
    contributions = contributions_of(6)
    results = held(play(network.hold(contributions)))
    check(network, contributions, results)
    if distrusted:
        assert len(results) == 5
        assert_left_out_or_counted(network)


# One fault at a time: what the fuzzer found, or could find only by much luck


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(st.sampled_from([0, 1, 30, 1000]), min_size=3, max_size=3),
    parts=scripts(4, 3),
    averages=scripts(4, 10),
    codec=codec_names,
    answer_codec=answer_codec_names,
    calls=weird_calls(4),
    seed=seeds,
)
def test_whatever_an_auxiliary_member_says_the_others_have_finite_results_or_none(
    samples: list[int],
    parts: Script,
    averages: Script,
    codec: str,
    answer_codec: str,
    calls: list,
    seed: int,
) -> None:
    """It averages everything, since nobody else can be dialled."""
    members = [
        GroupMember(
            peer_id=peer(index), spans=whole(SIZE, count), samples=2**60, steps=5, can_be_dialled=False, codec="int8"
        )
        for index, count in enumerate(samples)
    ]
    helper = GroupMember(peer_id=peer(3), spans=whole(SIZE, 0), samples=0, steps=0, auxiliary=True)
    plan = plan_round(
        group_id=GROUP_ID,
        tick=17,
        fragment=0,
        size=SIZE,
        members=[*members, helper],
        target_group_size=64,
        part_elements=4,
    )
    assert [share.reducers for share in plan.shares if share.parts] == [(3,)]
    with mock.patch("hostile.HOSTILE", 3):
        calls = [call for call in calls if call[0] != 3]
        network = HostileNetwork(plan, parts, averages, codec, answer_codec, calls, seed)
        outcomes = play(network.hold([*contributions_of(3), torch.zeros(SIZE)]))
    results = [outcome for outcome in outcomes[:3] if isinstance(outcome, RoundResult)]
    for result in results:
        assert float(result.average.abs().max()) <= MAX_ABSOLUTE_AVERAGE  # false for NaN
        assert all(index < len(plan.members) for part in result.parts for index in part.included)
    if averages.alike:
        assert len({result.average.numpy().tobytes() for result in results}) <= 1


def test_the_largest_difference_that_is_allowed_voids_no_round_however_it_is_rounded() -> None:
    """In 1.8 % of all weights a float32 average of 1e4 is a little above 1e4."""
    say = Script({(other, part): replace_body(encoding([1e4], 0)) for other in range(4) for part in range(4)})
    weights = torch.arange(1.0, 2e6)
    weight = int(weights[weights * 1e4 / weights > 1e4][0])
    for answer_codec in ("float32", "int8", "int4"):
        network = HostileNetwork(plan_of([0, weight, 0, 0], distrusted=True), say, Script({}), "float32", answer_codec)
        results = held(play(network.hold(contributions_of(4))))
        assert set(results) == {0, 2, 3} and float(results[0].average.max()) == pytest.approx(1e4)


def test_what_arrives_after_a_root_has_answered_early_is_not_added_to_its_average() -> None:
    plan = plan_of([10] * 6, distrusted=False, groups_of=3, part_elements=3)
    for seed in range(20):
        network = HostileNetwork(plan, Script({}), Script({}, early=99), seed=seed)
        check(network, contributions_of(6), held(play(network.hold(contributions_of(6)))))


def test_a_part_is_closed_also_if_whoever_closes_it_is_cancelled() -> None:
    async def scene() -> frozenset[int]:
        plan = plan_of([10] * 3, distrusted=False)
        reducer = PartReducer(plan, 0, Rules(), torch.zeros(SIZE))
        for source in (0, 2):
            await reducer.add(source, 0, torch.ones(reducer.parts[0].size))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow_thread(work: Callable[..., Any], *arguments: Any) -> Any:
            begun.set()
            await go_on.wait()
            return work(*arguments)

        with mock.patch("peers.reducer.INLINE_ELEMENTS", 0), mock.patch("asyncio.to_thread", slow_thread):
            leaving = asyncio.create_task(reducer.leave_out(HOSTILE, "sent nonsense"))
            await begun.wait()
            leaving.cancel()  # it hung up
            await asyncio.sleep(0)
            go_on.set()
            return (await reducer.result(0)).included

    assert play(scene()) == {0, 2}


def test_nobody_hears_of_nonsense_whose_sender_hung_up_while_it_was_decoded() -> None:
    def fail() -> None:
        raise InvalidPart("nonsense")

    async def scene() -> None:
        async def thread(work: Callable[..., Any]) -> Any:
            await asyncio.sleep(1)
            return work()

        with mock.patch("asyncio.to_thread", thread):
            decoding = asyncio.create_task(off_loop(2**30, fail))
            await asyncio.sleep(0.5)
            decoding.cancel()
            await asyncio.sleep(1)

    play(scene())


def test_work_grows_with_the_spans_that_members_announce_not_with_their_square() -> None:
    """256 members, 16 of them with 1024 spans each, all in one part."""
    size, cuts = 2**16, 1024
    many = [
        tuple(
            PendingSpan(start=start, stop=size if last else start + 1, samples=1 + start % 7, steps=1)
            for start, last in ((start, start == cuts - 1) for start in range(cuts))
        )
    ] * 16
    plan = plan_for([*many, *[whole(size, 3)] * 240], size, size)
    counted = 0

    class Counting:
        name = "samples"
        value_weight = staticmethod(BY_SAMPLES.value_weight)
        normaliser = staticmethod(BY_SAMPLES.normaliser)

        def normaliser_terms(self, samples: int, steps: int) -> tuple[float, ...]:
            nonlocal counted
            counted += 1
            return BY_SAMPLES.normaliser_terms(samples, steps)

    async def scene() -> list[tuple[slice, float]]:
        reducer = PartReducer(plan, 0, Rules(weighting=Counting()), torch.zeros(size))
        reducer.parts[0].included = set(range(256))
        return reducer._normalisers(reducer.parts[0])

    found = play(scene())
    spans = sum(len(member.spans_in(0, size)) for member in plan.members)
    assert counted <= spans + 1
    assert [normaliser for _, normaliser in found][:3] == [16 * (1 + start % 7) + 720.0 for start in range(3)]
