"""A fragment's base and account through commits, losses and fetches: every sample counts exactly once.

The training process is played by ``Peer``: its parameters grow by ``UNIT`` per sample in every element, so that what
a base does not hold yet can be read off the parameters as well as off the ledger.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hivemind.p2p import PeerID
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.arena import SharedArena
from peers.fragment_state import FragmentState, counts_at_start
from peers.fragments import FragmentLayout
from peers.ledger import Counts, Ledger, PendingSpan
from peers.messages import MAX_RECEIPTS, AveragedPart, extend_history
from peers.outer import NO_HISTORY, Nesterov, base_digest
from peers.pipe import FragmentMeta, SnapshotTaken
from peers.round_plan import GroupMember, RoundPlan
from peers.transfer import FetchedBase

SIZE = 12
UNIT = 2.0**-10
LAYOUT = FragmentLayout(names=("a",), shapes=((SIZE,),), bounds=(0, SIZE))
OUTER = Nesterov(lr=0.5, momentum=0.5)


class Peer:
    """One peer's state of the fragment, and the training process's side of it."""

    def __init__(self, index: int) -> None:
        self.id = PeerID(b"\x12\x20" + bytes([index]) * 32)
        self.state = FragmentState(0, LAYOUT, SharedArena.create(SIZE))
        zeros = torch.zeros(SIZE)
        self.state.restore(
            FragmentMeta(
                version=0,
                digest=base_digest(
                    fragment=0, version=0, total_element_samples=0, history=NO_HISTORY, base=zeros, outer_state=zeros
                ),
                total_element_samples=0,
                history=NO_HISTORY,
                ledger=Ledger.open(SIZE).to_json(),
            )
        )
        self.state.counted = Counts()
        self.parameters = zeros.clone()
        self.samples = 0
        self.contributed = 0
        self.save()

    def save(self) -> None:
        """A checkpoint, through JSON as on the disk."""
        record = json.loads(json.dumps(self.state.record.to_json()))
        tensors = self.state.base.clone(), self.state.outer_state.clone(), self.parameters.clone()
        self.saved = self.samples, record, tensors

    def restart(self, *, clean: bool) -> None:
        """Begin again from the checkpoint, as ``BaseKeeper.sync`` does. A snapshot does not survive that."""
        samples, record, (base, outer_state, parameters) = self.saved
        self.state = FragmentState(0, LAYOUT, SharedArena.create(SIZE))
        self.state.base.copy_(base)
        self.state.outer_state.copy_(outer_state)
        self.state.snapshot.copy_(base)
        self.state.restore(FragmentMeta.from_json(record))
        self.state.uncertain = not clean
        self.parameters = parameters.clone()
        self.samples, _ = counts_at_start(
            self.state, Counts(samples, samples), Counts(self.contributed, self.contributed)
        )
        self.state.counted = Counts(self.samples, self.samples)
        if self.samples > samples:
            self.parameters = base.clone()
            self.state.drop_undecided(self.samples, self.samples)

    @property
    def own_id(self) -> bytes:
        return self.id.to_bytes()

    def train(self, samples: int) -> None:
        self.samples += samples
        self.parameters += samples * UNIT

    def snapshot(self, *, late: bool = False) -> None:
        """``late``: for a round that it missed; the next one uses it."""
        self.state.taken, self.state.late = None, None
        self.state.snapshot.copy_(self.parameters)
        taken = SnapshotTaken(fragment=0, samples=self.samples, steps=self.samples)
        if late:
            self.state.late = taken
        else:
            self.state.taken = taken

    def prepare(self) -> None:
        """Before a round: the late snapshot if there is one, else a new one."""
        if self.state.late is not None:
            self.state.taken, self.state.late = self.state.late, None
        else:
            self.snapshot()
        assert self.state.taken is not None
        self.state.contribution(self.state.ledger.pending(self.state.taken.samples, self.state.taken.steps))

    def member(self) -> GroupMember:
        assert self.state.taken is not None
        taken = self.state.taken
        return GroupMember(
            peer_id=self.id,
            spans=self.state.ledger.pending(taken.samples, taken.steps),
            samples=taken.samples,
            steps=taken.steps,
        )

    def rebase(self, keep: bool) -> None:
        """What the training process does on ``Rebase``, and the swarm on ``Rebased``."""
        if keep:
            self.parameters = self.state.base + (self.parameters - self.state.snapshot)
        else:
            self.parameters = self.state.base.clone()
            self.state.ledger = self.state.ledger.drop(self.samples, self.samples)

    def commit(self, plan: RoundPlan, average: torch.Tensor, parts: Sequence[AveragedPart]) -> None:
        self.state.commit(OUTER, plan, average, parts, self.own_id)
        self.rebase(keep=True)

    def adopt(self, donor: Peer, *, newest: int = MAX_RECEIPTS) -> bool:
        """Take the donor's base, with its ``newest`` receipts only; returns whether progress was kept."""
        frozen = donor.state.frozen()
        sent = frozen.receipts[max(0, len(frozen.receipts) - newest) :]
        before = frozen.history_before
        for receipt in frozen.receipts[: len(frozen.receipts) - len(sent)]:
            before = extend_history(before, receipt)
        fetched = FetchedBase(
            claim=donor.state.claim,
            total_element_samples=frozen.total_element_samples,
            history=frozen.history,
            history_before=before,
            base=donor.state.base.clone(),
            outer_state=donor.state.outer_state.clone(),
            receipts=sent,
            donors=("d",),
            bytes_received=len(frozen.payload),
            seconds=1.0,
        )
        keep = self.state.adopt(fetched, self.own_id)
        self.rebase(keep)
        return keep

    @property
    def counts(self) -> tuple[int, int, int]:
        """Element samples: credited, dropped, pending."""
        ledger = self.state.ledger
        return (
            ledger.credited_element_samples(),
            ledger.dropped_element_samples(),
            ledger.pending_element_samples(self.samples),
        )

    def check(self) -> None:
        """Invariant 2 for this peer, in the ledger and in the parameters themselves."""
        assert sum(self.counts) == self.samples * SIZE
        pending = torch.zeros(SIZE)
        for span in self.state.ledger.pending(self.samples, self.samples):
            pending[span.start : span.stop] = span.samples
        torch.testing.assert_close((self.parameters - self.state.base) / UNIT, pending, rtol=1e-4, atol=0.02)


