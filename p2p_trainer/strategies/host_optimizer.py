"""An optimizer whose state and step are in host memory, for parameters that lie on a device.

Gradients come to the host one tensor after the other, each is given up on the device at once, and the new values go
back. The arithmetic is the inner optimizer's own, on the CPU. (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840, without
its overlap and without a copy of the parameters in host memory.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.inner_optimizer import build_inner_optimizer


class HostOptimizer(torch.optim.Optimizer):
    """The manifest's inner optimizer over ``params``, which may lie anywhere; its state is on the CPU.

    State dictionaries are the inner optimizer's, so a checkpoint does not tell where the state was.
    """

    def __init__(self, params: Iterable[nn.Parameter], section: InnerOptimizerSection) -> None:
        twins: dict[nn.Parameter, nn.Parameter] = {}
        for param in params:
            if param.requires_grad:
                # Memory that is never touched is never taken: a twin has its parameter's values during a step only.
                twins[nn.Parameter(torch.empty(param.shape, dtype=torch.float32))] = param
        self._inner = build_inner_optimizer(twins, section)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        groups = []
        for group in self._inner.param_groups:
            members = [twins[twin] for twin in group["params"]]
            self._pairs += zip(members, group["params"], strict=True)
            groups.append({**group, "params": members})
        for _, twin in self._pairs:
            twin.data = torch.empty(0)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient; their gradients are gone afterwards."""
        if closure is not None:
            raise ValueError("closure: steps are made from gradients that are there")
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in ours.items() if key != "params"})
        for param, twin in self._pairs:
            if param.grad is None:
                continue
            twin.data = param.detach().to("cpu", copy=True)
            twin.grad = param.grad.detach().to("cpu")
            param.grad = None
            self._inner.step()  # of this one: nothing else has a gradient
            param.copy_(twin)
            twin.grad = None
            twin.data = torch.empty(0)

    @property
    def kind(self) -> str:
        """Whose state this is, for a checkpoint: the inner optimizer's, wherever that lies."""
        return type(self._inner).__name__

    def state_dict(self) -> dict[str, Any]:
        """As of the inner optimizer."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` of this, or of the inner optimizer on a device, gave."""
        self._inner.load_state_dict(state_dict)
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            ours.update({key: value for key, value in inner.items() if key != "params"})

    def state_bytes(self) -> int:
        """Host memory that the state takes."""
        return sum(
            value.nbytes
            for state in self._inner.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
