"""The strategies that train some fragments only: ``fragments`` and ``stream``.

A fragment's elements are in pieces, one for each tensor that it has a part in. Trained pieces are float32 parameters
with gradients and optimizer state; the others are bfloat16 and have neither. A cut inside a tensor is a border between
two pieces, so what is trained is exactly the fragment, and the rest of the tensor cannot move.

A fragment that stops being trained has work that is in no base yet. Its float32 values are kept in host memory until
nothing of it is pending any more; the model reads them rounded. Running statistics are the model's own buffers, trained
or not. A sparse codec leaves most of a contribution where it
came from, to be sent once the fragment is trained again: then they are kept until that turn, and the plan counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from dht_config.manifest import InnerOptimizerSection
from p2p_trainer.inner_optimizer import build_inner_optimizer
from p2p_trainer.running_statistics import forbid_negative_variances, statistics_of
from p2p_trainer.strategies.base import StrategyName
from p2p_trainer.strategies.frozen import (
    FROZEN_DTYPE,
    Assembled,
    Notes,
    expose,
    holders,
    replace_what_is_kept,
    withdraw,
)
from peers.fragments import FragmentLayout, Segment


@dataclass(slots=True)
class _Piece:
    """A fragment's part of one tensor."""

    segment: Segment
    fragment: int
    elements: Tensor = field(default_factory=partial(torch.empty, 0))
    """A parameter where it is trained, else bfloat16 ``(length,)``."""


@dataclass(slots=True)
class _Weight:
    """One tensor of the model, the modules that read it, and its pieces in order."""

    shape: tuple[int, ...]
    places: list[tuple[nn.Module, str]]
    pieces: list[_Piece] = field(default_factory=list)
    assembled: Assembled | None = None
    """None where the modules have a parameter of their own."""

    def update(self, device: torch.device, notes: Notes) -> None:
        """Let the modules read what the pieces are now."""
        elements = [piece.elements for piece in self.pieces]
        if len(elements) == 1 and isinstance(elements[0], nn.Parameter):
            if self.assembled is not None:
                withdraw(self.places)
                self.assembled = None
            for module, attribute in self.places:
                module.register_parameter(attribute, elements[0])
        elif self.assembled is not None:
            self.assembled.replace(elements)
        else:
            self.assembled = Assembled(elements, self.shape, device, notes)
            expose(self.places, self.assembled)


