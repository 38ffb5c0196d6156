"""Image classification on scikit-learn's handwritten digits: real data, trained in seconds, for a first look.

1,797 images of 8 x 8 pixels that come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from dht_config.errors import DataError
from p2p_trainer.tasks.base import Batch, Indices, is_held_out, parse_section, shuffled_batches

EDGE = 8
PIXELS = EDGE * EDGE
CLASSES = 10
HELD_OUT_FRACTION = 0.15


class DigitsModel(BaseModel):
    """``[model]`` of the digits task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_sizes: tuple[Annotated[int, Field(strict=True, ge=1, le=65_536)], ...] = (64,)
    """Widths of the hidden layers, from the image to the answer; empty for a linear classifier."""
    channels: tuple[Annotated[int, Field(strict=True, ge=1, le=4096)], ...] = ()
    """Of 3 x 3 convolutions before the hidden layers, each with batch normalisation; empty for none."""


class DigitsData(BaseModel):
    """``[data]`` of the digits task: nothing can be set."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class _Images:
    pixels: npt.NDArray[np.float32]
    """(samples, 64), 0 to 1."""
    labels: npt.NDArray[np.int64]
    """(samples,), 0 to 9."""

    def batch(self, indices: Indices) -> Batch:
        return torch.from_numpy(self.pixels[indices]), torch.from_numpy(self.labels[indices])


class DigitsTask:
    """Classify 8 x 8 images of digits with a multi-layer perceptron, with or without convolutions before it."""

    name = "digits"
    version = 1
    unit = "images"

    def __init__(self, model: DigitsModel) -> None:
        self._model = model

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        channels = [1, *self._model.channels]
        if self._model.channels:
            layers.append(nn.Unflatten(1, (1, EDGE, EDGE)))
            for inputs, outputs in pairwise(channels):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers.append(nn.Flatten())
        sizes = [channels[-1] * PIXELS, *self._model.hidden_sizes, CLASSES]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def batches(self, seed: int, batch_size: int) -> Iterator[Batch]:
        images = self._split[0]
        order = shuffled_batches(lambda rng: rng.permutation(len(images.labels)), seed, batch_size)
        return (images.batch(indices) for indices in order)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels, labels = batch
        return functional.cross_entropy(model(pixels), labels)

    def held_out(self, batch_size: int, max_samples: int) -> list[Batch]:
        images = self._split[1]
        indices = np.arange(min(max_samples, len(images.labels)))
        return [images.batch(indices[at : at + batch_size]) for at in range(0, len(indices), batch_size)]

    @cached_property
    def _split(self) -> tuple[_Images, _Images]:
        pixels, labels = _read_digits()
        pixels, labels = (pixels / 16).astype(np.float32), labels.astype(np.int64)
        kept = np.array([is_held_out(f"digits/{at}", HELD_OUT_FRACTION) for at in range(len(labels))])
        return _Images(pixels[~kept], labels[~kept]), _Images(pixels[kept], labels[kept])


def _read_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """(samples, 64) values 0 to 16, and (samples,) labels, as ``sklearn.datasets.load_digits`` gives them.

    From the file in the package, which takes 0.03 s: to import scikit-learn takes a second of a core, in the process
    that measures and in the one that trains. Where a version keeps the file elsewhere, by its own function.

    Raises DataError if there is no scikit-learn.
    """
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    file = Path(next(iter(folders or ()), ""), "datasets", "data", "digits.csv.gz")
    if folders and file.is_file():
        with gzip.open(file, "rt", encoding="ascii") as lines:
            rows = np.loadtxt(lines, delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(np.int64)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            problem=f"The digits task needs scikit-learn, which cannot be imported ({error}).",
            remedy="Run: pip install scikit-learn",
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def create(model: Mapping[str, Any], data: Mapping[str, Any]) -> DigitsTask:
    """Make the task from a manifest's ``[model]`` and ``[data]``. Raises ManifestError naming the key."""
    parse_section(DigitsData, "data", data)
    return DigitsTask(parse_section(DigitsModel, "model", model))
