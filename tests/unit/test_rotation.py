"""Which fragments a peer trains by turns: every fragment in time, the least covered first, each peer by itself."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dht_config.records import PeerProfile
from p2p_trainer.strategies.rotation import ROUNDS_A_TURN, Rotation, by_need, next_trained
from peers.membership import coverage

NOBODY = frozenset[int]()


def first(fragments: int, count: int, peer_id: str) -> frozenset[int]:
    nothing = [0] * fragments
    return next_trained(NOBODY, nothing, nothing, peer_id, count)


class Swarm:
    """Partial peers, and full ones of a rate, whose rounds all succeed."""

    def __init__(self, fragments: int, counts: list[int], full_rate: float = 0.0) -> None:
        self.fragments, self.full_rate = fragments, full_rate
        self.trained = [first(fragments, count, str(index)) for index, count in enumerate(counts)]
        self.rotations = [Rotation(fragments, trained, str(index)) for index, trained in enumerate(self.trained)]
        self.ever = [set(trained) for trained in self.trained]

    def covered_by_others(self, peer: int) -> list[float]:
        return [
            self.full_rate + sum(fragment in trained for index, trained in enumerate(self.trained) if index != peer)
            for fragment in range(self.fragments)
        ]

    def cycle(self) -> None:
        for fragment in range(self.fragments):
            for index, rotation in enumerate(self.rotations):
                rotation.coverage = self.covered_by_others(index)
                before = self.trained[index]
                self.trained[index] = rotation.rebased(fragment, before)
                assert len(self.trained[index]) == len(before)
                assert len(before - self.trained[index]) <= 1
                if before != self.trained[index]:
                    assert before - self.trained[index] == {fragment}, "only just after a round of its own"
                self.ever[index] |= self.trained[index]


def test_the_least_covered_fragments_come_first() -> None:
    assert by_need(NOBODY, [-1] * 4, [5.0, 0.0, 9.0, 1.0], "a") == [1, 3, 0, 2]
    assert next_trained(frozenset({2}), [-1] * 4, [5.0, 0.0, 9.0, 1.0], "a", 2) == {1, 3}


def test_of_equally_covered_ones_those_come_first_that_were_longest_out_of_training() -> None:
    order = by_need(frozenset({0, 3}), [4, 2, -1, 1], [7.0] * 4, "a")
    assert order == [2, 1, 0, 3], "and of those in training the longest there goes first"


def test_peers_with_the_same_figures_begin_with_different_fragments() -> None:
    begun = [next(iter(first(8, 1, f"peer {index}"))) for index in range(64)]
    assert len(set(begun)) == 8
    assert max(begun.count(fragment) for fragment in range(8)) < 24
    assert first(8, 3, "peer 1") == first(8, 3, "peer 1")


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 12), st.data())
def test_beside_full_peers_a_partial_one_trains_every_fragment_in_time(fragments: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, fragments))
    swarm = Swarm(fragments, [count], full_rate=data.draw(st.floats(0, 1e6)))
    for _ in range(ROUNDS_A_TURN * (fragments + 1)):
        swarm.cycle()
    assert swarm.ever[0] == set(range(fragments))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.lists(st.integers(1, 3), min_size=2, max_size=6))
def test_partial_peers_spread_so_that_every_fragment_is_covered_again_soon(fragments: int, counts: list[int]) -> None:
    swarm = Swarm(fragments, [min(count, fragments) for count in counts])
    covered: list[set[int]] = []
    for _ in range(8 * ROUNDS_A_TURN):
        swarm.cycle()
        covered.append(set().union(*swarm.trained))
    if sum(counts) >= fragments:
        assert set().union(*covered[-2 * ROUNDS_A_TURN :]) == set(range(fragments))
        assert len(covered[-1]) >= fragments - 1


def test_whoever_trains_everything_never_changes() -> None:
    everything = frozenset(range(3))
    rotation = Rotation(3, everything, "a")
    assert all(rotation.rebased(index % 3, everything) == everything for index in range(50))


def profile(trains: bytes, rate: float) -> PeerProfile:
    return PeerProfile(
        software_version="0",
        status="training",
        samples_per_second=rate,
        processed_samples=0,
        credited_samples=0.0,
        micro_batch=1,
        device="cpu",
        joined_at=0.0,
        restart=0,
        trains=trains,
    )


def test_coverage_counts_a_peer_where_it_trains_and_equal_sums_are_equal() -> None:
    some = [profile(b"", 0.25), profile(b"\x05", 0.5)]
    assert coverage(some, 4) == [0.75, 0.25, 0.75, 0.25]
    three = [profile(b"", rate) for rate in (0.1, 0.2, 0.3)]
    assert coverage(three, 1) == coverage(reversed(three), 1)
    boasting = [*three, profile(b"\x01", 1e9)]
    assert coverage(boasting, 2)[0] < 4, "nobody counts for more than ten usual peers"
    assert coverage([], 3) == [0.0] * 3
    assert coverage([profile(b"\xff\xff", 1.0)], 4) == [1.0] * 4, "a mask that fits no run says nothing"
