"""What a memory strategy is: where a model's values, gradients and optimizer state lie, and which fragments have any.

A strategy is the seam between training and memory. Training asks it for a fragment's local values, gives it new bases,
and steps its optimizer; it need not know where anything lies or at what precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor, nn

from p2p_trainer.running_statistics import load_statistics, statistics_of
from p2p_trainer.settings import StrategyName as StrategyName
from peers.fragments import FragmentLayout

STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
"""Cheapest in time first; each takes less of the device's memory than the one before it.

``full``: everything on the device. ``checkpoint``: a block's activations are computed again in the backward pass.
``host_optimizer``: the same, and the optimizer's state and step are in host memory. ``fragments``: some fragments are
trained, the others frozen in bfloat16, without gradients or optimizer state. ``stream``: the same, with the frozen ones
in host memory. From ``checkpoint`` on all of them compute activations again where the model has blocks.
"""

PARTIAL: frozenset[StrategyName] = frozenset({"fragments", "stream"})
"""Those that train some fragments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What a strategy takes besides activations; on a CPU both are the machine's memory."""

    device_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.device_bytes + self.host_bytes


class MemoryStrategy(Protocol):
    """One model's memory. Fragment values that come and go are float32, on the CPU, ``(layout.size(fragment),)``."""

    name: StrategyName
    model: nn.Module
    """Its forward pass is the run's; its ``parameters()`` lie on the device that computes."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what is trained; another one after ``train_only``."""

    @property
    def trained(self) -> frozenset[int]:
        """Fragments that take gradients."""

    def snapshot(self, fragment: int, out: Tensor) -> None:
        """Copy the local values of a fragment into ``out``."""

    def load(self, fragment: int, values: Tensor, *, pending: bool = False) -> None:
        """Overwrite the local values of a fragment.

        :param pending: they hold work that is in no base yet, so nothing of them may be rounded away
        """

    def rebase(self, fragment: int, base: Tensor, reference: Tensor, *, pending: bool) -> None:
        """Move a fragment onto a new base: local values become ``base + (local values - reference)``.

        Running statistics stay as they are, unless the fragment becomes the base.

        :param pending: see ``load``; without it a fragment that is not trained becomes the base
        """

    def train_only(self, fragments: frozenset[int], values: Mapping[int, Tensor]) -> None:
        """Train these fragments from now on. What stops being trained keeps its values, unrounded, until a ``load`` or
        ``rebase`` with nothing pending.

        :param values: local values of those that begin, where this strategy holds them in low precision only

        Raises ValueError if values are missing, or if this strategy cannot train just these.
        """

    def unrounded(self) -> dict[int, Tensor]:
        """Copies of the local values of every fragment that has values of its own: what a checkpoint must keep."""


@contextmanager
def on_base(strategy: MemoryStrategy, layout: FragmentLayout, base: Tensor) -> Iterator[None]:
    """For as long, the model's values are ``base`` ``(layout.num_elements,)``; frozen ones stay as they are.

    Running statistics are the base's, also those of a frozen fragment: training moves them on all the same.
    """
    own = strategy.unrounded()
    statistics = {name: buffer.clone() for name, buffer in statistics_of(strategy.model, layout).items()}
    try:
        for fragment in own:
            strategy.load(fragment, base[layout.slice(fragment)])
        load_statistics(strategy.model, layout, base)
        yield
    finally:
        for fragment, values in own.items():
            strategy.load(fragment, values, pending=True)
        for name, buffer in statistics_of(strategy.model, layout).items():
            buffer.copy_(statistics[name])
