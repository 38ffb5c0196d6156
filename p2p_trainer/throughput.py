"""The real inner step, and how many samples a second and how much memory this machine makes of it.

What is measured is what is trained: ``measure_micro_batches`` times ``inner_step``, the very function of the
training loop, on the task's real data. It runs in a process of its own (``probe.py``), since memory that runs out on a
CPU kills whoever asks for it; the training loop measures its rate again while it runs.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from dht_config.errors import DeviceError
from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.hardware import anonymous_bytes
from p2p_trainer.inner_optimizer import learning_rate, set_learning_rate
from p2p_trainer.planning.compute import scaler_of
from p2p_trainer.strategies.checkpointing import buffers_kept
from p2p_trainer.tasks.base import Batch, Task, to_device

Result = TypeVar("Result")

GOOD_ENOUGH = 0.95
"""A smaller micro-batch is taken if it reaches this share of the best throughput: it leaves memory."""
PACED_SECONDS = 2.0
RETURNED_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
_PROC = Path("/proc")

Stopped = Literal["done", "time", "memory"]
"""Why no larger micro-batch was tried: there is none, there was no time, or memory would not hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What this machine does alone at one micro-batch."""

    samples_per_second: float
    micro_batch: int
    measured_seconds: float
    """Time that the measurement at this micro-batch took, without its first, slower step."""
    steps: int = 1
    """Inner steps in that time."""
    peak_bytes: int | None = None
    """The most that training held of the device's memory; on a CPU, beyond what the process held before there was a
    model. None where that is not known."""

    def makes_sense(self) -> bool:
        """Whether these are figures that can have been measured: they come out of files and other processes."""
        return (
            math.isfinite(self.samples_per_second)
            and self.samples_per_second > 0
            and self.micro_batch >= 1
            and (self.peak_bytes is None or 0 <= self.peak_bytes < 2**60)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Peak memory as a straight line over the micro-batch: what a step holds grows with the samples in it."""

    base_bytes: float
    bytes_per_sample: float

    def at(self, micro_batch: int) -> int:
        return math.ceil(self.base_bytes + self.bytes_per_sample * micro_batch)


def memory_line(measured: Sequence[Throughput], fixed_bytes: int) -> MemoryLine | None:
    """Through the smallest and the largest micro-batch measured; None if no peak is known.

    :param fixed_bytes: of parameters, gradients and optimizer state, where one micro-batch alone must do
    """
    points = sorted((one.micro_batch, one.peak_bytes) for one in measured if one.peak_bytes is not None)
    if not points:
        return None
    (least, lowest), (most, highest) = points[0], points[-1]
    if most > least:
        slope = max(0.0, (highest - lowest) / (most - least))
        return MemoryLine(base_bytes=highest - slope * most, bytes_per_sample=slope)
    base = min(fixed_bytes, highest)
    return MemoryLine(base_bytes=base, bytes_per_sample=(highest - base) / most)


