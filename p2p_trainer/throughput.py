"""The real inner step, and how many samples a second this machine makes of it.

What is measured is what is trained: ``measure_throughput`` times ``inner_step``, the very function of the
training loop, on the task's real data. It measures once; the training loop measures again while it runs.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from dht_config.errors import DeviceError
from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.hardware import resident_bytes
from p2p_trainer.inner_optimizer import build_inner_optimizer, learning_rate, set_learning_rate
from p2p_trainer.memory_limits import memory_left_bytes
from p2p_trainer.tasks.base import Batch, Task, to_device

Result = TypeVar("Result")

GOOD_ENOUGH = 0.95
"""A smaller micro-batch is taken if it reaches this share of the best throughput: it leaves memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What this machine does alone at the micro-batch chosen for it."""

    samples_per_second: float
    micro_batch: int
    measured_seconds: float
    """Time that the measurement at this micro-batch took, without its first, slower step."""


def inner_step(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro_batch: int,
    clip_norm: float | None = None,
    *,
    between: Callable[[], None] | None = None,
) -> float:
    """Make one optimizer step on the mean gradient of a batch, computed ``micro_batch`` samples at a time.

    Every micro-batch's gradient is weighted by its share of the samples, so a last one that is smaller counts
    for what it holds: the step is the whole batch's, whatever the micro-batch.

    :param batch: on any device; moved to the model's one micro-batch at a time.
    :param clip_norm: largest gradient norm over all parameters; None for no clipping.
    :param between: called between micro-batches; it must not touch parameters or gradients.
    :returns: mean loss over the batch before the step. Not finite if the loss or the gradient was not finite:
        then the step was left out and neither parameters nor optimizer state have changed.

    Running out of memory in the forward or backward pass also leaves parameters and optimizer state as they
    were: see ``shrinking_inner_step``.
    """
    device = next(model.parameters()).device
    samples = len(batch[0])
    model.train()
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    try:
        for start in range(0, samples, micro_batch):
            if start and between is not None:
                between()
            micro = to_device(tuple(tensor[start : start + micro_batch] for tensor in batch), device)
            share = len(micro[0]) / samples
            loss = task.loss(model, micro) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        gradients = _gradients(optimizer)
        norm = nn.utils.get_total_norm(gradients)
        mean = float(total)
        if not (math.isfinite(mean) and math.isfinite(float(norm))):
            return math.nan
        if clip_norm is not None:
            nn.utils.clip_grads_with_norm_(_parameters(optimizer), clip_norm, norm)
        optimizer.step()
        return mean
    finally:
        # Gradients are as large as the model: not held between steps, and not while a caller retries.
        optimizer.zero_grad(set_to_none=True)


def shrinking_inner_step(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro_batch: int,
    clip_norm: float | None = None,
    *,
    between: Callable[[], None] | None = None,
) -> tuple[float, int]:
    """Make one ``inner_step``; where memory runs out, halve the micro-batch and make the same step again.

    Exact, because a step that ran out of memory changed nothing. What it does not cover: memory that runs out
    while the optimizer allocates its state, in the very first step. ``measure_throughput`` has been there
    before.

    :returns: (mean loss, the micro-batch that fitted: use it from now on).

    Raises DeviceError if not even one sample at a time fits.
    """
    return shrinking(
        lambda fitting: inner_step(task, model, optimizer, batch, fitting, clip_norm, between=between),
        micro_batch,
        next(model.parameters()).device,
    )


def shrinking(attempt: Callable[[int], Result], micro_batch: int, device: torch.device) -> tuple[Result, int]:
    """Do what takes a micro-batch's memory; where that runs out, halve the micro-batch and do it again.

    :param attempt: changes nothing where memory runs out
    :returns: (its result, the micro-batch that fitted: use it from now on).

    Raises DeviceError if not even one sample at a time fits.
    """
    while True:
        try:
            result = attempt(micro_batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return result, micro_batch
        # Outside the handler: the exception holds the frames, and with them the activations.
        if micro_batch == 1:
            raise _too_little_memory(device)
        micro_batch //= 2
        release_memory()


def measure_throughput(
    task: Task,
    model: nn.Module,
    section: InnerOptimizerSection,
    device: torch.device,
    seed: int,
    limit_seconds: float = 4.0,
    on_progress: Callable[[float], None] | None = None,
) -> Throughput:
    """Find the micro-batch to train with, and the samples per second it gives, by making real inner steps.

    Doubles the micro-batch from 1 up to the inner batch, stops where memory runs out (on a CPU: where twice as much
    would not fit into what a cgroup or the machine has left) or the time is used up,
    and takes the smallest that comes within 5 % of the best. Works on a copy: the model is left as it is.

    :param seed: of the task's order of the data; use one that training does not use.
    :param limit_seconds: time for all micro-batches together. A machine that needs longer for two steps takes
        that long and stops there.
    :param on_progress: called with the share of the time used up, 0 to 1.

    Raises DeviceError if not even one sample at a time fits into the device's memory.
    """
    report = on_progress or (lambda _share: None)
    report(0.0)
    measured = _measure_all(task, copy.deepcopy(model).to(device), section, seed, limit_seconds, report)
    release_memory()
    report(1.0)
    if not measured:
        raise _too_little_memory(device)
    return choose(measured)


def choose(measured: list[Throughput]) -> Throughput:
    """Take the smallest micro-batch within 5 % of the best throughput."""
    enough = GOOD_ENOUGH * max(one.samples_per_second for one in measured)
    return min((one for one in measured if one.samples_per_second >= enough), key=lambda one: one.micro_batch)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error means that a device, or the machine, has no memory left for this allocation."""
    # torch.OutOfMemoryError is for accelerators; on the CPU it is a plain RuntimeError with one of these
    # texts.
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("can't allocate memory", "not enough memory")
    )


