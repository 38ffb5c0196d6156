"""A model's training step through torch.compile: one shape, compiled before training begins, or not at all.

Compiling takes from seconds to minutes, and fails for many reasons: no C++ compiler, a full disk, a model that dynamo
does not follow. So whether it pays is measured in a probe, which may be killed (``probe.py``), and here the first step
is made before anybody waits for this peer. Whatever goes wrong, or takes too long, training goes on without it.
Another batch than the one that was compiled, and evaluation, take the ordinary way; nothing is compiled while rounds
are held.

What this does not stop: a compiler that hangs where no signal reaches it.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import torch
from torch import Tensor, nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.planning.compute import scaler_of
from p2p_trainer.planning.probe_cache import default_cache_directory
from p2p_trainer.tasks.base import Batch, Task, to_device
from p2p_trainer.throughput import MemoryGauge, Throughput, inner_step, synchronize

_log = logging.getLogger(__name__)

FASTER = 1.05
"""Compiled steps are taken if they make so many times the samples a second."""
COMPILE_SECONDS = 120.0
"""What takes longer is given up."""
CHECK_SECONDS = 0.5
PAIRS = 3
"""Of steps, where there is time."""
_COMPILERS = ("g++", "clang++", "c++")


def why_not_compile(device: torch.device, wished: bool | None) -> str:
    """Why it is not even tried, as a sentence; empty if it is. :param wished: by a person; None: on cards"""
    if wished is False or (wished is None and device.type != "cuda"):
        return "It was not asked for."
    if not any(map(shutil.which, _COMPILERS)):
        return "There is no C++ compiler here."
    return ""


class CompiledTask:
    """The same task, its loss on one model and one shape of batch computed by compiled code."""

    def __init__(self, task: Task, model: nn.Module, batch: Batch) -> None:
        self._task, self._model = task, model
        self._shapes = _shapes(batch)
        self._compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
        self.may_compile = True
        """Set to False once every piece of code is there."""
        self.scaler = scaler_of(task)
        self.name, self.version, self.unit = task.name, task.version, task.unit

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        return self._task.batches(seed, batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not (model is self._model and model.training and torch.is_grad_enabled() and _shapes(batch) == self._shapes):
            return self._task.loss(model, batch)
        with torch.compiler.set_stance("default" if self.may_compile else "eager_on_recompile"):
            return self._task.loss(self._compiled, batch)

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        return self._task.held_out(batch_size, max_samples)


def compiled(
    task: Task, model: nn.Module, micro_batch: int, *, seed: int, check: Callable[[], None], say: Callable[[str], None]
) -> Task:
    """Compile the training step for micro-batches of this size, or say in one line why not and return the task itself.

    One step is computed; parameters, gradients and running statistics are as before.

    :param check: called now and then; what it raises ends the attempt and goes on to the caller
    """
    # Read when inductor is loaded: no processes of its own that would outlive this one, and nothing in /tmp.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_directory().parent / "compiled"))
    device = next(model.parameters()).device
    batch = to_device(next(task.batches(seed, micro_batch)), device)
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    was_training = model.training
    try:
        with _interrupted(check, COMPILE_SECONDS):
            made = CompiledTask(task, model, batch)
            model.train()
            loss = made.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        if not math.isfinite(float(loss.detach())):
            raise ValueError("its loss is not finite")
        made.may_compile = False
        return made
    except _PassedOn as passed:
        if not isinstance(passed.error, _TooLong):
            raise passed.error from None
        say(f"Training goes on without torch.compile ({passed.error}).")
        return task
    except Exception as error:  # whatever a compiler may raise
        _log.debug("torch.compile failed", exc_info=error)
        say(f"Training goes on without torch.compile ({_reason(error)}).")
        return task
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def measure_compiled(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    section: InnerOptimizerSection,
    ordinary: Throughput,
    *,
    seed: int,
    gauge: MemoryGauge,
    limit_seconds: float,
) -> tuple[Throughput | None, str]:
    """What ``ordinary`` would be in compiled code, from real inner steps, or why it would not.

    Steps of both kinds take turns: what else a machine does hits both. The peak memory is what compiling took, if that
    is more. The model is trained on.
    """
    said: list[str] = []
    gauge.reset()
    fast = compiled(task, model, ordinary.micro_batch, seed=seed, check=lambda: None, say=said.append)
    if said:
        return None, said[0]
    batches = task.batches(seed, section.batch_size)

    def seconds_of(kind: Task) -> float:
        began = time.perf_counter()
        inner_step(kind, model, optimizer, next(batches), ordinary.micro_batch, section.clip_norm)
        synchronize(next(model.parameters()).device)
        return time.perf_counter() - began

    taken = {fast: 0.0, task: 0.0}
    steps = 0
    try:
        seconds_of(fast), seconds_of(task)  # the first ones are slower
        while steps < PAIRS or sum(taken.values()) < limit_seconds:
            for kind in taken:
                taken[kind] += seconds_of(kind)
            steps += 1
            if sum(taken.values()) > 4 * limit_seconds:
                break
    except Exception as error:  # such as memory that its code does not find
        _log.debug("Compiled steps failed", exc_info=error)
        return None, f"torch.compile is not used: its steps fail ({_reason(error)})."
    rate = ordinary.samples_per_second * taken[task] / taken[fast]
    peak_bytes = gauge.peak_bytes()
    measured = replace(
        ordinary, samples_per_second=rate, measured_seconds=taken[fast], steps=steps, peak_bytes=peak_bytes
    )
    return measured, ""


class _TooLong(Exception):
    pass


class _PassedOn(BaseException):
    """What ``check`` raised; no handler in a compiler's way may take it for a failure of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def _interrupted(check: Callable[[], None], limit_seconds: float) -> Iterator[None]:
    """For as long, a timer calls ``check``; after the limit as if that raised _TooLong. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    calls = 0

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal calls
        calls += 1
        try:
            check()
        except Exception as error:
            raise _PassedOn(error) from error
        if calls * CHECK_SECONDS >= limit_seconds:
            raise _PassedOn(_TooLong(f"it took longer than {limit_seconds:.0f} s"))

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _reason(error: BaseException) -> str:
    """In one line. Dynamo wraps what a compiler raised into errors whose texts are pages long."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160].rstrip(".")


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in batch]
