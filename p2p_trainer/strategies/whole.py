"""The strategies that train every fragment: ``full``, ``checkpoint`` and ``host_optimizer``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from p2p_trainer.running_statistics import forbid_negative_variances, statistics_of
from p2p_trainer.strategies.base import StrategyName
from peers.fragments import FragmentLayout, gather_fragment, load_fragment, shift_fragment


class WholeModel:
    """All parameters are float32 on the device, and the model's own.

    :param parameters: by name, in the layout's order
    :param optimizer: over these parameters, wherever it keeps its state
    """

    def __init__(
        self,
        name: StrategyName,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        layout: FragmentLayout,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.name, self.model, self.parameters, self.optimizer = name, model, parameters, optimizer
        self.trained = frozenset(range(layout.num_fragments))
        self._layout = layout

    def snapshot(self, fragment: int, out: Tensor) -> None:
        gather_fragment(self._values(), self._layout, fragment, out)

    def load(self, fragment: int, values: Tensor, *, pending: bool = False) -> None:
        load_fragment(self._values(), self._layout, fragment, values)
        if self._layout.statistics:
            forbid_negative_variances(self.model)

    def rebase(self, fragment: int, base: Tensor, reference: Tensor, *, pending: bool) -> None:
        shift_fragment(self.parameters, self._layout, fragment, base, reference)

    def train_only(self, fragments: frozenset[int], values: Mapping[int, Tensor]) -> None:
        if fragments != self.trained:
            raise ValueError(f"fragments: the strategy {self.name} trains all of them")

    def unrounded(self) -> dict[int, Tensor]:
        copies = {fragment: torch.empty(self._layout.size(fragment)) for fragment in sorted(self.trained)}
        for fragment, out in copies.items():
            self.snapshot(fragment, out)
        return copies

    def _values(self) -> dict[str, Tensor]:
        return {**self.parameters, **statistics_of(self.model, self._layout)}
