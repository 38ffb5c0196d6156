"""What this machine does in this run: micro-batch, batch, memory strategy, cadence. One pure function, with reasons.

A plan follows from what was measured of the machine (``probe.py``), what is known of its line, the run's manifest and
what the swarm's records show. Whoever measures and asks again until the plan rests on measurements is ``planner.py``.

Memory: the first strategy of the ladder, cheapest in time first, that fits with one sample at a time; then the smallest
micro-batch that comes within 5 % of its best throughput, of those that fit. What a peer needs at most is the larger of
two moments: a step (parameters, gradients, optimizer state, activations), and the copy of everything that a checkpoint
is written from, when there are neither gradients nor activations. On a CPU the bases, rounds and the program itself
live in the same memory, and a probe takes its step while this peer is already there. Where the copy would not fit
beside a step in that memory, training waits while it is written.

Link: the lowest cadence at which rounds and the fetching between them leave the line some air, and the codec with it
where the run leaves that to its peers (``link_plan.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dht_config.errors import PlanError, UsageError
from dht_config.manifest import RunManifest
from p2p_trainer.machine_checks import PROCESSES_BYTES, need_of
from p2p_trainer.machines import memory_text
from p2p_trainer.planning.compiled import FASTER
from p2p_trainer.planning.link_plan import plan_line
from p2p_trainer.planning.plan_facts import NO_WISHES, Link, Machine, Measurement, Model, Plan, SwarmFacts, Wishes
from p2p_trainer.strategies import PARTIAL, StrategyName, fixed_bytes
from p2p_trainer.throughput import MemoryLine, choose, memory_line
from peers.fragments import FragmentLayout

FIT = 0.9
"""A plan uses this part of its budget: predicted peaks were measured to be within 10 % of real ones."""
STEPS_PER_CYCLE = 8
"""A peer makes at least so many inner steps between two rounds of a fragment, on smaller batches if need be."""
PROBING_BYTES = 90_000_000
"""What a peer's processes take while it measures beyond what they take while it trains, without model and rounds: a
probe and the process that forks it, and no training yet. 634 MB against 554 (a llama of 9.5 M parameters, the sum of
proportional set sizes)."""
_BYTES_PER_VALUE = 4
_IN_WORDS: Mapping[StrategyName, str] = {
    "full": "everything in memory",
    "checkpoint": "activation checkpointing",
    "host_optimizer": "optimizer state in host memory",
    "fragments": "some fragments trained, the rest frozen",
    "stream": "some fragments trained, the rest streamed from host memory",
}
_RELATIVES: Mapping[StrategyName, tuple[StrategyName, ...]] = {
    "full": (),
    "checkpoint": (),
    "host_optimizer": ("checkpoint",),
    "fragments": ("checkpoint",),
    "stream": ("fragments", "checkpoint"),
}
"""Whose activations a strategy's are like: from ``checkpoint`` on all compute them again where the model has blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rung of the ladder as this machine would stand on it."""

    strategy: StrategyName
    fragments: int
    step_bytes: int
    """Of the device's memory in a step, this peer's or a probe's, without activations."""
    rest_bytes: int
    """Of the same memory between steps at most, while a checkpoint is copied."""
    copied_bytes: int
    """Of the same memory, what a checkpoint is written from; 0 where that lies elsewhere."""
    host_bytes: int
    """Of the machine's own memory, where the device has one of its own."""
    line: MemoryLine | None
    """Activations over the micro-batch; None if nothing was measured."""
    measurement: Measurement | None
    program_bytes: int
    """Of that memory, what is there without a model: known, and no prediction."""

    def peak_bytes(self, micro_batch: int) -> int:
        activations = self.line.at(micro_batch) if self.line is not None else 0
        return max(self.step_bytes + activations, self.rest_bytes)

    def fits(self, machine: Machine, micro_batch: int) -> bool:
        if not self.host_fits(machine):
            return False
        if machine.budget_bytes is None:
            return True
        return self.peak_bytes(micro_batch) - self.program_bytes <= FIT * (machine.budget_bytes - self.program_bytes)

    def steps_while_saving(self, machine: Machine, micro_batch: int) -> bool:
        """Whether a step fits beside what a checkpoint is written from."""
        if machine.budget_bytes is None or not self.copied_bytes:
            return True
        if self.line is None:
            return False
        held = self.step_bytes + self.line.at(micro_batch) + self.copied_bytes
        return held - self.program_bytes <= FIT * (machine.budget_bytes - self.program_bytes)

    def host_fits(self, machine: Machine) -> bool:
        """Whether the machine's own memory holds what does not lie on the device."""
        if machine.host_budget_bytes is None or not self.host_bytes:
            return True
        return self.host_bytes - machine.program_bytes <= FIT * (machine.host_budget_bytes - machine.program_bytes)

    @property
    def is_refuted(self) -> bool:
        """Whether a probe of it ran out of memory at a single sample."""
        return self.measurement is not None and not self.measurement.results and self.measurement.stopped == "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """A rung in compiled code."""

    candidate: Candidate
    """With what its steps take."""
    rate: float
    """Samples a second."""


def plan(
    machine: Machine,
    link: Link,
    manifest: RunManifest,
    swarm: SwarmFacts,
    *,
    model: Model,
    wishes: Wishes = NO_WISHES,
) -> Plan:
    """Decide; pure.

    :raises PlanError: the machine's memory fits no strategy, or not the one that was wished for
    :raises UsageError: more fragments are to be trained than the run has, or it has a codec for all and one was chosen
    """
    layout = model.layout
    if wishes.micro_batch is not None:  # a batch has no more samples than this
        most = min(manifest.inner_optimizer.batch_size, wishes.batch_size or wishes.micro_batch)
        wishes = replace(wishes, micro_batch=min(wishes.micro_batch, most))
    candidates = candidates_of(machine, manifest, model, wishes)
    chosen = next(
        (one for one in candidates if not one.is_refuted and one.fits(machine, wishes.micro_batch or 1)), None
    )
    if chosen is None:
        raise _nothing_fits(machine, candidates, wishes)
    micro_batch, rate, why_micro_batch = _micro_batch(machine, manifest, chosen, wishes)
    cadence, codec, why_line = plan_line(link, manifest, layout, wishes)
    batch_size, why_batch = batch_for(manifest, rate, cadence, wishes)
    compiled, why_compiled = _compiled(machine, manifest, model, chosen, micro_batch, rate, wishes)
    if compiled is not None:
        of_compiled, why_of_compiled = batch_for(manifest, compiled.rate, cadence, wishes)
        if micro_batch <= of_compiled:
            chosen, rate, batch_size, why_batch = compiled.candidate, compiled.rate, of_compiled, why_of_compiled
        else:
            compiled, why_compiled = None, [f"torch.compile is not used: a batch has less than {micro_batch} samples."]
    micro_batch = min(micro_batch, batch_size)
    reasons = [
        _why_strategy(machine, chosen, candidates, micro_batch, layout, wishes),
        *why_micro_batch,
        *why_batch,
        *why_line,
        *_why_dtype(machine),
        *why_compiled,
        *_why_swarm(swarm),
    ]
    return Plan(
        micro_batch=micro_batch,
        batch_size=batch_size,
        lr_factor=lr_factor_for(manifest, batch_size),
        strategy=chosen.strategy,
        fragments=chosen.fragments,
        all_fragments=layout.num_fragments,
        cadence=cadence,
        codec=codec,
        compute_dtype=machine.compute_dtype,
        compiled=compiled is not None,
        samples_per_second=rate,
        predicted_bytes=chosen.peak_bytes(micro_batch) if chosen.line is not None else None,
        program_bytes=machine.program_bytes,
        steps_while_saving=chosen.steps_while_saving(machine, micro_batch),
        reasons=tuple(reasons),
    )


# -------------------------------------------------------------------- memory


def candidates_of(machine: Machine, manifest: RunManifest, model: Model, wishes: Wishes) -> list[Candidate]:
    """The rungs in the order in which they are tried: of those that train some fragments, as many as possible first.

    :raises UsageError: more fragments are to be trained than the run has
    """
    found: list[Candidate] = []
    layout = model.layout
    if wishes.train_fragments is not None and wishes.train_fragments > layout.num_fragments:
        raise UsageError(
            f"--train-fragments: {wishes.train_fragments} is more than the {layout.num_fragments} that this run has.",
            "Give a smaller number, or leave --train-fragments out.",
        )
    for strategy in model.offered:
        if wishes.strategy is not None and strategy != wishes.strategy:
            continue
        partial = strategy in PARTIAL
        counts: Sequence[int] = range(layout.num_fragments - 1, 0, -1) if partial else [layout.num_fragments]
        if wishes.train_fragments is not None:
            if not partial and wishes.strategy is None and wishes.train_fragments < layout.num_fragments:
                continue
            counts = [wishes.train_fragments] if partial else counts
        found += [_candidate(machine, manifest, model, strategy, count) for count in counts]
    return found


def _candidate(machine: Machine, manifest: RunManifest, model: Model, strategy: StrategyName, count: int) -> Candidate:
    layout = model.layout
    trained = frozenset(range(count))
    section = manifest.inner_optimizer
    use = fixed_bytes(strategy, layout, trained, section, model.facts)
    need = need_of(manifest, layout.num_elements)
    host = need.host_bytes - PROCESSES_BYTES + machine.program_bytes
    gradients = _BYTES_PER_VALUE * sum(layout.size(fragment) for fragment in trained)
    # A checkpoint's copy: bases with their outer state, and of training everything but the gradients.
    outer_values = 2 if manifest.outer_optimizer.name == "adamw" else 1
    left = _left_by_a_sparse_codec(manifest, layout, trained) if strategy in PARTIAL else 0
    kept = use.device_bytes + use.host_bytes - gradients + left
    copied = _BYTES_PER_VALUE * layout.num_elements * (1 + outer_values) + kept
    measurement = machine.measured.get(strategy)
    line = _activations(machine, manifest, model, strategy)
    if machine.one_memory:
        while_probing = machine.program_bytes + PROBING_BYTES + _BYTES_PER_VALUE * layout.num_elements
        common = max(host, while_probing) + use.host_bytes + left
        return Candidate(
            strategy=strategy,
            fragments=count,
            step_bytes=common + use.device_bytes,
            rest_bytes=host + left + use.host_bytes + use.device_bytes - gradients + copied,
            copied_bytes=copied,
            host_bytes=0,
            line=line,
            measurement=measurement,
            program_bytes=machine.program_bytes,
        )
    return Candidate(
        strategy=strategy,
        fragments=count,
        step_bytes=use.device_bytes,
        rest_bytes=0,
        copied_bytes=0,
        host_bytes=host + left + use.host_bytes + copied,
        line=line,
        measurement=measurement,
        program_bytes=0,
    )


def _left_by_a_sparse_codec(manifest: RunManifest, layout: FragmentLayout, trained: frozenset[int]) -> int:
    """What fragments whose turn is over hold of work that is still to be sent, until they are trained again.

    With other codecs nothing is kept of a fragment once its last contribution was accepted.
    """
    if manifest.averaging.codec not in ("sparse", "auto"):
        return 0
    return _BYTES_PER_VALUE * (layout.num_elements - sum(layout.size(fragment) for fragment in trained))


def _activations(machine: Machine, manifest: RunManifest, model: Model, strategy: StrategyName) -> MemoryLine | None:
    """What a step takes on top of what is fixed, from the strategy's own probe or from its nearest relative's.

    The gauge counts everything that training holds, so what is fixed is taken off.
    """
    for source in (strategy, *_RELATIVES[strategy]):
        measurement = machine.measured.get(source)
        if measurement is None or not measurement.results:
            continue
        probed = trained_in_probe(source, model.layout)
        fixed = fixed_bytes(source, model.layout, probed, manifest.inner_optimizer, model.facts).device_bytes
        line = memory_line(measurement.results, fixed)
        if line is not None:
            return MemoryLine(base_bytes=max(0.0, line.base_bytes - fixed), bytes_per_sample=line.bytes_per_sample)
    return None


def probe_budget(machine: Machine, manifest: RunManifest, model: Model, strategy: StrategyName) -> int | None:
    """What a probe of this strategy may hold of the device's memory, as its gauge counts; None for no limit."""
    if machine.budget_bytes is None:
        return None
    trained = trained_in_probe(strategy, model.layout)
    alone = _candidate(machine, manifest, model, strategy, len(trained))
    fixed = fixed_bytes(strategy, model.layout, trained, manifest.inner_optimizer, model.facts).device_bytes
    for_the_model = FIT * (machine.budget_bytes - alone.program_bytes)
    return max(0, int(for_the_model) - (alone.step_bytes - alone.program_bytes - fixed))


