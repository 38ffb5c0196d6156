"""Machines a rehearsal can pretend to have.

Only ratios matter: an emulated machine is slowed down to a number of samples a second, and the fastest one here is
given what a small CPU still does with the shipped example. Peak FP32 says nothing about memory, links or how well a
model fills a card; it orders machines roughly as people know them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine by its published peak: non-tensor FP32, TFLOPS at boost clock."""

    tflops: float
    source: str

    @property
    def samples_per_second(self) -> float:
        """What it is emulated with, to a tenth."""
        return round(FASTEST_SAMPLES_PER_SECOND * self.tflops / FASTEST_TFLOPS, 1)


_ADA = "NVIDIA Ada GPU Architecture white paper, table of GeForce specifications"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture white paper v2, table of GeForce specifications"
_RTX_3060 = Machine(tflops=12.7, source="NVIDIA product page: 3584 CUDA cores x 2 x 1.777 GHz")

MACHINES: dict[str, Machine] = {
    "4090": Machine(tflops=82.6, source=_ADA),
    "4080": Machine(tflops=48.7, source=_ADA),
    "4070": Machine(tflops=29.1, source="NVIDIA product page: 5888 CUDA cores x 2 x 2.475 GHz"),
    "4060": Machine(tflops=15.1, source="NVIDIA product page: 3072 CUDA cores x 2 x 2.46 GHz"),
    "3090": Machine(tflops=35.6, source=_AMPERE),
    "3080": Machine(tflops=29.8, source=_AMPERE),
    "3070": Machine(tflops=20.3, source=_AMPERE),
    "3060": _RTX_3060,
    "3060-12g": _RTX_3060,
    "t4": Machine(tflops=8.1, source="NVIDIA T4 data sheet"),
    "laptop-cpu": Machine(tflops=0.36, source="Intel ARK, Core i7-1165G7: 4 cores x 2.8 GHz x 32 (two 256-bit FMA)"),
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


def _plain_name(text: str) -> str:
    return text.strip().lower().removeprefix("rtx").lstrip("-_ ")