def average_of(peers: Sequence[Peer], parts: Sequence[AveragedPart]) -> torch.Tensor:
    """The weighted mean of the contributions that are in each part, rounded once."""
    average = torch.zeros(SIZE, dtype=torch.float64)
    weights = torch.zeros(SIZE, dtype=torch.float64)
    for part in parts:
        for index in part.included:
            contribution = peers[index].state.contribution(peers[index].member().spans).whole().double()
            for span in peers[index].member().spans:
                where = slice(max(span.start, part.start), max(span.start, part.start, min(span.stop, part.stop)))
                average[where] += span.samples * contribution[where]
                weights[where] += span.samples
    return torch.where(weights > 0, average / weights, 0.0).float()


ticks = itertools.count()


def plan_of(peers: Sequence[Peer]) -> RoundPlan:
    members = tuple(peer.member() for peer in peers)
    everybody = tuple(range(len(members)))
    return RoundPlan(
        group_id=b"group of a test",
        tick=next(ticks),
        fragment=0,
        size=SIZE,
        parameters=SIZE,
        members=members,
        groups=(everybody,),
        shares=(),
    )


def hold(
    peers: Sequence[Peer], included: Sequence[Sequence[int]], committing: Sequence[int], *, snapshot: bool = True
) -> list[AveragedPart]:
    """One round of ``peers``: part p holds ``included[p]``; those ``committing`` get all answers, the rest do not."""
    if snapshot:
        for peer in peers:
            peer.prepare()
    width = SIZE // len(included)
    borders = [index * width for index in range(len(included))] + [SIZE]
    parts = [
        AveragedPart(start=borders[index], stop=borders[index + 1], included=sorted(held))
        for index, held in enumerate(included)
    ]
    plan, average = plan_of(peers), average_of(peers, parts)
    for index, peer in enumerate(peers):
        peer.state.contributes(plan.tick)
        assert peer.state.taken is not None
        peer.contributed = peer.state.taken.samples
        if index in committing:
            peer.commit(plan, average, parts)
    return parts


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    first, second = Peer(1), Peer(2)
    first.train(8)
    second.train(4)
    yield first, second
    first.check()
    second.check()


def test_a_committed_contribution_is_counted_and_what_came_after_the_snapshot_is_pending(
    pair: tuple[Peer, Peer],
) -> None:
    first, second = pair
    first.snapshot()
    second.snapshot()
    first.train(5)  # training goes on during the round
    hold(pair, [[0, 1]], committing=[0, 1], snapshot=False)
    assert first.counts == (8 * SIZE, 0, 5 * SIZE)
    assert second.counts == (4 * SIZE, 0, 0)
    assert first.state.version == second.state.version == 1
    assert first.state.digest == second.state.digest
    assert first.state.total_element_samples == 12 * SIZE
    expected = 0.75 * (8 * 8 + 4 * 4) / 12 * UNIT  # lr * (1 + momentum) * mean
    torch.testing.assert_close(first.state.base, torch.full((SIZE,), expected))


