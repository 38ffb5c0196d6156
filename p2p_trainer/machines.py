"""Machines a rehearsal can pretend to have.

Only ratios matter: an emulated machine is slowed down to a number of samples a second, and the fastest one here is
given what a small CPU still does with the shipped example. Peak FP32 says nothing about links or how well a model fills
a card; it orders machines roughly as people know them. A card's memory becomes the limit of all that its peer takes,
although a card's own peer has its computer's memory as well: a model that just fits a card may not fit here.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

FASTEST_SAMPLES_PER_SECOND = 80.0
"""What the machine of FASTEST_TFLOPS is emulated with."""
FASTEST_TFLOPS = 82.6
MAX_SAMPLES_PER_SECOND = 1e6

_CARD = re.compile(r"[1-9]0[5-9]0", re.ASCII)
"""A number that people mean as a card."""
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)x(.*)", re.ASCII)
_BITS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kMG])(?:bit/s)?")
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([MG])(?:i?B)?", re.ASCII)
_BYTES = {"M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine by its published peak: non-tensor FP32, TFLOPS at boost clock."""

    tflops: float
    gigabytes: float
    """Memory, in 2**30 bytes; for a card the card's."""
    source: str
    """Of both figures, where it does not say otherwise."""

    @property
    def samples_per_second(self) -> float:
        """What it is emulated with, to a tenth."""
        return round(FASTEST_SAMPLES_PER_SECOND * self.tflops / FASTEST_TFLOPS, 1)

    @property
    def memory_bytes(self) -> int:
        return int(self.gigabytes * _BYTES["G"])


_ADA = "NVIDIA Ada GPU Architecture white paper, table of GeForce specifications"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture white paper v2, table of GeForce specifications"
_RTX_3060 = Machine(tflops=12.7, gigabytes=12, source="NVIDIA product page: 3584 CUDA cores x 2 x 1.777 GHz")

MACHINES: dict[str, Machine] = {
    "4090": Machine(tflops=82.6, gigabytes=24, source=_ADA),
    "4080": Machine(tflops=48.7, gigabytes=16, source=_ADA),
    "4070": Machine(tflops=29.1, gigabytes=12, source="NVIDIA product page: 5888 CUDA cores x 2 x 2.475 GHz"),
    "4060": Machine(tflops=15.1, gigabytes=8, source="NVIDIA product page: 3072 CUDA cores x 2 x 2.46 GHz"),
    "3090": Machine(tflops=35.6, gigabytes=24, source=_AMPERE),
    "3080": Machine(tflops=29.8, gigabytes=10, source=_AMPERE),
    "3070": Machine(tflops=20.3, gigabytes=8, source=_AMPERE),
    "3060": _RTX_3060,
    "3060-12g": _RTX_3060,
    "t4": Machine(tflops=8.1, gigabytes=16, source="NVIDIA T4 data sheet"),
    "laptop-cpu": Machine(
        tflops=0.36,
        gigabytes=16,
        source="Intel ARK, Core i7-1165G7: 4 cores x 2.8 GHz x 32 (two 256-bit FMA); its memory is an assumption, ARK "
        "names 64 GB as the most",
    ),
}


def read_speed(text: str) -> tuple[str, float]:
    """Read a speed: samples a second, a machine's name, or a share of a machine such as ``0.5x4090``.

    A name wins over a number: 3090 is the card; write 3090.0 for the number.

    Returns: what to call such a peer, safe in a file name, and its samples per second.
    Raises: ValueError saying what is wrong, for a person.
    """
    name = _plain_name(text)
    if name in MACHINES:
        return name, MACHINES[name].samples_per_second
    if (match := _SHARE.fullmatch(text.strip().lower())) and (machine := _plain_name(match[2])) in MACHINES:
        share = float(match[1])
        if not 0 < share <= 1:
            raise ValueError(f"a share of a machine is above 0 and at most 1; two of them are {machine}*2")
        return f"{share:g}x{machine}", share * MACHINES[machine].samples_per_second
    if _CARD.fullmatch(name):
        raise ValueError(f"no machine known here; if you mean samples a second, write {name}.0")
    try:
        samples_per_second = float(text)
    except ValueError:
        close = difflib.get_close_matches(name, MACHINES, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"not a number and no machine known here{guess}") from None
    if not (math.isfinite(samples_per_second) and 0 < samples_per_second <= MAX_SAMPLES_PER_SECOND):
        raise ValueError(f"samples a second must be above 0 and at most {MAX_SAMPLES_PER_SECOND:g}")
    return f"{samples_per_second:g}", samples_per_second


def memory_of(text: str) -> int | None:
    """The memory, in bytes, of the machine that a speed names, all of it also for a share; None for a mere number."""
    match = _SHARE.fullmatch(text.strip().lower())
    machine = MACHINES.get(_plain_name(match[2] if match else text))
    return machine.memory_bytes if machine is not None else None


def read_memory(text: str) -> int:
    """Read a memory's size such as ``2G``, ``512M`` or ``2GB``: in powers of 1024, as memory is sold.

    Returns: bytes.
    Raises: ValueError saying what is wrong, for a person.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError("a memory is a number of M or G bytes, such as 512M or 2G")
    size_bytes = int(float(match[1]) * _BYTES[match[2]])
    if size_bytes <= 0:
        raise ValueError("a memory is above 0")
    return size_bytes


def read_rate(text: str) -> float:
    """Read what a line carries, such as ``50M`` or ``800k``: in powers of 1000, as lines are sold.

    Returns: bits a second.
    Raises: ValueError saying what is wrong, for a person.
    """
    match = _BITS.fullmatch(text.strip())
    if match is None:
        raise ValueError("a rate is a number of k, M or G bits a second, such as 800k or 50M")
    bits_per_second = float(match[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[match[2]]
    if bits_per_second <= 0:
        raise ValueError("a rate is above 0")
    return bits_per_second


def memory_text(size_bytes: float) -> str:
    """As ``read_memory`` reads it, to two decimals: ``1.5 GB``."""
    unit = "G" if size_bytes >= _BYTES["G"] else "M"
    return f"{round(size_bytes / _BYTES[unit], 2 if unit == 'G' else 0):g} {unit}B"


def _plain_name(text: str) -> str:
    return text.strip().lower().removeprefix("rtx").lstrip("-_ ")
