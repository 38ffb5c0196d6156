"""``gradient`` mode against one process on the union of the samples, and its shares, snapshots and losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_rounds import Network, committed, hold, peer
from torch import Tensor, nn

from dht_config.manifest import example_manifest, parse_manifest
from p2p_trainer.modes import GradientMode
from p2p_trainer.tasks import Task
from p2p_trainer.tasks.base import Batch
from p2p_trainer.tasks.digits import create as create_digits
from peers.arena import SharedArena
from peers.codecs import get_codec
from peers.contribution import Difference, GradientSum, SentPart, shares
from peers.fragment_state import FragmentState
from peers.fragments import cut, gather_fragment
from peers.ledger import Counts, Ledger, PendingSpan
from peers.outer import NO_HISTORY, build_outer_optimizer
from peers.pipe import FragmentMeta, SnapshotTaken
from peers.residual import AverageResidual
from peers.round_plan import GroupMember, plan_round

GRADIENT = """
[run]
name = "gradients"
fragments = {fragments}
[task]
name = "digits"
[outer_optimizer]
{outer}
[averaging]
mode = "gradient"
matchmaking_seconds = 0.5
global_batch = {batch}
{more}
"""
ADAMW = 'name = "adamw"\nlr = 0.01\nweight_decay = 0.1'


@dataclass
class LinearRegression:
    """y = X w + noise; a sample is its number, so that peers can be given samples of their own."""

    name: str = "linear"
    version: int = 1
    unit: str = "points"

    def build_model(self) -> nn.Module:
        return nn.Linear(5, 1)

    def data(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(5000, 5, generator=generator)
        target = points @ torch.tensor([[1.0], [-2.0], [0.5], [3.0], [0.0]]) + 0.1 * torch.randn(
            5000, 1, generator=generator
        )
        return points[numbers % 5000], target[numbers % 5000]

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        position = 0
        while True:
            numbers = 100_000 * seed + 7 * torch.arange(position, position + batch_size)
            position += batch_size
            yield self.data(numbers)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        return []


class Peer:
    """One peer's training and averaging side, without processes between them."""

    def __init__(self, index: int, task: Task, model: nn.Module, manifest_text: str, micro_batch: int) -> None:
        self.manifest = parse_manifest(manifest_text, "test")
        self.id = peer(index)
        self.parameters = dict(model.named_parameters())
        self.layout = cut({name: tuple(value.shape) for name, value in self.parameters.items()}, 2)
        self.outer = build_outer_optimizer(self.manifest.outer_optimizer)
        self.arena = SharedArena.create(self.layout.num_elements, self.outer.states)
        self.mode = GradientMode(
            task, model, self.parameters, self.manifest, self.layout, self.arena, micro_batch, index
        )
        self.states = [FragmentState(index, self.layout, self.arena, GradientSum()) for index in range(2)]
        for state in self.states:
            gather_fragment(self.parameters, self.layout, state.index, state.base)
            state.restore(
                FragmentMeta(
                    version=0,
                    digest=bytes(32),
                    total_element_samples=0,
                    history=NO_HISTORY,
                    ledger=Ledger.open(state.size).to_json(),
                )
            )
        self.samples = self.steps = 0

    @property
    def due(self) -> int:
        due = self.mode.samples_due([Counts(self.samples, self.steps)] * 2, [state.ledger for state in self.states])
        assert due is not None
        return due

    def train(self) -> None:
        """Until nothing is due."""
        while due := self.due:
            _, count = self.mode.step(0, due, lambda: None)
            self.samples += count
            self.steps += 1

    def snapshot(self, fragment: int) -> GroupMember:
        state = self.states[fragment]
        self.mode.take_snapshot(fragment, self.samples)
        state.taken = SnapshotTaken(fragment=fragment, samples=self.samples, steps=self.steps)
        return GroupMember(
            peer_id=self.id,
            spans=state.ledger.pending(self.samples, self.steps),
            samples=self.samples,
            steps=self.steps,
        )