class MemoryGauge:
    """The most that training has held of a device's memory since ``reset``.

    On a CPU: what the process held at most beyond what it held when the gauge was made, so make it after everything
    that is no part of training was loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        held = anonymous_bytes() if device.type == "cpu" else None
        self._before_bytes = held[0] if held is not None else None

    def reset(self) -> None:
        """Count from now on. A kernel that does not let us (clear_refs) goes on with the highest so far, which is the
        last micro-batch's, as they grow."""
        if self._device.type == "cpu":
            with suppress(OSError):
                (_PROC / "self/clear_refs").write_text("5")
        elif self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int | None:
        """What torch has reserved counts, used or not: nobody else can have it."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self._device))
        if self._device.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        now = anonymous_bytes()
        return max(0, now[1] - self._before_bytes) if now is not None and self._before_bytes is not None else None


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
    try:
        loss = _accumulate(task, model, optimizer, batch, micro_batch, clip_norm, between=between)
        if math.isfinite(loss):
            optimizer.step()
        return loss
    finally:
        # Gradients are as large as the model: not held between steps.
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
    """Make one ``inner_step``; where memory runs out in forward or backward, halve the micro-batch and compute again.

    Exact, because nothing has changed by then. The optimizer's own step is made once: it may have moved some parameters
    when memory runs out in it, and a smaller micro-batch would not help.

    :returns: (mean loss, the micro-batch that fitted: use it from now on).

    Raises DeviceError if not even one sample at a time fits, or if the optimizer's step does not: then parameters and
    optimizer state are of no step, and good for nothing.
    """
    device = next(model.parameters()).device

    def gradients(fitting: int) -> float:
        return _accumulate(task, model, optimizer, batch, fitting, clip_norm, between=between)

    try:
        loss, micro_batch = shrinking(gradients, micro_batch, device)
        if math.isfinite(loss):
            _step_once(optimizer, device)
        return loss, micro_batch
    finally:
        optimizer.zero_grad(set_to_none=True)


def _accumulate(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro_batch: int,
    clip_norm: float | None,
    *,
    between: Callable[[], None] | None,
) -> float:
    """Leave the batch's mean gradient, clipped, in the parameters, and return the mean loss.

    The loss is not finite if loss or gradient were not. A gradient that overflows in float16 is computed again at half
    the scale; where no scale helps, it is as before. Whatever is raised, no gradient is held on to: a caller may try
    again.
    """
    scaler = scaler_of(task)
    began_at = None
    while True:
        with nullcontext() if began_at is None else buffers_kept(model):  # running statistics count a batch once
            loss = _add_up(task, model, optimizer, batch, micro_batch, between=between, scaler=scaler)
        scale = scaler.get_scale()
        began_at = scale if began_at is None else began_at
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm(_gradients(optimizer))
        overflows = not math.isfinite(float(norm))
        if not math.isfinite(loss) or (overflows and scale <= 1.0):
            if scaler.is_enabled():
                scaler.update(began_at)  # it is not the scale's fault
            return math.nan
        scaler.update()
        if not overflows:
            break
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(_parameters(optimizer), clip_norm, norm)
    return loss


def _add_up(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro_batch: int,
    *,
    between: Callable[[], None] | None,
    scaler: GradScaler,
) -> float:
    """Leave the batch's mean gradient, times the scale, in the parameters, and return the mean loss, whatever it is."""
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
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return float(total)
    except BaseException:
        optimizer.zero_grad(set_to_none=True)
        raise


def _step_once(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """:raises DeviceError: memory ran out, maybe half-way"""
    try:
        optimizer.step()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            problem=f"The memory of {device} ran out in the optimizer's step.",
            remedy="Close other programs that use it, then start the same command again: it continues from the last "
            "checkpoint.",
        ) from error


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


