import copy
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dht_config.errors import DeviceError
from dht_config.manifest import InnerOptimizerSection, example_manifest, parse_manifest
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.tasks import load_task
from p2p_trainer.tasks.base import Batch
from p2p_trainer.throughput import (
    MemoryGauge,
    Stopped,
    Throughput,
    choose,
    inner_step,
    measure_micro_batches,
    memory_line,
    paced_rate,
    shrinking_inner_step,
)

CPU = torch.device("cpu")
SGD = InnerOptimizerSection(name="sgd", lr=0.1)


class Regression:
    """Linear regression in double precision, on a device whose memory holds ``capacity`` samples."""

    name = "regression"
    version = 1
    unit = "rows"

    def __init__(self, capacity: int = 10**9, out_of_memory: Exception | None = None) -> None:
        self.capacity = capacity
        self.out_of_memory = out_of_memory or torch.OutOfMemoryError("CUDA out of memory.")
        self.sizes: list[int] = []

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1).double()

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            inputs = torch.randn(batch_size, 3, generator=generator, dtype=torch.float64)
            yield inputs, inputs.sum(dim=1, keepdim=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        self.sizes.append(len(inputs))
        if len(inputs) > self.capacity:
            raise self.out_of_memory
        return functional.mse_loss(model(inputs), targets)

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        return [next(self.batches(1, batch_size))]


def trained(task: Regression, model: nn.Module, batch: Batch, micro_batch: int, clip_norm: float | None) -> nn.Module:
    model = copy.deepcopy(model)
    inner_step(task, model, build_inner_optimizer(model.parameters(), SGD), batch, micro_batch, clip_norm)
    return model


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(1, 33), micro_batch=st.integers(1, 40), clip_norm=st.sampled_from([None, 0.1, 1e6]))
def test_the_step_is_the_whole_batchs_whatever_the_micro_batch(
    samples: int, micro_batch: int, clip_norm: float | None
) -> None:
    task = Regression()
    model = task.build_model()
    batch = next(task.batches(7, samples))
    whole = trained(task, model, batch, samples, clip_norm)
    cut = trained(task, model, batch, micro_batch, clip_norm)
    for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        assert ours.grad is None


def test_the_loss_is_the_mean_over_the_batch_before_the_step() -> None:
    task = Regression()
    model = task.build_model()
    batch = next(task.batches(0, 7))
    expected = float(task.loss(model, batch).detach())
    optimizer = build_inner_optimizer(model.parameters(), SGD)
    assert inner_step(task, model, optimizer, batch, 3) == pytest.approx(expected, rel=1e-6)


