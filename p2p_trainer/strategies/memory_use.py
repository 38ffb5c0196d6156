"""What a strategy takes before any activation, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.strategies.base import PARTIAL, MemoryUse, StrategyName
from p2p_trainer.strategies.checkpointing import blocks_of
from peers.fragments import FragmentLayout

FLOAT32_BYTES = 4
FROZEN_BYTES = 2
"""An element in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the layout does not say of a model."""

    other_bytes: int
    """Of buffers, and of parameters that the task does not train. Running statistics count here, and as elements."""
    largest_block_elements: int
    """Of the block with most parameters; of the largest parameter where there are no blocks."""


def facts_of(model: nn.Module) -> ModelFacts:
    """:param model: on any device, also on meta; before a strategy has it"""
    others = [*model.buffers(), *(parameter for parameter in model.parameters() if not parameter.requires_grad)]
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks_of(model)]
    return ModelFacts(
        other_bytes=sum(tensor.numel() * tensor.element_size() for tensor in others),
        largest_block_elements=max(blocks or [parameter.numel() for parameter in model.parameters()]),
    )


def state_bytes_per_element(optimizer: InnerOptimizerSection) -> int:
    """Of the inner optimizer's state."""
    if optimizer.name == "adamw":
        return 2 * FLOAT32_BYTES
    return FLOAT32_BYTES if optimizer.momentum else 0


def fixed_bytes(
    name: StrategyName,
    layout: FragmentLayout,
    trained: frozenset[int],
    optimizer: InnerOptimizerSection,
    facts: ModelFacts,
) -> MemoryUse:
    """Values, gradients and optimizer state at the fullest moment of a step; what activations take comes on top.

    :param trained: fragments that take gradients; strategies that train everything ignore it
    """
    elements = layout.num_elements
    state = state_bytes_per_element(optimizer)
    largest = max(math.prod(shape) for shape in layout.shapes)
    if name not in PARTIAL:
        device = 2 * FLOAT32_BYTES * elements + facts.other_bytes
        if name == "host_optimizer":
            # During a step one tensor after the other is in host memory, with its gradient.
            return MemoryUse(device_bytes=device, host_bytes=state * elements + 2 * FLOAT32_BYTES * largest)
        return MemoryUse(device_bytes=device + state * elements, host_bytes=0)
    taking = sum(layout.size(fragment) for fragment in trained)
    frozen = FROZEN_BYTES * (elements - taking)
    # While a block's gradients are computed its weights are there in float32.
    materialised = FLOAT32_BYTES * min(facts.largest_block_elements, elements - taking)
    device = (2 * FLOAT32_BYTES + state) * taking + materialised + facts.other_bytes
    if name == "stream":
        return MemoryUse(device_bytes=device, host_bytes=frozen)
    return MemoryUse(device_bytes=device + frozen, host_bytes=0)
