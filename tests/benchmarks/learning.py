"""What the choices of a round do to learning: real gradients, simulated time.

Eight peers, up to 20 times apart in speed, train a causal language model on the sources of Python's standard library,
by the product's own rules for fragments, weights, outer optimizer and codecs. Between two ticks peers do not depend
on each other, so one process computes their steps one after the other, as many as each would have made by the clock;
nothing sleeps and everything is seeded. A cell is one choice of rules; all cells of a comparison see the same initial
model, the same data in the same order and the same number of samples, so they are compared seed by seed.

    python tests/benchmarks/learning.py --quick --json results.json --seeds 3 --compare codec

``--quick`` with all comparisons leaves cells out; each comparison by itself has them all.

``results/`` holds what it gave on one core of a shared machine: ``learning-quick.json`` (one or two seeds a cell) and
``learning-quick-400-rounds.json``, made with ``--rounds 400``; continued from call to call with ``--resume``.

What it does not show: networks, late or lost peers, churn, private data, models above a few million parameters,
learning-rate schedules that end low. Everyone is in every round, and every contribution is counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dht_config.manifest import RunManifest, example_manifest, parse_manifest
from p2p_trainer.inner_optimizer import build_inner_optimizer, learning_rate, set_learning_rate
from p2p_trainer.tasks import Batch, Task, load_task, mean_loss
from peers.codecs import ErrorFeedback, get_codec
from peers.fragments import cut
from peers.outer import Nesterov
from peers.weighting import WEIGHTING_NAMES, get_weighting

HELD_OUT_SAMPLES = 2048
LR_GRID, MOMENTUM_GRID, DELAYS_CYCLES = (0.4, 0.7, 1.0), (0.6, 0.8, 0.9), (0.0, 0.5, 1.0)


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
    held_out_samples: int = HELD_OUT_SAMPLES


_LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
QUICK = Scale(
    name="quick",  # 135 k parameters; the steps are so small that calls into torch cost as much as arithmetic
    model=_LLAMA | {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256},
    sequence_length=32,
    batch_size=4,
    rounds=100,
    steps_per_cycle=(16.0, 10.0, 7.0, 4.5, 3.0, 2.0, 1.3, 0.8),
)
FULL = Scale(
    name="full",  # 1.03 M parameters
    model=_LLAMA | {"hidden_size": 144, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384},
    sequence_length=64,
    batch_size=8,
    rounds=400,
    steps_per_cycle=(24.0, 15.0, 10.0, 6.5, 4.5, 3.0, 2.0, 1.2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One choice of rules. The defaults are the product's; whatever a comparison varies is said in its cells."""

    name: str
    kind: str = "swarm"
    """"swarm"; "one process" on as many samples; "fastest alone", for as long."""
    weighting: str = "samples_times_batch"
    lr: float = 0.7
    momentum: float = 0.8
    delay_cycles: float = 0.5
    """From the snapshot to the moment when the new base is in place."""
    up: str = "float32"
    down: str = "float32"
    feedback: str = "parameters"
    """Where a sender keeps what its codec left out: in its "parameters", "apart" from them, or nowhere ("dropped")."""
    beta: float = 1.0
    """The share of it that is kept."""
    batch_factors: tuple[int, ...] = ()
    """For each peer, how many times the usual batch it takes, with so many times fewer steps; () for 1 everywhere."""
    inner_lr_factor: float = 1.0
    """Times the example's inner learning rate: outer and inner steps multiply."""
    brief: bool = True
    """Whether it is run when a quick look at everything is asked for."""


DEFAULT = Cell(name="default: float32, n²/τ, outer 0.7/0.8, half a cycle late")
BASELINES = (
    Cell(name="one process, as many samples", kind="one process"),
    Cell(name="fastest peer alone, as long", kind="fastest alone"),
)


