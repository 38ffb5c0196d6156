"""What a task is: the one seam between the training loop and a model with its data.

A task knows how to build its model, in which order this peer reads its data, and what the loss is. It knows
nothing of peers, devices or optimizers. People's own tasks implement ``Task`` and are installed under the
entry-point group ``p2p_trainer.tasks`` (see ``load_task``).
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from dht_config.errors import ManifestError

Batch = tuple[Tensor, ...]
"""Tensors whose first dimension is the samples, on the CPU as a task makes them."""

Indices = npt.NDArray[np.int64]

_Section = TypeVar("_Section", bound=BaseModel)


class Task(Protocol):
    """A model, its data and its loss, made from the ``[model]`` and ``[data]`` of a manifest by a factory
    ``create(model, data) -> Task``."""

    name: str
    version: int
    """Part of the run's fingerprint: raise it when a change would make equal manifests train differently."""
    unit: str
    """What one sample is, in the plural, for people: "sequences", "images"."""

    def build_model(self) -> nn.Module:
        """Build the untrained model: float32, on the CPU, initialised from torch's global generator.

        What travels is what takes gradients and the persistent buffers of floating-point numbers. Parameters that are
        frozen must be the same at every build, as from a file.

        Raises ManifestError if ``[model]`` describes no model.
        """

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        """Read the training data for ever, ``batch_size`` samples at a time, in an order of the seed's own.

        No sample comes twice before all came once; on exhaustion they are shuffled anew. Fewer samples than a
        batch are repeated until the batch is full. Raises DataError, at the call, if there are no usable
        data.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean loss over the samples of a batch on the model's device; a scalar."""

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        """Read up to ``max_samples`` samples that ``batches`` never gives, the same ones at every call."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the device that computes."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def mean_loss(
    task: Task, model: nn.Module, batches: Sequence[Batch], *, check: Callable[[], None] = lambda: None
) -> float:
    """Evaluate the model: the mean loss over the samples of ``batches``, without gradients.

    :param check: called between batches; may raise

    The model is put into evaluation mode and back. Raises ValueError if there are no samples.
    """
    samples = sum(len(batch[0]) for batch in batches)
    if samples == 0:
        raise ValueError("batches: no samples to evaluate on")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        total = 0.0
        with torch.no_grad():
            for batch in batches:
                check()
                total += float(task.loss(model, to_device(batch, device))) * len(batch[0])
    finally:
        model.train(was_training)
    return total / samples


def is_held_out(name: str, fraction: float) -> bool:
    """Decide by the hash of a sample's or file's name whether it is kept for evaluation.

    The same on every machine and in every version of Python and numpy, and unmoved by what else is there.
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def shuffled_batches(epoch: Callable[[np.random.Generator], Indices], seed: int, batch_size: int) -> Iterator[Indices]:
    """Cut an endless sequence of shuffled epochs into batches of exactly ``batch_size`` indices.

    :param epoch: gives every sample's index once, in an order drawn from the generator; never empty.
    :param seed: any integer; equal seeds give equal orders.
    """
    generator = np.random.default_rng(seed % 2**128)
    pending = epoch(generator)
    while True:
        while len(pending) < batch_size:
            pending = np.concatenate([pending, epoch(generator)])
        yield pending[:batch_size]
        pending = pending[batch_size:]


def parse_section(schema: type[_Section], section: str, values: Mapping[str, Any]) -> _Section:
    """Check a free-form manifest section against the schema of the task that owns it.

    Raises ManifestError naming the key, its value and what would be right.
    """
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(section)"
        if first["type"] == "extra_forbidden":
            raise unknown_key(section, key, list(schema.model_fields)) from error
        if first["type"] == "missing":
            raise ManifestError(problem=f"[{section}] {key} is missing.", remedy="Add it to the manifest.") from error
        raise ManifestError(
            problem=f"[{section}] {key} = {first['input']!r} cannot be used: {first['msg']}.",
            remedy="Correct it in the manifest.",
        ) from error


def unknown_key(section: str, key: str, known: Sequence[str]) -> ManifestError:
    """Say that a key means nothing to the task, and which one was perhaps meant."""
    close = difflib.get_close_matches(key, known, n=1)
    remedy = f"Did you mean {close[0]}?" if close else f"Known keys: {', '.join(sorted(known)) or 'none'}."
    return ManifestError(problem=f"[{section}] {key} is not a key of this task.", remedy=remedy)
