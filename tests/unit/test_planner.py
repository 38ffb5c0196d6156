"""A plan rests on measurements: the planner measures what the plan names, once, and remembers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_plan import FULL, PARAMETERS, RAN_OUT, machine, manifest, measurement, model

from p2p_trainer.hardware import DeviceFacts, Hardware
from p2p_trainer.limits import Limits, read_limits
from p2p_trainer.planning import planner as planning
from p2p_trainer.planning.plan_facts import NO_WISHES, Link, Machine, Measurement, Plan, SwarmFacts, Wishes
from p2p_trainer.planning.planner import Planner, machine_of, model_of, own_bytes, tries_compiling
from p2p_trainer.planning.probe import Prober, ProbeRequest
from p2p_trainer.planning.probe_cache import ProbeCache
from p2p_trainer.planning.reality import DRIFT, DRIFT_SECONDS, RealityWatch
from p2p_trainer.run_model import blank_model
from p2p_trainer.settings import PeerSettings
from p2p_trainer.strategies import StrategyName
from p2p_trainer.tasks import load_task

LIMITS: Limits = read_limits()
CHECKPOINT, FRAGMENTS = measurement("checkpoint", 50), measurement("fragments", 50)


class ScriptedProber:
    """Answers from a table and remembers what it was asked."""

    def __init__(self, **answers: Measurement) -> None:
        self.answers = answers
        self.asked: list[ProbeRequest] = []

    def measure(self, request: ProbeRequest, alive: Callable[[float], None]) -> Measurement:
        alive(0.5)
        self.asked.append(request)
        return self.answers[request.strategy]

    @property
    def strategies(self) -> list[StrategyName]:
        return [request.strategy for request in self.asked]


def planner(directory: Path, on: Machine, prober: ScriptedProber, said: list[str] | None = None) -> Planner:
    device = DeviceFacts(kind="cpu", name="A processor", total_bytes=10**11, free_bytes=10**10)
    return Planner(
        manifest=manifest(),
        task_version=1,
        model=model(),
        machine=on,
        hardware=Hardware(device=device, limits=LIMITS, disk_free_bytes=None),
        threads=1,
        seed=0,
        prober=cast(Prober, prober),
        cache=ProbeCache(directory),
        alive=lambda _share: None,
        say=(said if said is not None else []).append,
    )


def made(one: Planner, wishes: Wishes = NO_WISHES) -> Plan:
    return one.plan(Link(), SwarmFacts(), wishes)


def test_with_memory_to_spare_one_strategy_is_measured_and_at_the_next_start_none(tmp_path: Path) -> None:
    prober = ScriptedProber(full=FULL)
    first = made(planner(tmp_path, machine(10_000), prober))
    assert (first.strategy, prober.strategies) == ("full", ["full"])
    assert made(planner(tmp_path, machine(10_000), prober)) == first
    assert prober.strategies == ["full"]


def test_it_goes_down_the_ladder_as_far_as_measurements_send_it(tmp_path: Path) -> None:
    prober = ScriptedProber(full=RAN_OUT, checkpoint=CHECKPOINT)
    assert made(planner(tmp_path, machine(500), prober)).strategy == "checkpoint"
    assert prober.strategies == ["full", "checkpoint"]
    prober = ScriptedProber(full=RAN_OUT, checkpoint=RAN_OUT, fragments=FRAGMENTS)
    assert made(planner(tmp_path / "other", machine(450), prober)).strategy == "fragments"
    assert prober.strategies[-1] == "fragments"


def test_what_cannot_fit_is_not_measured(tmp_path: Path) -> None:
    """Plain takes 268 MB before any activation, and a checkpoint's copy more."""
    prober = ScriptedProber(fragments=FRAGMENTS)
    assert made(planner(tmp_path, machine(370), prober)).strategy == "fragments"
    assert prober.strategies == ["fragments"]


def test_a_probe_is_told_what_it_may_take(tmp_path: Path) -> None:
    prober = ScriptedProber(full=FULL)
    made(planner(tmp_path, machine(10_000), prober))
    (request,) = prober.asked
    assert request.budget_bytes is not None and 8 * 10**9 < request.budget_bytes < 9 * 10**9
    assert request.trained == frozenset(range(8)) and request.device == "cpu"