def codec_cells() -> Iterator[Cell]:
    """Lossy codecs, and where what they leave out is kept."""
    yield replace(DEFAULT, name="float16", up="float16", down="float16")
    yield replace(DEFAULT, name="int8", up="int8", down="int8")
    yield replace(DEFAULT, name="int4", up="int4", down="int4")
    yield replace(DEFAULT, name="int4, dropped", brief=False, up="int4", down="int4", feedback="dropped")
    sparse = replace(DEFAULT, up="sparse", down="int8")
    yield replace(sparse, name="sparse")
    yield replace(sparse, name="sparse, β 0.95", beta=0.95)
    yield replace(sparse, name="sparse, apart", brief=False, feedback="apart")
    yield replace(sparse, name="sparse, apart, β 0.95", feedback="apart", beta=0.95)
    yield replace(sparse, name="sparse, dropped", brief=False, feedback="dropped")
    for name, cell in (
        ("float32", DEFAULT),
        ("int8", replace(DEFAULT, up="int8", down="int8")),
        ("int4", replace(DEFAULT, up="int4", down="int4")),
        ("sparse", sparse),
        ("sparse, β 0.95", replace(sparse, beta=0.95)),
        ("sparse, apart, β 0.95", replace(sparse, feedback="apart", beta=0.95)),
    ):
        brief = name in ("float32", "sparse, β 0.95")
        yield replace(cell, name=f"{name}, outer 1/0", lr=1.0, momentum=0.0, brief=brief)


def weighting_cells() -> Iterator[Cell]:
    """Rules for the weight of a contribution, also with plain averaging: a rule that gives slow peers more weight
    makes smaller outer steps, which helps by itself where they are too big. With unequal batches the first two differ.
    """
    for name in WEIGHTING_NAMES:
        if name != DEFAULT.weighting:
            yield replace(DEFAULT, name=name, weighting=name, brief=name != "samples")
        if name not in WEIGHTING_NAMES[:2]:
            yield replace(DEFAULT, name=f"{name}, outer 1/0", weighting=name, lr=1.0, momentum=0.0, brief=False)
    for name in WEIGHTING_NAMES[:2]:
        yield replace(DEFAULT, name=f"{name}, fastest 3 with batch x 4", weighting=name, batch_factors=(4, 4, 4))


def outer_cells(quick: bool) -> Iterator[Cell]:
    """The outer optimizer's grid for each delay, the quick one a cross through the default; and the inner step."""
    for delay in DELAYS_CYCLES:
        for lr in LR_GRID:
            for momentum in MOMENTUM_GRID:
                cell = replace(
                    DEFAULT, name=f"outer {lr}/{momentum}, delay {delay}", lr=lr, momentum=momentum, delay_cycles=delay
                )
                off = (lr != DEFAULT.lr) + (momentum != DEFAULT.momentum) + (delay != DEFAULT.delay_cycles)
                if off and not (quick and off > 1):
                    yield cell
    for name, cell in (
        (DEFAULT.name, DEFAULT),
        ("outer 1/0", replace(DEFAULT, lr=1.0, momentum=0.0)),
        (BASELINES[0].name, BASELINES[0]),
    ):
        yield replace(cell, name=f"inner lr / 3: {name}", inner_lr_factor=1 / 3, brief=False)


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


class Peer:
    """One machine: its parameters, inner optimizer, data, and what of its work is not in a base yet."""

    def __init__(
        self, scale: Scale, initial: Tensor, seed: int, steps_per_cycle: float, batch_factor: int, lr_factor: float
    ) -> None:
        self.task, self.section = task_of(scale), manifest_of(scale).inner_optimizer
        self.lr_factor = lr_factor
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

    def step(self, lineage_samples: int) -> None:
        """One inner step."""
        set_learning_rate(self.optimizer, self.lr_factor * learning_rate(self.section, lineage_samples))
        gradient = self.net.gradient
        gradient.zero_()
        torch.autograd.backward(self.task.loss(self.net.model, next(self.batches)))
        if self.section.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient))
            if norm > self.section.clip_norm:
                gradient.mul_(self.section.clip_norm / norm)
        self.optimizer.step()
        self.steps += 1


@dataclass(slots=True, kw_only=True)
class Round:
    """A round under way: what will be the base, and what each peer's progress will be measured from."""

    fragment: int
    lands_at_tick: int
    base: Tensor
    momentum: Tensor
    references: list[Tensor]
    element_samples: int


