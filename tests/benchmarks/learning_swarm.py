"""The swarm of the learning check: peers with real gradients, the product's rules, and a clock that only counts.

See ``learning.py`` for what it is for. A tick computes, for each peer, the steps it would have made since the last one,
lands the bases that are due, and holds the round of the tick's fragment.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from error_feedback import ErrorFeedback
from torch import Tensor, nn
from torch.func import functional_call, grad

from dht_config.manifest import (
    AveragingSection,
    OuterOptimizerSection,
    RunManifest,
    example_manifest,
    parse_manifest,
)
from p2p_trainer.inner_optimizer import build_inner_optimizer, learning_rate, set_learning_rate
from p2p_trainer.strategies.partial import PartialModel
from p2p_trainer.strategies.rotation import Rotation, next_trained
from p2p_trainer.tasks import Batch, Task, load_task, mean_loss
from p2p_trainer.throughput import inner_step
from peers.codecs import get_codec
from peers.fragments import cut
from peers.outer import Nesterov
from peers.weighting import get_weighting

_OUTER, _AVERAGING = OuterOptimizerSection(), AveragingSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of model, swarm and run. A cycle is the time between two rounds of a fragment."""

    name: str
    model: dict[str, Any]
    sequence_length: int
    batch_size: int
    rounds: int
    """Rounds of each fragment, so cycles."""
    steps_per_cycle: tuple[float, ...]
    """Of each peer, the fastest first."""
    fragments: int = 4
    held_out_samples: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One choice of rules. The defaults are the product's; whatever a comparison varies is said in its cells."""

    name: str
    kind: str = "swarm"
    """"swarm"; "one process" on as many samples; "fastest alone", for as long."""
    weighting: str = _AVERAGING.weighting
    lr: float = _OUTER.lr
    momentum: float = _OUTER.momentum
    delay_cycles: float = 0.5
    """From the snapshot to the moment when the new base is in place."""
    up: str = _AVERAGING.codec
    """Codec of contributions."""
    down: str = _AVERAGING.answer_codec
    """Codec of averages."""
    feedback: str = "parameters"
    """Where a sender keeps what its codec left out: in its "parameters", "apart" from them, or nowhere ("dropped")."""
    beta: float = 1.0
    """The share of it that is kept."""
    batch_factors: tuple[int, ...] = ()
    """For each peer, how many times the usual batch it takes, with so many times fewer steps; () for 1 everywhere."""
    partial_peers: int = 0
    """How many of the peers, the slowest, train some fragments only, by turns, with the product's ``PartialModel``.
    Such a cell runs until as many samples are in the base as without them."""
    trained_fragments: int = 0
    """How many those train at a time."""
    slow_lines: tuple[int, ...] = ()
    """Peers that take part in every fourth round of a fragment, and then bring what they trained since their last."""
    staleness: str = "none"
    """By which rule the weight of what was trained on a base of the past falls: see ``STALENESS``. The product's is
    "inverse"; it makes no difference without slow lines."""
    inner_lr_factor: float = 1.0
    """Times the example's inner learning rate: outer and inner steps multiply."""
    brief: bool = True
    """Whether it is run when a quick look at everything is asked for."""


SLOW_CADENCE = 4
STALENESS: dict[str, Callable[[int], float]] = {
    "none": lambda rounds: 1.0,
    "half": lambda rounds: 0.5 if rounds else 1.0,
    "root": lambda rounds: (1 + rounds) ** -0.5,
    "inverse": lambda rounds: 1 / (1 + rounds),
}
"""Weight times this, by the rounds that went by without the peer: not at all; by half however many; by the polynomial
of FedAsync (Xie, Koyejo, Gupta 2019, arXiv:1903.03934) with its exponent 0.5, and with 1."""


