"""Training in float16: a gradient that overflows costs a smaller scale and a second computation, never a sample."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from dht_config.errors import UsageError
from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.hardware import read_hardware
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.planning.compute import compute_dtype_of, in_dtype, scaler_of
from p2p_trainer.planning.planner import machine_of
from p2p_trainer.strategies.host_optimizer import HostOptimizer
from p2p_trainer.tasks import Batch, Task, load_task
from p2p_trainer.throughput import inner_step, shrinking_inner_step

CPU = torch.device("cpu")
SECTION = InnerOptimizerSection(name="sgd", lr=0.05, batch_size=16)
DIGITS = load_task("digits", {"hidden_sizes": [16]}, {})


class Times:
    """A task, such as the digits, with a loss so many times as big."""

    def __init__(self, factor: float, task: Task = DIGITS) -> None:
        self._factor, self._task = factor, task
        self.computed = 0
        self.name, self.version, self.unit = task.name, task.version, task.unit
        self.build_model, self.batches, self.held_out = task.build_model, task.batches, task.held_out

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.computed += 1
        return self._task.loss(model, batch) * self._factor


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DIGITS.build_model()
    return model, build_inner_optimizer(model.parameters(), SECTION)


def moved(model: nn.Module, before: nn.Module) -> bool:
    return any(not torch.equal(now, then) for now, then in zip(model.parameters(), before.parameters(), strict=True))


def test_thirty_steps_are_near_those_in_float32() -> None:
    (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
    half = in_dtype(DIGITS, CPU, "float16")
    for batch, _ in zip(DIGITS.batches(0, 16), range(30), strict=False):
        loss = inner_step(half, model, optimizer, batch, 5, 1.0)
        wanted = inner_step(DIGITS, plain, plain_optimizer, batch, 5, 1.0)
        assert loss == pytest.approx(wanted, rel=0.02, abs=0.02)
    for now, then in zip(model.parameters(), plain.parameters(), strict=True):
        assert now.dtype == torch.float32
        torch.testing.assert_close(now, then, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("micro_batch", [16, 5])
def test_a_gradient_that_overflows_is_computed_again_at_a_smaller_scale(micro_batch: int) -> None:
    """The factor is taken back by the norm's limit: the step is the one of float32."""
    big = Times(3000.0)
    half = in_dtype(big, CPU, "float16")
    scaler = scaler_of(half)
    (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
    batch = next(DIGITS.batches(0, 16))
    loss, fitted = shrinking_inner_step(half, model, optimizer, batch, micro_batch, 1.0)
    assert math.isfinite(loss) and fitted == micro_batch
    assert scaler.get_scale() < 65536.0 and big.computed > -(-16 // micro_batch)
    inner_step(Times(3000.0), plain, plain_optimizer, batch, micro_batch, 1.0)
    for now, then in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(now, then, rtol=0.05, atol=0.005)
    computed = big.computed
    inner_step(half, model, optimizer, batch, micro_batch, 1.0)
    assert big.computed == computed + -(-16 // micro_batch), "the scale is right now"


def test_what_is_computed_again_counts_once_in_running_statistics() -> None:
    task = load_task("digits", {"hidden_sizes": [], "channels": [2]}, {})
    big = Times(3000.0, task)
    half = in_dtype(big, CPU, "float16")
    torch.manual_seed(0)
    model = task.build_model()
    once = copy.deepcopy(model)
    batch = next(task.batches(0, 16))
    assert math.isfinite(inner_step(half, model, build_inner_optimizer(model.parameters(), SECTION), batch, 16))
    assert big.computed > 1
    half.loss(once, batch)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, once.get_buffer(name)), name


def test_a_loss_that_is_not_finite_changes_neither_parameters_nor_the_scale() -> None:
    half = in_dtype(Times(math.nan), CPU, "float16")
    model, optimizer = model_and_optimizer()
    before = copy.deepcopy(model)
    for _ in range(20):
        assert math.isnan(inner_step(half, model, optimizer, next(DIGITS.batches(0, 16)), 16))
    assert not moved(model, before) and scaler_of(half).get_scale() == 65536.0


def test_what_no_scale_helps_is_left_out() -> None:
    half = in_dtype(Times(1e38), CPU, "float16")
    model, optimizer = model_and_optimizer()
    before = copy.deepcopy(model)
    for _ in range(2):
        assert math.isnan(inner_step(half, model, optimizer, next(DIGITS.batches(0, 16)), 16))
    assert not moved(model, before)
    assert scaler_of(half).get_scale() == 65536.0, "samples of this kind, now and then, would wear it down to nothing"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_in_host_memory_steps_on_what_the_gradients_are() -> None:
    (model, _), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
    half = in_dtype(DIGITS, CPU, "float16")
    batch = next(DIGITS.batches(0, 16))
    inner_step(half, model, HostOptimizer(model.parameters(), SECTION), batch, 16, 1.0)
    inner_step(half, plain, plain_optimizer, batch, 16, 1.0)
    for now, then in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(now, then)


def test_other_formats_scale_nothing() -> None:
    for task in (DIGITS, in_dtype(DIGITS, CPU, "bfloat16")):
        assert not scaler_of(task).is_enabled()


@pytest.mark.parametrize(
    ("bfloat16", "capability", "mode", "dtype"),
    [
        (True, (8, 0), "local", "bfloat16"),
        (True, (8, 0), "gradient", "bfloat16"),
        (False, (7, 5), "local", "float16"),
        (False, (7, 5), "gradient", "float32"),
        (False, (6, 1), "local", "float32"),
    ],
)
def test_a_card_computes_in_what_it_is_fast_in(
    bfloat16: bool, capability: tuple[int, int], mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert compute_dtype_of(torch.device("cuda", 0), mode) == dtype  # type: ignore[arg-type]
    assert compute_dtype_of(CPU, mode) == "float32"  # type: ignore[arg-type]


def test_a_person_may_choose_and_hears_what_cannot_be(tmp_path: pytest.TempPathFactory) -> None:
    hardware = read_hardware(CPU, tmp_path)  # type: ignore[arg-type]
    assert machine_of(CPU, hardware, None, None, "local", "float16").compute_dtype == "float16"
    assert machine_of(CPU, hardware, None, None, "gradient", "bfloat16").compute_dtype == "bfloat16"
    with pytest.raises(UsageError, match="this run averages them as they are"):
        machine_of(CPU, hardware, None, None, "gradient", "float16")


def test_a_task_in_another_format_is_the_same_task() -> None:
    half: Task = in_dtype(DIGITS, CPU, "float16")
    assert (half.name, half.version, half.unit) == (DIGITS.name, DIGITS.version, DIGITS.unit)
