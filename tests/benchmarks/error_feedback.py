"""Error feedback with a residual of its own, the literature's rule. The product's: see ``peers/codecs.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """What a contribution leaves out comes with the next one.

    A round is ``compensate``, encode, decode one's own bytes, and, once the contribution counts, ``residual_after``.
    A contribution that does not count leaves the residual as it was. Each method works on slices too, so accounting
    may follow parts. Every operation is rounded on its own and in place: no memory beyond the caller's two buffers.

    With beta below 1 what was left out long ago fades: what is sent does not add up to what was there. That is
    SparseLoCo's stand-in for outer momentum, so the outer optimizer should then have none.

    Source: Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2 (beta 1); SparseLoCo (Sarfi et al. 2025,
    arXiv:2508.15706), algorithm 1: e = beta * e + delta; send Q(top-k(e)); e = e - sent. Here beta is applied when
    the residual is stored, not when it is used: the same bits, and no temporary.
    """

    beta: float
    """The share of what was left out that the next contribution brings; SparseLoCo's is 0.95."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta is {self.beta}, not from 0 to 1")

    def compensate(self, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``value + residual``, float32 ``(size,)``, written to ``value``; ``residual`` is not changed."""
        return value.add_(residual)

    def residual_after(self, value: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        """``beta * (value - decoded)``, float32 ``(size,)``, written to ``value``: the next residual.

        :param value: what ``compensate`` gave
        :param decoded: what the others decode of it
        """
        value.sub_(decoded)
        return value if self.beta == 1 else value.mul_(self.beta)
