"""Weights in low precision that the model reads in float32: made on access, gone after use.

A tensor is *assembled* from its pieces, one for each fragment that it lies in: float32 and trained, or bfloat16 and
frozen. The model's modules get the assembled tensor whenever they ask for their weight (torch.nn.utils.parametrize), so
this works for any module and for tied weights. What autograd would keep of it for the backward pass is replaced by a
note and assembled again when that pass asks for it.

What this does not do: modules that keep their weights elsewhere than in their attributes (torch's RNNs) would not see
the change; ``cannot_freeze`` finds those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

FROZEN_DTYPE = torch.bfloat16


class Assembled(nn.Module):
    """One weight of a model, made of pieces. As a parametrization it gives modules the whole.

    :param pieces: in order; parameters of shape ``(1, n)`` or ``(n,)`` are trained, plain tensors ``(n,)`` are frozen
        and may lie elsewhere than ``device``
    """

    def __init__(self, pieces: Sequence[Tensor], shape: Sequence[int], device: torch.device, notes: Notes) -> None:
        super().__init__()
        self._shape, self._device, self._notes = tuple(shape), device, notes
        self.replace(pieces)

    def replace(self, pieces: Sequence[Tensor]) -> None:
        """Of the same sizes as the ones before."""
        self._pieces = list(pieces)  # in order, which nn.Module's registers of parameters and buffers do not keep
        self.trained = nn.ParameterList([piece for piece in pieces if isinstance(piece, nn.Parameter)])

    def assemble(self) -> Tensor:
        """Float32, on the device that computes."""
        parts = [piece.to(self._device, non_blocking=True).to(torch.float32).reshape(-1) for piece in self._pieces]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self._shape)

    def forward(self, original: Tensor) -> Tensor:
        """Called for every access; ``original`` is a placeholder."""
        weight = self.assemble()
        if torch.is_grad_enabled():
            self._notes.add(weight, self)
        return weight


@dataclass(frozen=True, slots=True)
class _Note:
    """In place of a tensor that autograd wanted to keep: a view of an assembled weight."""

    source: Assembled
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Notes:
    """Which tensors that are alive are assembled weights."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Tensor], Assembled]] = {}
        """By the address of their memory, which no other tensor has as long as they live."""

    def add(self, weight: Tensor, source: Assembled) -> None:
        address = weight.untyped_storage().data_ptr()

        def forget(reference: weakref.ref[Tensor]) -> None:
            if (known := self._alive.get(address)) is not None and known[0] is reference:
                del self._alive[address]

        if weight.numel():
            self._alive[address] = (weakref.ref(weight, forget), source)

    def replacing(self) -> AbstractContextManager[None]:
        """For as long, autograd keeps notes in place of assembled weights and of views of them."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        return hooks

    def _pack(self, tensor: Tensor) -> Tensor | _Note:
        known = self._alive.get(tensor.untyped_storage().data_ptr())
        # A weight that the model has changed in place is another one.
        if known is None or tensor.dtype != torch.float32 or tensor._version:
            return tensor
        return _Note(known[1], tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(kept: Tensor | _Note) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.source.assemble().as_strided(kept.size, kept.stride, kept.offset)


def replace_what_is_kept(model: nn.Module, notes: Notes) -> None:
    """Make every forward pass of the model one in which autograd keeps notes instead of assembled weights."""
    forward: Callable[..., Any] = model.forward

    @wraps(forward)
    def noting(*inputs: Any, **named: Any) -> Any:
        with notes.replacing():
            return forward(*inputs, **named)

    model.forward = noting


def holders(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter, the modules that have it, and under which name: several where weights are tied."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in parameters}
    for module, attribute, parameter in _direct_parameters(model):
        if (name := names.get(id(parameter))) is not None:
            found[name].append((module, attribute))
    return found


def cannot_freeze(model: nn.Module) -> str:
    """The kind of a module that keeps its weights where they cannot be replaced; empty if there is none."""
    return next((type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)), "")


def expose(places: Sequence[tuple[nn.Module, str]], assembled: Assembled) -> None:
    """Let these modules read the assembled weight in place of their own."""
    for module, attribute in places:
        delattr(module, attribute)
        module.register_buffer(attribute, torch.empty(0, device=assembled._device), persistent=False)
        # unsafe: the placeholder has neither the shape nor the values, and nothing is ever assigned.
        parametrize.register_parametrization(module, attribute, assembled, unsafe=True)


def withdraw(places: Sequence[tuple[nn.Module, str]]) -> None:
    """Take away what ``expose`` gave: these modules have nothing of that name any more."""
    for module, attribute in places:
        parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)
        delattr(module, attribute)


def _direct_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield module, attribute, parameter