def trained_in_probe(strategy: StrategyName, layout: FragmentLayout) -> frozenset[int]:
    """Which fragments have gradients while a strategy is measured: one, of those that train some only.

    The first: its gradients come back through the whole model, so that no other one keeps more activations.
    """
    return frozenset({0}) if strategy in PARTIAL else frozenset(range(layout.num_fragments))


def _micro_batch(
    machine: Machine, manifest: RunManifest, chosen: Candidate, wishes: Wishes
) -> tuple[int, float | None, list[str]]:
    """(micro-batch, samples a second, reasons)."""
    results = chosen.measurement.results if chosen.measurement is not None else ()
    fitting = [one for one in results if chosen.fits(machine, one.micro_batch)]
    paced = machine.emulated_samples_per_second
    failure = chosen.measurement.failure if chosen.measurement is not None else ""
    reasons = []
    if failure and not fitting:
        reasons.append(f"Measuring failed ({failure}): one sample at a time.")
    if wishes.micro_batch is not None:
        micro_batch = wishes.micro_batch
        measured = next((one for one in results if one.micro_batch == micro_batch), None)
        rate = measured.samples_per_second if measured is not None else None
        reasons.append(f"Micro-batch {micro_batch}, as you said.")
    elif fitting:
        best = choose(fitting)
        micro_batch, rate = best.micro_batch, best.samples_per_second
        fastest = max(fitting, key=lambda one: one.samples_per_second)
        if fastest.micro_batch != micro_batch:
            reasons.append(
                f"Micro-batch {micro_batch} makes {_speed(rate)}, within 5 % of the best ({fastest.micro_batch}: "
                f"{_speed(fastest.samples_per_second)})."
            )
        else:
            reasons.append(f"Micro-batch {micro_batch} makes {_speed(rate)}, the best of those that fit.")
    else:
        micro_batch, rate = 1, None
    if paced is not None:
        rate = min(paced, rate) if rate is not None else paced
    return min(micro_batch, manifest.inner_optimizer.batch_size), rate, reasons