def release_memory() -> None:
    """Give memory that torch caches back to the device: a smaller step, or another program, may need it."""
    torch.cuda.empty_cache()  # does nothing where CUDA has not been started


def _measure_all(
    task: Task,
    model: nn.Module,
    section: InnerOptimizerSection,
    seed: int,
    limit_seconds: float,
    report: Callable[[float], None],
) -> list[Throughput]:
    device = next(model.parameters()).device
    optimizer = build_inner_optimizer(model.parameters(), section)
    set_learning_rate(optimizer, learning_rate(section, 0))
    batches = task.batches(seed, section.batch_size)
    began = time.perf_counter()

    def step(micro_batch: int) -> None:
        inner_step(task, model, optimizer, next(batches), micro_batch, section.clip_norm)
        _synchronize(device)
        report(min(1.0, (time.perf_counter() - began) / limit_seconds))

    measured: list[Throughput] = []
    memory = _MemoryWatch(device)
    candidates = _doubling(section.batch_size)
    for position, micro_batch in enumerate(candidates):
        left_seconds = limit_seconds - (time.perf_counter() - began)
        if measured and (left_seconds <= 0 or not memory.holds(micro_batch / measured[-1].micro_batch)):
            break
        try:
            seconds, steps = _time_steps(partial(step, micro_batch), left_seconds / (len(candidates) - position))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        measured.append(
            Throughput(
                samples_per_second=steps * section.batch_size / seconds,
                micro_batch=micro_batch,
                measured_seconds=seconds,
            )
        )
    return measured


class _MemoryWatch:
    """Whether a larger micro-batch fits into the memory of a CPU's process.

    Where an accelerator's memory runs out, torch says so; here the kernel kills the process, also where a container or
    a cgroup has less than the machine.
    """

    def __init__(self, device: torch.device) -> None:
        before = resident_bytes() if device.type == "cpu" else None
        self._before = before[0] if before is not None else None

    def holds(self, times: float) -> bool:
        """:param times: as large as the micro-batch that was measured last; True where nothing is known"""
        now, left = resident_bytes(), memory_left_bytes()
        if self._before is None or now is None or left is None:
            return True
        held, most = now
        return self._before + times * (most - self._before) <= held + left


def _doubling(batch_size: int) -> list[int]:
    sizes = [1 << power for power in range(batch_size.bit_length()) if 1 << power < batch_size]
    return [*sizes, batch_size]


def _time_steps(step: Callable[[], None], budget_seconds: float) -> tuple[float, int]:
    """Make one step that does not count (allocations, caches), then what the budget holds, at least one."""
    began = time.perf_counter()
    step()
    counted = time.perf_counter()
    steps = 0
    while True:
        step()
        steps += 1
        now = time.perf_counter()
        if now - began >= budget_seconds:
            return now - counted, steps


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.grad for param in _parameters(optimizer) if param.grad is not None]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _too_little_memory(device: torch.device) -> DeviceError:
    return DeviceError(
        problem=f"The memory of {device} does not hold one sample of this run at a time.",
        remedy="Close other programs that use it, or join with a device that has more.",
    )
