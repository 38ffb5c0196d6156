"""A peer's own plan: made before it trains, told to its person, and compared with what training shows."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from dht_config.manifest import RunManifest
from p2p_trainer.hardware import Hardware
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.modes import LocalMode, Mode
from p2p_trainer.planning.compute import in_dtype
from p2p_trainer.planning.plan import batch_for, lr_factor_for
from p2p_trainer.planning.plan_facts import Link, Plan, SwarmFacts
from p2p_trainer.planning.planner import Planner, machine_of, model_of, tries_compiling, wishes_of
from p2p_trainer.planning.probe import Prober, saves_host_memory
from p2p_trainer.planning.probe_cache import ProbeCache, default_cache_directory
from p2p_trainer.planning.reality import RealityWatch
from p2p_trainer.settings import PeerSettings
from p2p_trainer.strategies import build_strategy
from p2p_trainer.tasks import Task
from p2p_trainer.throughput import paced_rate, return_freed_memory
from p2p_trainer.training import LeaveFlag
from p2p_trainer.view import LiveView
from peers.fragments import FragmentLayout
from peers.line import LineRate


@dataclass(kw_only=True)
class OwnPlan:
    """One peer's, from before it is made.

    :param model: as its task built it, on the CPU
    """

    manifest: RunManifest
    task: Task
    model: torch.nn.Module
    layout: FragmentLayout
    device: torch.device
    settings: PeerSettings
    seed: int
    """Of the data to measure with."""
    view: LiveView
    metrics: MetricsWriter
    leave: LeaveFlag
    line: LineRate
    """As an earlier start measured it."""

    def make(self, prober: Prober, hardware: Hardware) -> Plan:
        """Measure this machine as far as the plan wants it, and tell what it will do. :raises PlanError:"""

        def alive(share: float) -> None:
            self.leave.check()
            self.view.measuring(share)

        settings = self.settings
        self._planner = Planner(
            manifest=self.manifest,
            task_version=self.task.version,
            model=model_of(self.model, self.manifest, self.device, settings.strategy),
            machine=machine_of(
                self.device,
                hardware,
                settings.memory_bytes,
                settings.emulate,
                self.manifest.averaging.mode,
                settings.compute_dtype,
            ),
            hardware=hardware,
            threads=settings.threads,
            seed=self.seed,
            prober=prober,
            cache=ProbeCache(default_cache_directory(), self.view.status),
            alive=alive,
            say=self.view.status,
            compile=tries_compiling(self.device, self.manifest, settings, self.view.status),
        )
        link = Link.of(self.line, up_limit=settings.up_bits_per_second)
        plan = self._planner.plan(link, SwarmFacts(), wishes_of(settings))
        self.metrics.write("plan", **plan.to_json())
        for line in plan.in_two_lines():
            self.view.status(line)
        if saves_host_memory(plan.strategy, self.device):
            return_freed_memory()
        return plan

    def samples_per_second(self, plan: Plan) -> float:
        """What this machine makes alone: as measured, or in real steps on a copy if it is slowed down or unmeasured."""
        emulate = self.settings.emulate
        if emulate is None and plan.samples_per_second is not None:
            return plan.samples_per_second
        section = self.manifest.inner_optimizer
        twin = build_strategy(
            plan.strategy,
            copy.deepcopy(self.model),
            self.layout,
            section,
            self.device,
            frozenset(range(plan.fragments)),
            self.manifest.averaging.mode,
        )
        return paced_rate(
            in_dtype(self.task, self.device, plan.compute_dtype),
            twin.model,
            twin.optimizer,
            section,
            batch_size=plan.batch_size,
            micro_batch=plan.micro_batch,
            at_most=math.inf if emulate is None else emulate,
            check=self.leave.check,
        )

    def watch(self, plan: Plan, mode: Mode) -> RealityWatch:
        """Told by training how it goes; a person hears of it, the batch follows, and the next start knows it."""
        measured = plan.samples_per_second if self.settings.emulate is None else None

        def say(reason: str, **changes: Any) -> None:
            self.metrics.write("plan", **{**plan.to_json(), **changes, "reasons": [reason]})
            self.view.status(reason)

        def drifted(rate: float) -> None:
            self._planner.note_drift(plan)
            batch_size, why = batch_for(self.manifest, rate, plan.cadence, wishes_of(self.settings))
            factor = lr_factor_for(self.manifest, batch_size)
            if isinstance(mode, LocalMode):
                mode.take_batches_of(batch_size, factor)
            reason = f"This machine now makes {rate:.3g} samples/s: the next start measures again. {' '.join(why)}"
            say(reason.strip(), samples_per_second=rate, batch_size=batch_size, lr_factor=factor)

        def shrunk(too_big: int, fitted: int) -> None:
            self._planner.note_too_big(plan, too_big)
            say(
                f"Memory ran out in a step: micro-batch {fitted} instead of {too_big}, the batch stays.",
                micro_batch=fitted,
            )

        return RealityWatch(measured, on_drift=drifted, on_shrunk=shrunk)