def _compiled(
    machine: Machine,
    manifest: RunManifest,
    model: Model,
    chosen: Candidate,
    micro_batch: int,
    rate: float | None,
    wishes: Wishes,
) -> tuple[_Compiled | None, list[str]]:
    """What compiled steps make and take, if they are to be made, and why or why not where it was tried."""
    measurement = chosen.measurement
    if chosen.strategy != "full":
        return None, ["torch.compile is for training with everything in memory."] if wishes.compile else []
    if measurement is None or wishes.compile is False:
        return None, []
    found = measurement.compiled
    if found is None or rate is None:
        return None, [measurement.compiling] if measurement.compiling else []
    if found.micro_batch != micro_batch:
        return None, [f"torch.compile is not used: it was measured with micro-batch {found.micro_batch}."]
    times = found.samples_per_second / rate
    if times < FASTER:
        return None, [f"torch.compile is not used: it makes {times:.2f} times the samples."]
    everything = frozenset(range(model.layout.num_fragments))
    fixed = fixed_bytes(chosen.strategy, model.layout, everything, manifest.inner_optimizer, model.facts).device_bytes
    candidate = chosen
    if found.peak_bytes is not None:
        candidate = replace(chosen, line=MemoryLine(base_bytes=max(0, found.peak_bytes - fixed), bytes_per_sample=0.0))
    if not candidate.fits(machine, micro_batch):
        needs = memory_text(candidate.peak_bytes(micro_batch))
        return None, [f"torch.compile is not used: it would take {needs}."]
    why = f"torch.compile makes {_speed(found.samples_per_second)}, {times:.2f} times as many."
    return _Compiled(candidate=candidate, rate=found.samples_per_second), [why]