def test_a_text_models_step_is_the_same_for_unequal_micro_batches(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    task = load_task(
        "text",
        {
            "model_type": "llama",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 256,
        },
        {"files": [str(tmp_path / "text")], "sequence_length": 12},
    )
    model = task.build_model().double()
    batch = next(task.batches(0, 7))
    results = []
    for micro_batch in (7, 3):
        ours = copy.deepcopy(model)
        inner_step(task, ours, build_inner_optimizer(ours.parameters(), SGD), batch, micro_batch, 0.5)
        results.append(ours)
    for whole, cut in zip(results[0].parameters(), results[1].parameters(), strict=True):
        assert torch.allclose(whole, cut, rtol=0, atol=1e-6)  # the loss is computed in single precision


def test_clipping_limits_the_step() -> None:
    task = Regression()
    model = task.build_model()
    batch = next(task.batches(0, 4))
    clipped = trained(task, model, batch, 2, 0.01)
    moved = [new - old for new, old in zip(clipped.parameters(), model.parameters(), strict=True)]
    norm = math.sqrt(sum(float(move.detach().square().sum()) for move in moved))
    assert norm == pytest.approx(SGD.lr * 0.01, rel=1e-3)


@pytest.mark.parametrize(("samples", "micro_batch", "times"), [(8, 3, 2), (8, 4, 1), (8, 8, 0), (8, 99, 0), (3, 1, 2)])
def test_the_callback_comes_between_micro_batches_only(samples: int, micro_batch: int, times: int) -> None:
    task = Regression()
    model = task.build_model()
    calls: list[int] = []
    inner_step(
        task,
        model,
        build_inner_optimizer(model.parameters(), SGD),
        next(task.batches(0, samples)),
        micro_batch,
        between=lambda: calls.append(len(task.sizes)),
    )
    assert calls == list(range(1, times + 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_step_whose_loss_or_gradient_is_not_finite_changes_nothing(value: float) -> None:
    task = Regression()
    model = task.build_model()
    optimizer = build_inner_optimizer(model.parameters(), InnerOptimizerSection())
    inner_step(task, model, optimizer, next(task.batches(0, 4)), 2, 1.0)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    inputs, targets = next(task.batches(1, 4))
    inputs[3, 0] = value
    assert math.isnan(inner_step(task, model, optimizer, (inputs, targets), 2, 1.0))
    assert all(torch.equal(before[0][name], tensor) for name, tensor in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    for index, state in before[1]["state"].items():
        assert all(torch.equal(state[key], after[index][key]) for key in state)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported ..."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried …"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_running_out_of_memory_halves_the_micro_batch_and_makes_the_same_step(error: Exception) -> None:
    task = Regression(capacity=3, out_of_memory=error)
    model = task.build_model()
    batch = next(task.batches(0, 8))
    expected = trained(Regression(), model, batch, 8, 0.5)
    optimizer = build_inner_optimizer(model.parameters(), SGD)
    _, micro_batch = shrinking_inner_step(task, model, optimizer, batch, 8, 0.5)
    assert micro_batch == 2
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_device_that_does_not_hold_one_sample_is_an_error() -> None:
    task = Regression(capacity=0)
    model = task.build_model()
    with pytest.raises(DeviceError):
        shrinking_inner_step(task, model, build_inner_optimizer(model.parameters(), SGD), next(task.batches(0, 8)), 8)
    assert measure(task, SGD, limit_seconds=0.01) == ("memory", [])


@pytest.mark.parametrize("error", ERRORS)
def test_memory_that_runs_out_in_the_optimizers_step_is_an_error_and_no_second_step(error: Exception) -> None:
    class HalfAStep(torch.optim.SGD):
        steps = 0

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.steps += 1
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise error

    task = Regression()
    model = task.build_model()
    before = model.weight.detach().clone()
    optimizer = HalfAStep(model.parameters(), lr=0.1)
    with pytest.raises(DeviceError, match="optimizer's step"):
        shrinking_inner_step(task, model, optimizer, next(task.batches(0, 8)), 8)
    assert optimizer.steps == 1 and torch.equal(model.weight, before + 1.0)
    assert task.sizes == [8] and model.weight.grad is None


def test_an_error_that_is_not_about_memory_is_not_hidden() -> None:
    task = Regression(capacity=0, out_of_memory=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    model = task.build_model()
    with pytest.raises(RuntimeError, match="mat1"):
        shrinking_inner_step(task, model, build_inner_optimizer(model.parameters(), SGD), next(task.batches(0, 8)), 8)
    with pytest.raises(RuntimeError, match="mat1"):
        measure(task, SGD, limit_seconds=0.01)


class Gauge(MemoryGauge):
    """Ten bytes a sample on top of a hundred."""

    def __init__(self, task: Regression) -> None:
        super().__init__(CPU)
        self._task = task

    def reset(self) -> None:
        self._task.sizes.clear()

    def peak_bytes(self) -> int | None:
        return 100 + 10 * max(self._task.sizes)


def measure(
    task: Regression, section: InnerOptimizerSection, limit_seconds: float = 2.0, budget_bytes: int | None = None
) -> tuple[Stopped, list[Throughput]]:
    model = task.build_model()
    measured: list[Throughput] = []
    stopped = measure_micro_batches(
        task,
        model,
        build_inner_optimizer(model.parameters(), section),
        section,
        measured.append,
        seed=0,
        gauge=Gauge(task),
        fixed_bytes=100,
        budget_bytes=budget_bytes,
        limit_seconds=limit_seconds,
    )
    return stopped, measured


def test_measuring_doubles_up_to_the_inner_batch() -> None:
    stopped, measured = measure(Regression(), InnerOptimizerSection(batch_size=12))
    assert (stopped, [one.micro_batch for one in measured]) == ("done", [1, 2, 4, 8, 12])
    assert [one.peak_bytes for one in measured] == [110, 120, 140, 180, 220]
    assert all(one.makes_sense() and one.measured_seconds > 0 and one.steps > 0 for one in measured)


def test_measuring_stops_growing_where_memory_runs_out() -> None:
    task = Regression(capacity=5)
    stopped, measured = measure(task, InnerOptimizerSection(batch_size=32))
    assert (stopped, [one.micro_batch for one in measured]) == ("memory", [1, 2, 4])


@pytest.mark.parametrize(("budget", "tried"), [(119, [1]), (120, [1, 2]), (139, [1, 2]), (179, [1, 2, 4])])
def test_a_micro_batch_that_a_budget_would_not_hold_is_not_tried(budget: int, tried: list[int]) -> None:
    stopped, measured = measure(Regression(), InnerOptimizerSection(batch_size=32), budget_bytes=budget)
    assert (stopped, [one.micro_batch for one in measured]) == ("memory", tried)


def test_a_machine_too_slow_for_the_limit_measures_one_micro_batch() -> None:
    task = Regression()
    stopped, measured = measure(task, InnerOptimizerSection(batch_size=4), limit_seconds=1e-9)
    assert (stopped, [one.micro_batch for one in measured]) == ("time", [1])
    assert task.sizes == [1] * 8, "one step that does not count, and one that does"


def test_memory_over_the_micro_batch_is_a_line_through_what_was_measured() -> None:
    def at(micro_batch: int, peak_bytes: int | None) -> Throughput:
        return Throughput(samples_per_second=1.0, micro_batch=micro_batch, measured_seconds=1.0, peak_bytes=peak_bytes)

    assert memory_line([], 0) is None and memory_line([at(1, None)], 0) is None
    single = memory_line([at(2, 70)], 50)
    assert single is not None and (single.at(1), single.at(2), single.at(8)) == (60, 70, 130)
    line = memory_line([at(1, 60), at(2, 90), at(4, 90)], 50)
    assert line is not None and (line.at(1), line.at(4), line.at(8)) == (60, 90, 130)
    falling = memory_line([at(1, 60), at(4, 30)], 50)
    assert falling is not None and falling.at(8) == 30, "more samples never take less"


def test_the_smallest_micro_batch_within_five_percent_of_the_best_is_chosen() -> None:
    measured = [
        Throughput(samples_per_second=speed, micro_batch=micro_batch, measured_seconds=1.0)
        for micro_batch, speed in [(1, 40.0), (2, 80.0), (4, 96.0), (8, 100.0), (16, 99.0)]
    ]
    assert choose(measured).micro_batch == 4
    assert choose(measured[:2]).micro_batch == 2
    assert choose(measured[:1]).micro_batch == 1


def test_a_slow_machine_is_not_measured_for_minutes() -> None:
    """At a sample in a quarter of an hour: a test that slept through a step would time out."""
    manifest = parse_manifest(example_manifest("digits"), source="a test")
    task = load_task("digits", manifest.model, manifest.data)
    model, section = task.build_model(), manifest.inner_optimizer
    optimizer = build_inner_optimizer(model.parameters(), section)
    rate = paced_rate(task, model, optimizer, section, batch_size=8, micro_batch=8, at_most=0.001, check=lambda: None)
    assert rate == 0.001
