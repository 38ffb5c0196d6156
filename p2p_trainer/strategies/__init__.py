"""The memory ladder: ways to train a model that needs more memory than there is, behind one Protocol."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from dht_config.errors import UsageError
from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.strategies.base import PARTIAL, STRATEGIES, MemoryStrategy, MemoryUse, StrategyName, on_base
from p2p_trainer.strategies.checkpointing import can_checkpoint, checkpoint_blocks
from p2p_trainer.strategies.frozen import cannot_freeze
from p2p_trainer.strategies.host_optimizer import HostOptimizer
from p2p_trainer.strategies.memory_use import ModelFacts, facts_of, fixed_bytes
from p2p_trainer.strategies.partial import PartialModel
from p2p_trainer.strategies.whole import WholeModel
from peers.fragments import FragmentLayout

__all__ = [
    "PARTIAL",
    "STRATEGIES",
    "MemoryStrategy",
    "MemoryUse",
    "ModelFacts",
    "StrategyName",
    "build_strategy",
    "facts_of",
    "fixed_bytes",
    "on_base",
    "why_not",
]


def why_not(name: StrategyName, model: nn.Module, device: torch.device, mode: Literal["local", "gradient"]) -> str:
    """Why this strategy is not for this model, device and mode of the run, as a sentence; empty if it is."""
    if mode == "gradient" and name not in ("full", "checkpoint"):
        return "A run on averaged gradients trains everything on the device: its strategies are full and checkpoint."
    if name == "checkpoint" and not can_checkpoint(model):
        return "This model has no list of blocks whose activations could be computed again."
    if name in PARTIAL and (kind := cannot_freeze(model)):
        return f"This model has a module of the kind {kind}, whose weights cannot be frozen in low precision."
    if device.type == "cpu" and name in ("host_optimizer", "stream"):
        return f"On a CPU everything is in host memory already: {name} would bring nothing."
    return ""


def build_strategy(
    name: StrategyName,
    model: nn.Module,
    layout: FragmentLayout,
    section: InnerOptimizerSection,
    device: torch.device,
    trained: frozenset[int],
    mode: Literal["local", "gradient"] = "local",
) -> MemoryStrategy:
    """Put a model, as its task built it, under a strategy; it lies on the device afterwards.

    :param trained: fragments to train; strategies that train everything ignore it

    Raises UsageError if the strategy is not for this model, device or mode.
    """
    if reason := why_not(name, model, device, mode):
        raise UsageError(f"The memory strategy {name} cannot be used. {reason}", "Leave --strategy out.")
    if name != "full" and can_checkpoint(model):
        checkpoint_blocks(model)
    if name in PARTIAL:
        frozen_device = torch.device("cpu") if name == "stream" else device
        return PartialModel(name, model, layout, section, device, trained, frozen_device)
    model.to(device)
    parameters = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    if name == "host_optimizer":
        return WholeModel(name, model, parameters, layout, HostOptimizer(model.parameters(), section))
    return WholeModel(name, model, parameters, layout, build_inner_optimizer(model.parameters(), section))
