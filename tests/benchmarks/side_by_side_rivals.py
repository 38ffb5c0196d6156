"""One peer of a contender of ``side_by_side.py`` that is not ours, as a process of its own.

``python side_by_side_rivals.py CONFIG.json INDEX``; the configuration is ``RivalConfig``. What it does is in its
``metrics.jsonl``: ``ready`` with its speed alone, ``step`` after every step, ``snapshot`` when it saved its parameters
(peer 0), ``ended`` if it could not go on. It trains from the moment that stands in the file ``go`` until it is killed.

Every peer is paced as ours are (``--emulate``): a step that computed for a while sleeps until the emulated machine
would have finished it. What a contender waits for, and what it does in the background, is on top of that.

Settings of the rivals, and where they were given the benefit of the doubt:

- All have the run's model, data, loss, AdamW, clipping and warm-up; the learning rate is the run's as it stands,
  although most of them make bigger batches. It is the rate that the warm-up has after the step's samples, so that a
  first big batch is not wasted.
- DDP's gradients are those of the whole batch's mean, whatever the peers' shares (each loss is weighted). The sleep
  ends before the backward pass, so that the exchange overlaps with it as on a real machine. A peer whose share is
  rounded to nothing computes nothing, and only takes part in the exchange.
- hivemind has its defaults but for three that its quickstart sets as well: ``target_batch_size`` is what all peers
  process in one cycle of ours, ``matchmaking_time`` is 3 s and ``averaging_timeout`` 10 s, since the defaults are for
  epochs of minutes. With averaged gradients a slow peer makes smaller steps. Every sample that it does not throw away
  when it falls out of step counts as credited.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dht_config.manifest import RunManifest, example_manifest, parse_manifest
from p2p_trainer.inner_optimizer import build_inner_optimizer, learning_rate, set_learning_rate
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.tasks import Batch, Task, load_task
from p2p_trainer.throughput import inner_step
from peers.daemon import die_with_parent

POLL_SECONDS = 0.02
SNAPSHOT_SECONDS = 3.0
SOLO_SECONDS = 2.0
BACKWARD_REPEATS = 4
PORT = 29500
DEVICE = "tun0"
"""Of an emulated line."""
HIVEMIND_MODES: Mapping[str, Mapping[str, Any]] = {
    "hivemind_sync": {},
    "hivemind_delayed": {"delay_optimizer_step": True, "delay_grad_averaging": True},
    "hivemind_local": {"use_local_updates": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalConfig:
    """What all peers of one run of a contender must agree on."""

    contender: str
    run: str
    """Name of a shipped manifest."""
    seed: int
    speeds: tuple[float, ...]
    """Samples per second of each peer; the first is the fastest."""
    hosts: tuple[str, ...]
    batches: tuple[int, ...]
    """Samples of each peer in one step."""
    target_batch: int
    """hivemind's target_batch_size."""
    directory: str
    """Has ``go`` and ``address``, and a directory for each peer's index."""

    @classmethod
    def read(cls, path: Path) -> RivalConfig:
        table = json.loads(path.read_text())
        fields: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in table.items()}
        return cls(**fields)