def test_more_memory_than_at_the_last_start_is_tried_and_less_is_not(tmp_path: Path) -> None:
    prober = ScriptedProber(full=RAN_OUT, checkpoint=CHECKPOINT)
    made(planner(tmp_path, machine(500), prober))
    made(planner(tmp_path, machine(490), prober))
    assert prober.strategies == ["full", "checkpoint"]
    prober.answers["full"] = FULL
    assert made(planner(tmp_path, machine(2000), prober)).strategy == "full"
    assert prober.strategies == ["full", "checkpoint", "full"]


def test_a_probe_that_was_killed_refutes_its_rung_for_this_start_only(tmp_path: Path) -> None:
    """The kernel takes it first, also where somebody else wanted the memory."""
    prober = ScriptedProber(full=replace(RAN_OUT, killed=True), checkpoint=CHECKPOINT)
    assert made(planner(tmp_path, machine(10_000), prober)).strategy == "checkpoint"
    prober.answers["full"] = FULL
    assert made(planner(tmp_path, machine(10_000), prober)).strategy == "full"
    assert prober.strategies == ["full", "checkpoint", "full"]


def test_a_probe_that_fails_is_said_and_not_kept(tmp_path: Path) -> None:
    failed = Measurement(results=(), stopped=None, failure="it ended with exit code 3")
    prober, said = ScriptedProber(full=failed), list[str]()
    careful = made(planner(tmp_path, machine(10_000), prober, said))
    assert (careful.micro_batch, careful.samples_per_second) == (1, None)
    assert len(said) == 1 and "it ended with exit code 3" in said[0]
    made(planner(tmp_path, machine(10_000), prober, said))
    assert prober.strategies == ["full", "full"]


def test_a_probe_that_fails_late_is_said_so_and_what_it_found_counts(tmp_path: Path) -> None:
    half = replace(measurement("full", 20, m1=10.0, m2=20.0), stopped=None, failure="it was killed by SIGSEGV")
    prober, said = ScriptedProber(full=half), list[str]()
    plan = made(planner(tmp_path, machine(10_000), prober, said))
    assert (plan.micro_batch, plan.samples_per_second) == (2, 20.0)
    assert said == ["Measuring this machine ended early: it was killed by SIGSEGV. What it found until then counts."]
    made(planner(tmp_path, machine(10_000), prober))
    assert prober.strategies == ["full", "full"], "the next start tries again"


def test_what_an_earlier_start_compiled_is_for_those_only_who_try_that(tmp_path: Path) -> None:
    """Not for a start without --compile on a CPU, nor for one that is slowed down."""
    fast = replace(FULL, compiled=replace(FULL.results[0], samples_per_second=30.0))
    prober = ScriptedProber(full=fast)
    asking = planner(tmp_path, machine(10_000), prober)
    asking.compile = True
    first = made(asking, Wishes(compile=True))
    assert first.compiled and first.samples_per_second == 30.0
    plain = made(planner(tmp_path, machine(10_000), prober))
    assert (plain.compiled, plain.samples_per_second) == (False, 10.0)
    slowed = made(planner(tmp_path, replace(machine(10_000), emulated_samples_per_second=2.0), prober))
    assert (slowed.compiled, slowed.samples_per_second) == (False, 2.0)
    assert prober.strategies == ["full"]


def test_who_asks_for_compiled_code_hears_why_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "why_not_compile", lambda _device, wished: "" if wished else "It was not asked for.")
    cpu, said = torch.device("cpu"), list[str]()

    def tried(mode: str = "local", **settings: Any) -> bool:
        run = cast(Any, SimpleNamespace(averaging=SimpleNamespace(mode=mode)))
        return tries_compiling(cpu, run, PeerSettings(**settings), said.append)

    assert tried(compile=True) and not tried() and said == []
    assert not tried(compile=True, emulate=2.0) and not tried("gradient", compile=True)
    assert said == [
        "torch.compile is not tried. This peer is slowed down.",
        "torch.compile is not tried. A run on averaged gradients steps no optimizer here.",
    ]


