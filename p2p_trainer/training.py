"""The training loop of one peer: inner steps, and answers to the averaging process in between.

Training never waits for a round. It is held only while one fragment is copied out (snapshot) or moved onto a new
base (rebase). What the averaging process asks for is answered between micro-batches and while a slow emulated
machine idles.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dht_config.errors import CheckpointError
from p2p_trainer.checkpoint import optimizer_to_tensors, save_checkpoint
from p2p_trainer.metrics import MetricsWriter
from p2p_trainer.modes import GradientMode, Mode
from p2p_trainer.planning.reality import RealityWatch
from p2p_trainer.running_statistics import counters
from p2p_trainer.settings import PeerSettings
from p2p_trainer.strategies import MemoryStrategy, on_base
from p2p_trainer.strategies.rotation import Rotation
from p2p_trainer.tasks import Task, mean_loss
from p2p_trainer.tasks.base import Batch
from p2p_trainer.view import LiveView, PeerView
from peers.arena import SharedArena
from peers.fragments import FragmentLayout
from peers.ledger import Counts, Ledger
from peers.pipe import (
    Event,
    FragmentMeta,
    Progress,
    Quiesce,
    Quiet,
    Rebase,
    Rebased,
    Resume,
    SnapshotTaken,
    TakeSnapshot,
    Waiting,
)
from peers.process import SwarmHandle

REPORT_SECONDS = 1.0
ACCOUNT_SECONDS = 5.0
RATE_WINDOW_SECONDS = 20.0
EVALUATION_SECONDS = 5.0
"""About as long may an evaluation take: no step is made meanwhile, and no round gets a snapshot."""
WAIT_SECONDS = 0.2
"""For messages, while there is nothing to compute."""
QUIET_SECONDS = 2.0
"""A leaving peer waits this long for the averaging process to hold still, which takes milliseconds."""


class LeaveRequested(Exception):
    """A person or the system asked this peer to leave; raised between micro-batches."""


@dataclass(slots=True)
class LeaveFlag:
    """Set by signal handlers; ``hurry`` after the second request."""

    reason: str = ""
    requests: int = 0

    @property
    def is_set(self) -> bool:
        return bool(self.reason)

    def check(self) -> None:
        if self.reason:
            raise LeaveRequested(self.reason)


@dataclass(slots=True, kw_only=True)
class Accounts:
    """This peer's cumulative counts and each fragment's ledger, as of its last rebase."""

    layout: FragmentLayout
    samples: int
    """What went through the model."""
    steps: int
    counts: list[Counts]
    """Of each fragment, what went through the model while that fragment was trained."""
    fragments: list[FragmentMeta]
    ledgers: list[Ledger] = field(init=False)

    def __post_init__(self) -> None:
        self.ledgers = [Ledger.from_json(meta.ledger) for meta in self.fragments]

    def replace(self, fragment: int, meta: FragmentMeta) -> None:
        self.fragments[fragment] = meta
        self.ledgers[fragment] = Ledger.from_json(meta.ledger)

    def stepped(self, samples: int, trained: Iterable[int]) -> None:
        """One inner step was made that trained these fragments."""
        self.samples += samples
        self.steps += 1
        for fragment in trained:
            self.counts[fragment] = self.counts[fragment].after(samples, 1)

    def is_pending(self, fragment: int) -> bool:
        """Whether any of the fragment's samples are in no base yet."""
        return self.ledgers[fragment].pending_element_samples(self.counts[fragment].samples) > 0

    def _mean(self, element_samples: Iterable[int]) -> float:
        return sum(element_samples) / self.layout.num_elements

    def _trained(self) -> Iterator[int]:
        return (ledger.size * count.samples for ledger, count in zip(self.ledgers, self.counts, strict=True))

    def _pending(self) -> Iterator[int]:
        return (
            ledger.pending_element_samples(count.samples)
            for ledger, count in zip(self.ledgers, self.counts, strict=True)
        )

    @property
    def trained_samples(self) -> float:
        """Mean over the fragments, each weighted by its parameters: less than ``samples`` if not all are trained."""
        return self._mean(self._trained())

    @property
    def credited_samples(self) -> float:
        """Mean over the fragments, each weighted by its parameters."""
        return self._mean(map(Ledger.credited_element_samples, self.ledgers))

    @property
    def dropped_samples(self) -> float:
        return self._mean(map(Ledger.dropped_element_samples, self.ledgers))

    @property
    def pending_samples(self) -> float:
        return self._mean(self._pending())

    @property
    def exact(self) -> bool:
        """Invariant 2, in integers: credited + pending + dropped is what was processed, in every element trained."""
        accounted = sum(ledger.credited_element_samples() + ledger.dropped_element_samples() for ledger in self.ledgers)
        return sum(self._trained()) == accounted + sum(self._pending())

    @property
    def lineage_samples(self) -> int:
        """Samples of all peers in the bases: what the learning-rate schedule follows."""
        return sum(meta.total_element_samples for meta in self.fragments) // self.layout.num_elements

    def fields(self) -> dict[str, Any]:
        """The ``account`` event."""
        return {
            "processed_samples": self.samples,
            "inner_steps": self.steps,
            "trained_samples": self.trained_samples,
            "credited_samples": self.credited_samples,
            "pending_samples": self.pending_samples,
            "dropped_samples": self.dropped_samples,
            "exact": self.exact,
        }

    def by_fragment(self) -> list[dict[str, Any]]:
        """The ``fragments`` of a ``leave`` event."""
        return [
            {
                "fragment": index,
                "parameters": ledger.size,
                "trained_samples": count.samples,
                "credited_samples": ledger.credited_element_samples() / ledger.size,
                "pending_samples": ledger.pending_element_samples(count.samples) / ledger.size,
                "version": meta.version,
                "digest": meta.digest.hex(),
            }
            for index, (meta, ledger, count) in enumerate(zip(self.fragments, self.ledgers, self.counts, strict=True))
        ]