def test_the_digest_of_a_committed_base_is_that_of_its_bytes(pair: tuple[Peer, Peer]) -> None:
    hold(pair, [[0, 1]], committing=[0, 1])
    state = pair[0].state
    assert state.claim.digest == base_digest(
        fragment=0,
        version=1,
        total_element_samples=state.total_element_samples,
        history=extend_history(NO_HISTORY, state.receipts[0]),
        base=state.base,
        outer_state=state.outer_state,
    )


def test_a_step_that_fails_half_way_leaves_no_base_that_anybody_could_take_for_one(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    first.snapshot()
    plan, parts = plan_of([first]), [AveragedPart(start=0, stop=SIZE, included=[0])]
    average = first.state.contribution(first.member().spans).whole()
    with pytest.raises(RuntimeError):
        first.state.commit(OUTER, plan, average[:-1], parts, first.own_id)
    assert first.state.version == -1 and not first.state.digest


def test_parts_that_closed_without_us_stay_pending_with_their_progress(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1], [1], [0, 1]], committing=[0, 1])
    assert first.counts == (8 * 8, 0, 8 * 4)
    assert second.counts == (4 * SIZE, 0, 0)
    first.train(2)
    first.check()
    hold(pair, [[0, 1]], committing=[0, 1])
    assert first.counts == (10 * SIZE, 0, 0)
    assert first.state.total_element_samples == 10 * SIZE + 4 * SIZE


def test_a_contribution_whose_answers_were_missed_is_counted_once(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[1])
    first.train(3)
    assert first.adopt(second)
    assert first.counts == (8 * SIZE, 0, 3 * SIZE)
    assert first.state.claim == second.state.claim


def test_a_contribution_that_was_in_some_parts_only_is_carried_in_the_others(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1], [1]], committing=[1])
    first.train(3)
    assert first.adopt(second)
    assert first.counts == (8 * 6, 0, 3 * 6 + 11 * 6)


def test_a_contribution_that_the_round_left_out_is_carried_whole(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[1]], committing=[1])
    assert first.adopt(second)
    assert first.counts == (0, 0, 8 * SIZE)


def test_if_receipts_do_not_reach_back_a_contribution_of_unknown_fate_is_dropped_never_counted_twice(
    pair: tuple[Peer, Peer],
) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[1])
    first.train(3)
    assert not first.adopt(second, newest=0)
    assert first.counts == (0, 11 * SIZE, 0)
    assert torch.equal(first.parameters, first.state.base)


@pytest.mark.parametrize("rounds_before", [1, 4])
def test_who_comes_back_to_a_line_has_the_credit_that_is_in_it_and_not_that_of_the_other(
    pair: tuple[Peer, Peer], rounds_before: int
) -> None:
    """Whichever line is longer."""
    first, second = pair
    elsewhere = Peer(3)
    for _ in range(rounds_before):
        hold(pair, [[0, 1]], committing=[0, 1])
    elsewhere.train(7)
    for _ in range(2):
        hold([elsewhere], [[0]], committing=[0])
    assert first.adopt(elsewhere)
    assert first.counts == (0, 8 * SIZE, 0)
    first.train(5)
    hold([first, elsewhere], [[0, 1]], committing=[0, 1])
    assert first.counts == (5 * SIZE, 8 * SIZE, 0)
    first.train(2)
    assert first.adopt(second)
    assert first.counts == (8 * SIZE, 5 * SIZE, 2 * SIZE)
    assert first.state.total_element_samples == (8 + 4) * SIZE, "as the peers' accounts add up"


def test_who_comes_back_to_a_line_has_the_credit_of_a_round_there_whose_answers_it_missed(
    pair: tuple[Peer, Peer],
) -> None:
    first, second = pair
    elsewhere = Peer(3)
    hold(pair, [[0, 1]], committing=[0, 1])
    first.train(3)
    hold(pair, [[0, 1]], committing=[1])
    for _ in range(2):
        hold([elsewhere], [[0]], committing=[0])
    assert first.adopt(elsewhere)
    hold([first, elsewhere], [[0, 1]], committing=[0, 1])
    assert first.counts == (3 * SIZE, 8 * SIZE, 0), "the other line knows nothing of that round"
    assert first.adopt(second)
    assert first.counts == (11 * SIZE, 0, 0)
    assert first.state.total_element_samples == (8 + 3 + 4) * SIZE