class FlatModel:
    """A model whose parameters and gradients are views of two flat vectors, in the order of the product's layout."""

    def __init__(self, task: Task, scale: Scale) -> None:
        self.model = task.build_model()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        parameters = list(self.model.parameters())
        self.flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
        self.gradient = torch.zeros_like(self.flat.data)
        self.flat.grad = self.gradient
        position = 0
        for parameter in parameters:
            part = slice(position, position + parameter.numel())
            parameter.data = self.flat.data[part].view(parameter.shape)
            parameter.grad = self.gradient[part].view(parameter.shape)
            position = part.stop

    @property
    def values(self) -> Tensor:
        return self.flat.data

    def compute_gradient(self, task: Task, batch: Batch) -> None:
        self.gradient.zero_()
        torch.autograd.backward(task.loss(self.model, batch))


@lru_cache
def compiled_gradient(manifest_json: str) -> Callable[[Tensor, Batch], Tensor]:
    """The gradient at flat parameters ``(size,)``, compiled once for all peers: the calls into torch cost less."""
    task = _task(manifest_json)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.build_model()

        def forward(self, batch: Batch) -> Tensor:
            return task.loss(self.model, batch)

    loss = Loss()
    shapes = {name: parameter.shape for name, parameter in loss.named_parameters()}

    def of_flat(flat: Tensor, batch: Batch) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        parameters = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        value: Tensor = functional_call(loss, parameters, (batch,))
        return value

    compiled: Callable[[Tensor, Batch], Tensor] = torch.compile(grad(of_flat), fullgraph=True, dynamic=False)
    return compiled


class Peer:
    """One machine: its parameters, inner optimizer, data, and what of its work is not in a base yet."""

    def __init__(
        self,
        scale: Scale,
        initial: Tensor,
        seed: int,
        *,
        steps_per_cycle: float = 1.0,
        batch_factor: int = 1,
        lr_factor: float = 1.0,
        compiled: bool = False,
    ) -> None:
        self.task, self.section = task_of(scale), manifest_of(scale).inner_optimizer
        self.lr_factor = lr_factor
        self.compiled = compiled_gradient(manifest_of(scale).canonical_json()) if compiled else None
        self.net = FlatModel(self.task, scale)
        self.net.values.copy_(initial)
        self.optimizer = build_inner_optimizer([self.net.flat], self.section)
        self.batch_size = scale.batch_size * batch_factor
        self.steps_per_cycle = steps_per_cycle / batch_factor
        self.batches = self.task.batches(seed, self.batch_size)
        self.steps = 0
        self.accounted = [0] * scale.fragments
        """For each fragment, the steps that are in a contribution."""
        self.residual = torch.zeros_like(initial)
        self.cadence = 1
        self.stands_on = initial.clone()
        """The base that progress is measured from, of a peer that skips rounds."""

    def is_due(self, cycle: int, fragment: int) -> bool:
        return (cycle + fragment) % self.cadence == 0

    def fetch(self, where: slice, base: Tensor) -> None:
        """Before its round: what others made since goes under its progress."""
        self.net.values[where].add_(base).sub_(self.stands_on[where])
        self.stands_on[where] = base

    def steps_of(self, fragment: int) -> int:
        """In which that fragment was trained."""
        return self.steps

    def local(self, where: slice, fragment: int) -> Tensor:
        """A copy of a fragment's local values."""
        return self.net.values[where].clone()

    def rebase(self, where: slice, fragment: int, base: Tensor, reference: Tensor, coverage: Sequence[float]) -> None:
        """Parameters become the new base plus the progress since the reference."""
        self.net.values[where].sub_(reference).add_(base)

    def step(self, lineage_samples: int) -> None:
        """One inner step."""
        set_learning_rate(self.optimizer, self.lr_factor * learning_rate(self.section, lineage_samples))
        gradient = self.net.gradient
        if self.compiled is None:
            self.net.compute_gradient(self.task, next(self.batches))
        else:
            gradient.copy_(self.compiled(self.net.values, next(self.batches)))
        if self.section.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient))
            if norm > self.section.clip_norm:
                gradient.mul_(self.section.clip_norm / norm)
        self.optimizer.step()
        self.steps += 1


