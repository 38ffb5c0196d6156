"""What one step of training is, and what a fragment's snapshot and rebase mean for it: the two modes of a run.

``local``: an inner optimizer steps the parameters away from the base. ``gradient``: the parameters are the base, and
gradients add up until a round takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from dht_config.manifest import RunManifest
from p2p_trainer.inner_optimizer import learning_rate, set_learning_rate
from p2p_trainer.running_statistics import mend, within_reach
from p2p_trainer.strategies import MemoryStrategy
from p2p_trainer.tasks import Task
from p2p_trainer.tasks.base import Batch, to_device
from p2p_trainer.throughput import shrinking, shrinking_inner_step
from peers.arena import SharedArena
from peers.fragments import FragmentLayout, gather_fragment, load_fragment
from peers.ledger import Counts, Ledger


class Mode(Protocol):
    """Trains between rounds. ``micro_batch`` may shrink where memory runs out."""

    micro_batch: int

    def step(self, lineage_samples: int, due: int | None, between: Callable[[], None]) -> tuple[float, int]:
        """Train on some samples: mean loss (not finite if they were left out) and their number.

        :param lineage_samples: in the bases, of all peers
        :param due: process no more than this many; None for no limit
        :param between: called between micro-batches
        """

    def samples_due(self, counts: Sequence[Counts], ledgers: Sequence[Ledger]) -> int | None:
        """How many samples to process before the next rounds; None for no limit, 0 to wait.

        :param counts: cumulative, of each fragment
        """

    def take_snapshot(self, fragment: int, samples: int) -> None:
        """Bring this fragment of the arena's snapshot up to date, as of its cumulative count."""

    def rebase(self, fragment: int, *, keep: bool, pending: bool) -> None:
        """Move onto the new base in the arena.

        :param keep: with the progress made since the reference
        :param pending: work of the fragment's is in no base yet
        """


