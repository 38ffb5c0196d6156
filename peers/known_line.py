"""What rounds measured of this peer's line, kept for its next start.

Until rounds measure it anew it is the best guess there is: the plan rests on it, and the first rounds do. A line that
has changed meanwhile, as with a laptop that moved, costs some rounds, as one that nothing is known of does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from peers.line import LineRate
from peers.notes import write_note

FILE_NAME = "line.json"
KEPT_SECONDS = 7 * 86_400.0
"""Older than this it is forgotten."""


def keep_line(directory: Path, rate: LineRate, now: float) -> None:
    """:param now: seconds since 1970"""
    known = {"up": rate.up, "down": rate.down, "round_trip_seconds": rate.round_trip_seconds}
    write_note(
        directory / FILE_NAME, {"time": now} | {name: value for name, value in known.items() if math.isfinite(value)}
    )


def known_line(directory: Path, now: float) -> LineRate:
    """What is known of the line; nothing if there is no note that makes sense, or only an old one."""
    try:
        note = json.loads((directory / FILE_NAME).read_text())
        age = now - float(note["time"])
        up, down = float(note.get("up", math.inf)), float(note.get("down", math.inf))
        round_trip = float(note.get("round_trip_seconds", 0.0))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return LineRate()
    if not (0 <= age <= KEPT_SECONDS and up > 0 and down > 0 and 0 <= round_trip < math.inf):
        return LineRate()
    return LineRate(up=up, down=down, round_trip_seconds=round_trip)