class PartialPeer(Peer):
    """One that trains some fragments only, by the product's own strategy and rotation."""

    def __init__(self, scale: Scale, initial: Tensor, seed: int, count: int, speed: float) -> None:
        super().__init__(scale, initial, seed, steps_per_cycle=speed)
        model = self.task.build_model()
        self.layout = cut(self.net.shapes, scale.fragments)
        nothing = [0] * scale.fragments
        trained = next_trained(frozenset(), nothing, nothing, f"{seed}", count)
        self.strategy = PartialModel(
            "fragments", model, self.layout, self.section, initial.device, trained, initial.device
        )
        self.rotation = Rotation(scale.fragments, trained, f"{seed}")
        self.trained_steps = [0] * scale.fragments
        self.bases = [initial[self.layout.slice(fragment)].clone() for fragment in range(scale.fragments)]
        for fragment, base in enumerate(self.bases):
            self.strategy.load(fragment, base)

    def steps_of(self, fragment: int) -> int:
        return self.trained_steps[fragment]

    def local(self, where: slice, fragment: int) -> Tensor:
        values = torch.empty(self.layout.size(fragment))
        self.strategy.snapshot(fragment, values)
        return values

    def rebase(self, where: slice, fragment: int, base: Tensor, reference: Tensor, coverage: Sequence[float]) -> None:
        pending = self.trained_steps[fragment] > self.accounted[fragment]
        self.strategy.rebase(fragment, base, reference, pending=pending)
        self.bases[fragment] = base.clone()
        self.rotation.coverage = coverage
        wanted = self.rotation.rebased(fragment, self.strategy.trained)
        if wanted != self.strategy.trained:
            new = wanted - self.strategy.trained
            self.strategy.train_only(wanted, {other: self.bases[other] for other in new})

    def step(self, lineage_samples: int) -> None:
        set_learning_rate(self.strategy.optimizer, self.lr_factor * learning_rate(self.section, lineage_samples))
        inner_step(
            self.task,
            self.strategy.model,
            self.strategy.optimizer,
            next(self.batches),
            self.batch_size,
            self.section.clip_norm,
        )
        self.steps += 1
        for fragment in self.strategy.trained:
            self.trained_steps[fragment] += 1


@dataclass(slots=True, kw_only=True)
class Round:
    """A round under way: what will be the base, and what each peer's progress will be measured from."""

    fragment: int
    lands_at_tick: int
    base: Tensor
    momentum: Tensor
    references: list[Tensor | None]
    """None for a peer that skipped it."""
    element_samples: int


