"""The machine as a record: what a plan is made from and what ``doctor`` judges. Read once, frozen, no decisions.

Free memory counts, not total: somebody else's program may hold most of a card. NVML sees what other programs hold, and
temperature and power; torch sees the device it computes on, also one that NVML refuses to speak of. Where both know,
the smaller figure is taken: of a MIG instance NVML may only know the whole card.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from p2p_trainer.limits import Limits, free_disk_bytes, read_limits
from p2p_trainer.nvml import CardFacts, match_card, read_nvml, visible_devices

_log = logging.getLogger(__name__)

_NAME_CHARACTERS = 64
"""What a peer's profile has room for."""
_PROC = Path("/proc")

Kind = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device that computes. None or empty: nobody says."""

    kind: Kind
    index: int = 0
    name: str
    """As people know it, in 1 to 64 characters: "NVIDIA GeForce RTX 3090"."""
    uuid: str = ""
    """As NVML writes it; the same at every start, unlike the index."""
    driver: str = ""
    total_bytes: int | None
    free_bytes: int | None
    """What can still be taken now."""
    utilisation: float | None = None
    """Share of the last moment in which the device computed, for whomever, 0 to 1."""
    temperature_celsius: int | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine at one moment."""

    device: DeviceFacts
    limits: Limits
    disk_free_bytes: int | None
    """Where the peer keeps its state."""


def read_hardware(device: torch.device, directory: Path) -> Hardware:
    """Look at the machine. What cannot be read is None.

    :param device: proven to compute (``pick_device``)
    :param directory: the peer's, which need not exist
    """
    limits = read_limits()
    return Hardware(device=read_device(device, limits), limits=limits, disk_free_bytes=free_disk_bytes(directory))


def read_device(device: torch.device, limits: Limits) -> DeviceFacts:
    """Everything about the device that computes."""
    if device.type == "cuda":
        return _cuda_facts(device)
    if device.type == "mps":
        total = int(torch.mps.recommended_max_memory())
        free = max(0, total - int(torch.mps.driver_allocated_memory()))
        name = _short(f"Apple {_processor_name()}")
        # Unified: what the system has no room for is no room for the device either.
        return DeviceFacts(kind="mps", name=name, total_bytes=total, free_bytes=min(free, limits.free_memory_bytes))
    return DeviceFacts(
        kind="cpu",
        name=_short(_processor_name()),
        total_bytes=limits.total_memory_bytes,
        free_bytes=limits.free_memory_bytes,
    )


def anonymous_bytes() -> tuple[int, int] | None:
    """Memory of this process's own, no files: what it holds, and about the most since the last reset; None if unknown.

    The kernel keeps the highest total only. Files are taken off it as of now: libraries are mapped bit by bit, and
    stay, so the figure may be low by what was mapped since the peak.
    """
    figures = _own_memory("RssAnon", "VmHWM", "RssFile", "RssShmem")
    if figures is None:
        return None
    held, most, files, shared = figures
    return held, max(held, most - files - shared)


def data_bytes() -> int | None:
    """Writable private memory that this process has asked for, used or not: what RLIMIT_DATA counts."""
    figures = _own_memory("VmData")
    return figures[0] if figures is not None else None


def _own_memory(*keys: str) -> list[int] | None:
    try:
        lines = dict(line.split(":", 1) for line in (_PROC / "self/status").read_text().splitlines())
        return [1024 * int(lines[key].split()[0]) for key in keys]
    except (OSError, KeyError, ValueError) as error:
        _log.debug("/proc/self/status does not tell what this process holds: %r", error)
        return None


def agreed_memory(
    torch_total: int | None, torch_free: int | None, card: CardFacts | None
) -> tuple[int | None, int | None]:
    """(total, free) in bytes out of torch's figures and NVML's: the smaller one where both know."""
    totals = [total for total in (torch_total, card.total_bytes if card else None) if total]
    frees = [free for free in (torch_free, card.free_bytes if card else None) if free is not None]
    total, free = min(totals, default=None), min(frees, default=None)
    return total, min(free, total) if free is not None and total is not None else free


def _cuda_facts(device: torch.device) -> DeviceFacts:
    nvml_driver, card = _driver_and_card_of(device)
    torch_total = torch_free = None
    try:
        torch_total = int(torch.cuda.get_device_properties(device).total_memory)
        torch_free, torch_total = (int(value) for value in torch.cuda.mem_get_info(device))
    except (RuntimeError, AttributeError) as error:
        _log.debug("torch does not tell the memory of %s: %r", device, error)
    total, free = agreed_memory(torch_total, torch_free, card)
    return DeviceFacts(
        kind="cuda",
        index=device.index or 0,
        name=_short((card.name if card else "") or torch.cuda.get_device_name(device)) or "CUDA device",
        uuid=card.uuid if card else "",
        driver=nvml_driver,
        total_bytes=total,
        free_bytes=free,
        utilisation=card.utilisation if card else None,
        temperature_celsius=card.temperature_celsius if card else None,
        power_watts=card.power_watts if card else None,
    )


def _driver_and_card_of(device: torch.device) -> tuple[str, CardFacts | None]:
    nvml = read_nvml()
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    except (RuntimeError, AttributeError) as error:
        _log.debug("torch does not tell the UUID of %s: %r", device, error)
        uuid = None
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return nvml.driver, match_card(nvml.cards, uuid, device.index or 0, visible)


def _processor_name() -> str:
    try:
        for line in (_PROC / "cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError as error:
        _log.debug("/proc/cpuinfo cannot be read (%s): the platform module names the processor.", error)
    return platform.processor() or platform.machine() or "processor"


def _short(name: str) -> str:
    return " ".join(name.split())[:_NAME_CHARACTERS]
