"""What rounds measured of this peer's line, kept for its next start.

Until rounds measure it anew it is the best guess there is: the plan rests on it, and the first rounds do. A line that
has changed meanwhile, as with a laptop that moved, costs some rounds, as one that nothing is known of does. Each way
has its own age: a way up that a strong codec does not fill is not measured, and so is not known anew either.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from peers.line import LineRate
from peers.notes import write_note

FILE_NAME = "line.json"
KEPT_SECONDS = 7 * 86_400.0
"""What was measured longer ago is forgotten."""
_UNKNOWN = {"up": math.inf, "down": math.inf, "round_trip_seconds": 0.0}


def keep_line(directory: Path, measured: LineRate, now: float, *, known: LineRate | None = None) -> None:
    """Write down what this start has measured of the line.

    :param now: seconds since 1970
    :param known: with what is still reckoned with of earlier starts, which keeps its age; the same if it is not given
    """
    before = _read(directory)
    note: dict[str, tuple[float, float]] = {}
    for name, unknown in _UNKNOWN.items():
        if (value := getattr(measured, name)) != unknown:
            note[name] = value, now
        elif known is not None and getattr(known, name) != unknown and name in before:
            note[name] = before[name]
    write_note(directory / FILE_NAME, note)


def known_line(directory: Path, now: float) -> LineRate:
    """What is known of the line; nothing if there is no note that makes sense, or only an old one."""
    recent = {name: value for name, (value, at) in _read(directory).items() if 0 <= now - at <= KEPT_SECONDS}
    return LineRate(**(_UNKNOWN | recent))


def _read(directory: Path) -> dict[str, tuple[float, float]]:
    """What was measured, and when, seconds since 1970; nothing if a part of it makes no sense."""
    try:
        note = json.loads((directory / FILE_NAME).read_text())
        found = {name: (float(note[name][0]), float(note[name][1])) for name in _UNKNOWN if name in note}
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError):
        return {}
    makes_sense = all(0 < value < math.inf and math.isfinite(at) for value, at in found.values())
    return found if makes_sense else {}
