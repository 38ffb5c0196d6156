"""torch.compile: only where it is measured to be faster, and whatever it does, training goes on."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import p2p_trainer.planning.compiled as compiling
from dht_config.manifest import InnerOptimizerSection, parse_manifest
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.planning.compiled import CompiledTask, compiled, measure_compiled, why_not_compile
from p2p_trainer.planning.compute import in_dtype, scaler_of
from p2p_trainer.planning.plan_facts import Measurement
from p2p_trainer.planning.probe import ProbeRequest, start_prober
from p2p_trainer.planning.probe_cache import Entry, ProbeCache
from p2p_trainer.tasks import Task, load_task
from p2p_trainer.throughput import MemoryGauge, Throughput, inner_step

CPU = torch.device("cpu")
SECTION = InnerOptimizerSection(name="sgd", lr=0.05, batch_size=16)
DIGITS = load_task("digits", {"hidden_sizes": [16], "channels": [2]}, {})
real_compile = torch.compile


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """dynamo as it is, without a C++ compiler: that takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(real_compile, backend="aot_eager"))
    monkeypatch.setattr(compiling, "default_cache_directory", lambda: tmp_path / "probes")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def made(task: Task, model: nn.Module, check: Callable[[], None] = lambda: None) -> tuple[Task, list[str]]:
    said: list[str] = []
    return compiled(task, model, 8, seed=0, check=check, say=said.append), said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compiled_steps_are_the_same_steps_and_compiling_leaves_no_trace(dtype: Any) -> None:
    torch.manual_seed(0)
    model = DIGITS.build_model()
    plain = copy.deepcopy(model)
    task = in_dtype(DIGITS, CPU, dtype)
    fast, said = made(task, model)
    assert not said and isinstance(fast, CompiledTask)
    assert scaler_of(fast).is_enabled() == (dtype == "float16")
    for (name, now), then in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(now, then), name
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizers = [build_inner_optimizer(each.parameters(), SECTION) for each in (model, plain)]
    for batch, _ in zip(DIGITS.batches(0, 16), range(4), strict=False):
        loss = inner_step(fast, model, optimizers[0], batch, 8)
        assert loss == pytest.approx(inner_step(task, plain, optimizers[1], batch, 8), rel=1e-2)
    for now, then in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(now, then, rtol=2e-2, atol=2e-3)


def test_other_shapes_evaluation_and_other_models_take_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DIGITS.build_model()
    fast, _ = made(DIGITS, model)
    seen: list[nn.Module] = []
    monkeypatch.setattr(DIGITS, "loss", lambda model, batch: seen.append(model) or torch.zeros(()))
    batch = next(DIGITS.batches(0, 8))
    model.train()
    fast.loss(model, batch)
    fast.loss(model, tuple(tensor[:3] for tensor in batch))
    other = DIGITS.build_model()
    fast.loss(other, batch)
    with torch.no_grad():
        fast.loss(model, batch)
    model.eval()
    fast.loss(model, batch)
    assert seen[0] is not model and [one is model for one in seen[1:]] == [True, False, True, True]


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("g++: fatal error: no space left on device\ncompilation terminated.")


def test_any_failure_is_one_line_and_the_task_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DIGITS.build_model()
    model.eval()
    monkeypatch.setattr(torch, "compile", partial(real_compile, backend=broken))
    same, said = made(DIGITS, model)
    assert same is DIGITS and not model.training
    (line,) = said
    assert line == "Training goes on without torch.compile (g++: fatal error: no space left on device)."


def slow_backend(*_: Any, **__: Any) -> Any:
    while True:
        time.sleep(0.01)


def test_what_takes_too_long_is_given_up_and_who_leaves_meanwhile_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(real_compile, backend=slow_backend))
    monkeypatch.setattr(compiling, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.2)
    same, said = made(DIGITS, DIGITS.build_model())
    assert same is DIGITS and "it took longer" in said[0]

    class Leaves(Exception):
        pass

    def leaves() -> None:
        raise Leaves

    with pytest.raises(Leaves):
        made(DIGITS, DIGITS.build_model(), leaves)


