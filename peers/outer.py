"""The outer optimizer: DiLoCo's Nesterov step on averaged pseudo-gradients, bit-identical on any hardware.

Every operation is a separate multiply, add or subtract, which IEEE 754 rounds alike everywhere. ``add(alpha=...)``
and ``lerp`` fuse and gave different bits under ATEN_CPU_CAPABILITY default, avx2 and avx512 (torch 2.13).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch

NO_HISTORY = bytes(32)
"""The history of a base of version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum. Source: DiLoCo (Douillard et al. 2023), section 2; PyTorch's SGD formulation."""

    lr: float
    momentum: float

    def step(
        self, base: torch.Tensor, momentum: torch.Tensor, average: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New base and momentum, as new tensors; nothing is changed in place.

        :param base: float32 ``(size,)``
        :param momentum: float32 ``(size,)``
        :param average: weighted mean of the contributions (local parameters minus base), float32 ``(size,)``.
            The pseudo-gradient is its negative.
        """
        new_momentum = torch.sub(torch.mul(momentum, self.momentum), average)
        look_ahead = torch.sub(torch.mul(new_momentum, self.momentum), average)
        return torch.sub(base, torch.mul(look_ahead, self.lr)), new_momentum


def base_digest(
    *,
    fragment: int,
    version: int,
    total_element_samples: int,
    history: bytes,
    base: torch.Tensor,
    momentum: torch.Tensor,
) -> bytes:
    """SHA-256 over everything peers of one version must agree on: 32 bytes.

    :param total_element_samples: sum over all accepted contributions of elements times samples
    :param history: hash chain over the receipts of all versions so far (``messages.extend_history``)
    """
    digest = hashlib.sha256(struct.pack("<IQ", fragment, version))
    digest.update(history)
    digest.update(total_element_samples.to_bytes(16, "little"))
    digest.update(base.contiguous().numpy().data)
    digest.update(momentum.contiguous().numpy().data)
    return digest.digest()