class Rival:
    """A peer: its model and data, its pace, and what it writes down."""

    def __init__(self, config: RivalConfig, index: int) -> None:
        self.config, self.index = config, index
        self.shared = Path(config.directory)
        self.directory = self.shared / str(index)
        self.speed, self.batch_size = config.speeds[index], config.batches[index]
        manifest = load_manifest(config.run)
        self.section = manifest.inner_optimizer
        self.task = task_of(manifest)
        torch.manual_seed(config.seed)  # the same initial model on every peer
        self.model = self.task.build_model()
        self.seed = config.seed * 1000 + index
        self.metrics = MetricsWriter(self.directory / "metrics.jsonl")
        self.processed = self.rejected = 0
        self.began_at = 0.0
        self._saved_at = float("-inf")

    def batches(self, size: int) -> Iterator[Batch]:
        return self.task.batches(self.seed, size)

    def pace(self, began: float, samples: int, spare_seconds: float = 0.0) -> None:
        """Sleep until the emulated machine has computed these samples. :param began: by the monotonic clock"""
        left = began + samples / self.speed - spare_seconds - time.monotonic()
        if left > 0:
            time.sleep(left)

    def measure_alone(self) -> float:
        """Samples per second, paced, with nobody to wait for; steps of about half a second."""
        size = min(self.section.batch_size, max(1, int(self.speed / 2)))
        batches = self.batches(size)
        self._gradient(next(batches))  # the first is slower
        began, samples = time.monotonic(), 0
        while time.monotonic() - began < SOLO_SECONDS:
            step_began = time.monotonic()
            self._gradient(next(batches))
            self.pace(step_began, size)
            samples += size
        return samples / (time.monotonic() - began)

    def backward_seconds(self, batch: Batch) -> float:
        """The fastest backward pass, which no other process held up."""
        found = []
        for _ in range(BACKWARD_REPEATS):
            loss = self.task.loss(self.model, batch)
            began = time.monotonic()
            torch.autograd.backward(loss)
            found.append(time.monotonic() - began)
        self.model.zero_grad()
        return min(found)

    def wait_for_start(self, samples_per_second: float) -> None:
        """Say that this peer is ready, and wait for the others."""
        self.metrics.write("ready", samples_per_second=samples_per_second)
        go = self.shared / "go"
        while not go.exists():
            time.sleep(POLL_SECONDS)
        self.began_at = float(go.read_text())
        while (left := self.began_at - time.time()) > 0:
            time.sleep(left)
        self.snapshot()

    def stepped(self, samples: int, rounds: int) -> None:
        """Write down that samples were processed. :param rounds: exchanges with the others so far"""
        self.processed += samples
        self.metrics.write("step", processed_samples=self.processed, rejected_samples=self.rejected, rounds=rounds)
        self.snapshot()

    def snapshot(self) -> None:
        """Save the parameters now and then, for somebody to evaluate them after the run: a millisecond's work."""
        now = time.monotonic()
        if self.index or now - self._saved_at < SNAPSHOT_SECONDS:
            return
        self._saved_at = now
        name = f"{time.time():.3f}.npy"
        with torch.no_grad():
            np.save(self.directory / name, nn.utils.parameters_to_vector(self.model.parameters()).numpy())
        self.metrics.write("snapshot", file=name)

    def _gradient(self, batch: Batch) -> None:
        torch.autograd.backward(self.task.loss(self.model, batch))
        self.model.zero_grad()


def command(config: Path, index: int) -> list[str]:
    """What starts a peer."""
    return [sys.executable, str(Path(__file__)), str(config), str(index)]


def load_manifest(run: str) -> RunManifest:
    return parse_manifest(example_manifest(run), source=run)


def task_of(manifest: RunManifest) -> Task:
    return load_task(manifest.task.name, manifest.model, manifest.data)


def train_alone(rival: Rival) -> None:
    """One machine, nobody else: the product's inner step on the run's batch."""
    optimizer = build_inner_optimizer(rival.model.parameters(), rival.section)
    batches = rival.batches(rival.batch_size)
    rival.wait_for_start(rival.measure_alone())
    while True:
        began = time.monotonic()
        set_learning_rate(optimizer, learning_rate(rival.section, rival.processed))
        inner_step(
            rival.task, rival.model, optimizer, next(batches), rival.batch_size, clip_norm=rival.section.clip_norm
        )
        rival.pace(began, rival.batch_size)
        rival.stepped(rival.batch_size, rounds=0)


