"""The number format that a device computes in: parameters, gradients and optimizer stay float32, matrices do not.

bfloat16 where a CUDA device has it: it has float32's range, so gradients need no scaling. A card without it computes in
float32: float16 would need a scaler that skips steps, and a skipped step is a sample that counts for nothing. A CPU
computes in float32. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from p2p_trainer.tasks.base import Batch, Task

ComputeDtype = Literal["float32", "bfloat16"]


def compute_dtype_of(device: torch.device) -> ComputeDtype:
    """:param device: proven to compute (``pick_device``)"""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    return "float32"


def in_dtype(task: Task, device: torch.device, dtype: ComputeDtype) -> Task:
    """The same task, its loss computed in ``dtype`` where torch's autocast deems that safe."""
    return task if dtype == "float32" else _AutocastTask(task, device, getattr(torch, dtype))


class _AutocastTask:
    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype) -> None:
        self._task, self._device_type, self._dtype = task, device.type, dtype
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
