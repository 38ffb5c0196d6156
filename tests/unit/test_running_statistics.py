"""Buffers that training changes without gradients: in the base as a plain mean, a peer's own in training."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_rounds import Network, committed, hold, plan_for, whole
from safetensors.torch import load_file
from saved_run import SMALL_DIGITS, save_run
from torch import Tensor, nn

from dht_config.errors import ManifestError
from dht_config.manifest import InnerOptimizerSection, parse_manifest
from p2p_trainer.checkpoint import load_checkpoint, save_checkpoint
from p2p_trainer.export import export, read_base
from p2p_trainer.modes import LocalMode
from p2p_trainer.run_model import layout_of
from p2p_trainer.running_statistics import averaged, counters, restore_counters, running_statistics
from p2p_trainer.session import Session, load_values, make_initial_bases
from p2p_trainer.strategies import MemoryStrategy, build_strategy, on_base
from p2p_trainer.tasks import load_task
from p2p_trainer.training import Accounts, Trainer
from peers.arena import SharedArena
from peers.fragment_state import FragmentState
from peers.fragments import FragmentLayout
from peers.ledger import Counts
from peers.outer import Nesterov, base_digest
from peers.reducer import MAX_ABSOLUTE_DIFFERENCE, Rules
from peers.round_plan import RoundPlan, plan_round
from peers.weighting import get_weighting

CONVOLUTIONS = SMALL_DIGITS + "[model]\nchannels = [4, 4]\nhidden_sizes = []\n"
MANIFEST = parse_manifest(CONVOLUTIONS, "test")
TASK = load_task("digits", MANIFEST.model, {})
CPU = torch.device("cpu")
SECTION = InnerOptimizerSection(name="sgd", lr=0.05, batch_size=8)
LAST = 1


class Peer:
    """A model with its arena, on its base."""

    def __init__(self, strategy: Any = "full", trained: frozenset[int] = frozenset()) -> None:
        torch.manual_seed(0)
        model = TASK.build_model()
        self.layout = layout_of(model, MANIFEST)
        self.arena = SharedArena.create(self.layout.num_elements)
        self.metas = make_initial_bases(averaged(model), self.layout, self.arena)
        self.state = FragmentState(LAST, self.layout, self.arena)
        self.state.restore(self.metas[LAST])
        self.strategy: MemoryStrategy = build_strategy(strategy, model, self.layout, SECTION, CPU, trained)
        manifest: Any = SimpleNamespace(inner_optimizer=SECTION)
        self.mode = LocalMode(TASK, self.strategy, manifest, self.layout, self.arena, 8, 7)

    @property
    def model(self) -> nn.Module:
        return self.strategy.model

    def statistics(self, of: Tensor) -> Tensor:
        """The part of a vector of the last fragment that is statistics."""
        return of[self.layout.parameters_of(LAST) :]

    def own(self) -> Tensor:
        out = torch.empty(self.layout.size(LAST))
        self.strategy.snapshot(LAST, out)
        return self.statistics(out)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.mode.step(0, None, lambda: None)


def with_statistics(plan: RoundPlan, parameters: int, part_elements: int = 1000) -> RoundPlan:
    """The same round of a fragment in which not all elements are parameters."""
    return plan_round(
        group_id=plan.group_id,
        tick=plan.tick,
        fragment=plan.fragment,
        size=plan.size,
        parameters=parameters,
        members=plan.members,
        target_group_size=64,
        part_elements=part_elements,
    )


def test_persistent_buffers_of_floating_point_are_the_last_elements_of_the_last_fragment() -> None:
    model = TASK.build_model()
    model.register_buffer("constant", torch.ones(3), persistent=False)
    names = list(running_statistics(model))
    assert names == ["2.running_mean", "2.running_var", "5.running_mean", "5.running_var"]
    layout = layout_of(model, MANIFEST)
    assert layout.statistics == tuple(names) and layout.names[-4:] == tuple(names)
    sizes = [layout.size(0), layout.size(1)]
    assert [layout.parameters_of(0), layout.parameters_of(1)] == [sizes[0], sizes[1] - 16]
    assert sum(sizes) == sum(value.numel() for value in averaged(model).values())


@given(st.integers(1, 50), st.integers(0, 20), st.integers(1, 9), st.integers(2, 5))
def test_no_part_holds_parameters_and_statistics(parameters: int, statistics: int, part: int, members: int) -> None:
    size = parameters + statistics
    plan = with_statistics(plan_for([whole(size, 1)] * members, size), parameters, part)
    parts = [part for share in plan.shares for part in share.parts]
    assert [low for low, _ in parts] == [0, *(high for _, high in parts[:-1])] and parts[-1][1] == size
    assert not any(low < parameters < high for low, high in parts)


@pytest.mark.parametrize("weighting", ["samples_times_batch", "fednova", "uniform"])
def test_statistics_travel_as_they_are_and_their_mean_is_by_samples(weighting: str) -> None:
    """Under a codec and a weighting that would make something else of them."""
    samples, parameters, size = (1, 3, 28), 300, 310
    spans = [whole(size, count, steps=1 + count % 2) for count in samples]
    plan = with_statistics(plan_for(spans, size), parameters, 128)
    own = [torch.randn(size) * 0.01 for _ in samples]
    for peer, values in enumerate(own):
        values[parameters:] = torch.arange(10) * 100.0 + peer
    network = Network(plan, codec="int4", answer_codec="int4", weighting=get_weighting(weighting))
    results = committed(hold(network, own))
    assert len({result.average.numpy().tobytes() for result in results}) == 1
    mean = sum(count * values[parameters:] for count, values in zip(samples, own, strict=True)) / sum(samples)
    torch.testing.assert_close(results[0].average[parameters:], mean, rtol=1e-6, atol=1e-5)


def test_a_base_has_the_weighted_mean_of_everybodys_and_no_momentum_moves_it_on() -> None:
    """Three peers, each with data of its own kind; the outer optimizer has momentum, which is for parameters."""
    samples = (8, 16, 40)
    peers = [Peer() for _ in samples]
    spans = [whole(peers[0].state.size, count) for count in samples]
    for round_number in range(3):
        for index, peer in enumerate(peers):
            with torch.no_grad():
                peer.model.train()
                peer.model(torch.rand(8, 64) * (1 + 20 * index))
            peer.mode.take_snapshot(LAST, samples[index])
        own = [peer.own() for peer in peers]
        plan = replace(plan_for(spans, peers[0].state.size), fragment=LAST, tick=round_number)
        plan = with_statistics(plan, peers[0].state.parameters)
        contributions = [peer.state.contribution(span).whole() for peer, span in zip(peers, spans, strict=True)]
        results = committed(hold(Network(plan, codec="int8", answer_codec="int8"), contributions))
        for peer, result in zip(peers, results, strict=True):
            peer.state.commit(Nesterov(lr=0.7, momentum=0.9), plan, result.average, result.parts, b"")
            peer.mode.rebase(LAST, keep=True, pending=True)
        assert len({peer.state.digest for peer in peers}) == 1
        mean = sum(count * values for count, values in zip(samples, own, strict=True)) / sum(samples)
        torch.testing.assert_close(peers[0].statistics(peers[0].state.base), mean, rtol=1e-4, atol=1e-5)
        assert torch.equal(peers[0].own(), own[0]), "in training each goes on with its own"
    # The momentum of statistics is never used.
    assert not peers[0].statistics(peers[0].state.outer_state[0]).any()


@pytest.mark.parametrize(
    ("name", "trained"), [("full", frozenset()), ("fragments", frozenset({LAST})), ("fragments", frozenset({0}))]
)
def test_a_newcomer_gets_them_with_the_base_and_a_variance_is_never_negative(
    name: Any, trained: frozenset[int]
) -> None:
    peer = Peer(name, trained)
    base = peer.state.base
    peer.statistics(base).copy_(torch.linspace(1, 2, 16))
    variances = slice(4, 8)
    peer.statistics(base)[variances] = -1e-7  # a mean's rounding
    peer.mode.rebase(LAST, keep=False, pending=False)
    assert (peer.own()[variances] == 0).all()
    assert torch.equal(peer.own()[8:], peer.statistics(base)[8:])
    peer.steps(2)
    assert (peer.own()[variances] > 0).all()
    counter = dict(peer.model.named_buffers())["2.num_batches_tracked"]
    assert counter.dtype == torch.int64 and counter == 2


def test_a_rebase_leaves_them_where_training_has_brought_them() -> None:
    for name, trained in (("full", frozenset[int]()), ("fragments", frozenset({LAST}))):
        peer = Peer(name, trained)
        peer.steps(3)
        peer.mode.take_snapshot(LAST, 24)
        peer.steps(1)
        before = peer.own()
        peer.state.base.sub_(100.0)  # so far that a variance would become negative
        peer.mode.rebase(LAST, keep=True, pending=True)
        assert torch.equal(peer.own(), before)
        assert (peer.own()[4:8] > 0).all()


def live(peer: Peer) -> Tensor:
    """What the model itself holds."""
    return torch.cat(list(running_statistics(peer.model).values())).clone()


def test_they_move_on_while_their_fragment_is_not_trained() -> None:
    """Its work from before waits for a round: what comes of that does not set them back."""
    peer = Peer("fragments", frozenset({LAST}))
    peer.steps(2)
    peer.mode.take_snapshot(LAST, 16)
    peer.strategy.train_only(frozenset({0}), {0: peer.arena.base[peer.layout.slice(0)].clone()})
    peer.steps(3)
    before = live(peer)
    saved = peer.strategy.unrounded()
    assert torch.equal(peer.statistics(saved[LAST]), before)
    peer.mode.rebase(LAST, keep=True, pending=True)
    assert LAST in peer.strategy.unrounded(), "it is kept"
    assert torch.equal(live(peer), before) and torch.equal(peer.own(), before)


@pytest.mark.parametrize("pending", [True, False])
def test_an_evaluation_is_with_those_of_the_base_also_where_their_fragment_is_frozen(pending: bool) -> None:
    peer = Peer("fragments", frozenset({LAST}) if pending else frozenset({0}))
    if pending:
        peer.steps(2)
        peer.strategy.train_only(frozenset({0}), {0: peer.arena.base[peer.layout.slice(0)].clone()})
    peer.steps(3)
    before = live(peer)
    assert (LAST in peer.strategy.unrounded()) == pending
    base = torch.full((peer.layout.num_elements,), 0.25)
    with on_base(peer.strategy, peer.layout, base):
        inside = running_statistics(peer.model)
        assert tuple(inside) == peer.layout.statistics and all(bool((value == 0.25).all()) for value in inside.values())
    assert torch.equal(live(peer), before)


def test_counters_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    peer = Peer()
    peer.steps(3)
    accounts = Accounts(layout=peer.layout, samples=24, steps=3, counts=[Counts(24, 3)] * 2, fragments=peer.metas)
    trainer: Any = SimpleNamespace(arena=peer.arena, strategy=peer.strategy, accounts=accounts, checkpoint_meta={})
    tensors, meta = Trainer.checkpoint_contents(trainer, peer.metas, clean=True)
    again = Peer()
    session: Any = SimpleNamespace(_restore_optimizer=lambda *_: None)
    save_checkpoint(tmp_path, tensors, {**meta, "format": 3})
    saved = load_checkpoint(tmp_path, pytest.fail)
    assert saved is not None
    Session._restored(session, saved, again.strategy, again.layout)
    assert [int(value) for value in counters(again.model).values()] == [3, 3]
    restore_counters(again.model, {"2.num_batches_tracked": torch.ones(2), "unknown": torch.ones(())})
    assert [int(value) for value in counters(again.model).values()] == [3, 3], "of another model"


def test_what_is_not_finite_is_not_contributed_and_does_not_stay() -> None:
    peer = Peer()
    buffer = dict(peer.model.named_buffers())["2.running_mean"]
    buffer[0], buffer[1], buffer[2] = torch.nan, torch.inf, 1e9
    peer.mode.take_snapshot(LAST, 8)
    contribution = peer.statistics(peer.state.contribution(whole(peer.state.size, 8)).whole())
    most = MAX_ABSOLUTE_DIFFERENCE / 2
    assert contribution[:4].tolist() == [0.0, most, most, 0.0]
    peer.mode.rebase(LAST, keep=True, pending=True)
    assert buffer.tolist() == [0.0, 0.0, 1e9, 0.0]


def test_they_come_back_from_a_checkpoint_as_they_were() -> None:
    peer = Peer()
    peer.steps(3)
    saved = peer.strategy.unrounded()
    own = peer.own()
    again = Peer()
    again.arena.snapshot.copy_(again.arena.base)
    again.state.base.sub_(50.0)
    accounts = Accounts(layout=again.layout, samples=24, steps=3, counts=[Counts(24, 3)] * 2, fragments=again.metas)
    load_values(again.strategy, again.arena, accounts, saved, [True, True])
    assert torch.equal(again.own(), own)


def test_an_exported_model_has_those_of_the_base(tmp_path: Path) -> None:
    manifest, arena = save_run(tmp_path / "run", CONVOLUTIONS)
    layout = layout_of(TASK.build_model(), manifest)
    arena.base[-8:-4] = 0.25
    _save_again(tmp_path / "run", layout, arena)
    export(read_base(tmp_path / "run", lambda _warning: None), tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored["5.running_mean"].tolist() == [0.25] * 4
    assert stored["5.num_batches_tracked"].dtype == torch.int64


def _save_again(directory: Path, layout: FragmentLayout, arena: SharedArena) -> None:
    """The same checkpoint with what lies in the arena now."""
    found = load_checkpoint(directory, lambda _warning: None)
    assert found is not None
    for index, row in enumerate(found.meta["fragments"]):
        where = layout.slice(index)
        digest = base_digest(
            fragment=index,
            version=row["version"],
            total_element_samples=row["total_element_samples"],
            history=bytes.fromhex(row["history"]),
            base=arena.base[where],
            outer_state=arena.outer_state[:, where],
        )
        row["digest"] = digest.hex()
    save_checkpoint(directory, {"base": arena.base, "outer_state": arena.outer_state}, found.meta)


def test_a_run_on_averaged_gradients_refuses_such_a_model_and_names_what_would_do() -> None:
    text = CONVOLUTIONS + '[averaging]\nmode = "gradient"\nglobal_batch = 32\n'
    with pytest.raises(ManifestError, match=r"running statistics \(2.running_mean, ...\)") as refused:
        layout_of(TASK.build_model(), parse_manifest(text, "test"))
    assert "GroupNorm" in refused.value.remedy


def test_values_that_are_not_finite_are_refused_before_a_run_begins() -> None:
    model = copy.deepcopy(TASK.build_model())
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    layout = layout_of(model, MANIFEST)
    with pytest.raises(ManifestError, match="mask begins with values that are not finite") as refused:
        make_initial_bases(averaged(model), layout, SharedArena.create(layout.num_elements))
    assert "persistent=False" in refused.value.remedy


def test_rules_differ_for_statistics_only() -> None:
    plan = plan_for([whole(4, 1)] * 2, 4)
    rules = Rules(codec=None)
    assert rules.at(plan, 0) is rules and rules.at(plan, 3) is rules