def _why_strategy(
    machine: Machine,
    chosen: Candidate,
    candidates: Sequence[Candidate],
    micro_batch: int,
    layout: FragmentLayout,
    wishes: Wishes,
) -> str:
    """ "12 GB: micro-batch 4 with checkpointing, 3 of 8 fragments; plain would need 15.1 GB."""
    budget = memory_text(machine.budget_bytes) if machine.budget_bytes is not None else "Memory of unknown size"
    what = f"micro-batch {micro_batch} with {_IN_WORDS[chosen.strategy]}"
    if chosen.fragments < layout.num_fragments:
        what += f", {chosen.fragments} of {layout.num_fragments} fragments"
    needs = f", which takes {memory_text(chosen.peak_bytes(micro_batch))}" if chosen.line is not None else ""
    if wishes.strategy is not None:
        return f"{budget}: {what}{needs}, as you said."
    plainer = candidates[0]
    if chosen is plainer or plainer.strategy == chosen.strategy:
        return f"{budget}: {what}{needs}."
    if plainer.line is not None:
        would = f"plain would need {memory_text(plainer.peak_bytes(1))}"
    elif plainer.is_refuted:
        would = "plain ran out of it with one sample"
    else:
        would = f"plain would need more than {memory_text(plainer.peak_bytes(1))}"
    return f"{budget}: {what}{needs}; {would}."