class PartialModel:
    """Some fragments are trained; see the module's text.

    :param model: as the task built it
    :param device: computes
    :param frozen_device: holds what is not trained
    """

    def __init__(
        self,
        name: StrategyName,
        model: nn.Module,
        layout: FragmentLayout,
        section: InnerOptimizerSection,
        device: torch.device,
        trained: frozenset[int],
        frozen_device: torch.device,
    ) -> None:
        self.name, self.model = name, model
        self.trained = _checked(trained, layout)
        self._layout, self._section = layout, section
        self._device, self._frozen_device = device, frozen_device
        self._notes = Notes()
        self._kept: dict[int, Tensor] = {}
        """Unrounded values of fragments that are not trained, with work that is in no base."""
        self._fragments: list[list[_Piece]] = [[] for _ in range(layout.num_fragments)]
        self._weights: dict[str, _Weight] = {}
        parameters = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
        places = holders(model, parameters)
        for path, shape in zip(layout.names, layout.shapes, strict=True):
            if path in parameters:
                self._weights[path] = _Weight(shape, places[path])
        for fragment, own in enumerate(self._fragments):
            segments = (segment for segment in layout.segments(fragment) if segment.name in parameters)
            own.extend(_Piece(segment, fragment) for segment in segments)
            for piece in own:
                self._weights[piece.segment.name].pieces.append(piece)
        for path, weight in self._weights.items():
            # One after the other, so that two copies of the model are never there.
            values = parameters.pop(path).detach().reshape(-1)
            for piece in weight.pieces:
                start = piece.segment.tensor_start
                self._place(piece, values[start : start + piece.segment.length])
            weight.update(device, self._notes)
        model.to(device)
        self.optimizer = build_inner_optimizer(self._trained_parameters(), section)
        replace_what_is_kept(model, self._notes)

    # ---------------------------------------------------------------- values

    def snapshot(self, fragment: int, out: Tensor) -> None:
        if (kept := self._kept.get(fragment)) is not None:
            out.copy_(kept)
            self._copy_statistics_out(fragment, out)
            return
        self._copy_out(fragment, out)

    def _copy_out(self, fragment: int, out: Tensor) -> None:
        for piece in self._fragments[fragment]:
            out[_within(piece)].copy_(piece.elements.detach().reshape(-1))
        self._copy_statistics_out(fragment, out)

    def _copy_statistics_out(self, fragment: int, out: Tensor) -> None:
        """Those of now: training moves them on, whether their fragment is trained or not."""
        for segment, buffer in self._statistics(fragment):
            out[segment.fragment_start : segment.fragment_start + segment.length].copy_(buffer.reshape(-1))

    def _statistics(self, fragment: int) -> list[tuple[Segment, Tensor]]:
        layout = self._layout
        if layout.parameters_of(fragment) == layout.size(fragment):
            return []
        buffers = statistics_of(self.model, layout)
        return [(segment, buffers[segment.name]) for segment in layout.segments(fragment) if segment.name in buffers]

    def load(self, fragment: int, values: Tensor, *, pending: bool = False) -> None:
        if any(piece.elements.is_pinned() for piece in self._fragments[fragment]):
            # The device may not have read yet what it was told to copy: see ``Assembled.assemble``.
            torch.cuda.current_stream(self._device).synchronize()
        for piece in self._fragments[fragment]:
            piece.elements.detach().view(-1).copy_(values[_within(piece)])
        for segment, buffer in self._statistics(fragment):
            own = values[segment.fragment_start : segment.fragment_start + segment.length]
            buffer.copy_(own.view(buffer.shape))
        if self._layout.statistics:
            forbid_negative_variances(self.model)
        self._kept.pop(fragment, None)
        if pending and fragment not in self.trained:
            self._kept[fragment] = values.clone()

    def rebase(self, fragment: int, base: Tensor, reference: Tensor, *, pending: bool) -> None:
        if fragment in self.trained:
            for piece in self._fragments[fragment]:
                local, where = piece.elements.detach().view(-1), _within(piece)
                progress = local.to(device="cpu", dtype=torch.float32, copy=True).sub_(reference[where])
                local.copy_(progress.add_(base[where]))
        elif pending and (kept := self._kept.get(fragment)) is not None:
            stepped = slice(self._layout.parameters_of(fragment))
            kept[stepped].sub_(reference[stepped]).add_(base[stepped])
            self._copy_statistics_out(fragment, kept)
            self.load(fragment, kept, pending=True)
        else:
            self.load(fragment, base)

    def unrounded(self) -> dict[int, Tensor]:
        own = sorted(self.trained | self._kept.keys())
        copies = {fragment: torch.empty(self._layout.size(fragment)) for fragment in own}
        for fragment, out in copies.items():
            self.snapshot(fragment, out)
        return copies

    # -------------------------------------------------------------- rotation

    def train_only(self, fragments: frozenset[int], values: Mapping[int, Tensor]) -> None:
        fragments = _checked(fragments, self._layout)
        starting, stopping = fragments - self.trained, self.trained - fragments
        if missing := sorted(starting - values.keys() - self._kept.keys()):
            raise ValueError(f"values: none for the fragments {missing}, which are held in low precision")
        for fragment in stopping:
            self._kept[fragment] = torch.empty(self._layout.size(fragment))
            self._copy_out(fragment, self._kept[fragment])
        self.trained = fragments
        states = dict(self.optimizer.state)
        del self.optimizer  # with the state of what stops, before anything new is there
        for fragment in sorted(stopping | starting, key=lambda fragment: fragment in starting):
            unrounded = self._kept[fragment] if fragment in self._kept else values[fragment]
            for piece in self._fragments[fragment]:
                states.pop(piece.elements, None)
                self._place(piece, unrounded[_within(piece)])
                self._weights[piece.segment.name].update(self._device, self._notes)
        for fragment in starting:
            self._kept.pop(fragment, None)
        self.optimizer = build_inner_optimizer(self._trained_parameters(), self._section)
        for parameter in self._trained_parameters():
            if parameter in states:
                self.optimizer.state[parameter] = states[parameter]

    def _place(self, piece: _Piece, values: Tensor) -> None:
        """Hold a piece as its fragment is held now. :param values: ``(length,)``"""
        if piece.fragment not in self.trained:
            piece.elements = values.detach().to(self._frozen_device, FROZEN_DTYPE, copy=True)
            if self._frozen_device.type == "cpu" and self._device.type == "cuda":
                piece.elements = piece.elements.pin_memory()  # else the way to the device is not asynchronous
            return
        shape = self._weights[piece.segment.name].shape
        whole = piece.segment.length == torch.Size(shape).numel()
        # A piece of a matrix stays a matrix: the optimizer decays those, and those only.
        form = shape if whole else (1, -1) if len(shape) > 1 else (-1,)
        piece.elements = nn.Parameter(values.detach().to(self._device, torch.float32, copy=True).view(form))

    def _trained_parameters(self) -> list[nn.Parameter]:
        """In the layout's order."""
        return [
            piece.elements
            for weight in self._weights.values()
            for piece in weight.pieces
            if isinstance(piece.elements, nn.Parameter)
        ]


def _within(piece: _Piece) -> slice:
    """Where its elements are among the fragment's."""
    return slice(piece.segment.fragment_start, piece.segment.fragment_start + piece.segment.length)


def _checked(fragments: frozenset[int], layout: FragmentLayout) -> frozenset[int]:
    if not fragments or not fragments <= frozenset(range(layout.num_fragments)):
        raise ValueError(f"fragments: {sorted(fragments)} are not some of the {layout.num_fragments} of this model")
    return fragments
