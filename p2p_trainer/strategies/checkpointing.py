"""Activation checkpointing by block: what a block computed is computed again in the backward pass instead of kept.

transformers models bring it; others get it around the blocks of their longest list (Chen et al. 2016, arXiv:1604.06174,
with one segment a block). The gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of the list that holds most of the model; empty if no list has two blocks of several parts each.

    A list of single layers has nothing to gain: what a layer keeps is its input, which checkpointing keeps as well.
    """
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = [child for child in module if any(child.children()) and any(True for _ in child.parameters())]
        held = sum(_elements(block) for block in blocks)
        if len(blocks) > 1 and held > most:
            best, most = blocks, held
    return best


def can_checkpoint(model: nn.Module) -> bool:
    """Whether ``checkpoint_blocks`` has anything to do."""
    return bool(blocks_of(model))


def checkpoint_blocks(model: nn.Module) -> None:
    """Compute the activations of each block again in the backward pass, from now on.

    Raises ValueError if the model has no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError("model: it has no list of blocks whose activations could be computed again")
    if getattr(model, "supports_gradient_checkpointing", False):
        # transformers 5 calls it activation checkpointing, and warns of the old name.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable: Any = next((getattr(model, name) for name in names if hasattr(model, name)), None)
        if enable is not None:
            enable({"use_reentrant": False})
            return
    for block in blocks:
        block.forward = partial(_checkpointed, block, block.forward)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=partial(_contexts, block), **named)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), buffers_kept(block)


@contextmanager
def buffers_kept(block: nn.Module) -> Iterator[None]:
    """Put buffers back afterwards: running statistics count a batch once, not again when it is computed again."""
    kept = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # past autograd's version counter: nothing that it kept has changed


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
