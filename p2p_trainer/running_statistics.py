"""Running statistics of a model, such as those of batch normalisation: buffers that training changes without gradients.

Every persistent buffer of floating-point numbers counts as one, since none can be told from a constant. A newcomer
gets it with the base, the base has everybody's weighted mean, and evaluation and ``export`` use that. In training,
which does not read them, each peer goes on with its own. Rejected: broadcasting one peer's, as DistributedDataParallel
does, for then all others' data count for nothing; leaving them out of the base (FedBN, Li et al. 2021,
arXiv:2102.07623), which is for a model of each peer's own; computing them anew for the averaged parameters (SWA,
Izmailov et al. 2018, arXiv:1803.05407), which would give every peer others where their data are unlike.

Buffers of whole numbers, such as counters of batches, are each peer's own and stay whole. A large constant should be
registered with ``persistent=False``: as it is, it travels in every round of the last fragment.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from peers.fragments import FragmentLayout, load_fragment
from peers.reducer import MAX_ABSOLUTE_DIFFERENCE


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that take gradients, by name, each shared one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """:param model: as its task built it, on any device, also on meta"""
    stored = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in stored and buffer.is_floating_point() and buffer.numel()
    }


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Everything that is in a base, by name: what the layout cuts."""
    return {**trainable(model), **running_statistics(model)}


def statistics_of(model: nn.Module, layout: FragmentLayout) -> dict[str, Tensor]:
    """Those of the layout, whatever a strategy has made of the rest of the model."""
    return {name: model.get_buffer(name) for name in layout.statistics}


def load_statistics(model: nn.Module, layout: FragmentLayout, base: Tensor) -> None:
    """Overwrite those of the layout with a base's. :param base: float32 ``(layout.num_elements,)``"""
    buffers = statistics_of(model, layout)
    position = len(base) - sum(buffer.numel() for buffer in buffers.values())
    for buffer in buffers.values():
        buffer.copy_(base[position : position + buffer.numel()].view(buffer.shape))
        position += buffer.numel()
    if buffers:
        forbid_negative_variances(model)


def counters(model: nn.Module) -> dict[str, Tensor]:
    """Stored buffers that are in no base, such as counters of batches: what a peer's checkpoint keeps of its own."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored and not buffer.is_floating_point()}


def restore_counters(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """:param saved: by name; what does not fit is left out"""
    for name, buffer in counters(model).items():
        value = saved.get(name)
        fits = value is not None and (value.shape, value.dtype) == (buffer.shape, buffer.dtype)
        if value is not None and fits and not torch.equal(value, buffer.cpu()):  # a constant need not be writable
            buffer.copy_(value)


def load_model(model: nn.Module, layout: FragmentLayout, base: Tensor) -> None:
    """Make an ordinary model the one of a base, float32 ``(layout.num_elements,)``."""
    values = averaged(model)
    for fragment in range(layout.num_fragments):
        load_fragment(values, layout, fragment, base[layout.slice(fragment)])
    forbid_negative_variances(model)


def forbid_negative_variances(model: nn.Module) -> None:
    """A weighted mean of numbers near zero may end a rounding below it, and a square root would make that NaN."""
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_var is not None:
            module.running_var.clamp_(min=0.0)


def within_reach(own: Tensor, base: Tensor) -> Tensor:
    """What to contribute of a peer's own statistics: as far from the base as a contribution may be.

    Where they are not finite, as after a step that was left out, the base is what they are.
    """
    most = MAX_ABSOLUTE_DIFFERENCE / 2
    return base + torch.nan_to_num(own - base, nan=0.0, posinf=most, neginf=-most).clamp_(-most, most)


def mend(model: nn.Module, layout: FragmentLayout, base: Tensor) -> None:
    """Replace statistics that are not finite, which would stay so for ever.

    :param base: those of the base, float32, in the layout's order
    """
    position = 0
    for buffer in statistics_of(model, layout).values():
        wanted = base[position : position + buffer.numel()].view(buffer.shape)
        position += buffer.numel()
        broken = ~torch.isfinite(buffer)
        if broken.any():
            buffer[broken] = wanted.to(buffer.device, buffer.dtype)[broken]
