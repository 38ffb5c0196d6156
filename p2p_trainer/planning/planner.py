"""Asking and measuring until a plan rests on measurements.

``plan`` names the first strategy that is not known to need too much. That one is measured, or was measured at an
earlier start, and ``plan`` is asked again; it stays with it, or goes on to the next. So a machine with memory to spare
measures one strategy, and none twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import psutil
import torch
from torch import nn

from dht_config.errors import UsageError
from dht_config.manifest import RunManifest
from p2p_trainer.hardware import Hardware
from p2p_trainer.planning.compiled import why_not_compile
from p2p_trainer.planning.compute import ComputeDtype, compute_dtype_of
from p2p_trainer.planning.link_plan import refuse_codec
from p2p_trainer.planning.plan import plan, probe_budget, trained_in_probe
from p2p_trainer.planning.plan_facts import Link, Machine, Measurement, Model, Plan, SwarmFacts, Wishes
from p2p_trainer.planning.probe import Prober, ProbeRequest
from p2p_trainer.planning.probe_cache import Entry, ProbeCache, key_of
from p2p_trainer.run_model import layout_of
from p2p_trainer.settings import PeerSettings
from p2p_trainer.strategies import STRATEGIES, StrategyName, facts_of, why_not


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one machine in one run.

    :param prober: forked early; ended by whoever started it
    :param alive: called while something is measured, with the share of the time used up, 0 to 1; may raise
    :param say: one line for a person
    """

    manifest: RunManifest
    task_version: int
    model: Model
    machine: Machine
    hardware: Hardware
    threads: int | None
    seed: int
    prober: Prober
    cache: ProbeCache
    alive: Callable[[float], None]
    say: Callable[[str], None]
    compile: bool = False
    """Whether to try torch.compile, where everything is trained on the device."""
    keys: dict[StrategyName, str] = field(default_factory=dict)
    """Of what was asked of the cache."""

    def plan(self, link: Link, swarm: SwarmFacts, wishes: Wishes) -> Plan:
        """:raises PlanError: this machine's memory fits no strategy"""
        if not self.compile:  # an earlier start may have measured it
            wishes = replace(wishes, compile=False)
        measured: dict[StrategyName, Measurement] = {}
        while True:
            machine = replace(self.machine, measured=measured)
            made = plan(machine, link, self.manifest, swarm, model=self.model, wishes=wishes)
            if made.strategy in measured:
                return made
            measured[made.strategy] = self._measurement(made.strategy)

    def note_drift(self, made: Plan) -> None:
        """The rate that a plan rests on is not so any more: the next start measures again."""
        if (key := self.keys.get(made.strategy)) is not None:
            self.cache.note_drift(key)

    def note_too_big(self, made: Plan, micro_batch: int) -> None:
        """Memory ran out at this micro-batch while training: the next start does not try it again."""
        if (key := self.keys.get(made.strategy)) is not None:
            self.cache.note_too_big(key, micro_batch)

    def _measurement(self, strategy: StrategyName) -> Measurement:
        budget = probe_budget(self.machine, self.manifest, self.model, strategy)
        key = self.keys[strategy] = key_of(
            self.manifest,
            self.task_version,
            strategy,
            self.machine.compute_dtype,
            self.hardware.device,
            cores=self.hardware.limits.cores,
            threads=self.threads,
        )
        compile = self.compile and strategy == "full"
        if (known := self.cache.read(key)) is not None and known.holds_for(budget, compile=compile):
            return known.measurement
        with self.cache.lock(lambda: self.alive(0.0)):
            # Somebody may have measured the same while we waited.
            if (known := self.cache.read(key)) is not None and known.holds_for(budget, compile=compile):
                return known.measurement
            measurement = self.prober.measure(
                ProbeRequest(
                    manifest=self.manifest,
                    strategy=strategy,
                    trained=trained_in_probe(strategy, self.model.layout),
                    device=self.machine.device,
                    compute_dtype=self.machine.compute_dtype,
                    threads=self.threads,
                    seed=self.seed,
                    budget_bytes=budget,
                    compile=compile,
                ),
                self.alive,
            )
            self.alive(1.0)
            if measurement.failure and measurement.results:
                self.say(f"Measuring this machine ended early: {measurement.failure}. What it found until then counts.")
            elif measurement.failure:
                self.say(f"This machine could not be measured: {measurement.failure}. It starts with small steps.")
            elif measurement.stopped is not None and not measurement.killed:
                self.cache.write(key, Entry(measurement=measurement, budget_bytes=budget))
        return measurement