class LocalMode:
    """Inner steps of the manifest's batch, or of a smaller one with the learning rate that goes with it."""

    def __init__(
        self,
        task: Task,
        strategy: MemoryStrategy,
        manifest: RunManifest,
        layout: FragmentLayout,
        arena: SharedArena,
        micro_batch: int,
        seed: int,
        *,
        batch_size: int | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        self._task, self._strategy = task, strategy
        self._section = manifest.inner_optimizer
        self._layout, self._arena = layout, arena
        self.micro_batch = micro_batch
        self._seed = seed
        self.take_batches_of(batch_size or self._section.batch_size, lr_factor)

    def step(self, lineage_samples: int, due: int | None, between: Callable[[], None]) -> tuple[float, int]:
        strategy = self._strategy
        set_learning_rate(strategy.optimizer, self._lr_factor * learning_rate(self._section, lineage_samples))
        batch = next(self._batches)
        loss, self.micro_batch = shrinking_inner_step(
            self._task,
            strategy.model,
            strategy.optimizer,
            batch,
            self.micro_batch,
            self._section.clip_norm,
            between=between,
        )
        return loss, len(batch[0])

    def take_batches_of(self, batch_size: int, lr_factor: float) -> None:
        """From the next step on, with another order of the data.

        :param lr_factor: times the manifest's learning rate
        """
        self._lr_factor = lr_factor
        self._batches = self._task.batches(self._seed, batch_size)
        self._seed += 1

    def samples_due(self, counts: Sequence[Counts], ledgers: Sequence[Ledger]) -> int | None:
        return None

    def take_snapshot(self, fragment: int, samples: int) -> None:
        where = self._layout.slice(fragment)
        snapshot = self._arena.snapshot[where]
        self._strategy.snapshot(fragment, snapshot)
        own = snapshot[self._layout.parameters_of(fragment) :]
        if len(own):
            own.copy_(within_reach(own, self._arena.base[where][-len(own) :]))

    def rebase(self, fragment: int, *, keep: bool, pending: bool) -> None:
        where = self._layout.slice(fragment)
        base, reference = self._arena.base[where], self._arena.snapshot[where]
        if keep:
            self._strategy.rebase(fragment, base, reference, pending=pending)
            if statistics := self._layout.size(fragment) - self._layout.parameters_of(fragment):
                mend(self._strategy.model, self._layout, base[-statistics:])
        else:
            self._strategy.load(fragment, base)


class GradientMode:
    """Gradients of this peer's share of the global batch, added up in the parameters' own ``grad``.

    ``share`` is set from outside whenever the swarm's rates change. With ``delayed`` the peer computes on while a round
    holds what it contributed; else it waits for the new base, and every gradient is of the base it is applied to.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        manifest: RunManifest,
        layout: FragmentLayout,
        arena: SharedArena,
        micro_batch: int,
        seed: int,
    ) -> None:
        self._task, self._model, self._parameters = task, model, parameters
        self._layout, self._arena = layout, arena
        self._delayed = manifest.averaging.delayed
        self.share = manifest.averaging.global_batch
        self.micro_batch = micro_batch
        self._batches = task.batches(seed, micro_batch)
        self._left: Batch | None = None
        self._contributed = [0] * layout.num_fragments
        self._device = next(iter(parameters.values())).device
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, lineage_samples: int, due: int | None, between: Callable[[], None]) -> tuple[float, int]:
        batch = self._take(self.micro_batch if due is None else min(self.micro_batch, due))
        done = counted = 0
        total = 0.0
        while done < len(batch[0]):
            rest = tuple(tensor[done:] for tensor in batch)
            (loss, fitted), self.micro_batch = shrinking(
                partial(self._add_gradient, rest), self.micro_batch, self._device
            )
            done += fitted
            if math.isfinite(loss):
                total += loss * fitted
                counted += fitted
        return (total / counted, counted) if counted else (math.nan, done)

    def _add_gradient(self, batch: Batch, micro_batch: int) -> tuple[float, int]:
        """Add the gradient of the first ``micro_batch`` samples: mean loss and their number.

        The loss is not finite, and nothing was added, if loss or gradient were not. Where memory runs out nothing is
        added either.
        """
        part = to_device(tuple(tensor[:micro_batch] for tensor in batch), self._device)
        count = len(part[0])
        self._model.train()
        loss = self._task.loss(self._model, part)
        found = torch.autograd.grad(loss * float(count), list(self._parameters.values()), allow_unused=True)
        norm = nn.utils.get_total_norm([gradient for gradient in found if gradient is not None])
        mean = float(loss.detach())
        if not (math.isfinite(mean) and math.isfinite(float(norm))):
            return math.nan, count
        for collected, gradient in zip(self._gradients().values(), found, strict=True):
            if gradient is not None:
                collected.add_(gradient)
        return mean, count

    def _take(self, count: int) -> Batch:
        """The next ``count`` samples of this peer's order of the data, none left out."""
        while self._left is None or len(self._left[0]) < count:
            more = next(self._batches)
            joined = more
            if self._left is not None:
                joined = tuple(torch.cat((old, new)) for old, new in zip(self._left, more, strict=True))
            self._left = joined
        taken = tuple(tensor[:count] for tensor in self._left)
        self._left = tuple(tensor[count:] for tensor in self._left)
        return taken

    def samples_due(self, counts: Sequence[Counts], ledgers: Sequence[Ledger]) -> int | None:
        pending = []
        for count, contributed, ledger in zip(counts, self._contributed, ledgers, strict=True):
            counted = min(span.samples for span in ledger.spans)
            pending.append(count.samples - (max(counted, contributed) if self._delayed else counted))
        return max(0, self.share - max(pending))

    def take_snapshot(self, fragment: int, samples: int) -> None:
        self._contributed[fragment] = samples
        where = self._layout.slice(fragment)
        gathered = torch.empty(self._layout.size(fragment))
        gradients = self._gradients()
        gather_fragment(gradients, self._layout, fragment, gathered)
        self._arena.snapshot[where].sub_(gathered)
        load_fragment(gradients, self._layout, fragment, gathered.zero_())

    def rebase(self, fragment: int, *, keep: bool, pending: bool) -> None:
        where = self._layout.slice(fragment)
        load_fragment(self._parameters, self._layout, fragment, self._arena.base[where])
        if not keep:
            load_fragment(self._gradients(), self._layout, fragment, torch.zeros(self._layout.size(fragment)))

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: _grad(parameter) for name, parameter in self._parameters.items()}


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    return gradient
