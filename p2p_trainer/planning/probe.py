"""Measuring in a process of its own, so that running out of memory kills the probe, not the peer.

On a CPU the kernel does not say that memory has run out: it kills somebody. So each measurement is a process that the
kernel takes first, that may not allocate more than its budget, and that reports every micro-batch as soon as it is
measured: whatever becomes of it, what it found counts.

A process with torch's threads cannot be forked and compute, and a fresh one takes seconds to import everything. So a
process forked early (``start_prober``, beside the averaging process, before threads and CUDA) does nothing but fork one
child per measurement. Both end with whoever started them.

What this does not stop: a machine without a memory limit that swaps before it kills, and a driver that holds the
probe where no signal reaches it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from dht_config.errors import P2PTrainerError
from dht_config.manifest import InnerOptimizerSection, RunManifest
from p2p_trainer.devices import pick_device, set_thread_count
from p2p_trainer.hardware import anonymous_bytes, data_bytes
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.loading import loading
from p2p_trainer.planning.compiled import COMPILE_SECONDS, measure_compiled
from p2p_trainer.planning.compute import ComputeDtype, in_dtype
from p2p_trainer.planning.plan_facts import Measurement
from p2p_trainer.run_model import layout_of
from p2p_trainer.strategies import StrategyName, build_strategy, facts_of, fixed_bytes
from p2p_trainer.tasks import load_task
from p2p_trainer.throughput import (
    MemoryGauge,
    Stopped,
    Throughput,
    choose,
    is_out_of_memory,
    measure_micro_batches,
    return_freed_memory,
)
from peers.daemon import die_with_parent

_log = logging.getLogger(__name__)

SILENCE_SECONDS = 300.0
"""A probe that says nothing for so long hangs: it speaks between micro-batches, and a slow machine needs minutes for
one of a large model."""
BEAT_SECONDS = 0.1
COMPILED_STEPS_SECONDS = 2.0
"""For steps in compiled code and others by turns."""
COMPILING_SILENCE_SECONDS = COMPILE_SECONDS + 60.0
"""A probe that says nothing of torch.compile for so long hangs; what it measured before counts."""
JOIN_SECONDS = 1.0
SLACK_BYTES = 32 * 1024 * 1024
"""Of a CPU's probe beyond its budget before an allocation is refused: stacks of threads, and what malloc holds back."""
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to measure."""

    manifest: RunManifest
    strategy: StrategyName
    trained: frozenset[int]
    """Fragments with gradients."""
    device: str
    compute_dtype: ComputeDtype
    threads: int | None
    seed: int
    budget_bytes: int | None
    """What training may hold of the device's memory; None for no limit."""
    limit_seconds: float = 4.0
    compile: bool = False
    """Then measure the best micro-batch in compiled code as well."""


@dataclass(frozen=True, slots=True)
class _Beat:
    share: float


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Everything but a model."""

    held_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Compiling:
    """Everything else is measured; whatever becomes of this, it counts."""

    stopped: Stopped


@dataclass(frozen=True, slots=True)
class _Compiled:
    measured: Throughput | None
    why_not: str


@dataclass(frozen=True, slots=True)
class _Ended:
    stopped: Stopped | None
    failure: str = ""
    error: P2PTrainerError | None = None
    killed: bool = False


class Prober:
    """The starting process's end of the process that forks probes."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def measure(self, request: ProbeRequest, alive: Callable[[float], None] = lambda _share: None) -> Measurement:
        """Measure in a fresh process.

        :param alive: called all the time with the share of the time used up, 0 to 1; what it raises ends the probe
        :raises P2PTrainerError: what a person can act on: data that are missing, a device that does not compute
        """
        results: list[Throughput] = []
        share, program_bytes = 0.0, None
        compiled = _Compiled(None, "")
        try:
            self._pipe.send(request)
            while True:
                alive(share)
                if not self._pipe.poll(BEAT_SECONDS):
                    continue
                message = self._pipe.recv()
                if isinstance(message, _Beat):
                    share = message.share
                elif isinstance(message, Throughput):
                    results.append(message)
                elif isinstance(message, _Loaded):
                    program_bytes = message.held_bytes
                elif isinstance(message, _Compiled):
                    compiled = message
                else:
                    break
        except (EOFError, OSError):
            message = _Ended(None, "it could not be started")
        except BaseException:
            self.close()
            raise
        if message.error is not None:
            raise message.error
        if not all(one.makes_sense() for one in results):
            return Measurement(results=(), stopped=None, failure="it reported nonsense")
        return Measurement(
            results=tuple(results),
            stopped=message.stopped,
            failure=message.failure,
            killed=message.killed,
            program_bytes=program_bytes,
            compiled=compiled.measured if compiled.measured is not None and compiled.measured.makes_sense() else None,
            compiling=compiled.why_not,
        )

    def close(self) -> None:
        """End the process, and a measurement with it."""
        self._pipe.close()
        self._process.kill()
        self._process.join(JOIN_SECONDS)


def start_prober() -> Prober:
    """Fork the process that will fork probes. Call it before CUDA is touched and before any thread is started."""
    # With the first optimizer torch imports its compiler, which takes 2 s of a core: once for every probe and for the
    # peer, which has nothing else to do while the averaging process looks for others.
    with loading():
        torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=True)
    process = context.Process(target=_serve, args=(theirs, ours, os.getpid()), name="p2p-trainer probes", daemon=True)
    process.start()
    theirs.close()
    return Prober(process, ours)


def _serve(pipe: Connection, parents_end: Connection, parent: int) -> None:
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    with suppress(EOFError, OSError):
        while True:
            _relay(pipe.recv(), pipe)