def test_reality_comes_into_the_next_plan(tmp_path: Path) -> None:
    prober = ScriptedProber(full=measurement("full", 20, m1=10.0, m2=20.0, m4=40.0, m8=80.0))
    one = planner(tmp_path, machine(10_000), prober)
    plan = made(one)
    assert plan.micro_batch == 8
    one.note_too_big(plan, 8)
    assert made(planner(tmp_path, machine(10_000), prober)).micro_batch == 4
    one.note_drift(plan)
    made(planner(tmp_path, machine(10_000), prober))
    assert prober.strategies == ["full", "full"]


# --- the machine


def hardware(kind: str, free: int, host_free: int = 10**10) -> Hardware:
    device = DeviceFacts(kind=kind, name="A device", total_bytes=10**11, free_bytes=free)  # type: ignore[arg-type]
    limits = replace(LIMITS, free_memory_bytes=host_free)
    return Hardware(device=device, limits=limits, disk_free_bytes=None)


def test_what_a_peer_already_holds_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "own_bytes", lambda: 700)
    cpu = machine_of(torch.device("cpu"), hardware("cpu", 1000), None, None)
    assert (cpu.budget_bytes, cpu.one_memory) == (1700, True)
    assert machine_of(torch.device("cpu"), hardware("cpu", 1000), 500, None).budget_bytes == 500
    assert machine_of(torch.device("cpu"), hardware("cpu", 1000), 5000, 2.0).budget_bytes == 1700


def test_a_card_has_two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "own_bytes", lambda: 700)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 50)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    card = machine_of(torch.device("cuda", 0), hardware("cuda", 1000, 9000), None, None)
    assert (card.budget_bytes, card.host_budget_bytes, card.one_memory) == (1050, 9700, False)
    assert card.compute_dtype == "bfloat16"


def test_this_process_holds_something() -> None:
    assert own_bytes() > 10**7


def test_what_is_offered_follows_from_model_and_device() -> None:
    run = manifest()
    task = load_task("digits", {"hidden_sizes": [16, 16]}, {})
    shape = model_of(blank_model(task), run, torch.device("cpu"))
    assert "full" in shape.offered and "fragments" in shape.offered
    assert "stream" not in shape.offered and "host_optimizer" not in shape.offered
    assert "checkpoint" not in shape.offered, "it has no blocks"
    assert shape.layout.num_elements < PARAMETERS


# --- reality


def watch(planned: float | None) -> tuple[RealityWatch, list[Any]]:
    told: list[Any] = []
    return RealityWatch(planned, on_drift=told.append, on_shrunk=lambda *sizes: told.append(sizes)), told


@pytest.mark.parametrize("rate", [100 * (1 + DRIFT) + 1, 100 * (1 - DRIFT) - 1])
def test_a_rate_that_is_off_for_a_minute_has_drifted(rate: float) -> None:
    looking, told = watch(100.0)
    for second in range(int(DRIFT_SECONDS)):
        looking.rate(rate, second)
    assert told == []
    for second in range(3):
        looking.rate(rate, DRIFT_SECONDS + second)
    assert told == [rate], "once"
    for second in range(int(2 * DRIFT_SECONDS)):
        looking.rate(rate, 100 + second)
    assert told == [rate], "it is what is expected from then on"
    for second in range(int(DRIFT_SECONDS) + 1):
        looking.rate(2 * rate, 1000 + second)
    assert told == [rate, 2 * rate]


def test_a_rate_that_comes_back_has_not() -> None:
    looking, told = watch(100.0)
    for second in range(1000):
        looking.rate(50.0 if second % 50 else 100.0, second)
    unknown, nothing = watch(None)
    unknown.rate(1.0, 0.0)
    unknown.rate(1.0, 1000.0)
    assert told == nothing == []


def test_a_micro_batch_that_shrank_is_told() -> None:
    looking, told = watch(None)
    looking.micro_batch(8, 8)
    looking.micro_batch(8, 2)
    assert told == [(8, 2)]