def wishes_of(settings: PeerSettings) -> Wishes:
    """What of a plan a person decided."""
    return Wishes(
        compile=settings.compile,
        micro_batch=settings.micro_batch,
        batch_size=settings.batch,
        strategy=settings.strategy,
        train_fragments=settings.train_fragments,
        cadence=settings.cadence,
        codec=settings.codec,
    )


def tries_compiling(
    device: torch.device, manifest: RunManifest, settings: PeerSettings, say: Callable[[str], None]
) -> bool:
    """Whether torch.compile is measured here: not for whoever is slowed down, or never steps an optimizer.

    :param say: told why not, if a person asked for it
    """
    if manifest.averaging.mode != "local":
        why = "A run on averaged gradients steps no optimizer here."
    elif settings.emulate is not None:
        why = "This peer is slowed down."
    else:
        why = why_not_compile(device, settings.compile)
    if why and settings.compile:
        say(f"torch.compile is not tried. {why}")
    return not why


def machine_of(
    device: torch.device,
    hardware: Hardware,
    limit_bytes: int | None,
    emulate: float | None,
    mode: Literal["local", "gradient"] = "local",
    dtype: ComputeDtype | None = None,
) -> Machine:
    """The machine as a plan sees it before anything is measured.

    :param limit_bytes: of the device's memory, what a person lets this peer take at most
    :param emulate: samples a second that a person slows it down to
    :param mode: of the run
    :param dtype: that a person chose

    :raises UsageError: float16 was chosen for a run on averaged gradients
    """
    _refuse_dtype(mode, dtype)
    own = own_bytes()
    budget = hardware.device.free_bytes
    host_budget = None
    if device.type == "cuda":
        budget = budget + int(torch.cuda.memory_reserved(device)) if budget is not None else None
        host_budget = hardware.limits.free_memory_bytes + own
    elif budget is not None:
        budget += own
    if limit_bytes is not None:
        budget = min(budget, limit_bytes) if budget is not None else limit_bytes
    return Machine(
        device=str(device),
        budget_bytes=budget,
        host_budget_bytes=host_budget,
        compute_dtype=dtype or compute_dtype_of(device, mode),
        emulated_samples_per_second=emulate,
    )


def refuse_choices(manifest: RunManifest, settings: PeerSettings) -> None:
    """Tell what a person chose that a run does not allow, before anybody is asked for anything.

    :raises UsageError: names the flag
    """
    refuse_codec(manifest, settings.codec)
    _refuse_dtype(manifest.averaging.mode, settings.compute_dtype)


def _refuse_dtype(mode: Literal["local", "gradient"], dtype: ComputeDtype | None) -> None:
    if dtype == "float16" and mode == "gradient":
        raise UsageError(
            "--compute-dtype: float16 scales gradients, and this run averages them as they are.",
            "Leave --compute-dtype out, or choose float32 or bfloat16.",
        )


def model_of(
    model: nn.Module, manifest: RunManifest, device: torch.device, wished: StrategyName | None = None
) -> Model:
    """:param model: as its task built it, on any device, also on meta

    :raises UsageError: the wished strategy is not for this model, device or run
    """
    mode = manifest.averaging.mode
    if wished is not None and (reason := why_not(wished, model, device, mode)):
        raise UsageError(f"The memory strategy {wished} cannot be used. {reason}", "Leave --strategy out.")
    return Model(
        layout=layout_of(model, manifest),
        facts=facts_of(model),
        offered=tuple(name for name in STRATEGIES if not why_not(name, model, device, mode)),
    )


def own_bytes() -> int:
    """What this process and its descendants already hold: of what is free for this peer, that is not missing.

    Shared pages count for each process's part of them (proportional set size).
    """
    held = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error, OSError, AttributeError):
            held += process.memory_full_info().pss
    return held
