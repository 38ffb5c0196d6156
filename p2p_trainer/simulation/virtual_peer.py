"""A peer of a rehearsal in virtual time: real parameters, real gradients, and the product's own account of fragments.

Steps, snapshots and rebases are ``modes.LocalMode``'s, what becomes of a base is ``peers/fragment_state.py``'s, and
averages are made by ``peers/reducer.py`` from what the manifest's codecs leave of contributions. No bytes travel.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dht_config.manifest import RunManifest
from p2p_trainer.modes import LocalMode
from p2p_trainer.running_statistics import averaged
from p2p_trainer.session import make_initial_bases
from p2p_trainer.simulation.simulated_peer import MadeBase, SimulatedPeer
from p2p_trainer.simulation.simulated_round import RoundFlow
from p2p_trainer.strategies import build_strategy
from p2p_trainer.tasks import Task
from peers.arena import SharedArena
from peers.codecs import Codec
from peers.contribution import SentPart
from peers.fragment_state import FragmentState
from peers.fragments import FragmentLayout
from peers.ledger import Ledger, PendingSpan
from peers.lineage import Claim
from peers.outer import OuterOptimizer, build_outer_optimizer
from peers.pipe import SnapshotTaken
from peers.reducer import InvalidPart, PartReducer, Rules, check_values
from peers.round_plan import RoundPlan
from peers.transfer import FetchedBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """What all peers of a run in virtual time share: one untrained model, the text read once."""

    manifest: RunManifest
    task: Task
    model: torch.nn.Module
    layout: FragmentLayout
    rules: Rules
    outer: OuterOptimizer

    @classmethod
    def of(cls, manifest: RunManifest, task: Task, layout: FragmentLayout, rules: Rules, seed: int) -> TrainedRun:
        """:param seed: of the model's first values"""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = task.build_model()
        outer = build_outer_optimizer(manifest.outer_optimizer)
        return cls(manifest=manifest, task=task, model=model, layout=layout, rules=rules, outer=outer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Average:
    """What a round's reducers made."""

    values: torch.Tensor
    """Float32 ``(plan.size,)``."""
    left_out: Mapping[int, dict[tuple[int, int], bytes]] = field(default_factory=dict)
    """Of each reducer, by its index among the members: what its averages left out."""


class TrainedWork:
    """One peer's model, optimizer and data."""

    def __init__(self, run: TrainedRun, own_id: bytes, data_seed: int) -> None:
        model = copy.deepcopy(run.model)
        values = averaged(model)
        section = run.manifest.inner_optimizer
        strategy = build_strategy("full", model, run.layout, section, torch.device("cpu"), frozenset())
        self._arena = SharedArena.create(run.layout.num_elements, run.outer.states)
        self.mode = LocalMode(
            run.task,
            strategy,
            run.manifest,
            run.layout,
            self._arena,
            section.batch_size,
            data_seed,
        )
        metas = make_initial_bases(values, run.layout, self._arena)
        self.holdings = []
        for index, meta in enumerate(metas):
            state = FragmentState(index, run.layout, self._arena)
            state.restore(meta)
            self.holdings.append(TrainedHolding(run, self, state, own_id))
        self.samples = self.steps = 0
        self.losses: list[float] = []
        """Of the steps since somebody emptied the list."""

    def train(self, steps: int, lineage_samples: int) -> int:
        before = self.samples
        for _ in range(steps):
            loss, samples = self.mode.step(lineage_samples, None, lambda: None)
            if math.isfinite(loss):
                self.samples += samples
                self.losses.append(loss)
            self.steps += 1
        return self.samples - before


class TrainedHolding:
    """One fragment of a peer that trains."""

    def __init__(self, run: TrainedRun, work: TrainedWork, state: FragmentState, own_id: bytes) -> None:
        self._run, self._work, self.state, self._own_id = run, work, state, own_id
        self.size = state.size
        self.values = torch.empty(0)
        """What it brings to the round under way, float32 ``(size,)``."""

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def claim(self) -> Claim:
        return self.state.claim

    @property
    def total_element_samples(self) -> int:
        return self.state.total_element_samples

    @property
    def backers(self) -> frozenset[str]:
        return self.state.backers

    @property
    def backed_until(self) -> float:
        return self.state.backed_until

    @backed_until.setter
    def backed_until(self, until: float) -> None:
        self.state.backed_until = until

    @property
    def unresolved_mates(self) -> frozenset[str]:
        return self.state.unresolved_mates

    @property
    def ancestors(self) -> frozenset[bytes]:
        return self.state.ancestors

    def take(self, samples: int, steps: int, spans: Sequence[PendingSpan]) -> bool:
        self._work.mode.take_snapshot(self.state.index, samples)
        self.state.taken = SnapshotTaken(fragment=self.state.index, samples=samples, steps=steps)
        self.values = self.state.contribution(spans).whole()
        try:
            check_values(self.values)
        except InvalidPart:
            self.state.give_up()
            self.drop(samples, steps)
            return False
        return True

    def contributes(self, tick: int, mates: frozenset[str]) -> None:
        self.state.unresolved_mates |= mates
        self.state.contributes(tick)

    def sent(self, start: int, stop: int, codec: Codec, lossy: list[SentPart]) -> torch.Tensor:
        """What a reducer decodes of this contribution's elements; noted in ``lossy`` if that is something else."""
        values = self.values[start:stop]
        if codec.lossless:
            return values
        lossy.append(SentPart(start, stop, codec.encode(values), codec))
        return lossy[-1].values()

    def commit(self, made: MadeBase, index: int) -> None:
        average: _Average = made.average
        self.state.commit(self._run.outer, made.plan, average.values, made.parts, self._own_id)
        self.state.average_residual.replace(average.left_out.get(index, {}))
        self._work.mode.rebase(self.state.index, keep=True, pending=True)
        self.state.forget_snapshot()

    def frozen(self) -> FetchedBase:
        state = self.state
        return FetchedBase(
            claim=state.claim,
            total_element_samples=state.total_element_samples,
            history=state.history,
            history_before=state.history_before,
            base=state.base.clone(),
            outer_state=state.outer_state.clone(),
            receipts=tuple(state.receipts),
            donors=(),
            bytes_received=state.num_bytes,
            seconds=0.0,
        )

    def adopt(self, fetched: FetchedBase) -> None:
        keep = self.state.adopt(fetched, self._own_id)
        self._work.mode.rebase(self.state.index, keep=keep, pending=True)
        if not keep:
            self.state.ledger = self.state.ledger.drop(self._work.samples, self._work.steps)
        self.state.forget_snapshot()

    def drop(self, samples: int, steps: int) -> None:
        self.state.drop_undecided(samples, steps)
        self._work.mode.rebase(self.state.index, keep=False, pending=False)

    def restarts(self) -> None:
        self.state.backers = self.state.unresolved_mates = frozenset()
        self.state.taken = None


def average_of(run: TrainedRun, plan: RoundPlan, flow: RoundFlow, peers: Sequence[SimulatedPeer]) -> _Average:
    """Let the plan's reducers average what arrived; the members' peers are in the plan's order."""
    holdings = []
    for peer in peers:
        holding = peer.work.holdings[plan.fragment]
        if isinstance(holding, TrainedHolding):
            holdings.append(holding)
    return asyncio.run(_reduced(run.rules, plan, flow, holdings))


async def _reduced(rules: Rules, plan: RoundPlan, flow: RoundFlow, holdings: Sequence[TrainedHolding]) -> _Average:
    average = torch.zeros(plan.size)
    lossy: list[list[SentPart]] = [[] for _ in holdings]
    left_out: dict[int, dict[tuple[int, int], bytes]] = {}
    for share, included in zip(plan.shares, flow.included, strict=True):
        if len(included) < min(2, len(plan.members)):
            continue
        reducers = {}
        for group, own in zip(plan.groups, share.reducers, strict=True):
            residual = holdings[own].state.average_residual.of
            reducer = reducers[own] = PartReducer(plan, own, rules, torch.zeros(plan.size), residual)
            for index in group:
                if index not in included:
                    await reducer.leave_out(index, "was not there in time")
                    continue
                for part, (start, stop) in enumerate(share.parts):
                    values = holdings[index].values[start:stop]
                    if index != own:
                        codec = rules.at(plan, start).codec_of(plan.members[index])
                        values = holdings[index].sent(start, stop, codec, lossy[index])
                    await reducer.add(index, part, values)
        for source, reducer in reducers.items():
            for root, parts in reducer.rooted.items():
                for part in parts if root != source else ():
                    summed = reducer.part(part)
                    if summed.included:
                        await reducers[root].add(source, part, summed.sum, summed.included)
        for reducer in reducers.values():
            await reducer.close()
        for part, (start, stop) in enumerate(share.parts):
            averaged = await reducers[share.root(part)].result(part)
            average[start:stop] = averaged.values
        left_out |= {own: reducer.left_out for own, reducer in reducers.items()}
    for holding, sent in zip(holdings, lossy, strict=True):
        holding.state.sent = sent
    return _Average(values=average, left_out=left_out)