def return_freed_memory() -> None:
    """Let glibc give a freed tensor's memory back at once, where a strategy saves memory on a CPU.

    As it is, large blocks come from one heap once the first of them was freed, and gradients that stay are put between
    activations that go. With activation checkpointing a step of a llama of 32 narrow layers held 862 MB, with this
    227 MB; it costs page faults, and time with them.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES)


def measure_micro_batches(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    section: InnerOptimizerSection,
    report: Callable[[Throughput], None],
    *,
    seed: int,
    gauge: MemoryGauge,
    fixed_bytes: int = 0,
    budget_bytes: int | None = None,
    limit_seconds: float = 4.0,
    alive: Callable[[float], None] = lambda _share: None,
) -> Stopped:
    """Make real inner steps at micro-batches of 1, 2, 4 ... up to the inner batch, as far as time and memory reach.

    A micro-batch of which a straight line through the ones before says that it would not fit is not tried. The model is
    trained on: use one that is thrown away.

    :param report: told of each micro-batch as soon as it is measured, so that it counts whatever becomes of the next
    :param seed: of the task's order of the data; use one that training does not use
    :param fixed_bytes: of parameters, gradients and optimizer state; for the line, while there is one point of it
    :param budget_bytes: what training may hold at most, on the gauge; None for no limit
    :param limit_seconds: time for all micro-batches together, from the end of the first step, which is slow. A machine
        that needs longer for one step takes that long and stops there.
    :param alive: called between steps and micro-batches with the share of the time used up, 0 to 1

    Returns why it stopped; "memory" without a report means that not even one sample at a time fits.
    """
    device = next(model.parameters()).device
    set_learning_rate(optimizer, learning_rate(section, 0))
    batches = task.batches(seed, section.batch_size)
    began = time.perf_counter()

    def tell() -> None:
        alive(min(1.0, (time.perf_counter() - began) / limit_seconds))

    def step(micro_batch: int) -> None:
        inner_step(task, model, optimizer, next(batches), micro_batch, section.clip_norm, between=tell)
        synchronize(device)
        tell()

    measured: list[Throughput] = []
    candidates = _doubling(section.batch_size)
    gauge.reset()
    try:
        step(candidates[0])
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "memory"
    began = time.perf_counter()
    for position, micro_batch in enumerate(candidates):
        left_seconds = limit_seconds - (time.perf_counter() - began)
        line = memory_line(measured, fixed_bytes)
        if budget_bytes is not None and line is not None and line.at(micro_batch) > budget_bytes:
            return "memory"
        if measured and left_seconds <= 0:
            return "time"
        if measured:
            gauge.reset()
        try:
            seconds, steps = _time_steps(
                partial(step, micro_batch), left_seconds / (len(candidates) - position), is_first=not measured
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return "memory"
        measured.append(
            Throughput(
                samples_per_second=steps * section.batch_size / seconds,
                micro_batch=micro_batch,
                measured_seconds=seconds,
                steps=steps,
                peak_bytes=gauge.peak_bytes(),
            )
        )
        report(measured[-1])
    return "done"


def paced_rate(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    section: InnerOptimizerSection,
    *,
    batch_size: int,
    micro_batch: int,
    at_most: float,
    check: Callable[[], None],
) -> float:
    """Samples per second alone in real steps, each stretched by sleeping where a machine is to be no faster.

    A machine whose step takes minutes is not measured for minutes. The model is trained on.

    :param at_most: samples a second; infinite for no pacing
    :param check: called all the time; may raise
    """
    batches = task.batches(0, batch_size)

    def step() -> None:
        inner_step(task, model, optimizer, next(batches), micro_batch, section.clip_norm, between=check)

    samples = 0
    step()  # the first one is slower
    began = time.monotonic()
    while samples == 0 or time.monotonic() - began < PACED_SECONDS:
        until = time.monotonic() + batch_size / at_most
        step()
        samples += batch_size
        if until - time.monotonic() > PACED_SECONDS:
            return at_most  # as slow as it is told to be: sleeping it out would show no more
        while (left := until - time.monotonic()) > 0:
            check()
            time.sleep(min(left, 0.2))
    return samples / (time.monotonic() - began)


def choose(measured: Sequence[Throughput]) -> Throughput:
    """Take the smallest micro-batch within 5 % of the best throughput."""
    enough = GOOD_ENOUGH * max(one.samples_per_second for one in measured)
    return min((one for one in measured if one.samples_per_second >= enough), key=lambda one: one.micro_batch)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error means that a device, or the machine, has no memory left for this allocation."""
    # torch.OutOfMemoryError is for what torch's own allocator asks of accelerators. On the CPU it is a plain
    # RuntimeError with one of the first texts, and where CUDA or its libraries ask for themselves one of the others.
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error)
        for text in (
            "can't allocate memory",
            "not enough memory",
            "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_ALLOC_FAILED",
        )
    )


def release_memory() -> None:
    """Give memory that torch caches back to the device: a smaller step, or another program, may need it."""
    torch.cuda.empty_cache()  # does nothing where CUDA has not been started


def _doubling(batch_size: int) -> list[int]:
    sizes = [1 << power for power in range(batch_size.bit_length()) if 1 << power < batch_size]
    return [*sizes, batch_size]


def _time_steps(step: Callable[[], None], budget_seconds: float, *, is_first: bool) -> tuple[float, int]:
    """Make one step that does not count (allocations, caches), then what the budget holds, at least one.

    :param is_first: that step was made
    """
    began = time.perf_counter()
    if not is_first:
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _too_little_memory(device: torch.device) -> DeviceError:
    return DeviceError(
        problem=f"The memory of {device} does not hold one sample of this run at a time.",
        remedy="Close other programs that use it, or join with a device that has more.",
    )
