"""Machines a rehearsal can pretend to have, and how a list of them is written.

Only ratios matter: an emulated machine is slowed down to a number of samples a second, and the fastest one here is
given what a small CPU still does with the shipped example. Peak FP32 says nothing about memory, links or how well a
model fills a card; it orders machines roughly as people know them.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from dht_config.errors import UsageError

FASTEST_SAMPLES_PER_SECOND = 80.0
"""What the machine of FASTEST_TFLOPS is emulated with."""
FASTEST_TFLOPS = 82.6
MAX_PEERS = 64
MAX_SAMPLES_PER_SECOND = 1e6


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

MACHINES: dict[str, Machine] = {
    "4090": Machine(tflops=82.6, source=_ADA),
    "4080": Machine(tflops=48.7, source=_ADA),
    "4070": Machine(tflops=29.1, source="NVIDIA product page: 5888 CUDA cores x 2 x 2.475 GHz"),
    "4060": Machine(tflops=15.1, source="NVIDIA product page: 3072 CUDA cores x 2 x 2.46 GHz"),
    "3090": Machine(tflops=35.6, source=_AMPERE),
    "3080": Machine(tflops=29.8, source=_AMPERE),
    "3070": Machine(tflops=20.3, source=_AMPERE),
    "3060": Machine(tflops=12.7, source="NVIDIA product page: 3584 CUDA cores x 2 x 1.777 GHz"),
    "t4": Machine(tflops=8.1, source="NVIDIA T4 data sheet"),
    "laptop-cpu": Machine(tflops=0.36, source="Intel ARK, Core i7-1165G7: 4 cores x 2.8 GHz x 32 (two 256-bit FMA)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPeer:
    """One peer of a rehearsal; its name is unique among them and safe in a file name."""

    name: str
    samples_per_second: float


def parse_peers(text: str) -> tuple[EmulatedPeer, ...]:
    """Read a list such as ``80,40,20,8`` or ``4090,3060*2,8``.

    Each piece is a number of samples a second or the name of a machine, and may end in ``*N`` for N such peers. A
    name wins over a number: 3090 is the card; write 3090.0 for the number.

    Raises: UsageError naming the piece that is wrong.
    """
    peers: list[EmulatedPeer] = []
    of_a_kind: dict[str, int] = {}
    for piece in text.split(","):
        label, samples_per_second, count = _parse_piece(piece.strip(), text)
        if len(peers) + count > MAX_PEERS:
            raise UsageError(
                problem=f"--peers {text!r}: {piece.strip()!r} makes more than {MAX_PEERS} peers.",
                remedy="Rehearse with fewer: they all share this machine.",
            )
        for _ in range(count):
            number = of_a_kind[label] = of_a_kind.get(label, 0) + 1
            name = label if number == 1 else f"{label}-{number}"
            peers.append(EmulatedPeer(name=name, samples_per_second=samples_per_second))
    return tuple(peers)


def _parse_piece(piece: str, text: str) -> tuple[str, float, int]:
    speed, star, times = (part.strip() for part in piece.partition("*"))
    count = 1
    if star:
        # Not `int` alone: it takes "1_0", "+2" and other scripts' digits.
        if not (times.isascii() and times.isdigit() and 1 <= len(times) <= 3 and int(times) >= 1):
            raise _wrong(piece, text, "what follows the * must be a whole number of peers, 1 or more")
        count = int(times)
    name = speed.lower().removeprefix("rtx").lstrip("-_ ")
    if name in MACHINES:
        return name, MACHINES[name].samples_per_second, count
    try:
        samples_per_second = float(speed)
    except ValueError:
        close = difflib.get_close_matches(name, MACHINES, n=1)
        raise _wrong(
            piece,
            text,
            f"not a number and no machine known here{f' (did you mean {close[0]}?)' if close else ''}",
        ) from None
    if not (math.isfinite(samples_per_second) and 0 < samples_per_second <= MAX_SAMPLES_PER_SECOND):
        raise _wrong(piece, text, f"samples a second must be above 0 and at most {MAX_SAMPLES_PER_SECOND:g}")
    return f"{samples_per_second:g}", samples_per_second, count


def _wrong(piece: str, text: str, complaint: str) -> UsageError:
    return UsageError(
        problem=f"--peers {text!r}: {piece!r} is wrong: {complaint}.",
        remedy=f"Write samples a second or machines ({', '.join(MACHINES)}), such as 80,40,20,8 or 4090,3060*2.",
    )