def data_seed(run_id: str, peer_id: str, restart: int) -> int:
    """A peer's own order of the data, another one after every restart."""
    digest = hashlib.sha256(f"{run_id}\n{peer_id}\n{restart}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Trainer:
    """Trains one model on this machine as part of a swarm.

    :param strategy: where the model's memory is, and which fragments are trained
    :param mode: what a step, a snapshot and a rebase are in this run
    :param rotation: chooses other fragments now and then, where not all are trained
    :param watch: told whether training goes as planned
    :param steps_while_saving: memory holds a step beside what a checkpoint is written from
    """

    def __init__(
        self,
        *,
        task: Task,
        strategy: MemoryStrategy,
        mode: Mode,
        rotation: Rotation | None,
        settings: PeerSettings,
        accounts: Accounts,
        arena: SharedArena,
        swarm: SwarmHandle,
        metrics: MetricsWriter,
        view: LiveView,
        peer_view: PeerView,
        leave: LeaveFlag,
        checkpoint_directory: Path,
        checkpoint_meta: Mapping[str, Any],
        watch: RealityWatch | None = None,
        steps_while_saving: bool = True,
    ) -> None:
        self.task, self.strategy, self.mode, self.rotation = task, strategy, mode, rotation
        self.settings = settings
        self.accounts, self.arena, self.swarm = accounts, arena, swarm
        self.metrics, self.view, self.peer_view, self.leave = metrics, view, peer_view, leave
        self.checkpoint_directory, self.checkpoint_meta = checkpoint_directory, checkpoint_meta
        self.watch = watch
        self.steps_while_saving = steps_while_saving
        self.device = next(strategy.model.parameters()).device
        self.held_seconds = 0.0
        self.waited_seconds = 0.0
        """For a round or a checkpoint, with nothing to compute: no part of this machine's throughput."""
        self._quiet: list[FragmentMeta] | None = None
        self._saving: threading.Thread | None = None
        self._save_problem: CheckpointError | None = None
        self._history: list[tuple[float, int]] = []
        self._losses: list[float] = []
        self._held_out: list[Batch] | None = None
        self._evaluated = False
        self._wanted = strategy.trained
        """Fragments to train from the next step on."""

    # ------------------------------------------------------------------ loop

    def train(self) -> str:
        """Make inner steps until asked to leave; returns the reason."""
        now = time.monotonic()
        reported = accounted = now
        # The first evaluation is early, so that a short run shows its start.
        evaluate_at = now + min(2.0, self.settings.eval_seconds)
        save_at = now + self.settings.checkpoint_seconds
        self.metrics.write(
            "training_started",
            processed_samples=self.accounts.samples,
            trained_fragments=len(self.strategy.trained),
            fragments=self.accounts.layout.num_fragments,
        )
        self._history.append((now, self.accounts.samples))
        try:
            while True:
                self.leave.check()
                self._step()
                if self._wanted != self.strategy.trained:
                    self._rotate()
                now = time.monotonic()
                if now - reported >= REPORT_SECONDS:
                    reported = now
                    self._report(now)
                if now - accounted >= ACCOUNT_SECONDS:
                    accounted = now
                    self.metrics.write("account", **self.accounts.fields())
                    self.metrics.write(
                        "throughput",
                        samples_per_second=self.peer_view.samples_per_second,
                        micro_batch=self.mode.micro_batch,
                        device=str(self.device),
                        phase="running",
                    )
                if now >= evaluate_at and self.settings.eval_samples:
                    evaluate_at = now + self.settings.eval_seconds
                    self._evaluate()
                if now >= save_at:
                    save_at = now + self.settings.checkpoint_seconds
                    self._save_in_background()
        except LeaveRequested as request:
            return str(request)

    def _step(self) -> None:
        """One step, made to last as long as the emulated machine would need for it, or a wait for the next round."""
        began, held_before = time.monotonic(), self.held_seconds
        due = self.mode.samples_due(self.accounts.counts, self.accounts.ledgers)
        if due == 0:
            self.handle_messages(WAIT_SECONDS)
            self.waited_seconds += time.monotonic() - began
            return
        micro_batch = self.mode.micro_batch
        loss, samples = self.mode.step(self.accounts.lineage_samples, due, self._between_micro_batches)
        if self.watch is not None:
            self.watch.micro_batch(micro_batch, self.mode.micro_batch)
        if math.isfinite(loss):
            # Before any message is answered: the parameters and the counts must tell the same.
            self.accounts.stepped(samples, self.strategy.trained)
            self._losses.append(loss)
        else:
            self.peer_view.note = "an inner step gave no finite loss and was left out"
        if self.settings.emulate is not None:
            # What held us up does not count as the machine's own time: it would hide in its slowness.
            held = self.held_seconds - held_before
            self._idle_until(began + samples / self.settings.emulate + held)
        self.handle_messages(0.0)

    def _between_micro_batches(self) -> None:
        self.leave.check()
        self.handle_messages(0.0)

    def _idle_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self.leave.check()
            held_before = self.held_seconds
            self.handle_messages(min(left, 0.2))
            moment += self.held_seconds - held_before

    # -------------------------------------------------------------- messages

    def handle_messages(self, wait_seconds: float) -> None:
        """Answer what the averaging process asks."""
        for message in self.swarm.messages(wait_seconds):
            began = time.monotonic()
            self.handle(message)
            self.held_seconds += time.monotonic() - began

    def handle(self, message: Any) -> None:
        accounts = self.accounts
        if isinstance(message, TakeSnapshot):
            samples, steps = accounts.counts[message.fragment]
            self.mode.take_snapshot(message.fragment, samples)
            self.swarm.send(SnapshotTaken(fragment=message.fragment, samples=samples, steps=steps))
        elif isinstance(message, Rebase):
            fragment = message.fragment
            samples, steps = accounts.counts[fragment]
            accounts.replace(fragment, message.meta)
            if not message.keep:
                accounts.ledgers[fragment] = accounts.ledgers[fragment].drop(samples, steps)
            # What other lossy codecs leave of a fragment that is not trained any more is given up: their rounding of
            # its last contribution.
            pending = accounts.is_pending(fragment) or message.unsent
            self.mode.rebase(fragment, keep=message.keep, pending=pending)
            self.swarm.send(Rebased(fragment=fragment, samples=samples, steps=steps))
            if self.rotation is not None and self._wanted == self.strategy.trained:
                self._wanted = self.rotation.rebased(fragment, self.strategy.trained)
        elif isinstance(message, Event):
            self._note_event(message)
        elif isinstance(message, Quiet):
            self._quiet = message.fragments
        elif isinstance(message, Waiting):
            self.view.status(message.text)

    def _note_event(self, event: Event) -> None:
        fields = event.fields
        if event.name == "peers":
            self.peer_view.peers_in_swarm = fields["training"] + 1
            self.peer_view.reason = fields["reason"]
            if isinstance(self.mode, GradientMode):
                self.mode.share = fields["share"]
            if self.rotation is not None:
                self.rotation.coverage = fields["coverage"]
            return
        self.metrics.write(event.name, **fields)
        if event.name == "state":
            self.peer_view.state, self.peer_view.reason = fields["state"], fields["reason"]
            if "isolated" in (fields["state"], fields["before"]):
                self.view.status(f"{fields['state'].capitalize()}: {fields['reason']}.")
        elif event.name == "round":
            if fields["outcome"] == "committed":
                self.peer_view.last_round_at = time.time()
                self.peer_view.last_group_size = fields["group_size"]
                self.peer_view.last_share = fields["weight_share"]
            self.peer_view.note = fields["reason"]
        elif event.name == "rebase" and fields["dropped_samples"] >= 1:
            self.peer_view.note = (
                f"the swarm went on without {fields['dropped_samples']:.0f} of this peer's samples in fragment "
                f"{fields['fragment']}"
            )

    def _report(self, now: float) -> None:
        accounts = self.accounts
        busy = now - self.waited_seconds
        self._history.append((busy, accounts.samples))
        while len(self._history) > 2 and self._history[1][0] < busy - RATE_WINDOW_SECONDS:
            self._history.pop(0)
        (then, before), rate = self._history[0], 0.0
        if busy > then:
            rate = (accounts.samples - before) / (busy - then)
        if self.watch is not None and busy - then >= RATE_WINDOW_SECONDS:
            self.watch.rate(rate, now)
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        self.metrics.write("train", samples=accounts.samples, steps=accounts.steps, loss=loss, samples_per_second=rate)
        self.swarm.send(
            Progress(
                samples=accounts.samples,
                steps=accounts.steps,
                credited_samples=accounts.credited_samples,
                samples_per_second=rate,
                trained=self.strategy.trained,
            )
        )
        view = self.peer_view
        view.samples_per_second = rate
        view.loss = loss if loss is not None else view.loss
        view.processed_samples = accounts.samples
        if self.rotation is not None and accounts.samples:
            view.trained_share = accounts.trained_samples / accounts.samples
        view.credited_samples, view.pending_samples = accounts.credited_samples, accounts.pending_samples
        self.view.update(view)
        if self._save_problem is not None:
            self.view.status(f"Training goes on, but the checkpoint could not be saved: {self._save_problem}")
            self._save_problem = None

    # -------------------------------------------------------------- rotation

    def _rotate(self) -> None:
        """Train what is wanted now. What begins does so from its base, which is read while it holds still."""
        before, layout = self.strategy.trained, self.accounts.layout
        values: dict[int, Tensor] = {}

        def copy_bases(fragments: list[FragmentMeta]) -> None:
            values.update({new: self.arena.base[layout.slice(new)].clone() for new in self._wanted - before})

        self._with_quiet_arena(copy_bases)
        self.strategy.train_only(self._wanted, values)
        self.metrics.write(
            "rotation",
            started=sorted(self._wanted - before),
            stopped=sorted(before - self._wanted),
            trained=sorted(self._wanted),
        )

    # ------------------------------------------------- evaluation and saving

    def _with_quiet_arena(self, use: Callable[[list[FragmentMeta]], None]) -> None:
        """Call ``use`` while no base changes; every rebase before it has been applied."""
        self._quiet = None
        self.swarm.send(Quiesce())
        give_up = time.monotonic() + QUIET_SECONDS
        try:
            while self._quiet is None:
                if time.monotonic() > give_up:
                    self.leave.check()
                self.handle_messages(0.2)
            use(self._quiet)
        finally:
            self.swarm.send(Resume())

    def _evaluate(self) -> None:
        """Held-out loss of the base, with the local values put aside for as long; frozen ones in low precision."""
        if self._held_out is None:
            # No more at once than in a step, which takes more memory: gradients are what activations are kept for.
            self._held_out = self.task.held_out(self.mode.micro_batch, self.settings.eval_samples)
        if not self._held_out:
            return
        base = torch.empty(0)
        versions: list[int] = []
        samples = 0

        def copy_base(fragments: list[FragmentMeta]) -> None:
            nonlocal base, samples
            base = self.arena.base.clone()
            versions.extend(meta.version for meta in fragments)
            samples = sum(meta.total_element_samples for meta in fragments) // self.accounts.layout.num_elements

        self._with_quiet_arena(copy_base)
        with on_base(self.strategy, self.accounts.layout, base):
            if not self._evaluated:
                self._held_out = self._as_many_as_time_allows(self._held_out)
                self._evaluated = True
            loss = mean_loss(self.task, self.strategy.model, self._held_out, check=self.leave.check)
        self.metrics.write("eval", version=min(versions), samples=samples, loss=loss)

    def _as_many_as_time_allows(self, batches: list[Batch]) -> list[Batch]:
        """Of the held-out samples, by how long the first ones take; spread over them, and the same from then on."""
        began = time.monotonic()
        mean_loss(self.task, self.strategy.model, batches[:1])
        seconds = (time.monotonic() - began) * len(batches)
        return batches[:: max(1, math.ceil(seconds / EVALUATION_SECONDS))]

    def checkpoint_contents(
        self, fragments: list[FragmentMeta], *, clean: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of everything a restart needs. :param clean: no contribution can be under way any more"""
        tensors = {"base": self.arena.base.clone(), "outer_state": self.arena.outer_state.clone()}
        tensors |= {f"local.{fragment}": values for fragment, values in self.strategy.unrounded().items()}
        state, optimizer_meta = optimizer_to_tensors(self.strategy.optimizer)
        tensors |= {f"optimizer.{name}": value.detach().cpu().clone() for name, value in state.items()}
        tensors |= {f"counter.{name}": value.cpu().clone() for name, value in counters(self.strategy.model).items()}
        meta = {
            **self.checkpoint_meta,
            "clean": clean,
            "samples": self.accounts.samples,
            "steps": self.accounts.steps,
            "counts": self.accounts.counts,
            "trained": sorted(self.strategy.trained),
            "optimizer": optimizer_meta,
            "fragments": [
                replace(fragment, ledger=ledger.to_json()).to_json()
                for fragment, ledger in zip(fragments, self.accounts.ledgers, strict=True)
            ],
        }
        return tensors, meta

    def save(self, fragments: list[FragmentMeta], *, clean: bool) -> None:
        """Write a checkpoint now. :raises CheckpointError:"""
        if self._saving is not None:
            self._saving.join()
        save_checkpoint(self.checkpoint_directory, *self.checkpoint_contents(fragments, clean=clean))

    def _save_in_background(self) -> None:
        """Copy everything while the arena is quiet, write it in a thread; a full disk is said, not fatal.

        Where memory holds no step beside the copy, only messages are answered until it is written.
        """
        if self._saving is not None and self._saving.is_alive():
            return
        contents: tuple[dict[str, Tensor], dict[str, Any]] = ({}, {})

        def copy(fragments: list[FragmentMeta]) -> None:
            nonlocal contents
            contents = self.checkpoint_contents(fragments, clean=False)

        self._with_quiet_arena(copy)

        def write() -> None:
            try:
                save_checkpoint(self.checkpoint_directory, *contents)
            except CheckpointError as error:
                self._save_problem = error

        self._saving = threading.Thread(target=write, name="checkpoint")
        self._saving.start()
        if not self.steps_while_saving:
            began = time.monotonic()
            while self._saving.is_alive():
                self.leave.check()
                self.handle_messages(WAIT_SECONDS)
            self.waited_seconds += time.monotonic() - began
