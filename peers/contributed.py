"""What this peer contributed last, fragment by fragment, written down before it is sent.

A peer that is killed has a checkpoint older than its last contribution. If it counted on from there, two different
pieces of work would carry the same numbers, and it could not tell which of them a base holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peers.ledger import Counts
from peers.notes import write_note

FILE_NAME = "contributed.json"
_MOST = 2**60


def note_contributed(directory: Path, fragment: int, counts: Counts, num_fragments: int) -> None:
    """Put the counts of a fragment's snapshot into the note. A full disk costs the note, not the round."""
    noted = list(last_contributed(directory, num_fragments))
    noted[fragment] = counts.furthest(noted[fragment])
    write_note(directory / FILE_NAME, {"fragments": noted})


def last_contributed(directory: Path, num_fragments: int) -> tuple[Counts, ...]:
    """Each fragment's cumulative counts at our last contribution to it; zeros if there is no note that makes sense.

    A note of one pair of counts is from when all fragments had the same.
    """
    try:
        note = json.loads((directory / FILE_NAME).read_text())
        rows = note["fragments"] if "fragments" in note else [[note["samples"], note["steps"]]] * num_fragments
        counts = tuple(_counts(row) for row in rows)
    except (OSError, ValueError, TypeError, KeyError):
        counts = ()
    return counts if len(counts) == num_fragments else (Counts(),) * num_fragments


def _counts(row: Any) -> Counts:
    samples, steps = row
    if not all(type(count) is int and 0 <= count <= _MOST for count in (samples, steps)):
        raise ValueError(f"{row}: no counts")
    return Counts(samples, steps)
