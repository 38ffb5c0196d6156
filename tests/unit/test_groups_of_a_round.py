"""Several groups in one tick end on one average: exact, bit-identical, and whole when a counterpart fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_rounds import HASTY_SECONDS, Network, committed, hold, peer, plan_for, whole
from test_round import expected_average, random_contributions

from peers.messages import Part
from peers.round import RoundResult, RoundVoid
from peers.round_plan import element_samples

SIZE = 240


@settings(max_examples=20)
@given(
    members=st.integers(3, 13),
    target=st.integers(2, 5),
    part_elements=st.integers(3, 60),
    samples=st.lists(st.integers(0, 1000), min_size=13, max_size=13),
    speeds=st.lists(st.integers(0, 100_000), min_size=13, max_size=13),
    answer_codec=st.sampled_from(["float32", "int8"]),
    seed=st.integers(0, 2**32),
)
def test_groups_end_on_one_weighted_mean(
    members: int,
    target: int,
    part_elements: int,
    samples: list[int],
    speeds: list[int],
    answer_codec: str,
    seed: int,
) -> None:
    spans = [whole(SIZE, samples[index]) for index in range(members)]
    plan = plan_for(spans, SIZE, part_elements, target, speeds[:members])
    contributions = random_contributions(members, SIZE, seed)
    results = committed(hold(Network(plan, answer_codec=answer_codec), contributions))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    bound = 1e-6 if answer_codec == "float32" else 1 / 250
    np.testing.assert_allclose(results[0].average.numpy(), expected_average(plan, contributions), atol=bound)
    for result in results:
        assert element_samples(plan, result.parts) == SIZE * sum(samples[:members])


def test_twelve_peers_in_groups_of_four_talk_to_few_and_agree() -> None:
    plan = plan_for([whole(SIZE, 5 + index) for index in range(12)], SIZE, 10, target_group_size=4)
    assert [len(group) for group in plan.groups] == [4, 4, 4]
    contributions = random_contributions(12, SIZE)
    talks: set[tuple[int, int]] = set()

    def listen(sender: int, receiver: int, message: object) -> object:
        if isinstance(message, Part):
            talks.add((sender, receiver))
        return message

    results = committed(hold(Network(plan, tamper=listen), contributions))  # type: ignore[arg-type]
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0].average.numpy(), expected_average(plan, contributions), atol=1e-6)
    assert max(sum(sender == index for sender, _ in talks) for index in range(12)) == 3 + 2


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_lost_counterpart_voids_the_round_for_whoever_needs_its_averages(how: str) -> None:
    plan = plan_for([whole(SIZE, 5)] * 6, SIZE, 10, target_group_size=3)
    network = Network(plan, wait_seconds=HASTY_SECONDS)
    lost = plan.shares[0].reducers[1]
    (network.dead_reducers if how == "dead" else network.silent_reducers).add(lost)
    outcomes = hold(network, random_contributions(6, SIZE))
    for index in range(6):
        if index != lost:
            assert isinstance(outcomes[index], RoundVoid)
    blamed = [index for index in range(6) if peer(lost) in network.rounds[index].failed]
    relay = plan.shares[0].reducers[0]
    assert relay in blamed, "the one that asked it"
    assert all(peer(relay) not in network.rounds[index].failed for index in plan.groups[0])


def test_a_group_whose_sums_do_not_come_is_left_out_of_those_parts() -> None:
    plan = plan_for([whole(SIZE, 5)] * 6, SIZE, 10, target_group_size=3)
    share = plan.shares[0]
    relay, root = share.reducers
    network = Network(plan, wait_seconds=HASTY_SECONDS, mute_to={(relay, root): 0})
    outcomes = hold(network, random_contributions(6, SIZE))
    for index in plan.groups[plan.group_of(root)]:
        result = outcomes[index]
        assert isinstance(result, RoundResult)
        for part in result.parts:
            number = next((n for n, cut in enumerate(share.parts) if cut == (part.start, part.stop)), None)
            if number is not None and share.root(number) == root:
                assert part.included == sorted(plan.groups[plan.group_of(root)])
            else:
                assert part.included == list(range(6))


def test_a_sender_that_freezes_is_left_out_by_its_group_alone() -> None:
    plan = plan_for([whole(SIZE, 5)] * 6, SIZE, 10, target_group_size=3)
    sender = plan.shares[0].reducers[0]
    mates = [index for index in plan.groups[0] if index != sender]
    network = Network(plan, wait_seconds=HASTY_SECONDS, mute_to={(sender, mate): 0 for mate in mates})
    results = committed(hold(network, random_contributions(6, SIZE)))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    everyone = set(range(6))
    for part in results[0].parts:
        own = (part.start, part.stop) in plan.shares[0].parts
        assert set(part.included) == (everyone if own else everyone - {sender})


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda part: (part.included, part.nan), id="nan"),
        pytest.param(lambda part: (b"\x3f", part.body), id="names members of other groups"),
        pytest.param(lambda part: (b"", part.body), id="names nobody"),
        pytest.param(lambda part: (b"\x00", part.body), id="an empty mask"),
        pytest.param(lambda part: (part.included + b"\x00", part.body), id="a mask too long"),
        pytest.param(lambda part: (part.included, part.body[:-4]), id="cut off"),
        pytest.param(lambda part: (part.included, part.huge), id="beyond what so many members can bring"),
    ],
)
def test_a_sum_that_cannot_be_is_refused_and_the_round_goes_on(forge: object) -> None:
    plan = plan_for([whole(SIZE, 5)] * 6, SIZE, 10, target_group_size=3)
    relay, root = plan.shares[0].reducers

    class Body:
        def __init__(self, message: Part) -> None:
            assert message.header is not None
            self.included, self.body = message.header.included, bytes(message.body)
            self.nan = np.full(len(self.body) // 4, np.nan, dtype="<f4").tobytes()
            self.huge = np.full(len(self.body) // 4, 1e7, dtype="<f4").tobytes()

    def tamper(sender: int, receiver: int, message: object) -> object:
        if isinstance(message, Part) and message.header is not None and (sender, receiver) == (relay, root):
            included, body = forge(Body(message))  # type: ignore[operator]
            return Part(message.header.model_copy(update={"included": included}), body)
        return message

    network = Network(plan, wait_seconds=HASTY_SECONDS, tamper=tamper)  # type: ignore[arg-type]
    outcomes = hold(network, random_contributions(6, SIZE))
    averages = set()
    for index in plan.groups[plan.group_of(root)]:
        result = outcomes[index]
        assert isinstance(result, RoundResult)
        assert bool(torch.isfinite(result.average).all())
        averages.add(result.average.numpy().tobytes())
    assert len(averages) == 1
    assert relay in network.rounds[root].reducer.rejected
