"""What this peer contributed last, written down before it is sent.

A peer that is killed has a checkpoint older than its last contribution. If it counted on from there, two different
pieces of work would carry the same numbers, and it could not tell which of them a base holds.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

FILE_NAME = "contributed.json"


def note_contributed(directory: Path, samples: int, steps: int) -> None:
    """Replace the note: cumulative counts of the snapshot. A full disk costs the note, not the round."""
    partial = directory / f".{FILE_NAME}.partial"
    with suppress(OSError):
        partial.write_text(json.dumps({"samples": samples, "steps": steps}))
        os.replace(partial, directory / FILE_NAME)


def last_contributed(directory: Path) -> tuple[int, int]:
    """Cumulative samples and steps of the last contribution; (0, 0) if there is no note that makes sense."""
    try:
        note = json.loads((directory / FILE_NAME).read_text())
        samples, steps = note["samples"], note["steps"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0, 0
    if not all(type(count) is int and 0 <= count <= 2**60 for count in (samples, steps)):
        return 0, 0
    return samples, steps