def test_newer_receipts_alone_do_not_tell_what_became_of_a_contribution(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[1])
    second.train(1)
    hold([second], [[0]], committing=[0])
    assert not first.adopt(second, newest=1)
    assert first.counts == (0, 8 * SIZE, 0)


def test_a_peer_that_was_in_no_round_keeps_its_progress_even_without_receipts(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold([second], [[0]], committing=[0])
    assert first.adopt(second, newest=0)
    assert first.counts == (0, 0, 8 * SIZE)


def test_a_contribution_from_a_snapshot_that_is_gone_is_counted_and_the_rest_dropped(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1], [1]], committing=[1])
    first.train(3)
    first.snapshot()  # for the next round, which found no group
    assert not first.adopt(second)
    assert first.counts == (8 * 6, 3 * 6 + 11 * 6, 0)


def test_a_late_snapshot_does_not_pass_for_the_one_that_was_contributed(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[1])
    first.train(3)
    first.snapshot(late=True)
    assert not first.adopt(second)
    assert first.counts == (8 * SIZE, 3 * SIZE, 0)
    assert first.state.late is None, "it is relative to a base that is gone"


def test_a_restarted_peer_learns_from_receipts_what_its_checkpoint_does_not_know(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[1])
    meta = first.state.meta
    first.state = FragmentState(0, LAYOUT, SharedArena.create(SIZE))  # a snapshot does not survive a restart
    first.state.restore(meta)
    first.state.uncertain = True
    assert not first.adopt(second)
    assert first.counts == (8 * SIZE, 0, 0)


def test_a_base_that_skips_several_versions_is_adopted_with_all_their_receipts(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[1])
    for _ in range(3):
        second.train(2)
        hold([second], [[0]], committing=[0])
    assert first.adopt(second)
    assert first.counts == (8 * SIZE, 0, 0)
    assert first.state.version == 4
    assert [one.version for one in first.state.receipts] == [1, 2, 3, 4], "it can tell others in its turn"


def test_what_was_credited_in_a_line_that_is_left_is_dropped(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[0, 1])
    first.train(5)
    hold([first], [[0]], committing=[0])  # a partition: each goes on alone
    second.train(9)
    hold([second], [[0]], committing=[0])
    first.train(2)
    assert first.adopt(second)
    assert first.counts == (8 * SIZE, 5 * SIZE, 2 * SIZE)
    assert first.state.claim == second.state.claim


def test_a_missed_round_of_the_line_that_wins_counts_although_we_committed_a_rival_of_it(
    pair: tuple[Peer, Peer],
) -> None:
    first, second = pair
    third = Peer(3)
    hold([first, third], [[0, 1]], committing=[1])
    hold([first, second], [[1]], committing=[0, 1])  # the rival of the same version, which left us out
    third.train(50)
    hold([third], [[0]], committing=[0])
    assert not first.adopt(third)
    assert first.counts == (8 * SIZE, 0, 0)


def test_what_was_credited_in_a_line_that_is_left_is_dropped_although_everybody_was_restarted(
    pair: tuple[Peer, Peer],
) -> None:
    first, second = pair
    hold(pair, [[0, 1]], committing=[0, 1])
    first.train(5)
    hold([first], [[0]], committing=[0])  # it leaves as the last one, and nobody has its base
    second.train(9)
    hold([second], [[0]], committing=[0])
    for peer in pair:
        peer.save()
        peer.restart(clean=True)
    first.train(2)
    assert first.adopt(second)
    assert first.counts == (8 * SIZE, 5 * SIZE, 2 * SIZE)