class Swarm:
    """The peers and the base they share."""

    def __init__(self, cell: Cell, scale: Scale, seed: int, compiled: bool = False) -> None:
        self.cell, self.scale = cell, scale
        torch.manual_seed(seed)
        net = FlatModel(task_of(scale), scale)
        self.layout = cut(net.shapes, scale.fragments)
        self.base = net.values.clone()
        self.momentum = torch.zeros_like(self.base)
        self.reducer_residual = torch.zeros_like(self.base)
        factors = cell.batch_factors + (1,) * (len(scale.steps_per_cycle) - len(cell.batch_factors))
        self.peers: list[Peer] = [
            Peer(
                scale,
                self.base,
                seed * 1000 + index,
                steps_per_cycle=speed,
                batch_factor=factor,
                lr_factor=cell.inner_lr_factor,
                compiled=compiled,
            )
            for index, (speed, factor) in enumerate(zip(scale.steps_per_cycle, factors, strict=True))
        ]
        for index in range(len(self.peers) - cell.partial_peers, len(self.peers)):
            self.peers[index] = PartialPeer(
                scale, self.base, seed * 1000 + index, cell.trained_fragments, scale.steps_per_cycle[index]
            )
        for index in cell.slow_lines:
            self.peers[index].cadence = SLOW_CADENCE
        self.weighting = get_weighting(cell.weighting)
        self.outer = Nesterov(lr=cell.lr, momentum=cell.momentum)
        self.feedback = ErrorFeedback(beta=cell.beta)
        self.delay_ticks = round(cell.delay_cycles * scale.fragments)
        self.under_way: list[Round] = []
        self.element_samples = 0

    @property
    def lineage_samples(self) -> int:
        return self.element_samples // self.layout.num_elements

    @property
    def averaged_samples(self) -> int:
        """What will be in the base when everything has landed."""
        under_way = sum(item.element_samples for item in self.under_way)
        return (self.element_samples + under_way) // self.layout.num_elements

    def tick(self, tick: int) -> None:
        """Everything up to and at a tick: steps, bases that land, then a snapshot."""
        for index, peer in enumerate(self.peers):
            phase = index / len(self.peers)  # of a step, so that peers do not step in time
            due = int((tick + 1) / self.scale.fragments * peer.steps_per_cycle + phase)
            while peer.steps < due:
                peer.step(self.lineage_samples)
        self.land(tick)
        self.under_way.append(self.average(tick))
        self.land(tick)

    def average(self, tick: int) -> Round:
        """The round of a tick's fragment: contributions, their average, and the base that it makes."""
        fragment, cell = tick % self.scale.fragments, self.cell
        where = self.layout.slice(fragment)
        base = self.base[where]
        total, terms = torch.zeros_like(base), []
        references: list[Tensor | None] = []
        element_samples = 0
        for peer in self.peers:
            if not peer.is_due(tick // self.scale.fragments, fragment):
                references.append(None)
                continue
            if peer.cadence > 1:
                peer.fetch(where, base)
            stale = STALENESS[cell.staleness](peer.cadence - 1)
            snapshot = peer.local(where, fragment)
            steps = peer.steps_of(fragment) - peer.accounted[fragment]
            samples = steps * peer.batch_size
            peer.accounted[fragment] = peer.steps_of(fragment)
            element_samples += samples * base.numel()
            terms.append(tuple(stale * term for term in self.weighting.normaliser_terms(samples, steps)))
            weight = stale * self.weighting.value_weight(samples, steps)
            if weight == 0.0:  # nothing is sent; what was left out before stays where it is
                references.append(base.clone() if cell.feedback == "parameters" else snapshot)
                continue
            value = torch.sub(snapshot, base)
            if cell.feedback == "apart":
                self.feedback.compensate(value, peer.residual[where])
            sent = transmitted(cell.up, value)
            total.add_(sent, alpha=weight)
            left_out = self.feedback.residual_after(value, sent)
            if cell.feedback == "apart":
                peer.residual[where] = left_out
            references.append(snapshot.sub_(left_out) if cell.feedback == "parameters" else snapshot)
        normaliser = self.weighting.normaliser(tuple(sum(column) for column in zip(*terms, strict=True)))
        mean = torch.div(total, normaliser) if normaliser > 0 else total
        if cell.feedback != "dropped":
            mean.add_(self.reducer_residual[where])
        average = transmitted(cell.down, mean)
        self.reducer_residual[where] = torch.sub(mean, average)
        new_base, state = self.outer.step(base, self.momentum[where].unsqueeze(0), average, 1)
        return Round(
            fragment=fragment,
            lands_at_tick=tick + self.delay_ticks,
            base=new_base,
            momentum=state[0],
            references=references,
            element_samples=element_samples,
        )

    def land(self, tick: int) -> None:
        """Put in place the bases that are due: parameters become the new base plus the progress since the snapshot."""
        for landing in [item for item in self.under_way if item.lands_at_tick <= tick]:
            self.under_way.remove(landing)
            where = self.layout.slice(landing.fragment)
            self.base[where], self.momentum[where] = landing.base, landing.momentum
            self.element_samples += landing.element_samples
            for peer, reference in zip(self.peers, landing.references, strict=True):
                if reference is None:
                    continue
                coverage = self.coverage_without(peer) if isinstance(peer, PartialPeer) else ()
                peer.rebase(where, landing.fragment, landing.base, reference, coverage)
                if peer.cadence > 1:
                    peer.stands_on[where] = landing.base

    def coverage_without(self, peer: Peer) -> list[float]:
        """For each fragment, the speed of the other peers that train it."""
        others = [other for other in self.peers if other is not peer]
        return [
            math.fsum(
                other.steps_per_cycle
                for other in others
                if not isinstance(other, PartialPeer) or fragment in other.strategy.trained
            )
            for fragment in range(self.scale.fragments)
        ]


def transmitted(name: str, values: Tensor) -> Tensor:
    """What arrives."""
    codec = get_codec(name)
    return values.clone() if codec.lossless else codec.decode(codec.encode(values), values.numel())


@lru_cache
def _manifest(sequence_length: int, batch_size: int, model: tuple[tuple[str, Any], ...]) -> RunManifest:
    """The shipped example with a model and batches of another size."""
    table = parse_manifest(example_manifest("stdlib-text"), "the example").model_dump()
    table["model"] = dict(model)
    table["data"] = {"sequence_length": sequence_length}
    table["inner_optimizer"]["batch_size"] = batch_size
    return RunManifest.model_validate(table)


def manifest_of(scale: Scale) -> RunManifest:
    return _manifest(scale.sequence_length, scale.batch_size, tuple(scale.model.items()))


@lru_cache
def _task(manifest_json: str) -> Task:
    table = json.loads(manifest_json)
    return load_task(table["task"]["name"], table["model"], table["data"])


def task_of(scale: Scale) -> Task:
    """One for all peers: it reads the text once."""
    return _task(manifest_of(scale).canonical_json())


@lru_cache
def _held_out(manifest_json: str, samples: int) -> list[Batch]:
    return _task(manifest_json).held_out(64, samples)


def held_out_loss(scale: Scale, net: FlatModel, values: Tensor) -> float:
    net.values.copy_(values)
    batches = _held_out(manifest_of(scale).canonical_json(), scale.held_out_samples)
    return mean_loss(task_of(scale), net.model, batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One cell with one seed."""

    loss: float
    curve: list[float]
    """Loss of the base after each quarter of the run, with what had landed by then; the last is ``loss``."""
    samples: int
    cpu_seconds: float


def run_cell(cell: Cell, scale: Scale, seed: int, compiled: bool = False) -> Outcome:
    """Train a cell to its end. The model is only ever evaluated at the base, as the organiser would publish it."""
    began = time.process_time()
    net = FlatModel(task_of(scale), scale)
    ticks = scale.rounds * scale.fragments
    quarters = [ticks * quarter // 4 for quarter in (1, 2, 3)]
    curve = []
    if cell.kind == "swarm":
        swarm = Swarm(cell, scale, seed, compiled)
        enough = credited_steps(scale) * scale.batch_size if cell.partial_peers else 0
        tick = 0
        while tick < ticks or swarm.averaged_samples < enough:
            swarm.tick(tick)
            tick += 1
            if tick in quarters:
                curve.append(held_out_loss(scale, net, swarm.base))
        swarm.land(tick + swarm.delay_ticks)
        values, samples = swarm.base, swarm.lineage_samples
    else:
        torch.manual_seed(seed)
        initial = FlatModel(task_of(scale), scale).values
        data_seed = seed * 1000 + (999 if cell.kind == "one process" else 0)
        peer = Peer(scale, initial, data_seed, lr_factor=cell.inner_lr_factor, compiled=compiled)
        steps = credited_steps(scale) if cell.kind == "one process" else round(scale.rounds * scale.steps_per_cycle[0])
        for _ in range(steps):
            peer.step(peer.steps * scale.batch_size)
            if peer.steps in [steps * quarter // 4 for quarter in (1, 2, 3)]:
                curve.append(held_out_loss(scale, net, peer.net.values))
        values, samples = peer.net.values, steps * scale.batch_size
    loss = held_out_loss(scale, net, values)
    return Outcome(
        loss=round(loss, 4),
        curve=[round(point, 4) for point in (*curve, loss)],
        samples=samples,
        cpu_seconds=round(time.process_time() - began, 1),
    )


def credited_steps(scale: Scale) -> int:
    """Steps that all peers have in the final base: those up to the last snapshot, which is a fragment's own."""
    last = [scale.rounds - 1 + (fragment + 1) / scale.fragments for fragment in range(scale.fragments)]
    number = len(scale.steps_per_cycle)
    return round(
        statistics.mean(
            sum(int(when * speed + index / number) for index, speed in enumerate(scale.steps_per_cycle))
            for when in last
        )
    )
