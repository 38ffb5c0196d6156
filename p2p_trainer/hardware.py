"""The machine under the training loop: which device computes, what it is called, how many threads it gets."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import torch

from dht_config.errors import DeviceError

_log = logging.getLogger(__name__)

_NAME_CHARACTERS = 64
"""What a peer's profile has room for."""

_PROC = Path("/proc")


def pick_device(requested: str | None = None) -> torch.device:
    """Choose the device to train on and prove that it computes.

    Starts CUDA, so it comes after every process is forked.

    :param requested: "cpu", "cuda", "cuda:1", "mps"; None takes the first CUDA device, else the CPU.

    Raises DeviceError if a requested device is missing or does not compute; also if none is requested, but
    this machine has an NVIDIA device which its driver hides from torch: falling back to a CPU in silence
    would waste the volunteer's evening.
    """
    if requested is not None:
        return _proven(_parse(requested))
    if torch.cuda.is_available():
        return _proven(torch.device("cuda", 0))
    if _nvidia_device_present() and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
        if torch.version.cuda is not None:
            raise DeviceError(
                problem="This machine has an NVIDIA device, but torch cannot use it "
                f"(torch was built for CUDA {torch.version.cuda}; is the driver too old?).",
                remedy="Update the driver, or say --device cpu to train on the CPU.",
            )
        _log.warning("This machine has an NVIDIA device, but its torch is built for the CPU only: training on the CPU.")
    return _proven(torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """Name the device as people know it, in at most 64 characters: "NVIDIA GeForce RTX 3090".

    Never fails: whatever NVML refuses, torch's or the system's name takes its place.
    """
    if device.type == "cuda":
        name = _nvml_name(device) or torch.cuda.get_device_name(device)
    else:
        name = _processor_name() or device.type
    return " ".join(name.split())[:_NAME_CHARACTERS]


def resident_bytes() -> tuple[int, int] | None:
    """What this process holds of the machine's memory, and the most it ever held; None where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in (_PROC / "self/status").read_text().splitlines())
        held, most = (1024 * int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError) as error:
        _log.debug("/proc/self/status does not tell what this process holds: %r", error)
        return None
    return held, most


def set_thread_count(threads: int | None) -> int:
    """Limit the threads that torch computes with on the CPU; None leaves torch's choice.

    Returns the number in force.

    Raises DeviceError if the number is not positive.
    """
    if threads is not None:
        if threads < 1:
            raise DeviceError(problem=f"{threads} threads cannot compute.", remedy="Use 1 or more, or leave it out.")
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _parse(requested: str) -> torch.device:
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise DeviceError(problem=f"{requested!r} is no device.", remedy="Use cpu, cuda, cuda:1 or mps.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = "no CUDA device" if count == 0 else f"only cuda:0 to cuda:{count - 1}"
            raise DeviceError(
                problem=f"{requested} is not there: torch finds {found}.",
                remedy="Check nvidia-smi and that torch is built for CUDA, or use --device cpu.",
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(
            problem="mps is not there: this is no Apple silicon, or torch is built without it.",
            remedy="Use --device cpu.",
        )
    if device.type not in ("cpu", "mps"):
        raise DeviceError(
            problem=f"{requested} is a kind of device that cannot train here.",
            remedy="Use cpu, cuda, cuda:1 or mps.",
        )
    return device


def _proven(device: torch.device) -> torch.device:
    try:
        total = float(torch.ones(8, device=device).sum())
    except RuntimeError as error:
        raise DeviceError(
            problem=f"{device} is there but does not compute ({str(error).splitlines()[0]}).",
            remedy="Check the driver, and that no other program holds the device, or use another one.",
        ) from error
    if total != 8.0:
        raise DeviceError(problem=f"{device} computes wrongly (8 ones add up to {total}).", remedy="Use another one.")
    return device


def _nvidia_device_present() -> bool:
    return any((_PROC / "driver/nvidia/gpus").glob("*"))


def _nvml_name(device: torch.device) -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            # By UUID: NVML counts all devices, torch only those that CUDA_VISIBLE_DEVICES leaves.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError) as error:
        _log.debug("NVML does not name %s (%r): torch does.", device, error)
        return None
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _processor_name() -> str:
    try:
        for line in (_PROC / "cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError as error:
        _log.debug("/proc/cpuinfo cannot be read (%s): the platform module names the processor.", error)
    return platform.processor() or platform.machine()