def test_work_from_after_the_checkpoint_counts_once_it_is_known_to_have_arrived(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    first.save()
    first.train(10)
    hold(pair, [[0, 1]], committing=[1])
    first.restart(clean=False)  # killed in the round: it cannot know that the other one committed it
    assert (first.samples, first.counts) == (18, (0, 18 * SIZE, 0)), "the numbers up to 18 are used up"
    first.train(3)
    assert first.adopt(second)
    assert first.counts == (18 * SIZE, 0, 3 * SIZE)


def test_work_from_after_the_checkpoint_stays_dropped_if_it_never_arrived(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    first.save()
    first.train(10)
    hold(pair, [[1]], committing=[1])
    first.restart(clean=False)
    first.train(3)
    assert first.adopt(second)
    hold(pair, [[0, 1]], committing=[0, 1])
    assert first.counts == (3 * SIZE, 18 * SIZE, 0)


def test_a_line_that_left_ours_before_all_that_we_remember_holds_none_of_our_credit(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    for _ in range(MAX_RECEIPTS + 1):
        first.train(1)
        hold([first], [[0]], committing=[0])
    second.train(200)
    for _ in range(MAX_RECEIPTS + 2):
        hold([second], [[0]], committing=[0])
    assert first.adopt(second)
    assert first.counts == (0, (8 + MAX_RECEIPTS + 1) * SIZE, 0)


def test_a_line_whose_branching_is_not_remembered_leaves_the_account_as_it_is(pair: tuple[Peer, Peer]) -> None:
    first, second = pair
    hold([first], [[0]], committing=[0])
    hold([second], [[0]], committing=[0])
    second.train(1)
    hold([second], [[0]], committing=[0])
    assert first.adopt(second, newest=1)
    assert sum(first.counts) == 8 * SIZE


def test_only_the_newest_receipts_are_kept(pair: tuple[Peer, Peer]) -> None:
    _, second = pair
    for _ in range(MAX_RECEIPTS + 3):
        hold([second], [[0]], committing=[0])
    assert [second.state.receipts[0].version, len(second.state.receipts)] == [4, MAX_RECEIPTS]


def test_what_is_announced_and_saved_describes_the_base(pair: tuple[Peer, Peer]) -> None:
    first, _ = pair
    hold(pair, [[0, 1]], committing=[0, 1])
    restored = FragmentState(0, LAYOUT, SharedArena.create(SIZE))
    assert restored.version == -1
    restored.restore(FragmentMeta.from_json(json.loads(json.dumps(first.state.record.to_json()))))
    assert restored.claim == first.state.claim
    assert restored.ledger == first.state.ledger
    assert restored.record == first.state.record
    assert first.state.claim.total_samples == 12


# Many rounds with random losses


@dataclass
class Step:
    """One thing that happens in the run; numbers are taken modulo what there is."""

    kind: str
    who: tuple[int, ...]
    samples: int
    included: tuple[tuple[int, ...], ...]
    committing: tuple[int, ...]
    newest: int


PEERS = 3
some = st.lists(st.integers(0, PEERS - 1), max_size=PEERS).map(tuple)
kinds = ["train", "train", "round", "round", "round", "fetch", "snapshot", "late snapshot", "save", "leave", "crash"]


def histories(newest: st.SearchStrategy[int]) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        kind=st.sampled_from(kinds),
        who=some,
        samples=st.integers(0, 20),
        included=st.lists(some, min_size=1, max_size=4).map(tuple),
        committing=some,
        newest=newest,
    )
    return st.lists(step, max_size=25)


class Run:
    """Plays steps, and keeps a plain account of whose samples are in which line of bases, element by element."""

    def __init__(self, *, forks: bool) -> None:
        self.peers = [Peer(index) for index in range(PEERS)]
        self.forks = forks
        self.held = {NO_HISTORY: torch.zeros(PEERS, SIZE, dtype=torch.int64)}
        """By history: samples of each peer in each element of that base."""

    @property
    def head(self) -> Peer:
        return max(self.peers, key=lambda peer: peer.state.claim.rank)

    def play(self, step: Step) -> None:
        chosen = [self.peers[index] for index in sorted(set(step.who))]
        if step.kind == "train":
            for peer in chosen:
                peer.train(step.samples)
        elif step.kind in ("snapshot", "late snapshot"):
            for peer in chosen:
                peer.snapshot(late=step.kind == "late snapshot")
        elif step.kind == "fetch":
            for peer in chosen:
                self.fetch(peer, step.newest)
        elif step.kind == "save":
            for peer in chosen:
                peer.save()
        elif step.kind == "leave":
            for peer in chosen:
                peer.save()
                peer.restart(clean=not peer.state.uncertain)
        elif step.kind == "crash":
            for peer in chosen:
                peer.restart(clean=False)
        elif chosen:
            self.round(chosen, step)
        for peer in self.peers:
            self.check(peer)

    def fetch(self, peer: Peer, newest: int = MAX_RECEIPTS) -> None:
        if peer.state.claim != self.head.state.claim:
            peer.adopt(self.head, newest=newest)

    def round(self, chosen: Sequence[Peer], step: Step) -> None:
        """Only peers with the same base meet; without forks only those with the swarm's."""
        base = chosen[0].state.claim if self.forks else self.head.state.claim
        group = [peer for peer in chosen if peer.state.claim == base]
        if not group:
            return
        for peer in group:
            peer.prepare()
        members = [peer.member() for peer in group]
        before = group[0].state.history
        included = [sorted({index % len(group) for index in held}) or [0] for held in step.included]
        committing = sorted({index % len(group) for index in step.committing})
        parts = hold(group, included, committing, snapshot=False)
        held = self.held[before].clone()
        for part in parts:
            for index in part.included:
                for span in members[index].spans:
                    where = slice(max(span.start, part.start), max(span.start, part.start, min(span.stop, part.stop)))
                    held[self.peers.index(group[index]), where] += span.samples
        for index in committing:
            self.held[group[index].state.history] = held

    def check(self, peer: Peer) -> None:
        peer.check()
        own = self.held[peer.state.history][self.peers.index(peer)]
        assert bool((own <= peer.samples).all()), "a sample is in the base twice"
        credited = torch.zeros(SIZE, dtype=torch.int64)
        for span in peer.state.ledger.spans:
            credited[span.start : span.stop] = span.credited
        assert bool((credited <= own).all()), "credited what the base does not hold"
        assert int(self.held[peer.state.history].sum()) == peer.state.total_element_samples


@settings(max_examples=100)
@given(histories(st.just(MAX_RECEIPTS)))
def test_whatever_is_lost_every_sample_is_in_the_lineage_once_or_pending_or_dropped(history: list[Step]) -> None:
    run = Run(forks=False)
    for step in history:
        run.play(step)
    for peer in run.peers:
        run.fetch(peer)
        run.check(peer)
    assert len({peer.state.digest for peer in run.peers}) == 1
    credited = sum(peer.counts[0] for peer in run.peers)
    assert credited == run.head.state.total_element_samples


@settings(max_examples=100)
@given(histories(st.sampled_from([0, 1, 2, MAX_RECEIPTS])))
def test_receipts_that_do_not_reach_back_never_make_a_sample_count_twice(history: list[Step]) -> None:
    run = Run(forks=False)
    for step in history:
        run.play(step)


@settings(max_examples=150)
@given(histories(st.just(MAX_RECEIPTS)))
def test_two_lines_of_bases_never_make_a_sample_count_twice_in_one(history: list[Step]) -> None:
    run = Run(forks=True)
    for step in history:
        run.play(step)
    for peer in run.peers:
        run.fetch(peer)
        run.check(peer)
    assert len({peer.state.digest for peer in run.peers}) == 1


def test_pending_spans_of_a_fresh_peer_are_one_span() -> None:
    peer = Peer(1)
    peer.train(3)
    peer.snapshot()
    assert peer.member().spans == (PendingSpan(start=0, stop=SIZE, samples=3, steps=3),)


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("lie", [{"samples": 2**59, "steps": 3}, {"samples": 3, "steps": 2**59}])
def test_a_base_that_names_more_work_of_ours_than_we_had_leaves_our_account_as_it_is(
    started: bool, lie: dict[str, int]
) -> None:
    """Else one liar, believed once, would leave a peer nothing to contribute, in its run directory for ever."""
    peer, liar = Peer(1), Peer(2)
    for one in (peer, liar):
        one.train(3)
    peer.snapshot()
    if not started:
        peer.state.counted = None
    peer.state.contribution(peer.state.ledger.pending(3, 3))
    liar.prepare()
    parts = [AveragedPart(start=0, stop=SIZE, included=[0, 1])]
    plan = plan_of([peer, liar])
    plan = replace(plan, members=(replace(plan.members[0], **lie), *plan.members[1:]))
    liar.commit(plan, torch.zeros(SIZE), parts)
    frozen = liar.state.frozen()
    fetched = FetchedBase(
        claim=liar.state.claim,
        total_element_samples=frozen.total_element_samples,
        history=frozen.history,
        history_before=frozen.history_before,
        base=liar.state.base.clone(),
        outer_state=liar.state.outer_state.clone(),
        receipts=frozen.receipts,
        donors=("d",),
        bytes_received=1,
        seconds=1.0,
    )
    before = peer.state.ledger
    peer.state.adopt(fetched, peer.own_id, possible_samples=1e9)
    assert peer.state.ledger == before and peer.state.version == 1
    assert counts_at_start(peer.state, Counts(3, 3), Counts(3, 3)) == Counts(3, 3)
