"""The outer optimizers: steps on averaged contributions, bit-identical on any hardware.

Every operation is a separate multiply, add or subtract, which IEEE 754 rounds alike everywhere. ``add(alpha=...)``
and ``lerp`` fuse and gave different bits under ATEN_CPU_CAPABILITY default, avx2 and avx512 (torch 2.13).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from dht_config.manifest import OuterOptimizerSection

PIECE_ELEMENTS = 1 << 18
NO_HISTORY = bytes(32)
"""The history of a base of version 0."""


class OuterOptimizer(Protocol):
    """Makes the next base of a fragment."""

    @property
    def states(self) -> int:
        """Vectors of state that belong to a base, all zero at version 0."""

    def step(
        self,
        base: torch.Tensor,
        state: torch.Tensor,
        average: torch.Tensor,
        version: int,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New base and state; nothing that it is given is changed but ``out``.

        :param base: float32 ``(size,)``
        :param state: float32 ``(states, size)``
        :param average: weighted mean of the contributions, float32 ``(size,)``: the direction in which to go, that is
            local parameters minus base, or the negative mean gradient
        :param version: of the new base, 1 for the first step
        :param out: where new base and state go, of the same shapes; may be the old ones. Without it new tensors
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum. Source: DiLoCo (Douillard et al. 2023), section 2; PyTorch's SGD formulation."""

    lr: float
    momentum: float
    states: ClassVar[int] = 1

    def step(
        self,
        base: torch.Tensor,
        state: torch.Tensor,
        average: torch.Tensor,
        version: int,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``OuterOptimizer``; the state is the momentum."""
        new_base, new_state = out or (torch.empty_like(base), torch.empty_like(state))
        for part in _cache_sized(len(base)):
            momentum = torch.sub(torch.mul(state[0, part], self.momentum), average[part])
            look_ahead = torch.sub(torch.mul(momentum, self.momentum), average[part])
            torch.sub(base[part], torch.mul(look_ahead, self.lr), out=new_base[part])
            new_state[0, part] = momentum
        return new_base, new_state


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay. Source: Loshchilov & Hutter 2019, algorithm 2; PyTorch's formulation.

    All scalars are computed in Python by multiplication and division alone: ``pow`` differs between C libraries.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    states: ClassVar[int] = 2

    def step(
        self,
        base: torch.Tensor,
        state: torch.Tensor,
        average: torch.Tensor,
        version: int,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``OuterOptimizer``; the state is the first and the second moment of the gradient."""
        beta1, beta2 = self.betas
        bias1, bias2 = 1.0 - power(beta1, version), 1.0 - power(beta2, version)
        new_base, new_state = out or (torch.empty_like(base), torch.empty_like(state))
        for part in _cache_sized(len(base)):
            # The average points downhill: it is the negative gradient.
            downhill = average[part]
            first = torch.sub(torch.mul(state[0, part], beta1), torch.mul(downhill, 1.0 - beta1))
            second = torch.add(torch.mul(state[1, part], beta2), torch.mul(torch.mul(downhill, downhill), 1.0 - beta2))
            scale = torch.add(torch.sqrt(torch.div(second, bias2)), self.eps)
            direction = torch.div(torch.div(first, bias1), scale)
            shrunk = torch.mul(base[part], 1.0 - self.lr * self.weight_decay)
            torch.sub(shrunk, torch.mul(direction, self.lr), out=new_base[part])
            new_state[0, part], new_state[1, part] = first, second
        return new_base, new_state


def _cache_sized(size: int) -> Iterator[slice]:
    """All elements in pieces, so that what lies between two operations takes no memory to speak of."""
    return (slice(start, min(start + PIECE_ELEMENTS, size)) for start in range(0, size, PIECE_ELEMENTS))


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by repeated squaring: the same bits everywhere.

    :param exponent: 0 or more
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def build_outer_optimizer(section: OuterOptimizerSection) -> OuterOptimizer:
    """The manifest's outer optimizer."""
    if section.name == "adamw":
        return AdamW(lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay)
    return Nesterov(lr=section.lr, momentum=section.momentum)


def base_digest(
    *,
    fragment: int,
    version: int,
    total_element_samples: int,
    history: bytes,
    base: torch.Tensor,
    outer_state: torch.Tensor,
) -> bytes:
    """SHA-256 over everything peers of one version must agree on: 32 bytes.

    :param total_element_samples: sum over all accepted contributions of elements times samples
    :param history: hash chain over the receipts of all versions so far (``messages.extend_history``)
    """
    digest = hashlib.sha256(struct.pack("<IQ", fragment, version))
    digest.update(history)
    digest.update(total_element_samples.to_bytes(16, "little"))
    digest.update(base.contiguous().numpy().data)
    digest.update(outer_state.contiguous().numpy().data)
    return digest.digest()