def _nothing_fits(machine: Machine, candidates: Sequence[Candidate], wishes: Wishes) -> PlanError:
    if not candidates:
        return PlanError(
            "What you asked for is not offered for this model on this device.",
            "Leave --strategy and --train-fragments out.",
        )
    least = min(candidates, key=lambda one: one.peak_bytes(1))
    budget = memory_text(machine.budget_bytes or 0)
    if not any(one.host_fits(machine) for one in candidates):
        return PlanError(
            f"The machine's own memory, {memory_text(machine.host_budget_bytes or 0)} free, does not hold this run: it "
            f"takes {memory_text(min(one.host_bytes for one in candidates))}.",
            "Close other programs, or join a run with a smaller model.",
        )
    needed = (least.peak_bytes(wishes.micro_batch or 1) - least.program_bytes) / FIT + least.program_bytes
    more = ""
    if least.is_refuted or least.line is None:
        needed, more = max(needed, machine.budget_bytes or 0), "more than "
    how = f"with the strategy {wishes.strategy}" if wishes.strategy is not None else "whatever the strategy"
    return PlanError(
        f"{budget} of memory do not hold this run {how}: it takes {more}{memory_text(needed)}.",
        "Close other programs, raise --memory or the limit of this container, or join a run with a smaller model.",
    )


# ------------------------------------------------------ batch, and the rest


def batch_for(manifest: RunManifest, rate: float | None, cadence: int, wishes: Wishes) -> tuple[int, list[str]]:
    """(samples of an inner step, why, where it is not the run's).

    A peer too slow for 8 steps between its rounds takes a smaller batch; nobody takes a larger one.

    :param rate: samples a second
    """
    of_run = manifest.inner_optimizer.batch_size
    if wishes.batch_size is not None:
        return min(wishes.batch_size, of_run), [f"Batch {min(wishes.batch_size, of_run)}, as you said."]
    if manifest.averaging.mode != "local" or rate is None:
        return of_run, []
    seconds = manifest.run.tick_seconds * manifest.run.fragments * cadence
    steps = rate * seconds / of_run
    if steps >= STEPS_PER_CYCLE:
        return of_run, []
    batch_size = max(1, math.floor(rate * seconds / STEPS_PER_CYCLE))
    if batch_size == of_run:
        return of_run, []
    return batch_size, [
        f"{_speed(rate)} make {steps:.2g} steps of {of_run} samples between two rounds of a fragment: batch "
        f"{batch_size}, learning rate times {lr_factor_for(manifest, batch_size):.2f}."
    ]


def lr_factor_for(manifest: RunManifest, batch_size: int) -> float:
    """Times the manifest's learning rate: a smaller batch's gradient is noisier, by the square root."""
    return math.sqrt(batch_size / manifest.inner_optimizer.batch_size)


def _why_dtype(machine: Machine) -> list[str]:
    return [] if machine.compute_dtype == "float32" else [f"Computes in {machine.compute_dtype}."]


def _why_swarm(swarm: SwarmFacts) -> list[str]:
    if swarm.training_peers is None:
        return []
    return [f"{swarm.training_peers} other peer(s) train in this run now."]


def _speed(samples_per_second: float) -> str:
    digits = f"{samples_per_second:,.0f}" if samples_per_second >= 100 else f"{samples_per_second:.3g}"
    return f"{digits} samples/s"