def train_ddp(rival: Rival) -> None:
    """torch's DistributedDataParallel over gloo."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    config, section, size = rival.config, rival.section, rival.batch_size
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    world, whole = len(config.speeds), sum(config.batches)
    dist.init_process_group("gloo", init_method=f"tcp://{config.hosts[0]}:{PORT}", rank=rival.index, world_size=world)
    batches = rival.batches(max(1, size))
    alone = rival.measure_alone()
    spare_seconds = rival.backward_seconds(next(batches))
    model = DistributedDataParallel(rival.model)
    optimizer = build_inner_optimizer(rival.model.parameters(), section)
    # DDP divides the sum over the peers by their number.
    weight = size * world / whole
    rival.wait_for_start(alone)
    steps = 0
    while True:
        began = time.monotonic()
        loss = rival.task.loss(model, next(batches)) * weight
        rival.pace(began, size, spare_seconds)
        torch.autograd.backward(loss)
        clip(rival.model.parameters(), section.clip_norm)
        set_learning_rate(optimizer, learning_rate(section, (steps + 1) * whole - section.batch_size))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        rival.stepped(size, rounds=steps)


def train_hivemind(rival: Rival) -> None:
    """hivemind.Optimizer as it comes."""
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    config, section, size = rival.config, rival.section, rival.batch_size
    mode = HIVEMIND_MODES[config.contender]
    # It forks processes: before torch has started a thread.
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{config.hosts[rival.index]}/tcp/0"], initial_peers=_first_address(rival), start=True
    )
    if rival.index == 0:
        publish(rival.shared / "address", str(dht.get_visible_maddrs()[0]))

    def build(groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        parameters = [parameter for group in groups for parameter in group["params"]]
        optimizer = build_inner_optimizer(parameters, section)
        optimizer.register_step_pre_hook(lambda *_: clip(parameters, section.clip_norm))
        return optimizer

    # The factory must make as many groups as it is given.
    groups = build_inner_optimizer(rival.model.parameters(), section).param_groups
    # It warns of deadlocks if this is as long as the matchmaking, which its default is.
    patience = {"request_timeout": 1.0}
    delayed = "delay_grad_averaging" in mode
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="side_by_side",
        batch_size_per_step=size,
        target_batch_size=config.target_batch,
        # Only a factory and parameters can be delayed; they are offloaded by default.
        optimizer=build if delayed else build(groups),
        params=groups if delayed else None,
        matchmaking_time=3.0,
        averaging_timeout=10.0,
        averager_opts=patience,
        grad_averager_factory=None if "use_local_updates" in mode else partial(GradientAverager, **patience),
        **mode,
    )
    _count_rejected(rival, optimizer)
    batches = rival.batches(size)
    rival.wait_for_start(rival.measure_alone())
    while True:
        began = time.monotonic()
        torch.autograd.backward(rival.task.loss(rival.model, next(batches)))
        rival.pace(began, size)
        if optimizer.use_local_updates:
            in_swarm = optimizer.local_epoch * config.target_batch + rival.processed
        else:
            in_swarm = (optimizer.local_epoch + 1) * config.target_batch
        set_learning_rate(optimizer.opt, learning_rate(section, in_swarm))
        optimizer.step()
        optimizer.zero_grad()
        rival.stepped(size, rounds=optimizer.local_epoch)


def _count_rejected(rival: Rival, optimizer: Any) -> None:
    """What it has accumulated, and the step under way, are thrown away when it downloads the state of others."""
    load = optimizer.load_state_from_peers

    def counted(**options: Any) -> None:
        rival.rejected += optimizer.tracker.local_progress.samples_accumulated + rival.batch_size
        load(**options)

    optimizer.load_state_from_peers = counted


def _first_address(rival: Rival) -> list[str]:
    """Where to join: the first peer's address, when it is there."""
    if rival.index == 0:
        return []
    path = rival.shared / "address"
    while not path.exists():
        time.sleep(POLL_SECONDS)
    return [path.read_text()]


def publish(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def clip(parameters: Any, clip_norm: float | None) -> None:
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, clip_norm)


TRAIN: Mapping[str, Callable[[Rival], None]] = {
    "ddp_equal": train_ddp,
    "ddp_proportional": train_ddp,
    **dict.fromkeys(HIVEMIND_MODES, train_hivemind),
    "fastest_alone": train_alone,
    "one_machine": train_alone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("config", type=Path)
    parser.add_argument("index", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The processes that hivemind forks must not outlive this one.
    os.register_at_fork(after_in_child=partial(die_with_parent, signal.SIGKILL))
    rival = Rival(RivalConfig.read(arguments.config), arguments.index)
    try:
        TRAIN[rival.config.contender](rival)
    except Exception as error:  # a peer that others left is a result
        rival.metrics.write("ended", reason=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        traceback.print_exc()
        os._exit(1)  # threads of hivemind would go on


if __name__ == "__main__":
    main()