class Swarm:
    """The peers and the base they share."""

    def __init__(self, cell: Cell, scale: Scale, seed: int) -> None:
        self.cell, self.scale = cell, scale
        torch.manual_seed(seed)
        net = FlatModel(task_of(scale), scale)
        self.layout = cut(net.shapes, scale.fragments)
        self.base = net.values.clone()
        self.momentum = torch.zeros_like(self.base)
        self.reducer_residual = torch.zeros_like(self.base)
        factors = cell.batch_factors + (1,) * (len(scale.steps_per_cycle) - len(cell.batch_factors))
        self.peers = [
            Peer(scale, self.base, seed * 1000 + index, speed, factor, cell.inner_lr_factor)
            for index, (speed, factor) in enumerate(zip(scale.steps_per_cycle, factors, strict=True))
        ]
        self.weighting = get_weighting(cell.weighting)
        self.outer = Nesterov(lr=cell.lr, momentum=cell.momentum)
        self.feedback = ErrorFeedback(beta=cell.beta)
        self.delay_ticks = round(cell.delay_cycles * scale.fragments)
        self.under_way: list[Round] = []
        self.element_samples = 0

    @property
    def lineage_samples(self) -> int:
        return self.element_samples // self.layout.num_elements

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
        references = []
        element_samples = 0
        for peer in self.peers:
            snapshot = peer.net.values[where].clone()
            steps = peer.steps - peer.accounted[fragment]
            samples = steps * peer.batch_size
            peer.accounted[fragment] = peer.steps
            element_samples += samples * base.numel()
            terms.append(self.weighting.normaliser_terms(samples, steps))
            weight = self.weighting.value_weight(samples, steps)
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
                local = peer.net.values[where]
                local.sub_(reference).add_(landing.base)


def transmitted(codec: str, values: Tensor) -> Tensor:
    """What arrives."""
    if codec == "float32":
        return values.clone()
    return get_codec(codec).decode(get_codec(codec).encode(values), values.numel())


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


