"""The cut of a model's parameters into fragments: the unit of averaging, transfer and memory planning.

Running statistics, such as those of batch normalisation, are the last elements of the last fragment. They follow the
data and no gradient, so they are no progress from one place to another: a peer keeps its own, and the base has the mean
of everybody's, without an outer step and without loss on the way (``Rules.at``). What this does not bring: the variance
between peers whose data are unlike is no part of the mean of their variances.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

SNAP_FRACTION = 0.25
"""A cut moves to the next tensor border if that changes a fragment by at most this share of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one parameter that lies in one fragment; all positions in elements."""

    name: str
    tensor_start: int
    fragment_start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentLayout:
    """Parameters in order, then running statistics, flattened into one float32 vector, cut at ``bounds`` (F + 1
    positions in elements)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bounds: tuple[int, ...]
    statistics: tuple[str, ...] = ()
    """The last ones of ``names``: those of running statistics."""

    @property
    def num_fragments(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_elements(self) -> int:
        return self.bounds[-1]

    def size(self, fragment: int) -> int:
        """Elements of one fragment."""
        return self.bounds[fragment + 1] - self.bounds[fragment]

    def slice(self, fragment: int) -> slice:
        return slice(self.bounds[fragment], self.bounds[fragment + 1])

    @property
    def digest(self) -> bytes:
        """Of what is averaged and how it is cut: 32 bytes, the same for equal layouts alone."""
        text = json.dumps([self.names, self.shapes, self.bounds, self.statistics])
        return hashlib.sha256(text.encode()).digest()

    def parameters_of(self, fragment: int) -> int:
        """Elements of one fragment that are parameters: the first ones. What follows is running statistics."""
        elements = sum(math.prod(shape) for shape in self.shapes[len(self.names) - len(self.statistics) :])
        return max(0, min(self.size(fragment), self.num_elements - elements - self.bounds[fragment]))

    def segments(self, fragment: int) -> Iterator[Segment]:
        begin, end = self.bounds[fragment], self.bounds[fragment + 1]
        position = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            length = math.prod(shape)
            low, high = max(begin, position), min(end, position + length)
            if low < high:
                yield Segment(name=name, tensor_start=low - position, fragment_start=low - begin, length=high - low)
            position += length


def cut(
    shapes: Mapping[str, Sequence[int]], fragments: int, statistics: Mapping[str, Sequence[int]] | None = None
) -> FragmentLayout:
    """Cut parameters, in order, into ``fragments`` pieces of about equal bytes.

    A cut snaps to a tensor border within 25 % of a fragment's size, so that most tensors lie in one fragment.

    :param statistics: shapes of running statistics, which go into the last fragment
    :raises ValueError: if the model has fewer elements than fragments.
    """
    borders = [0]
    for shape in shapes.values():
        borders.append(borders[-1] + math.prod(shape))
    total = borders[-1]
    if total < fragments:
        raise ValueError(f"a model of {total} parameters cannot be cut into {fragments} fragments")
    ideal = total / fragments
    bounds = [0]
    for index in range(1, fragments):
        wanted = round(index * ideal)
        nearest = min(borders, key=lambda border: abs(border - wanted))
        position = nearest if abs(nearest - wanted) <= SNAP_FRACTION * ideal else wanted
        room_left = total - (fragments - index)
        bounds.append(min(max(position, bounds[-1] + 1), room_left))
    statistics = statistics or {}
    everything = {**shapes, **statistics}
    return FragmentLayout(
        names=tuple(everything),
        shapes=tuple(tuple(shape) for shape in everything.values()),
        bounds=(*bounds, total + sum(math.prod(shape) for shape in statistics.values())),
        statistics=tuple(statistics),
    )


def gather_fragment(
    parameters: Mapping[str, torch.Tensor], layout: FragmentLayout, fragment: int, out: torch.Tensor
) -> None:
    """Copy a fragment of ``parameters`` (any device and dtype) into ``out``: float32, CPU, ``(size,)``."""
    for segment in layout.segments(fragment):
        source = parameters[segment.name].detach().reshape(-1)
        out[segment.fragment_start : segment.fragment_start + segment.length].copy_(
            source[segment.tensor_start : segment.tensor_start + segment.length]
        )


def shift_fragment(
    parameters: Mapping[str, torch.Tensor],
    layout: FragmentLayout,
    fragment: int,
    base: torch.Tensor,
    reference: torch.Tensor,
) -> None:
    """Rebase in place: parameters become ``base + (parameters - reference)``; both are float32, ``(size,)``.

    Running statistics stay what they are.
    """
    with torch.no_grad():
        for segment in layout.segments(fragment):
            if segment.name in layout.statistics:
                continue
            part = slice(segment.fragment_start, segment.fragment_start + segment.length)
            flat = parameters[segment.name].detach().reshape(-1)
            local = flat[segment.tensor_start : segment.tensor_start + segment.length]
            progress = local.to(device="cpu", dtype=torch.float32) - reference[part]
            _write(parameters[segment.name], segment, progress.add_(base[part]))


def load_fragment(
    parameters: Mapping[str, torch.Tensor], layout: FragmentLayout, fragment: int, values: torch.Tensor
) -> None:
    """Overwrite a fragment of ``parameters`` with ``values``: float32, CPU, ``(size,)``."""
    with torch.no_grad():
        for segment in layout.segments(fragment):
            part = slice(segment.fragment_start, segment.fragment_start + segment.length)
            _write(parameters[segment.name], segment, values[part])


def _write(parameter: torch.Tensor, segment: Segment, values: torch.Tensor) -> None:
    """Overwrite a segment's elements of its parameter; ``values`` is ``(segment.length,)``."""
    flat = parameter.detach().reshape(-1)
    flat[segment.tensor_start : segment.tensor_start + segment.length].copy_(values)
    if not parameter.is_contiguous():  # then ``flat`` is a copy
        parameter.detach().copy_(flat.view(parameter.shape))