def _relay(request: ProbeRequest, pipe: Connection) -> None:
    """Fork a probe and pass on what it reports, until it has ended one way or the other."""
    theirs, ours = multiprocessing.get_context("fork").Pipe(duplex=False)
    own = os.getpid()
    # Not multiprocessing's: a daemonic process of its may have no children.
    child = os.fork()
    if child == 0:
        _probe(request, ours, own)
    ours.close()
    ended: _Ended | None = None
    compiling: _Compiling | None = None
    hangs = False
    try:
        while ended is None:
            if not theirs.poll(SILENCE_SECONDS if compiling is None else COMPILING_SILENCE_SECONDS):
                hangs = True
                break
            message = theirs.recv()
            if isinstance(message, _Ended):
                ended = message
            elif isinstance(message, _Compiling):
                compiling = message
            else:
                pipe.send(message)
    except EOFError:
        pass
    finally:
        theirs.close()
        if ended is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if ended is None and compiling is not None:
        pipe.send(_Compiled(None, "torch.compile took too long." if hangs else "torch.compile broke its process."))
        ended = _Ended(compiling.stopped)
    if ended is None:
        ended = _ending(status, hangs=hangs)
    pipe.send(ended)


def _ending(status: int, *, hangs: bool) -> _Ended:
    """What became of a probe that did not say so."""
    if hangs:
        return _Ended(None, f"it said nothing for {SILENCE_SECONDS:.0f} s")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:  # by the kernel: nobody else knows of it
            return _Ended("memory", killed=True)
        return _Ended(None, f"it was killed by {signal.Signals(number).name}")
    return _Ended(None, f"it ended with exit code {os.WEXITSTATUS(status)}")


def _probe(request: ProbeRequest, pipe: Connection, parent: int) -> NoReturn:
    """The life of a probe."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        die_first()
        if os.getppid() == parent:
            pipe.send(_measured(request, pipe))
        code = 0
    except BaseException as error:  # the boundary of a process: whatever it is becomes a line
        _log.debug("A probe failed", exc_info=error)
        with suppress(OSError):
            if isinstance(error, P2PTrainerError):
                pipe.send(_Ended(None, error=error))
            elif isinstance(error, MemoryError):
                pipe.send(_Ended("memory"))
            else:
                text = (str(error).strip() or type(error).__name__).splitlines()[0]
                pipe.send(_Ended(None, f"{type(error).__name__}: {text[:200].rstrip('.')}"))
    finally:
        os._exit(code)


def _measured(request: ProbeRequest, pipe: Connection) -> _Ended:
    set_thread_count(request.threads)
    device = pick_device(request.device)
    manifest = request.manifest
    task = in_dtype(load_task(manifest.task.name, manifest.model, manifest.data), device, request.compute_dtype)
    next(task.batches(request.seed, 1))  # the data are read here, and held from here on
    if saves_host_memory(request.strategy, device):
        return_freed_memory()
    _warm_up(manifest.inner_optimizer, device)
    held = anonymous_bytes()
    pipe.send(_Loaded(held[0] if held is not None else None))
    gauge = MemoryGauge(device)
    if device.type == "cpu" and request.budget_bytes is not None:
        allow_no_more_than(request.budget_bytes + SLACK_BYTES)
    last_beat = 0.0

    def alive(share: float) -> None:
        nonlocal last_beat
        if (now := time.monotonic()) - last_beat >= BEAT_SECONDS:
            last_beat = now
            pipe.send(_Beat(share))

    try:
        model = task.build_model()
        layout, facts = layout_of(model, manifest), facts_of(model)
        strategy = build_strategy(
            request.strategy,
            model,
            layout,
            manifest.inner_optimizer,
            device,
            request.trained,
            manifest.averaging.mode,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return _Ended("memory")
    use = fixed_bytes(request.strategy, layout, request.trained, manifest.inner_optimizer, facts)
    measured: list[Throughput] = []

    def report(one: Throughput) -> None:
        measured.append(one)
        pipe.send(one)

    stopped = measure_micro_batches(
        task,
        strategy.model,
        strategy.optimizer,
        manifest.inner_optimizer,
        report,
        seed=request.seed,
        gauge=gauge,
        fixed_bytes=use.device_bytes,
        budget_bytes=request.budget_bytes,
        limit_seconds=request.limit_seconds,
        alive=alive,
    )
    if request.compile and measured:
        pipe.send(_Compiling(stopped))
        found = measure_compiled(
            task,
            strategy.model,
            strategy.optimizer,
            manifest.inner_optimizer,
            choose(measured),
            seed=request.seed,
            gauge=gauge,
            limit_seconds=COMPILED_STEPS_SECONDS,
        )
        pipe.send(_Compiled(*found))
    return _Ended(stopped)


def saves_host_memory(strategy: StrategyName, device: torch.device) -> bool:
    """Whether what a strategy frees should go back to the machine at once."""
    return device.type == "cpu" and strategy != "full"


def _warm_up(section: InnerOptimizerSection, device: torch.device) -> None:
    """Load what torch loads at its first step and start its threads: no part of what this model's training takes."""
    wide = 1 << 16
    model = nn.Linear(wide, torch.get_num_threads()).to(device)  # as much as takes all threads
    optimizer = build_inner_optimizer(model.parameters(), section)
    model(torch.ones(1, wide, device=device)).sum().backward()
    optimizer.step()


def die_first() -> None:
    """Where memory runs out, the kernel should take this process before any other."""
    with suppress(OSError):  # not Linux
        (_PROC / "self/oom_score_adj").write_text("1000")


def allow_no_more_than(more_bytes: int) -> None:
    """Refuse allocations once this process holds so much more than now: torch reports that, and nobody is killed.

    Linux counts writable private memory; elsewhere nothing happens.
    """
    held = data_bytes()
    if held is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = held + more_bytes
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