def test_steps_of_both_kinds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DIGITS.build_model()
    ordinary = Throughput(samples_per_second=100.0, micro_batch=8, measured_seconds=1.0)
    arguments = (DIGITS, model, build_inner_optimizer(model.parameters(), SECTION), SECTION, ordinary)
    found, why = measure_compiled(*arguments, seed=0, gauge=MemoryGauge(CPU), limit_seconds=0.1)
    assert not why and found is not None and found.makes_sense() and found.micro_batch == 8
    monkeypatch.setattr(torch, "compile", broken)
    found, why = measure_compiled(*arguments, seed=0, gauge=MemoryGauge(CPU), limit_seconds=0.1)
    assert found is None and "no space left on device" in why


def test_compiled_steps_that_fail_are_not_used_and_what_was_measured_before_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordinary = Throughput(samples_per_second=100.0, micro_batch=8, measured_seconds=1.0)

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(compiling, "inner_step", out_of_memory)
    model = DIGITS.build_model()
    optimizer = build_inner_optimizer(model.parameters(), SECTION)
    found, why = measure_compiled(
        DIGITS, model, optimizer, SECTION, ordinary, seed=0, gauge=MemoryGauge(CPU), limit_seconds=0.1
    )
    assert found is None and why.startswith("torch.compile is not used: its steps fail (") and "can't allocate" in why


def test_it_is_tried_on_cards_or_where_a_person_says_so_and_a_compiler_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: f"/usr/bin/{name}")
    card = torch.device("cuda", 0)
    assert why_not_compile(CPU, None) and why_not_compile(CPU, False) and why_not_compile(card, False)
    assert not why_not_compile(CPU, True) and not why_not_compile(card, None)
    monkeypatch.setattr(compiling.shutil, "which", lambda _name: None)
    assert "no C++ compiler" in why_not_compile(card, None)


RUN = '[run]\nname = "tiny"\nfragments = 2\n[task]\nname = "digits"\n[inner_optimizer]\nbatch_size = 4\n'


def request(**changes: Any) -> ProbeRequest:
    return ProbeRequest(
        manifest=parse_manifest(RUN, "a test"),
        strategy="full",
        trained=frozenset({0, 1}),
        device="cpu",
        compute_dtype="float32",
        threads=1,
        seed=0,
        budget_bytes=None,
        limit_seconds=0.2,
        compile=True,
        **changes,
    )


def test_a_probe_measures_it_and_what_it_measured_before_counts_where_compiling_kills_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os
    import signal

    import p2p_trainer.planning.probe as probing

    def killed(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(*_: Any, **__: Any) -> Any:
        time.sleep(300)

    ordinary = Throughput(samples_per_second=2.0, micro_batch=1, measured_seconds=1.0)
    monkeypatch.setattr(probing, "COMPILING_SILENCE_SECONDS", 0.5)
    for becomes, why in (
        (lambda *_, **__: (ordinary, ""), ""),
        (killed, "torch.compile broke its process."),
        (hangs, "torch.compile took too long."),
    ):
        monkeypatch.setattr(probing, "measure_compiled", becomes)
        prober = start_prober()
        try:
            found = prober.measure(request())
        finally:
            prober.close()
        assert found.results and found.stopped in ("done", "time") and not found.failure and not found.killed
        assert found.compiling == why and (found.compiled == ordinary) == (not why)


@pytest.mark.parametrize(("tried", "compiling_said"), [(True, ""), (False, "It broke."), (False, "")])
def test_what_became_of_it_is_remembered(tried: bool, compiling_said: str, tmp_path: Path) -> None:
    one = Throughput(samples_per_second=2.0, micro_batch=1, measured_seconds=1.0)
    measurement = Measurement(results=(one,), stopped="done", compiled=one if tried else None, compiling=compiling_said)
    cache = ProbeCache(tmp_path)
    cache.write("key", Entry(measurement=measurement, budget_bytes=None))
    known = cache.read("key")
    assert known is not None and known.measurement == measurement
    assert known.holds_for(None) and known.holds_for(None, compile=True) == bool(tried or compiling_said)
