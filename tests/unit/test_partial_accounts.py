"""A peer that trains some fragments by turns: whatever it does in between, every sample counts exactly once.

Training is played: a step moves every trained element by ``UNIT`` for each sample. Rounds are plain averages of this
peer alone, so what bases hold and what is pending can be read off the values as well as off the ledgers.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.modes import LocalMode
from p2p_trainer.session import local_values, make_initial_bases, restored_counts
from p2p_trainer.strategies import build_strategy
from p2p_trainer.strategies.partial import PartialModel
from p2p_trainer.training import Accounts
from peers.arena import SharedArena
from peers.codecs import get_codec
from peers.contributed import FILE_NAME, last_contributed, note_contributed
from peers.contribution import SentPart
from peers.fragment_state import FragmentState, counts_at_start
from peers.fragments import cut
from peers.ledger import Counts, Ledger
from peers.messages import AveragedPart
from peers.outer import Nesterov
from peers.pipe import FragmentMeta, SnapshotTaken
from peers.round_plan import GroupMember, RoundPlan

UNIT = 2.0**-10
CPU = torch.device("cpu")
SHAPES = {"first": (5, 3), "second": (7,), "third": (4, 5)}
LAYOUT = cut(SHAPES, 4)
PLAIN = Nesterov(lr=1.0, momentum=0.0)
SECTION = InnerOptimizerSection(name="sgd", lr=0.1)
PEER = PeerID(b"\x12\x20" + bytes(32))


def untrained() -> nn.Module:
    model = nn.Module()
    for name, shape in SHAPES.items():
        setattr(model, name, nn.Parameter(torch.zeros(shape)))
    return model


class Alone:
    """Both sides of one peer, without processes between them."""

    def __init__(self, trained: frozenset[int]) -> None:
        self.ticks = 0
        self.arena = SharedArena.create(LAYOUT.num_elements, PLAIN.states)
        metas = make_initial_bases(dict(untrained().named_parameters()), LAYOUT, self.arena)
        self.begin(trained, metas, 0, [Counts()] * LAYOUT.num_fragments, {})

    def begin(
        self,
        trained: frozenset[int],
        metas: list[FragmentMeta],
        samples: int,
        counts: list[Counts],
        values: dict[int, torch.Tensor],
    ) -> None:
        strategy = build_strategy("fragments", untrained(), LAYOUT, SECTION, CPU, trained)
        assert isinstance(strategy, PartialModel)
        self.strategy = strategy
        manifest: Any = SimpleNamespace(inner_optimizer=SECTION)
        task: Any = SimpleNamespace(batches=lambda seed, size: iter(()))
        self.mode = LocalMode(task, strategy, manifest, LAYOUT, self.arena, 1, 0)
        self.states = [FragmentState(index, LAYOUT, self.arena) for index in range(LAYOUT.num_fragments)]
        for state, meta in zip(self.states, metas, strict=True):
            state.restore(meta)
        self.accounts = Accounts(layout=LAYOUT, samples=samples, steps=samples, counts=counts, fragments=metas)
        for state in self.states:
            pending = self.accounts.is_pending(state.index)
            strategy.load(state.index, values.get(state.index, state.base), pending=pending)

    def train(self, samples: int) -> None:
        for fragment in self.strategy.trained:
            for piece in self.strategy._fragments[fragment]:
                piece.elements.data.add_(samples * UNIT)
        self.accounts.stepped(samples, self.strategy.trained)

    def snapshot(self, fragment: int) -> None:
        samples, steps = self.accounts.counts[fragment]
        self.mode.take_snapshot(fragment, samples)
        self.states[fragment].taken = SnapshotTaken(fragment=fragment, samples=samples, steps=steps)

    def round(self, fragment: int, *, whole: bool, after: int = 0, codec: str = "float32") -> None:
        """A round; ``whole``: or else its second half closed without us. ``after``: samples trained meanwhile."""
        state = self.states[fragment]
        self.snapshot(fragment)
        taken = state.taken
        assert taken is not None
        member = GroupMember(
            peer_id=PEER,
            spans=state.ledger.pending(taken.samples, taken.steps),
            samples=taken.samples,
            steps=taken.steps,
        )
        contribution = state.contribution(member.spans).whole()
        if codec != "float32":
            body = get_codec(codec).encode(contribution)
            state.sent = [SentPart(0, state.size, body, get_codec(codec))]
            contribution = state.sent[0].values()
        self.train(after) if after else None
        middle = state.size if whole else state.size // 2
        parts = [AveragedPart(start=0, stop=middle, included=[0])]
        if not whole:
            parts.append(AveragedPart(start=middle, stop=state.size, included=[]))
        average = contribution.clone()
        average[middle:] = 0.0
        self.ticks += 1
        plan = RoundPlan(
            group_id=b"alone",
            tick=self.ticks,
            fragment=fragment,
            size=state.size,
            parameters=state.size,
            members=(member,),
            groups=((0,),),
            shares=(),
        )
        state.commit(PLAIN, plan, average, parts, PEER.to_bytes())
        self.rebase(fragment, keep=True)

    def rebase(self, fragment: int, *, keep: bool) -> None:
        """What ``Trainer`` does on ``Rebase``, and the averaging process on ``Rebased``."""
        state = self.states[fragment]
        self.accounts.replace(fragment, state.meta)
        if not keep:
            state.give_up()
            state.ledger = state.ledger.drop(*self.accounts.counts[fragment])
            self.accounts.ledgers[fragment] = state.ledger
        pending = self.accounts.is_pending(fragment) or state.unsent
        self.mode.rebase(fragment, keep=keep, pending=pending)
        state.forget_snapshot()

    def rotate(self, trained: frozenset[int]) -> None:
        bases = {fragment: state.base.clone() for fragment, state in enumerate(self.states)}
        self.strategy.train_only(trained, bases)

    def restart(self, trained: frozenset[int]) -> None:
        """Through what a checkpoint holds."""
        metas = [FragmentMeta.from_json(json.loads(json.dumps(state.record.to_json()))) for state in self.states]
        counts = [Counts(*row) for row in json.loads(json.dumps(self.accounts.counts))]
        self.begin(trained, metas, self.accounts.samples, counts, self.strategy.unrounded())

    def check(self) -> None:
        """Invariant 2, in the ledgers and in the values themselves."""
        assert self.accounts.exact
        for state, count in zip(self.states, self.accounts.counts, strict=True):
            assert state.ledger.credited_element_samples() == state.total_element_samples
            local = torch.empty(state.size)
            self.strategy.snapshot(state.index, local)
            has_own = state.index in self.strategy.unrounded()
            for span in state.ledger.pending(*count):
                where = slice(span.start, span.stop)
                if has_own:
                    assert torch.equal(local[where], state.base[where] + span.samples * UNIT)
                else:
                    assert not span.samples, "frozen with work that is in no base"
                    assert torch.equal(local[where], state.base[where].bfloat16().float())
            for span in state.ledger.spans:
                expected = torch.full((span.stop - span.start,), span.credited * UNIT)
                assert torch.equal(state.base[span.start : span.stop], expected)


fragments = st.integers(0, LAYOUT.num_fragments - 1)
some = st.frozensets(fragments, min_size=1)
events = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 5)),
        st.tuples(st.just("round"), fragments, st.booleans(), st.integers(0, 3)),
        st.tuples(st.just("lost"), fragments),
        st.tuples(st.just("drop"), fragments),
        st.tuples(st.just("rotate"), some),
        st.tuples(st.just("restart"), some),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(some, events)
def test_every_sample_counts_once_whatever_is_trained_when(trained: frozenset[int], history: list[Any]) -> None:
    peer = Alone(trained)
    for event in history:
        match event:
            case ("train", int(samples)):
                peer.train(samples)
            case ("round", int(fragment), bool(whole), int(after)):
                peer.round(fragment, whole=whole, after=after)
            case ("lost", int(fragment)):
                peer.snapshot(fragment)
                peer.train(1)
            case ("drop", int(fragment)):
                peer.rebase(fragment, keep=False)
                assert not peer.accounts.is_pending(fragment)
            case ("rotate", chosen):
                peer.rotate(chosen)
            case ("restart", chosen):
                peer.restart(chosen)
        peer.check()


def test_a_fragment_is_credited_with_what_trained_it_and_no_more() -> None:
    peer = Alone(frozenset({0, 1}))
    peer.train(8)
    peer.rotate(frozenset({1, 2}))
    peer.train(4)
    for fragment in range(4):
        peer.round(fragment, whole=True)
    credited = [row["credited_samples"] for row in peer.accounts.by_fragment()]
    assert credited == [8, 12, 4, 0]
    assert peer.accounts.samples == 12
    assert peer.accounts.trained_samples == peer.accounts.credited_samples
    assert set(peer.strategy.unrounded()) == {1, 2}, "what stopped with nothing pending takes no memory any more"


def test_what_a_sparse_codec_left_is_sent_when_its_fragment_is_trained_again() -> None:
    peer = Alone(frozenset({0}))
    peer.train(5)
    peer.round(0, whole=True, codec="sparse")
    peer.rotate(frozenset({1}))
    for fragment in (1, 0):
        peer.round(fragment, whole=True, codec="sparse")
    assert not peer.accounts.is_pending(0)
    assert 0 in peer.strategy.unrounded()
    peer.rotate(frozenset({0}))
    local = torch.empty(LAYOUT.size(0))
    peer.strategy.snapshot(0, local)
    torch.testing.assert_close(local, torch.full_like(local, 5 * UNIT))


# ------------------------------------------------------------------- restarts


def test_counts_go_on_from_the_furthest_that_is_known_of_each_fragment() -> None:
    state = Alone(frozenset({0})).states[0]
    state.ledger = Ledger.open(state.size).credit([(0, 2)], 30, 3)
    assert counts_at_start(state, Counts(20, 4), Counts(10, 2)) == (30, 4)
    assert counts_at_start(state, Counts(20, 2), Counts(40, 9)) == (40, 9)


def test_a_note_of_contributions_remembers_the_furthest_of_each_fragment(tmp_path: Any) -> None:
    assert last_contributed(tmp_path, 3) == ((0, 0),) * 3
    note_contributed(tmp_path, 1, Counts(8, 1), 3)
    note_contributed(tmp_path, 2, Counts(16, 2), 3)
    note_contributed(tmp_path, 1, Counts(4, 1), 3)
    assert last_contributed(tmp_path, 3) == ((0, 0), (8, 1), (16, 2))
    assert last_contributed(tmp_path, 4) == ((0, 0),) * 4, "of a run with as many fragments only"


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"fragments": 3}', '{"fragments": [[1]]}', '{"fragments": [[-1, 0]]}', '{"samples": 1}']
)
def test_a_damaged_note_is_no_note(tmp_path: Any, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert last_contributed(tmp_path, 1) == ((0, 0),)


def test_notes_and_checkpoints_from_before_counts_went_by_fragment_still_hold(tmp_path: Any) -> None:
    (tmp_path / FILE_NAME).write_text('{"samples": 24, "steps": 3}')
    assert last_contributed(tmp_path, 2) == ((24, 3), (24, 3))
    meta = {"format": 2, "samples": 24, "steps": 3}
    assert restored_counts(meta, 4) == [Counts(24, 3)] * 4
    tensors = {f"parameter.{name}": torch.full(shape, 1.5) for name, shape in SHAPES.items()}
    whole: Any = SimpleNamespace(tensors=tensors, meta=meta)
    values = local_values(whole, LAYOUT)
    assert [value.tolist() for value in values.values()] == [[1.5] * LAYOUT.size(index) for index in range(4)]
    assert local_values(SimpleNamespace(tensors={}, meta=meta), LAYOUT) == {}, "bases only"  # type: ignore[arg-type]
    assert restored_counts({}, 4) == [Counts()] * 4