def run_cell(cell: Cell, scale: Scale, seed: int) -> Outcome:
    """Train a cell to its end. The model is only ever evaluated at the base, as the organiser would publish it."""
    began = time.process_time()
    net = FlatModel(task_of(scale), scale)
    ticks = scale.rounds * scale.fragments
    quarters = [ticks * quarter // 4 for quarter in (1, 2, 3)]
    curve = []
    if cell.kind == "swarm":
        swarm = Swarm(cell, scale, seed)
        for tick in range(ticks):
            swarm.tick(tick)
            if tick + 1 in quarters:
                curve.append(held_out_loss(scale, net, swarm.base))
        swarm.land(ticks + swarm.delay_ticks)
        values, samples = swarm.base, swarm.lineage_samples
    else:
        torch.manual_seed(seed)
        initial = FlatModel(task_of(scale), scale).values
        data_seed = seed * 1000 + (999 if cell.kind == "one process" else 0)
        peer = Peer(scale, initial, data_seed, 1.0, 1, cell.inner_lr_factor)
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


@dataclass(slots=True)
class Results:
    """Outcomes as they come in."""

    scale: Scale
    cells: Sequence[Cell]
    """All there are, so that a continued file keeps what this call does not run."""
    outcomes: dict[str, dict[int, Outcome]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """What is known so far; ratios are to the default with the same seed."""
        reference = self.outcomes.get(DEFAULT.name, {})
        rows = []
        for cell in self.cells:
            outcomes = self.outcomes.get(cell.name, {})
            if not outcomes:
                continue
            losses = {seed: outcome.loss for seed, outcome in sorted(outcomes.items())}
            ratios = [loss / reference[seed].loss for seed, loss in losses.items() if seed in reference]
            rows.append(
                {
                    "name": cell.name,
                    "loss": round(statistics.mean(losses.values()), 4),
                    "loss_stdev": _stdev(list(losses.values())),
                    "ratio": round(statistics.mean(ratios), 4) if ratios else None,
                    "ratio_stdev": _stdev(ratios),
                    "runs": {seed: asdict(outcome) for seed, outcome in sorted(outcomes.items())},
                    "settings": {
                        key: value
                        for key, value in asdict(cell).items()
                        if key not in ("name", "brief") and value != getattr(DEFAULT, key)
                    },
                }
            )
        return rows

    def write(self, path: Path) -> None:
        report = {"torch": torch.__version__, "scale": self.described_scale(), "cells": self.rows()}
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")

    def described_scale(self) -> dict[str, Any]:
        parameters = len(FlatModel(task_of(self.scale), self.scale).values)
        scale: dict[str, Any] = json.loads(json.dumps(asdict(self.scale)))
        return scale | {"parameters": parameters}

    def resume(self, path: Path) -> None:
        """Take over what a file holds. :raises ValueError: it is of another scale"""
        report = json.loads(path.read_text())
        if report["scale"] != self.described_scale():
            raise ValueError(f"{path} holds results of another scale; name another file")
        for row in report["cells"]:
            runs = {int(seed): Outcome(**run) for seed, run in row["runs"].items()}
            self.outcomes.setdefault(row["name"], {}).update(runs)

    def table(self) -> Table:
        table = Table(title=f"{self.scale.name}: {self.scale.rounds} rounds of each fragment")
        for heading in ("cell", "held-out loss", "±", "to default", "±", "seeds", "samples", "CPU s"):
            table.add_column(heading, justify="left" if heading == "cell" else "right")
        for row in self.rows():
            table.add_row(
                row["name"],
                f"{row['loss']:.4f}",
                f"{row['loss_stdev']:.4f}" if row["loss_stdev"] is not None else "",
                f"{row['ratio']:.4f}" if row["ratio"] is not None else "",
                f"{row['ratio_stdev']:.4f}" if row["ratio_stdev"] is not None else "",
                str(len(row["runs"])),
                str(max(run["samples"] for run in row["runs"].values())),
                f"{statistics.mean(run['cpu_seconds'] for run in row['runs'].values()):.0f}",
            )
        return table


def _stdev(values: list[float]) -> float | None:
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def run_cells(
    jobs: Sequence[tuple[Cell, int]], scale: Scale, processes: int, threads: int
) -> Iterator[tuple[tuple[Cell, int], Outcome]]:
    """Run cells with their seeds; outcomes come as they are ready."""
    if processes == 1:
        torch.set_num_threads(threads)
        yield from ((job, run_cell(job[0], scale, job[1])) for job in jobs)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        futures = {pool.submit(run_cell, cell, scale, seed): (cell, seed) for cell, seed in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="135 k parameters, 100 rounds of each fragment")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="written after every run of a cell")
    parser.add_argument("--resume", action="store_true", help="keep what FILE holds already, run what it lacks")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="rounds of each fragment")
    parser.add_argument("--compare", choices=["weighting", "outer", "codec", "all"], default="all")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the default and cells with one of these in their name: 'a|b'"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads in each process")
    options = parser.parse_args(arguments)

    scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    cells = [DEFAULT, *BASELINES]
    if options.compare in ("codec", "all"):
        cells += codec_cells()
    if options.compare in ("weighting", "all"):
        cells += weighting_cells()
    if options.compare in ("outer", "all"):
        cells += outer_cells(options.quick)
    if options.quick and options.compare == "all" and not options.only:
        cells = [cell for cell in cells if cell.brief]
    if options.only:
        wanted = options.only.split("|")
        cells = [cell for cell in cells if cell is DEFAULT or any(text in cell.name for text in wanted)]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    everything = [DEFAULT, *BASELINES, *codec_cells(), *weighting_cells(), *outer_cells(quick=False)]
    results = Results(scale, everything)
    if options.resume and options.json.exists():
        results.resume(options.json)
    console = Console(width=None if sys.stdout.isatty() else 120)

    jobs = [(cell, seed) for seed in seeds for cell in cells if seed not in results.outcomes.get(cell.name, {})]
    for (cell, seed), outcome in run_cells(jobs, scale, options.jobs, options.threads):
        results.outcomes.setdefault(cell.name, {})[seed] = outcome
        results.write(options.json)
        console.print(f"{cell.name}, seed {seed}: {outcome.loss:.4f} ({outcome.cpu_seconds:.0f} s)", style="dim")
    console.print(results.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
