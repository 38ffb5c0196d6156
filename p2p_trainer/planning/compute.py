"""The number format that a device computes in: parameters, gradients and optimizer stay float32, matrices do not.

bfloat16 where a CUDA device has it: it has float32's range, so gradients need no scaling. A card without it that is
fast in float16 computes in that, with torch's GradScaler: what a gradient is multiplied by is halved where one
overflows, and the batch is computed again, so no sample is lost over it (``throughput._accumulate``). A run on
averaged gradients, which never steps an optimizer here, is computed in float32 on such a card; so is everything on a
CPU, unless a person says otherwise. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from p2p_trainer.settings import ComputeDtype as ComputeDtype
from p2p_trainer.tasks.base import Batch, Task

_FAST_IN_FLOAT16 = (7, 0)
"""CUDA's compute capability from which on cards have units for it; before it many were slower in it than in float32."""


def compute_dtype_of(device: torch.device, mode: Literal["local", "gradient"] = "local") -> ComputeDtype:
    """:param device: proven to compute (``pick_device``)"""
    if device.type != "cuda":
        return "float32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    fast = torch.cuda.get_device_capability(device) >= _FAST_IN_FLOAT16
    return "float16" if fast and mode == "local" else "float32"


def in_dtype(task: Task, device: torch.device, dtype: ComputeDtype) -> Task:
    """The same task, its loss computed in ``dtype`` where torch's autocast deems that safe."""
    return task if dtype == "float32" else _AutocastTask(task, device, getattr(torch, dtype))


def scaler_of(task: Task) -> GradScaler:
    """What the loss of a task must be multiplied by before its gradients are computed; does nothing but for float16."""
    scaler = getattr(task, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) else GradScaler(enabled=False)


class _AutocastTask:
    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype) -> None:
        self._task, self._device_type, self._dtype = task, device.type, dtype
        self.scaler = GradScaler(device.type, enabled=dtype == torch.float16)
        self.name, self.version, self.unit = task.name, task.version, task.unit

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        return self._task.batches(seed, batch_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(self._device_type, dtype=self._dtype):
            return self._task.loss(model, batch)

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        return self._task.held_out(batch_size, max_samples)