@dataclass
class Group:
    peers: Sequence[Peer]
    codec: str = "float32"
    residuals: dict[int, AverageResidual] = field(default_factory=dict)
    ticks: int = 0
    target_group_size: int = 64

    def round(self, fragment: int, *, lose: bool = False) -> None:
        """Snapshots, all-reduce, commit; ``lose``: nobody gets an answer."""
        members = tuple(each.snapshot(fragment) for each in self.peers)
        states = [each.states[fragment] for each in self.peers]
        size = states[0].size
        self.ticks += 1
        plan = plan_round(
            group_id=b"a group of this test",
            tick=self.ticks,
            fragment=fragment,
            size=size,
            members=members,
            target_group_size=self.target_group_size,
            part_elements=max(50, size // 10),
        )
        contributions = [
            state.contribution(member.spans).whole() for state, member in zip(states, members, strict=True)
        ]
        network = Network(plan, codec=self.codec)
        results = committed(hold(network, contributions))
        if lose:
            return
        for index, state in enumerate(states):
            state.sent = network.lossy[index]
        for each, state, result in zip(self.peers, states, results, strict=True):
            state.commit(each.outer, plan, result.average, result.parts, each.id.to_bytes())
            each.mode.rebase(fragment, keep=True, pending=True)
        assert len({state.digest for state in states}) == 1


def union(task: Task, model: nn.Module, manifest_text: str, batches: Iterator[Batch], steps: int) -> list[Tensor]:
    """One process on all samples of each step, with torch's own optimizer."""
    section = parse_manifest(manifest_text, "test").outer_optimizer
    optimizer: torch.optim.Optimizer
    if section.name == "adamw":
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
        )
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=section.lr, momentum=section.momentum, nesterov=section.momentum > 0
        )
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def united(task: Task, sizes: Sequence[int]) -> Iterator[Batch]:
    """The samples that peers with these shares train on, step by step."""
    each = [task.batches(index, size) for index, size in enumerate(sizes)]
    while True:
        parts = [next(batches) for batches in each]
        yield tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def twins(task: Task, count: int) -> list[nn.Module]:
    models = [task.build_model() for _ in range(count)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


@pytest.mark.parametrize(("outer", "target_group_size"), [(ADAMW, 64), ("lr = 0.05\nmomentum = 0.5", 64), (ADAMW, 2)])
def test_peers_with_batches_1_3_and_28_are_one_process_on_32_samples(outer: str, target_group_size: int) -> None:
    task, sizes = LinearRegression(), [1, 3, 28]
    text = GRADIENT.format(fragments=2, batch=32, outer=outer, more="")
    *models, single = twins(task, 4)
    peers = [Peer(index, task, model, text, 4) for index, model in enumerate(models)]
    group = Group(peers, target_group_size=target_group_size)
    for _ in range(20):
        for each, size in zip(peers, sizes, strict=True):
            each.mode.share = size
            each.train()
            assert each.due == 0, "it waits for the new base"
        for fragment in range(2):
            group.round(fragment)
    expected = union(task, single, text, united(task, sizes), 20)
    for each, size in zip(peers, sizes, strict=True):
        for value, parameter in zip(expected, each.parameters.values(), strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-5)
        for state in each.states:
            assert state.ledger.credited_element_samples() == 20 * size * state.size
            assert state.total_element_samples == 20 * 32 * state.size


def test_four_peers_on_digits_are_one_process_on_the_union() -> None:
    example = parse_manifest(example_manifest("digits"), "digits")
    task = create_digits(example.model, example.data)
    sizes = [4, 8, 16, 36]
    text = GRADIENT.format(fragments=2, batch=64, outer=ADAMW, more="")
    *models, single = twins(task, 5)
    peers = [Peer(index, task, model, text, 8) for index, model in enumerate(models)]
    group = Group(peers)
    for _ in range(20):
        for each, size in zip(peers, sizes, strict=True):
            each.mode.share = size
            each.train()
        for fragment in range(2):
            group.round(fragment)
    # Peers take their samples from batches of their own micro-batch: the same order, cut differently.
    streams = [Samples(task, index, 8) for index in range(4)]

    def joined() -> Iterator[Batch]:
        while True:
            parts = [stream.take(size) for stream, size in zip(streams, sizes, strict=True)]
            yield tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    expected = union(task, single, text, joined(), 20)
    for each in peers:
        for value, parameter in zip(expected, each.parameters.values(), strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-5)


class Samples:
    """A task's samples one after another, however its batches are cut."""

    def __init__(self, task: Task, seed: int, batch_size: int) -> None:
        self.batches = task.batches(seed, batch_size)
        self.left: list[tuple[Tensor, ...]] = []

    def take(self, count: int) -> Batch:
        while len(self.left) < count:
            batch = next(self.batches)
            self.left += [tuple(tensor[row : row + 1] for tensor in batch) for row in range(len(batch[0]))]
        taken, self.left = self.left[:count], self.left[count:]
        return tuple(torch.cat(tensors) for tensors in zip(*taken, strict=True))


def test_a_lost_round_is_carried_with_its_samples_and_gradients() -> None:
    task = LinearRegression()
    text = GRADIENT.format(fragments=2, batch=8, outer="lr = 0.1\nmomentum = 0.0", more="")
    *models, single = twins(task, 3)
    peers = [Peer(index, task, model, text, 4) for index, model in enumerate(models)]
    group = Group(peers)
    for each in peers:
        each.mode.share = 4
        each.train()
    group.round(0, lose=True)
    assert [each.due for each in peers] == [0, 0], "the same samples are contributed again"
    for fragment in range(2):
        group.round(fragment)
    expected = union(task, single, text, united(task, [4, 4]), 1)
    for value, parameter in zip(expected, peers[0].parameters.values(), strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-6)
    assert all(float(state.snapshot.abs().max()) == 0 for each in peers for state in each.states)


def test_delayed_peers_compute_on_while_a_round_holds_their_contribution() -> None:
    task = LinearRegression()
    text = GRADIENT.format(fragments=2, batch=8, outer=ADAMW, more="delayed = true")
    peers = [Peer(index, task, model, text, 4) for index, model in enumerate(twins(task, 2))]
    for each in peers:
        each.mode.share = 4
        each.train()
        for fragment in range(2):
            each.snapshot(fragment)
        assert each.due == 4
        each.train()
        assert (each.due, each.samples) == (0, 8)


@pytest.mark.parametrize("codec", ["int8", "int4", "sparse"])
def test_what_a_codec_leaves_out_of_gradients_stays_in_the_sum(codec: str) -> None:
    task = LinearRegression()
    text = GRADIENT.format(fragments=2, batch=8, outer="lr = 0.01\nmomentum = 0.0", more="")
    peers = [Peer(index, task, model, text, 4) for index, model in enumerate(twins(task, 2))]
    group = Group(peers, codec=codec)
    for _ in range(3):
        before = []
        for each in peers:
            each.mode.share = 4
            each.train()
        for fragment in range(2):
            group.round(fragment)
        before = [state.snapshot.abs().max() for each in peers for state in each.states]
        assert all(torch.isfinite(value) for value in before)
    assert any(float(value) > 0 for value in before), "a lossy codec left something out"


def test_progress_that_is_dropped_leaves_no_gradient_behind() -> None:
    task = LinearRegression()
    text = GRADIENT.format(fragments=2, batch=8, outer=ADAMW, more="")
    each = Peer(0, task, task.build_model(), text, 4)
    each.train()
    each.snapshot(0)
    each.states[0].give_up()
    each.mode.rebase(0, keep=False, pending=False)
    each.mode.rebase(1, keep=False, pending=False)
    assert float(each.states[0].snapshot.abs().max()) == 0
    assert all(float(value.grad.abs().max()) == 0 for value in each.parameters.values() if value.grad is not None)


def test_a_batch_that_gives_no_finite_gradient_adds_nothing() -> None:
    class Diverging(LinearRegression):
        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return super().loss(model, batch) * float("inf")

    text = GRADIENT.format(fragments=2, batch=8, outer=ADAMW, more="")
    each = Peer(0, Diverging(), Diverging().build_model(), text, 4)
    loss, _ = each.mode.step(0, 4, lambda: None)
    assert loss != loss
    assert all(float(value.grad.abs().max()) == 0 for value in each.parameters.values() if value.grad is not None)


@given(
    st.integers(1, 10_000),
    st.dictionaries(st.text(min_size=1, max_size=5), st.floats(0, 1e6), min_size=1, max_size=20),
)
def test_shares_add_up_and_follow_the_rates(global_batch: int, rates: dict[str, float]) -> None:
    given_out = shares(global_batch, rates)
    assert sum(given_out.values()) == global_batch
    assert given_out == shares(global_batch, dict(reversed(rates.items()))), "in whatever order they are read"
    total = sum(rates.values())
    if total > 0:
        assert all(abs(given_out[one] - global_batch * rates[one] / total) <= 1 + 1e-6 for one in rates)


def test_a_contribution_of_no_samples_is_zero_and_leaves_what_there_was() -> None:
    spans = [PendingSpan(start=0, stop=2, samples=0, steps=0), PendingSpan(start=2, stop=4, samples=5, steps=1)]
    snapshot, base = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4)
    local = Difference()
    assert local.outgoing(snapshot, base, spans).whole().tolist() == [0.0, 0.0, 3.0, 4.0]
    local.accepted(snapshot, base, [(0, 4)], [])
    assert snapshot.tolist() == [0.0, 0.0, 3.0, 4.0], "progress without samples still counts from the base"
    snapshot = torch.tensor([1.0, 2.0, 5.0, 10.0])
    gradients = GradientSum()
    assert gradients.outgoing(snapshot, base, spans).whole().tolist() == [0.0, 0.0, 1.0, 2.0]
    body = get_codec("float16").encode(torch.tensor([0.5]))
    gradients.accepted(snapshot, base, [(0, 4)], [SentPart(2, 3, body, get_codec("float16"))])
    assert snapshot.tolist() == [1.0, 2.0, 2.5, 0.0]
