"""Which device computes, how many threads it gets, and what it means when it stops.

A volunteer who gave a card never trains on the CPU without having said so: a card that is there but hidden, or that
goes away, is an error with a remedy.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pynvml import NVML_ERROR_LIBRARY_NOT_FOUND

from dht_config.errors import DeviceError, DeviceLostError
from p2p_trainer.limits import read_group_limits
from p2p_trainer.nvml import explain, read_nvml, visible_devices
from p2p_trainer.throughput import is_out_of_memory

_log = logging.getLogger(__name__)

_PROC = Path("/proc")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
"""VGA and 3D controllers; the same cards also show up as audio."""


def pick_device(requested: str | None = None) -> torch.device:
    """Choose the device to train on and prove that it computes.

    Starts CUDA, so it comes after every process is forked.

    :param requested: "cpu", "cuda", "cuda:1", "mps"; None takes the first CUDA device, else Apple's, else the CPU.

    Raises DeviceError if a requested device is missing or does not compute; also if none is requested, but
    this machine has an NVIDIA device which torch does not get to see: falling back to a CPU in silence
    would waste the volunteer's evening.
    """
    if requested is not None:
        return _proven(_parse(requested))
    available, complaint = _cuda_is_available()
    if available:
        return _proven(torch.device("cuda", 0))
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible != () and nvidia_device_present():
        if torch.version.cuda is not None:
            cause, remedy = why_hidden(visible, complaint)
            raise DeviceError(
                problem=f"This machine has an NVIDIA device, but torch cannot use it: {cause}.",
                remedy=f"{remedy} Or say --device cpu to train on the CPU.",
            )
        _log.warning("This machine has an NVIDIA device, but its torch is built for the CPU only: training on the CPU.")
    if torch.backends.mps.is_available():
        return _proven(torch.device("mps"))
    return _proven(torch.device("cpu"))


def why_hidden(visible: tuple[str, ...] | None, complaint: str) -> tuple[str, str]:
    """(cause, remedy) of a card that torch does not see: what NVML says, else what torch says.

    :param visible: the entries of CUDA_VISIBLE_DEVICES
    :param complaint: torch's own words, or empty
    """
    nvml = read_nvml()
    if nvml.failure is not None:
        return explain(nvml.failure.code, nvml.failure.text)
    if visible:
        return f"CUDA_VISIBLE_DEVICES={','.join(visible)} names none that is there", "Correct it or unset it."
    words = complaint or "is the driver too old?"
    driver = f"driver {nvml.driver}, " if nvml.driver else ""
    return f"{driver}torch was built for CUDA {torch.version.cuda}; {words}", "Update the driver."


def nvidia_device_present() -> bool:
    """Whether the machine has an NVIDIA card, whatever became of its driver."""
    if any((_PROC / "driver/nvidia/gpus").glob("*")):
        return True
    for device in _PCI.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASSES):
            return True
    return False


@contextmanager
def device_failures(device: torch.device) -> Iterator[None]:
    """Tell a device that stopped from any other error: the driver's errors stay, so a healthy device still computes.

    :raises DeviceError: its memory is used up, where nothing smaller can be tried
    :raises DeviceLostError: it fell off the bus, its driver was changed, or a kernel of ours broke its context
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceError(
                f"{device} has no memory left: {_first_line(error)}.",
                "Close what else uses it, or join a run with a smaller model.",
            ) from error
        if not isinstance(error, torch.AcceleratorError) and (device.type == "cpu" or _computes(device)):
            raise
        cause, remedy = _what_nvml_says(device)
        raise DeviceLostError(
            f"{device} stopped while it computed: {_first_line(error)}{f' ({cause})' if cause else ''}.",
            f"{remedy} Then start the same command again: it continues from the last checkpoint.".strip(),
        ) from error


def set_thread_count(threads: int | None) -> int:
    """Limit the threads that torch computes with on the CPU; None leaves torch's choice.

    torch counts the machine's cores; where a control group allows less, more threads only wait for each other.

    Returns the number in force.

    Raises DeviceError if the number is not positive.
    """
    if threads is None:
        allowed = read_group_limits().cores
        if allowed is not None and torch.get_num_threads() > math.ceil(allowed):
            threads = math.ceil(allowed)
    if threads is not None:
        if threads < 1:
            raise DeviceError(problem=f"{threads} threads cannot compute.", remedy="Use 1 or more, or leave it out.")
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _cuda_is_available() -> tuple[bool, str]:
    """Whether torch sees a card, and in one line what it complains of; torch warns where people would see it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    return available, next((str(warning.message).strip().splitlines()[0].rstrip(".") for warning in caught), "")


def _parse(requested: str) -> torch.device:
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise DeviceError(problem=f"{requested!r} is no device.", remedy="Use cpu, cuda, cuda:1 or mps.") from error
    if device.type == "cuda":
        available, complaint = _cuda_is_available()
        count = torch.cuda.device_count() if available else 0
        if (device.index or 0) >= count:
            found = "no CUDA device" if count == 0 else f"only cuda:0 to cuda:{count - 1}"
            remedy = "Check nvidia-smi and that torch is built for CUDA"
            remedy += "; a container must be started with `docker run --gpus all`." if count == 0 else "."
            visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
            if count == 0 and visible != () and torch.version.cuda is not None and nvidia_device_present():
                cause, remedy = why_hidden(visible, complaint)
                found += f" ({cause})"
            raise DeviceError(
                problem=f"{requested} is not there: torch finds {found}.", remedy=f"{remedy} Or use --device cpu."
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
        cause, remedy = _what_nvml_says(device)
        raise DeviceError(
            problem=f"{device} is there but does not compute ({_first_line(error)}{f'; {cause}' if cause else ''}).",
            remedy=remedy or "Check the driver, and that no other program holds the device, or use another one.",
        ) from error
    if total != 8.0:
        raise DeviceError(problem=f"{device} computes wrongly (8 ones add up to {total}).", remedy="Use another one.")
    return device


def _what_nvml_says(device: torch.device) -> tuple[str, str]:
    """(cause, remedy) of a CUDA device that fails; empty where NVML knows no more, or is not there at all."""
    failure = read_nvml().failure if device.type == "cuda" and torch.version.hip is None else None
    if failure is None or failure.code == NVML_ERROR_LIBRARY_NOT_FOUND:
        return "", ""
    return explain(failure.code, failure.text)


def _computes(device: torch.device) -> bool:
    try:
        return _proven(device) == device
    except DeviceError:
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
